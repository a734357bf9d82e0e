"""Settings of the comparison of training regimes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rocktokens.settings import Settings, require

Regime = Literal[
    "uniform",
    "freeze",
    "freeze_rocks",
    "soft",
    "random",
    "adaptive",
    "small",
    "prefix",
    "entropy",
    "divergence",
    "tip",
    "teachable",
    "iw",
    "fire",
    "selectkd",
    "position",
    "adakd",
    "todi",
    "srkl",
]


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Settings):
    """Which regimes are trained from one checkpoint of the run, over how many seeds, and how they are evaluated."""

    regimes: tuple[Regime, ...] = ("uniform", "freeze", "random")
    """Any of: uniform; freeze (the bypass list); freeze_rocks, soft (all rocks); random (controls of what freeze leaves
    out, else of the rocks); adaptive; small (one rollout per prompt); the published selectors prefix, entropy,
    divergence, tip, teachable, iw, fire, selectkd, position, adakd; the losses todi, srkl (see docs/compare.md)."""
    seeds: int = 3
    """Trainings of each regime; a seed decides the order of prompts and all rollouts, the same for every regime."""
    first_seed: int = 0
    """Number of the first of them. With 2, say, a second machine adds further trainings to the two of the first."""
    start: int | None = None
    """Step of the kept checkpoint that every training starts from, to ask what a regime does late, where the loss has
    begun to level off; unset: the checkpoint that OPD started from."""
    steps: int | None = None
    """Optimiser steps; unset: those that the run's own distillation took."""
    schedule: Literal["linear", "cosine", "constant"] | None = None
    """Learning rate after the warm-up, in every regime; unset: as in the run's own distillation."""
    learning_rate: float | None = None
    """Peak learning rate in every regime; unset: as in the run's own distillation."""
    prompts_per_step: int | None = None
    """Prompts of an optimiser step in every regime; unset: as in the run's own distillation."""
    train_prompts: int | None = None
    """Train on so many of the prompts, so that each comes several times; unset: all of them."""
    normalise: Literal["kept", "all"] | None = None
    """What the loss is divided by, the same in every regime; unset: as in the run's own distillation."""
    evaluations: int = 10
    """Evaluations along each training, evenly spaced, beside the one before it."""
    problems: int = 400
    """Held-out prompts, of the share that neither training nor detection used."""
    rollouts: int = 4
    """Rollouts of each of them at the end."""
    curve_rollouts: int = 1
    """Rollouts of each of them at the evaluations before."""
    contexts: int = 200
    """Held-out rollouts, common to all regimes, on which the loss on rocks and on the rest is measured."""
    audits: int = 10
    """Steps of each training in which every position is measured: what the regime changed and, in uniform's trainings,
    what the other selectors would keep."""
    rocks: tuple[int, ...] = ()
    """Token ids that freeze and freeze_rocks leave out; empty: the run's bypass list, and the rocks that `detect`
    declared."""
    definition: Literal["certified", "burden", "context"] | None = None
    """Take the types that this definition names as the rocks that freeze_rocks, soft and the controls go by; `context`
    is the paper's. unset: the rocks that `detect` declared."""
    lam: float = 0.5
    """For soft: loss weight of a rock."""
    keep: float = 0.5
    """For entropy, divergence, tip and adakd: share of positions that keep their loss."""
    teachable: float = 0.05
    """For teachable: the same."""
    prefix: float = 0.3
    """For prefix: share of max_new_tokens after which sampling stops."""
    clock: Literal["wall", "processor"] = "wall"
    """Seconds that regimes are compared by: wall-clock, or the training process's processor time, which is steadier on
    a busy machine and means nothing on a GPU. Both are recorded."""
    margin: float = 0.01
    """Change of accuracy that does not matter; also what "reached uniform's accuracy" may fall short by."""
    level: float = 0.95
    """Coverage of intervals."""
    resamples: int = 1000
    """Bootstrap resamples of seeds and prompts, for when a target is reached."""
    keep_students: bool = False
    """Keep every regime's checkpoints instead of removing them once they are evaluated."""

    def __post_init__(self) -> None:
        require(bool(self.regimes), "name at least one regime beside uniform")
        for name in ("seeds", "evaluations", "rollouts", "curve_rollouts", "contexts", "audits"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(self.first_seed >= 0, f"first_seed must be at least 0, got {self.first_seed}")
        for name in ("steps", "train_prompts", "prompts_per_step"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, got {value}; or unset it")
        require(self.start is None or self.start >= 0, f"start is a checkpoint's step, got {self.start}; or unset it")
        require(self.problems >= 2, f"problems must be at least 2, got {self.problems}")
        for name in ("keep", "teachable", "prefix"):
            require(0 < getattr(self, name) <= 1, f"{name} is a share in (0, 1], got {getattr(self, name)}")
        require(0 < self.lam < 1, f"lam must lie between 0 and 1, got {self.lam}; 0 is freeze, 1 is uniform")
        require(0 <= self.margin < 1, f"margin is a share in [0, 1), got {self.margin}")
        require(0 < self.level < 1, f"level must lie between 0 and 1, got {self.level}")
        require(self.resamples >= 100, f"resamples must be at least 100, got {self.resamples}")
        rate = self.learning_rate
        require(rate is None or rate > 0, f"learning_rate must be > 0, got {rate}; or unset it")
        require(
            not (self.rocks and self.definition),
            "rocks and definition both say which types are left out; name one of them",
        )
