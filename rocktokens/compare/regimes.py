"""Which regimes a comparison trains, as configurations of one distillation.

Regimes of one seed differ in their selector, in the loss (todi, srkl) or in the rollouts per prompt (small), and in
nothing else: a test holds this. This module turns settings into settings; it trains nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from rocktokens.compare.settings import CompareConfig, Regime
from rocktokens.errors import ConfigError, RunError
from rocktokens.run import Run
from rocktokens.select.settings import SelectorConfig
from rocktokens.train.settings import DistillConfig, OffPolicyConfig
from rocktokens.values import Row

log = logging.getLogger(__name__)

# Regimes that sample less, and what a saving of theirs must beat: uniform training that simply samples less, too.
SAVERS: tuple[Regime, ...] = ("prefix",)
CONTROLS_OF_SAVING: tuple[Regime, ...] = ("uniform", "small")
SAMPLE_LESS: tuple[Regime, ...] = (*SAVERS, "small")
OTHER_LOSS: tuple[Regime, ...] = ("todi", "srkl")
AUDITS = 10  # steps of each training in which every position is measured


@dataclass(frozen=True)
class FrozenSets:
    """Token types that regimes leave out: all rocks, and those that the bypass list lets training skip."""

    rocks: tuple[int, ...] = ()
    bypass: tuple[int, ...] = ()

    def of(self, regime: Regime) -> tuple[int, ...] | None:
        """Types that a regime leaves out, or is the control of; None where it needs no list."""
        controlled = self.bypass or self.rocks  # `random` is the control of freeze; where there is none, of the rocks
        needed = {"freeze": self.bypass, "random": controlled, "freeze_rocks": self.rocks, "soft": self.rocks}
        return needed.get(regime)


def frozen_sets(run: Run, config: CompareConfig) -> FrozenSets:
    """Token ids named by the user, else the rocks, declared or by the definition asked for, and the bypass list."""
    if config.rocks:
        return FrozenSets(config.rocks, config.rocks)
    bypass = tuple(run.facts("bypass")["ids"]) if run.done("bypass") else ()
    if config.definition is None:
        return FrozenSets(tuple(run.facts("detect")["rocks"]) if run.done("detect") else (), bypass)
    if not run.done("detect"):
        raise RunError(f"definition = {config.definition} needs a detection; run `rocktokens detect {run.path}` first")
    order = f"select token_id from types where in_{config.definition} order by place_{config.definition}, token_id"
    return FrozenSets(tuple(run.query(order)["token_id"].to_pylist()), bypass)


def regimes_to_train(run: Run, config: CompareConfig, sets: FrozenSets) -> tuple[Regime, ...]:
    """The regimes asked for, uniform first, without those that have nothing to leave out; says which and why."""
    asked = [name for name in dict.fromkeys(config.regimes) if name != "uniform"]
    if not run.done("detect"):
        return ("uniform", *asked)  # nothing was looked for: a regime that needs it is refused
    left_out = [name for name in asked if sets.of(name) == ()]
    if left_out:
        why = f"no type is a rock by {config.definition}" if config.definition else "detect declared no rocks"
        if sets.rocks:
            why = "the bypass list is empty" if run.done("bypass") else f"run `rocktokens bypass {run.path}` first"
        log.warning("not compared, there is nothing to leave out: %s (%s)", ", ".join(left_out), why)
    if {"freeze", "freeze_rocks"} <= set(asked) and sorted(sets.rocks) == sorted(sets.bypass):
        log.info("the bypass list holds every rock: freeze_rocks is freeze, and is not trained twice")
        left_out.append("freeze_rocks")
    return ("uniform", *(name for name in asked if name not in left_out))


def common_base(trained: DistillConfig, settings: CompareConfig, *, steps: int) -> DistillConfig:
    """What all regimes share: the run's own distillation, over a fixed number of steps.

    Nothing is recorded or evaluated on the way: students are kept at the evaluation points and evaluated afterwards.
    """
    return replace(
        trained,
        steps=steps,
        learning_rate=settings.learning_rate or trained.learning_rate,
        loss="reverse_kl",
        selector=SelectorConfig(),
        shadows=(),
        off_policy=OffPolicyConfig(),
        keep=min(settings.evaluations, steps),
        telemetry_every=None,
        audit_every=max(1, steps // AUDITS),
        report_to=(),
    )


def regime_config(
    regime: Regime, base: DistillConfig, settings: CompareConfig, *, seed: int, sets: FrozenSets
) -> DistillConfig:
    """The distillation of one regime with one seed."""
    config, frozen = replace(base, seed=base.seed + seed), sets.of(regime)
    if frozen == ():
        needed, stage = ("a bypass list", "bypass") if regime == "freeze" else ("rocks", "detect")
        raise ConfigError(
            f"regime {regime} needs {needed} that names token types; run `rocktokens {stage}` first, or name ids with "
            "--rocks"
        )
    if regime in OTHER_LOSS:
        return replace(config, loss=regime)  # type: ignore[arg-type]
    if regime == "small":
        fits = base.micro_batch is None or base.prompts_per_step % base.micro_batch == 0
        return replace(config, rollouts_per_prompt=1, micro_batch=base.micro_batch if fits else None)
    options: dict[str, Row] = {
        "soft": {"lam": settings.lam},
        "random": {"seed": seed},
        "adaptive": {"seed": seed},
        "prefix": {"keep": settings.prefix},
        **{name: {"keep": settings.keep} for name in ("entropy", "divergence", "tip", "adakd")},
    }
    return replace(config, selector=SelectorConfig(name=regime, rocks=frozen or (), **options.get(regime, {})))
