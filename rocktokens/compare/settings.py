"""Settings of the comparison of training regimes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rocktokens.settings import Settings, require

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
    "tip",
    "tip_confident",
    "teachable",
    "iw",
    "fire",
    "selectkd",
    "position",
    "adakd",
    "todi",
    "srkl",
    "prefix",
    "scheduled_prefix",
    "esr",
    "cut",
    "fewer",
    "saturated",
    "merit",
    "small",
    "small_2",
    "random_rollouts",
    "shorter",
    "no_teacher",
    "small_cut",
    "small_matched",
    "wide",
]


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Settings):
    """Which regimes are trained from one checkpoint of the run, over how many seeds, and how they are evaluated."""

    regimes: tuple[Regime, ...] = ("uniform", "freeze", "random")
    """Any of: uniform; freeze (the bypass list); freeze_rocks, soft (all rocks); random, random_loss (controls of what
    freeze leaves out, else of the rocks); adaptive; the published selectors entropy, divergence, tip, tip_confident,
    teachable, iw, fire, selectkd, position, adakd, prefix, scheduled_prefix, esr; the losses todi, srkl; cut, fewer,
    saturated, merit (savings from the token record); the controls of savings small, small_2 (one and two rollouts per
    prompt), random_rollouts, shorter; no_teacher; small_cut, small_matched, wide (see docs/compare.md)."""
    seeds: int = 3
    """Trainings of each regime; a seed decides the order of prompts and all rollouts, the same for every regime. With
    until=decided the most that are made."""
    first_seed: int = 0
    """Number of the first of them. With 2, say, a second machine adds further trainings to the two of the first."""
    until: Literal["seeds", "decided"] = "seeds"
    """decided: a regime gets no further seeds once its verdict is settled; the looks share the error rate."""
    start: int | None = None
    """Step of the kept checkpoint that every training starts from, to ask what a regime does late, where the loss has
    begun to level off; unset: the checkpoint that OPD started from."""
    steps: int | None = None
    """Optimiser steps; unset: those that the run's own distillation took."""
    equal: Literal["steps", "both"] = "steps"
    """both: a regime that spends fewer tokens (sampled, and scored by the teacher) goes on after the steps until it has
    spent as many as the others, so that accuracy at equal steps and at equal tokens come from one training. The
    learning rate is constant then."""
    tokens: int | None = None
    """For equal=both: the tokens; unset: what the run's own distillation spent in as many steps."""
    schedule: Literal["linear", "cosine", "constant"] | None = None
    """Learning rate after the warm-up, in every regime; unset: as in the run's own distillation, or constant with
    equal=both."""
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
    definition: Literal["certified", "burden", "context", "excess"] | None = None
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
    esr: int = 100
    """For esr: tokens after which sampling stops."""
    coverage: float = 0.95
    """For cut, small_cut and merit: share of the non-rock loss that must lie before the cut, at every scored
    checkpoint."""
    least: int = 1
    """For fewer and merit: rollouts that a prompt gets at least."""
    full: float = 0.5
    """For fewer and merit: share of the first steps' non-rock loss above which a prompt gets all its rollouts."""
    rollouts_of: Regime | None = None
    """For random_rollouts: the regime whose number of rollouts in each step it takes; unset: `rollout_share`."""
    rollout_share: float = 0.5
    """For random_rollouts without rollouts_of: share of the rollouts of each step that are sampled."""
    shorter: float = 0.7
    """For shorter: share of the steps, with the learning rate's schedule compressed to them."""
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
        for name in ("seeds", "evaluations", "rollouts", "curve_rollouts", "contexts", "least", "esr", "audits"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(self.first_seed >= 0, f"first_seed must be at least 0, got {self.first_seed}")
        for name in ("steps", "tokens", "train_prompts", "prompts_per_step"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, got {value}; or unset it")
        require(self.start is None or self.start >= 0, f"start is a checkpoint's step, got {self.start}; or unset it")
        require(self.problems >= 2, f"problems must be at least 2, got {self.problems}")
        for name in ("keep", "teachable", "prefix", "coverage", "full", "rollout_share", "shorter"):
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
        self._check_budgets()

    def _check_budgets(self) -> None:
        """Budgets and seeds that contradict each other."""
        require(
            self.tokens is None or self.equal == "both",
            "tokens is a budget beside the steps; set equal=both, or leave tokens unset",
        )
        require(
            self.equal == "steps" or self.schedule in (None, "constant"),
            f"equal=both goes on after the steps, and schedule={self.schedule} has decayed by then; set "
            "schedule=constant",
        )
        require(
            self.until == "seeds" or self.seeds >= 3,
            f"until=decided needs at least 3 seeds to look at, got seeds = {self.seeds}",
        )
        of = self.rollouts_of
        require(
            of is None or (of in self.regimes and of != "random_rollouts"),
            f"rollouts_of names {of}, which is not compared here; add it to regimes",
        )
