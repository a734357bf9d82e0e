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

# Regimes that cannot be trained without declared rocks, and those that need something frozen to be the control of.
from rocktokens.values import Row

NEED_ROCKS: tuple[Regime, ...] = ("freeze_rocks", "soft", "fewer", "saturated", "merit")
CONTROLS: tuple[Regime, ...] = ("random", "random_loss")
# Controls of savings: uniform training that simply samples less.
FAIR: tuple[Regime, ...] = ("uniform", "small", "small_2", "random_rollouts", "shorter")
# Regimes that save by sampling less: shorter rollouts, fewer of them, or fewer steps.
SAVERS: tuple[Regime, ...] = ("prefix", "scheduled_prefix", "esr", "cut", "fewer", "saturated", "merit", "small_cut")
SAVERS += ("small_matched",)
SAMPLE_LESS: tuple[Regime, ...] = (*SAVERS, "small", "small_2", "random_rollouts", "shorter")
# Regimes that end before the others' budget: that is their saving.
STOP_EARLY: tuple[Regime, ...] = ("saturated", "merit", "shorter")
OTHER_LOSS: tuple[Regime, ...] = ("todi", "srkl", "no_teacher")
NEED_CUT: tuple[Regime, ...] = ("cut", "small_cut", "merit")
# What a regime may set differently from uniform beside its selector.
SCHEDULE: dict[str, frozenset[str]] = {
    "saturated": frozenset({"until", "saturation_on", "tokens"}),
    "merit": frozenset({"until", "saturation_on", "tokens"}),
    "shorter": frozenset({"steps", "keep", "tokens"}),
    "small": frozenset({"rollouts_per_prompt", "micro_batch"}),
    "small_2": frozenset({"rollouts_per_prompt", "micro_batch"}),
    "small_cut": frozenset({"rollouts_per_prompt", "micro_batch"}),
    "small_matched": frozenset({"rollouts_per_prompt", "micro_batch", "learning_rate"}),
    "wide": frozenset({"rollouts_per_prompt", "prompts_per_step"}),
    "todi": frozenset({"loss"}),
    "srkl": frozenset({"loss"}),
    "no_teacher": frozenset({"loss"}),
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
        if regime in CONTROLS:
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
        tokens=None,
        saturation_on="loss",
        schedule="constant" if settings.equal == "both" else schedule,
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
    cut: int | None = None,
    tokens: int | None = None,
) -> DistillConfig:
    """One regime with one seed.

    Args:
        regime: its name.
        base: what all regimes share.
        settings: the comparison's.
        seed: number of the training.
        sets: the token types that regimes leave out.
        cut: the length at which `cut`, `small_cut` and `merit` stop sampling.
        tokens: with equal=both, the tokens that every regime spends at least.
    """
    if not sets.allows(regime):
        needed, stages = ("a bypass list", "bypass") if regime == "freeze" else ("rocks", "detect")
        raise ConfigError(
            f"regime {regime} needs {needed} that names token types; run `rocktokens {stages}` first, or name ids with "
            "--rocks"
        )
    keep = 1.0 if cut is None else min(1.0, cut / base.max_new_tokens)
    selector = SelectorConfig(**_selector(regime, settings, seed, sets, keep))
    tokens = None if regime in STOP_EARLY else tokens
    config = replace(base, selector=selector, seed=base.seed + seed, tokens=tokens)
    return replace(config, **_schedule(regime, base, settings))


def _selector(regime: Regime, settings: CompareConfig, seed: int, sets: FrozenSets, keep: float) -> Row:
    """The selector's settings; regimes that differ in something else have uniform's."""
    sparse: Row = {"rocks": sets.rocks, "least": settings.least, "full": settings.full}
    named: dict[str, Row] = {
        "freeze": {"name": "freeze", "rocks": sets.bypass},
        "freeze_rocks": {"name": "freeze_rocks", "rocks": sets.rocks},
        "soft": {"name": "soft", "rocks": sets.rocks, "lam": settings.lam},
        "random": {"name": "random", "rocks": sets.controlled, "seed": seed},
        "random_loss": {"name": "random", "rocks": sets.controlled, "seed": seed, "match_loss": True},
        "adaptive": {"name": "adaptive", "seed": seed},
        "tip_confident": {"name": "tip", "keep": settings.keep, "corner": "confident"},
        "teachable": {"name": "teachable", "keep": settings.teachable},
        "prefix": {"name": "prefix", "keep": settings.prefix},
        "esr": {"name": "esr", "tokens": settings.esr},
        "cut": {"name": "prefix", "keep": keep},
        "small_cut": {"name": "prefix", "keep": keep},
        "fewer": {"name": "fewer", **sparse},
        "merit": {"name": "merit", "keep": keep, **sparse},
        "random_rollouts": {"name": "random_rollouts", "share": settings.rollout_share, "seed": seed},
    }
    named |= {name: {"name": name, "keep": settings.keep} for name in ("entropy", "divergence", "tip", "adakd")}
    named |= {name: {"name": name} for name in ("iw", "fire", "selectkd", "position", "scheduled_prefix")}
    return named.get(regime, {"name": "uniform"})


def _schedule(regime: Regime, base: DistillConfig, settings: CompareConfig) -> Row:
    """What a regime sets beside its selector; SCHEDULE says what it may."""
    if regime in ("saturated", "merit"):
        return {"until": "saturated", "saturation_on": "rest"}
    if regime == "shorter":
        steps = max(1, round(settings.shorter * base.steps))
        return {"steps": steps, "keep": min(base.keep, steps)}
    if regime in OTHER_LOSS:
        return {"loss": regime}
    if regime == "wide":
        return {"rollouts_per_prompt": 1, "prompts_per_step": base.prompts_per_step * base.rollouts_per_prompt}
    if not regime.startswith("small"):
        return {}
    fewer = min(2 if regime == "small_2" else 1, base.rollouts_per_prompt)
    changed: Row = {"rollouts_per_prompt": fewer}
    if base.micro_batch is not None and (base.prompts_per_step * fewer) % base.micro_batch:
        changed["micro_batch"] = None
    if regime == "small_matched":  # AdamW: the noise of the gradient grows as the root of the batch falls
        changed["learning_rate"] = base.learning_rate * (fewer / base.rollouts_per_prompt) ** 0.5
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
