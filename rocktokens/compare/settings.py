"""Settings of the comparison of training regimes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from rocktokens.settings import Count, CountOrZero, Pair, Positive, Resamples, Settings, Share, ShareOrAll, require

Basic = Literal["uniform", "freeze", "freeze_rocks", "soft", "random", "adaptive", "small", "prefix"]
Published = Literal["entropy", "divergence", "tip", "teachable", "iw", "fire", "selectkd", "position", "adakd"]
Regime = Literal[Basic, Published, "todi", "srkl"]


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Settings, section="compare"):
    """Which regimes are trained from one checkpoint of the run, over how many seeds, and how they are evaluated."""

    regimes: Annotated[tuple[Regime, ...], Meta(min_length=1)] = ("uniform", "freeze", "random")
    """Any of: uniform; freeze (the bypass list); freeze_rocks, soft (all rocks); random (controls of what freeze leaves
    out, else of the rocks); adaptive; small (one rollout per prompt); the published selectors prefix, entropy,
    divergence, tip, teachable, iw, fire, selectkd, position, adakd; the losses todi, srkl (see docs/compare.md)."""
    seeds: Annotated[int, Meta(ge=1, le=1000)] = 3
    """Trainings of each regime; a seed decides the order of prompts and all rollouts, the same for every regime."""
    start: CountOrZero | None = None
    """Step of the kept checkpoint that every training starts from, to ask what a regime does late, where the loss has
    begun to level off; unset: the checkpoint that OPD started from."""
    steps: Count | None = None
    """Optimiser steps; unset: as many as the run's own distillation took."""
    learning_rate: Positive | None = None
    """Peak learning rate in every regime; unset: as in the run's own distillation."""
    evaluations: Count = 10
    """Evaluations during each training, evenly spaced, in addition to the one before it."""
    problems: Pair = 400
    """Held-out prompts, of the share that neither training nor detection used."""
    rollouts: Count = 4
    """Rollouts of each of them at the end."""
    contexts: Count = 200
    """Held-out rollouts, common to all regimes, on which the loss on rocks and on the rest is measured."""
    rocks: tuple[CountOrZero, ...] = ()
    """Token ids that freeze and freeze_rocks leave out; empty: the run's bypass list, and the declared rocks."""
    definition: Literal["certified", "burden", "context"] | None = None
    """Take the types that this definition names as the rocks of freeze_rocks, soft and random; context is the paper's.
    Unset: the rocks that `detect` declared."""
    lam: Share = 0.5
    """For soft: loss weight of a rock."""
    keep: ShareOrAll = 0.5
    """For entropy, divergence, tip and adakd: share of positions that keep their loss."""
    prefix: ShareOrAll = 0.3
    """For prefix: share of max_new_tokens after which sampling stops."""
    margin: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    """Change of accuracy that does not matter; also what "reached uniform's accuracy" may fall short by."""
    resamples: Resamples = 1000
    """Bootstrap resamples of seeds and prompts, for when a target is reached."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            set(self.regimes) != {"uniform"},
            "compare.regimes must name at least one beside uniform: there would be nothing to compare",
        )
        require(
            not (self.rocks and self.definition),
            "compare.rocks and compare.definition both say which types are left out; name one of them",
        )
