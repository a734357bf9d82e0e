"""Settings of the comparison of training regimes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rocktokens.config.base import Settings, require

Regime = Literal[
    "uniform",
    "freeze",
    "freeze_rocks",
    "random",
    "random_loss",
    "soft",
    "adaptive",
    "entropy",
    "divergence",
    "prefix",
    "cut",
    "fewer",
    "saturated",
    "merit",
    "shorter",
]


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Settings):
    """Which regimes are trained from the run's pre-OPD checkpoint, over how many seeds, and how they are read."""

    regimes: tuple[Regime, ...] = ("uniform", "freeze", "freeze_rocks", "random")
    """Any of: uniform; freeze (the bypass list); freeze_rocks, soft (all rocks); random, random_loss (controls of what
    freeze leaves out, else of the rocks); adaptive; entropy, divergence, prefix
    (rivals); cut, fewer, saturated, merit (savings from the token record, alone and together); shorter (uniform over
    fewer steps)."""
    seeds: int = 3
    """Trainings of each regime; a seed decides the order of prompts and all rollouts, the same for every regime."""
    steps: int | None = None
    """Optimiser steps; unset: those that the run's own distillation took."""
    normalise: Literal["kept", "all"] | None = None
    """What the loss is divided by, the same in every regime; unset: as in the run's own distillation."""
    evaluations: int = 10
    """Readings along each training, evenly spaced, beside the one before it."""
    problems: int = 400
    """Held-out problems, of the share that neither training nor detection used."""
    rollouts: int = 4
    """Responses to each of them at the end."""
    curve_rollouts: int = 1
    """Responses to each of them at the readings before."""
    contexts: int = 200
    """Held-out rollouts, common to all regimes, on which the loss on rocks and on the rest is measured."""
    rocks: tuple[int, ...] = ()
    """Token ids that freeze and freeze_rocks leave out; empty: the run's bypass list, and the rocks that `detect`
    declared."""
    lam: float = 0.5
    """For soft: loss weight of a rock."""
    keep: float = 0.5
    """For entropy and divergence: share of positions that keep their loss."""
    prefix: float = 0.3
    """For prefix: share of max_new_tokens after which sampling stops."""
    coverage: float = 0.95
    """For cut and merit: share of the non-rock loss that must lie before the cut, at every scored checkpoint."""
    least: int = 1
    """For fewer and merit: rollouts that a prompt gets at least."""
    full: float = 0.5
    """For fewer and merit: share of the first steps' non-rock loss above which a prompt gets all its rollouts."""
    shorter: float = 0.7
    """For shorter: share of the steps, with the learning rate's schedule compressed to them."""
    clock: Literal["wall", "processor"] = "wall"
    """Seconds that regimes are read by: wall-clock, or the training process's processor time, which is steadier on a
    busy machine and means nothing on a GPU. Both are recorded."""
    margin: float = 0.01
    """Change of accuracy that does not matter; also what "reached uniform's accuracy" may fall short by."""
    level: float = 0.95
    """Coverage of intervals."""
    resamples: int = 1000
    """Bootstrap resamples of seeds and problems, for when a target is reached."""
    keep_students: bool = False
    """Keep every regime's checkpoints instead of removing them once they are read."""

    def __post_init__(self) -> None:
        require(bool(self.regimes), "name at least one regime beside uniform")
        for name in ("seeds", "evaluations", "rollouts", "curve_rollouts", "contexts", "least"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(self.steps is None or self.steps >= 1, f"steps must be at least 1, got {self.steps}; or unset it")
        require(self.problems >= 2, f"problems must be at least 2, got {self.problems}")
        for name in ("keep", "prefix", "coverage", "full", "shorter"):
            require(0 < getattr(self, name) <= 1, f"{name} is a share in (0, 1], got {getattr(self, name)}")
        require(0 < self.lam < 1, f"lam must lie between 0 and 1, got {self.lam}; 0 is freeze, 1 is uniform")
        require(0 <= self.margin < 1, f"margin is a share in [0, 1), got {self.margin}")
        require(0 < self.level < 1, f"level must lie between 0 and 1, got {self.level}")
        require(self.resamples >= 100, f"resamples must be at least 100, got {self.resamples}")
