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

from rocktokens.compare.settings import CompareConfig, Regime
from rocktokens.errors import ConfigError
from rocktokens.select.settings import SelectorConfig
from rocktokens.train.settings import DistillConfig, OffPolicyConfig
from rocktokens.values import Row

# Regimes that cannot be trained without declared rocks.
NEED_ROCKS: tuple[Regime, ...] = ("freeze_rocks", "soft")
# Regimes that sample less, and uniform training that samples less too: the control that a saving must beat.
SAVERS: tuple[Regime, ...] = ("prefix",)
FAIR: tuple[Regime, ...] = ("uniform", "small")
SAMPLE_LESS: tuple[Regime, ...] = ("prefix", "small")
OTHER_LOSS: tuple[Regime, ...] = ("todi", "srkl")
# What a regime may set differently from uniform beside its selector.
SCHEDULE: dict[str, frozenset[str]] = {
    "small": frozenset({"rollouts_per_prompt", "micro_batch"}),
    "todi": frozenset({"loss"}),
    "srkl": frozenset({"loss"}),
}
# Selectors that run in uniform's shadow: what would they keep? Those with a memory, or with a list that may change
# between two comparisons, do not.
SHADOWS: tuple[str, ...] = ("freeze_rocks", "entropy", "divergence", "tip", "teachable", "fire", "selectkd")
SHADOWS += ("iw", "position", "prefix")


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
        if regime == "random":
            return bool(self.controlled)
        return bool(self.rocks) or regime not in NEED_ROCKS


NOTHING = FrozenSets()


def common_base(trained: DistillConfig, settings: CompareConfig, *, steps: int) -> DistillConfig:
    """What all regimes share: the run's own distillation, over a fixed number of steps.

    Nothing is recorded or evaluated on the way: students are kept at the evaluation points and evaluated afterwards.
    """
    schedule = settings.schedule or trained.schedule
    if schedule == "auto":
        schedule = "constant" if trained.until == "saturated" else "linear"
    return replace(
        trained,
        steps=steps,
        until="steps",
        hours=None,
        schedule=schedule,
        learning_rate=settings.learning_rate or trained.learning_rate,
        prompts_per_step=settings.prompts_per_step or trained.prompts_per_step,
        normalise=settings.normalise or trained.normalise,
        loss="reverse_kl",
        selector=SelectorConfig(),
        shadows=(),
        off_policy=OffPolicyConfig(),
        keep=min(settings.evaluations, steps),
        telemetry_every=None,
        audit_every=max(1, steps // settings.audits),
        report_to=(),
    )


def regime_config(
    regime: Regime,
    base: DistillConfig,
    settings: CompareConfig,
    *,
    seed: int,
    sets: FrozenSets = NOTHING,
) -> DistillConfig:
    """One regime with one seed.

    Args:
        regime: its name.
        base: what all regimes share.
        settings: the comparison's.
        seed: number of the training.
        sets: the token types that regimes leave out.
    """
    if not sets.allows(regime):
        needed, stages = ("a bypass list", "bypass") if regime == "freeze" else ("rocks", "detect")
        raise ConfigError(
            f"regime {regime} needs {needed} that names token types; run `rocktokens {stages}` first, or name ids with "
            "--rocks"
        )
    selector = SelectorConfig(**_selector(regime, settings, seed, sets))
    config = replace(base, selector=selector, seed=base.seed + seed)
    return replace(config, **_schedule(regime, base))


def _selector(regime: Regime, settings: CompareConfig, seed: int, sets: FrozenSets) -> Row:
    """The selector's settings; regimes that differ in something else have uniform's."""
    named: dict[str, Row] = {
        "freeze": {"name": "freeze", "rocks": sets.bypass},
        "freeze_rocks": {"name": "freeze_rocks", "rocks": sets.rocks},
        "soft": {"name": "soft", "rocks": sets.rocks, "lam": settings.lam},
        "random": {"name": "random", "rocks": sets.controlled, "seed": seed},
        "adaptive": {"name": "adaptive", "seed": seed},
        "teachable": {"name": "teachable", "keep": settings.teachable},
        "prefix": {"name": "prefix", "keep": settings.prefix},
    }
    named |= {name: {"name": name, "keep": settings.keep} for name in ("entropy", "divergence", "tip", "adakd")}
    named |= {name: {"name": name} for name in ("iw", "fire", "selectkd", "position")}
    return named.get(regime, {"name": "uniform"})


def _schedule(regime: Regime, base: DistillConfig) -> Row:
    """What a regime sets beside its selector; SCHEDULE says what it may."""
    if regime in OTHER_LOSS:
        return {"loss": regime}
    if regime != "small":
        return {}
    changed: Row = {"rollouts_per_prompt": 1}
    if base.micro_batch is not None and base.prompts_per_step % base.micro_batch:
        changed["micro_batch"] = None
    return changed


def differences(first: Any, second: Any) -> set[str]:
    """Names of the settings in which two configurations differ, a section's fields with a dot."""

    def flat(values: Mapping[str, Any], prefix: str = "") -> Row:
        found: dict[str, object] = {}
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
