"""The regimes of a comparison as configurations of one distillation, and the proof that nothing else differs.

    sets = FrozenSets(rocks=rocks, bypass=bypass)
    configs = {name: regime_config(name, base, settings, seed=0, sets=sets) for name in settings.regimes}
    check_arms(configs)     # refuses a difference that is not the selector's or the schedule's

This module turns configurations into configurations; it trains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rocktokens.config import CompareConfig, DistillConfig, OffPolicyConfig, Regime, SelectorConfig
from rocktokens.errors import ConfigError

# Regimes that cannot be had without declared rocks, and those that need something frozen to be the control of.
NEED_ROCKS: tuple[Regime, ...] = ("freeze_rocks", "soft", "cut", "fewer", "saturated", "merit")
CONTROLS: tuple[Regime, ...] = ("random", "random_loss")
# Regimes that save by sampling less: shorter rollouts, fewer of them, or fewer steps.
SAMPLE_LESS: tuple[Regime, ...] = ("prefix", "cut", "fewer", "saturated", "merit", "shorter")
# What a regime may set differently from uniform; everything beside `selector` is a schedule.
SCHEDULE: dict[str, frozenset[str]] = {
    "saturated": frozenset({"until", "saturation_on"}),
    "merit": frozenset({"until", "saturation_on"}),
    "shorter": frozenset({"steps", "keep"}),
}


@dataclass(frozen=True)
class FrozenSets:
    """Token types that regimes leave out: all declared rocks, and those that the bypass list lets be skipped."""

    rocks: tuple[int, ...] = ()
    bypass: tuple[int, ...] = ()

    @property
    def controlled(self) -> tuple[int, ...]:
        """What the controls stand for: what freeze leaves out or, where that is nothing, the rocks."""
        return self.bypass or self.rocks

    def allows(self, regime: Regime) -> bool:
        """Whether there is something for a regime to do."""
        if regime == "freeze":
            return bool(self.bypass)
        if regime in CONTROLS:
            return bool(self.controlled)
        return bool(self.rocks) or regime not in NEED_ROCKS


NOTHING = FrozenSets()


def common_base(trained: DistillConfig, settings: CompareConfig, *, steps: int) -> DistillConfig:
    """What all regimes share: the run's own distillation, from its pre-OPD checkpoint, over a fixed number of steps.

    Nothing is recorded or evaluated on the way: students are kept at the reading points and read afterwards.
    """
    schedule = trained.schedule
    if schedule == "auto":
        schedule = "constant" if trained.until == "saturated" else "linear"
    return replace(
        trained,
        steps=steps,
        until="steps",
        hours=None,
        saturation_on="loss",
        schedule=schedule,
        normalise=settings.normalise or trained.normalise,
        selector=SelectorConfig(),
        shadows=(),
        off_policy=OffPolicyConfig(),
        keep=min(settings.evaluations, steps),
        telemetry_every=None,
        report_to=(),
    )


def regime_config(
    regime: Regime,
    base: DistillConfig,
    settings: CompareConfig,
    *,
    seed: int,
    sets: FrozenSets = NOTHING,
    cut: int | None = None,
) -> DistillConfig:
    """One regime with one seed. `cut` is the length at which `cut` and `merit` stop sampling."""
    if not sets.allows(regime):
        needed, stages = ("a bypass list", "bypass") if regime == "freeze" else ("rocks", "detect")
        raise ConfigError(
            f"regime {regime} needs {needed} that names token types; run `rocktokens {stages}` first, or name ids with "
            "--rocks"
        )
    rocks, controlled = sets.rocks, sets.controlled
    keep = 1.0 if cut is None else min(1.0, cut / base.max_new_tokens)
    sparse: dict[str, Any] = {"rocks": rocks, "least": settings.least, "full": settings.full}
    selectors: dict[str, dict[str, Any]] = {
        "uniform": {"name": "uniform"},
        "freeze": {"name": "freeze", "rocks": sets.bypass},
        "freeze_rocks": {"name": "freeze_rocks", "rocks": rocks},
        "soft": {"name": "soft", "rocks": rocks, "lam": settings.lam},
        "random": {"name": "random", "rocks": controlled, "seed": seed},
        "random_loss": {"name": "random", "rocks": controlled, "seed": seed, "match_loss": True},
        "adaptive": {"name": "adaptive", "seed": seed},
        "entropy": {"name": "entropy", "keep": settings.keep},
        "divergence": {"name": "divergence", "keep": settings.keep},
        "prefix": {"name": "prefix", "keep": settings.prefix},
        "cut": {"name": "prefix", "keep": keep},
        "fewer": {"name": "fewer", **sparse},
        "saturated": {"name": "uniform"},
        "merit": {"name": "merit", "keep": keep, **sparse},
        "shorter": {"name": "uniform"},
    }
    config = replace(base, selector=SelectorConfig(**selectors[regime]), seed=base.seed + seed)
    if regime in ("saturated", "merit"):
        config = replace(config, until="saturated", saturation_on="rest")
    if regime == "shorter":
        steps = max(1, round(settings.shorter * base.steps))
        config = replace(config, steps=steps, keep=min(base.keep, steps))
    return config


def differences(first: Any, second: Any) -> set[str]:
    """Names of the settings in which two configurations differ, a section's fields with a dot."""

    def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in values.items():
            found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        return found

    one, other = flat(asdict(first)), flat(asdict(second))
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def check_arms(configs: Mapping[str, DistillConfig]) -> None:
    """Refuse regimes of one seed that differ from uniform in anything but the selector and their stated schedule."""
    uniform = configs["uniform"]
    for regime, config in configs.items():
        allowed = SCHEDULE.get(regime, frozenset())
        wrong = {n for n in differences(uniform, config) if not n.startswith("selector.") and n not in allowed}
        if wrong:
            raise ConfigError(f"regime {regime} differs from uniform in {', '.join(sorted(wrong))}: not comparable")
