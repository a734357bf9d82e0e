"""Which occurrences carry loss, and how much: one rule a class, one interface.

A selector sees every occurrence of one optimiser step, over all micro-batches and ranks, and gives each a weight in
[0, 1]. What counts is the token PREDICTED at a position, never the one before it. This module knows token ids,
positions and, where a rule asks for them, losses; it knows no model, trainer or file, and draws only from seeds it
was given.

Shapes: N occurrences of one optimiser step, in rollout and position order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from rocktokens.detect.measures import matched_control
from rocktokens.divergence.monitor import TokenMonitor
from rocktokens.seeds import derive_seed
from rocktokens.settings import require
from rocktokens.values import Row

# Share of occurrences below the threshold of a high-divergence window, where no threshold is given (docs/method.md §3).
TAU_QUANTILE = 0.8


@dataclass(frozen=True)
class SelectorBatch:
    """The occurrences of one optimiser step, in rollout and position order, on the CPU."""

    token_N: Tensor
    """The token predicted at each position."""
    rollout_N: Tensor
    """Number of the rollout within the step."""
    position_N: Tensor
    """Position in the response, from 0."""
    step: int
    """The optimiser step, from 1."""
    length_limit: int
    """Longest response that sampling allows."""
    value_N: Tensor | None = None
    """Loss of each occurrence in nats; only for a selector that asks for it with `needs_losses`."""
    student_entropy_N: Tensor | None = None
    """Entropy of the student's distribution; likewise."""
    teacher_entropy_N: Tensor | None = None
    """Entropy of the teacher's distribution; likewise."""
    student_logprob_N: Tensor | None = None
    """The student's log-probability of the token; likewise."""
    teacher_logprob_N: Tensor | None = None
    """The teacher's log-probability of the token; likewise."""
    student_top_id_Nk: Tensor | None = None
    """The student's most probable tokens, best first; only for a selector that asks for k of them with `needs_top`."""
    student_top_Nk: Tensor | None = None
    """The student's log-probabilities of these; likewise."""
    teacher_at_student_top_Nk: Tensor | None = None
    """The teacher's log-probabilities of the same tokens; likewise."""
    teacher_top_id_Nk: Tensor | None = None
    """The teacher's most probable tokens, best first; likewise."""

    def __len__(self) -> int:
        return len(self.token_N)

    def measured(self, name: str) -> Tensor:
        """A column that a selector asked for; refused where the step did not measure it."""
        column: Tensor | None = getattr(self, name)
        require(column is not None, f"this selector needs {name}, which the step did not measure")
        assert column is not None
        return column


class Selector:
    """Base of every selector. Write your own by overriding `weights`; the rest has working defaults."""

    name: ClassVar[str] = "custom"
    needs_losses: bool = False
    """Ask for losses, entropies and log-probabilities: costs a pass without gradient before each step, on the meter."""
    needs_top: int = 0
    """Ask for both models' k most probable tokens, from the same pass; goes with `needs_losses`."""
    bound: float = 1.0
    """Largest weight this selector may give; above 1 only where its source asks for it."""

    def weights(self, batch: SelectorBatch) -> Tensor:
        """A weight in [0, bound] for every occurrence; a weight of 0 never reaches an output head."""
        raise NotImplementedError

    def length(self, limit: int) -> int:
        """Where sampling stops at the latest; a selector that never uses later positions says so here."""
        return limit

    def observe(self, monitor: TokenMonitor) -> None:
        """Called once after every optimiser step with what each token type has cost so far, over all ranks."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token types this selector names, so that ids outside the vocabulary are refused at the start."""
        return ()

    def state_dict(self) -> Row:
        """State that `weights` depends on; saved with every checkpoint."""
        return {}

    def load_state_dict(self, state: Row) -> None:
        """Restore what `state_dict` returned."""


def share(name: str, value: float) -> float:
    """The value, refused unless it is a share in (0, 1]."""
    require(0 < value <= 1, f"{name} must lie in (0, 1], got {value}")
    return float(value)


class Uniform(Selector):
    """Every occurrence counts the same."""

    name = "uniform"

    def weights(self, batch: SelectorBatch) -> Tensor:
        return torch.ones(len(batch))


class Soft(Selector):
    """Rocks, and with `window` their high-divergence windows, count λ; everything else counts 1."""

    name = "soft"
    wants: ClassVar[str] = "rocks: a list of token ids, or a run in which `detect` declared some"

    def __init__(self, *, rocks: Iterable[int], lam: float = 0.5, window: int = 0, tau: float | None = None) -> None:
        """`lam`: λ. `window`: how far a window may reach on either side; 0 is off. `tau`: its threshold in nats."""
        self._rocks = tuple(sorted({int(rock) for rock in rocks}))
        require(bool(self._rocks), f"selector {self.name} needs {self.wants}")
        require(0 <= lam <= 1, f"lam is a loss weight in [0, 1], got {lam}")
        require(window >= 0, f"window must be at least 0 positions, got {window}")
        self.lam, self.window, self.tau = float(lam), int(window), tau
        self.needs_losses = window > 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self._rocks

    def rocks_at(self, batch: SelectorBatch) -> Tensor:
        """Where a rock is predicted or its window lies."""
        rock_N = torch.isin(batch.token_N, torch.tensor(self._rocks))
        if not self.window:
            return rock_N
        return high_divergence_window(
            rock_N, batch.measured("value_N"), batch.rollout_N, width=self.window, tau=self.tau
        )

    def weights(self, batch: SelectorBatch) -> Tensor:
        return torch.where(self.rocks_at(batch), self.lam, 1.0)


class Freeze(Soft):
    """The types of a bypass list, or those named, carry no loss: λ = 0."""

    name = "freeze"
    wants = (
        "a bypass list that is not empty: make one with `rocktokens bypass`, name token ids with rocks, or take "
        "freeze_rocks to freeze all rocks"
    )

    def __init__(self, *, rocks: Iterable[int], window: int = 0, tau: float | None = None) -> None:
        super().__init__(rocks=rocks, lam=0.0, window=window, tau=tau)


class FreezeRocks(Freeze):
    """All declared rocks carry no loss, whatever tests say about them: the paper's act, for comparison."""

    name = "freeze_rocks"
    wants = Soft.wants


class Random(Soft):
    """The control of `freeze`: as many non-rock occurrences in each step, in runs of the same lengths, drawn by seed.

    With `match_loss` they also carry about the loss that the rocks carry.
    """

    name = "random"

    def __init__(
        self,
        *,
        rocks: Iterable[int],
        lam: float = 0.0,
        match_loss: bool = False,
        window: int = 0,
        tau: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(rocks=rocks, lam=lam, window=window, tau=tau)
        self.match_loss, self.seed = match_loss, seed
        self.needs_losses = self.needs_losses or match_loss

    def weights(self, batch: SelectorBatch) -> Tensor:
        rock_N = self.rocks_at(batch).numpy()
        if not rock_N.any():
            return torch.ones(len(batch))
        rng = np.random.default_rng(derive_seed(self.seed, "random", batch.step))
        loss_N = np.zeros(len(batch)) if batch.value_N is None else batch.value_N.double().numpy()
        chosen_N = matched_control(
            rock_N, batch.rollout_N.numpy(), np.nan_to_num(loss_N), rng=rng, match_loss=self.match_loss
        ).chosen_N
        # Where rocks are dense, runs one free position apart do not all fit: the number is kept, the runs give way.
        missing = int(rock_N.sum() - chosen_N.sum())
        free = np.flatnonzero(~rock_N & ~chosen_N)
        chosen_N[rng.choice(free, min(missing, len(free)), replace=False)] = True
        return torch.where(torch.from_numpy(chosen_N), self.lam, 1.0)


class TopShare(Selector):
    """Keeps the occurrences with the largest scores, over the whole optimiser step."""

    needs_losses = True

    def __init__(self, *, keep: float = 0.5) -> None:
        """`keep`: share of the step's occurrences that keep their loss."""
        self.keep = share("keep", keep)

    def score(self, batch: SelectorBatch) -> Tensor:
        """What occurrences are ranked by, one number each."""
        raise NotImplementedError

    def weights(self, batch: SelectorBatch) -> Tensor:
        score_N = torch.nan_to_num(self.score(batch).double(), nan=-math.inf)
        weight_N = torch.zeros(len(batch))
        weight_N[score_N.argsort(descending=True, stable=True)[: math.ceil(self.keep * len(batch))]] = 1.0
        return weight_N


class Entropy(TopShare):
    """Keeps the share of occurrences at which the student is least certain."""

    name = "entropy"

    def score(self, batch: SelectorBatch) -> Tensor:
        return batch.measured("student_entropy_N")


class HighDivergence(TopShare):
    """Keeps the share of occurrences with the largest loss."""

    name = "divergence"

    def score(self, batch: SelectorBatch) -> Tensor:
        return batch.measured("value_N")


class Prefix(Selector):
    """Keeps the first share of the longest response allowed, and stops sampling there."""

    name = "prefix"

    def __init__(self, *, keep: float = 0.5) -> None:
        self.keep = share("keep", keep)

    def length(self, limit: int) -> int:
        return max(1, math.ceil(self.keep * limit))

    def weights(self, batch: SelectorBatch) -> Tensor:
        return (batch.position_N < self.length(batch.length_limit)).float()


def high_divergence_window(
    hit_N: Tensor, value_N: Tensor, rollout_N: Tensor, *, width: int, tau: float | None = None
) -> Tensor:
    """Hits, and around each the run of positions whose 3-token moving mean of loss stays >= tau, at most ±width.

    The moving mean takes what exists at a rollout's ends. Without `tau`: the 80th percentile of the losses given.
    """
    value_N = torch.nan_to_num(value_N.double())
    if tau is None:
        tau = float(np.quantile(value_N.numpy(), TAU_QUANTILE)) if len(value_N) else 0.0
    follows_N = torch.zeros(len(value_N), dtype=torch.bool)  # is this row's predecessor in the same rollout
    follows_N[1:] = rollout_N[1:] == rollout_N[:-1]
    total_N, count_N = value_N.clone(), torch.ones_like(value_N)
    total_N[1:] += value_N[:-1] * follows_N[1:]
    total_N[:-1] += value_N[1:] * follows_N[1:]
    count_N[1:] += follows_N[1:]
    count_N[:-1] += follows_N[1:]
    high_N = total_N / count_N >= tau

    inside_N, edge = hit_N.clone(), torch.zeros(1, dtype=torch.bool)
    right_N = left_N = hit_N & high_N
    for _ in range(width):  # one position further on both sides, within the rollout and while the mean stays high
        right_N = torch.cat([edge, right_N[:-1]]) & follows_N & high_N
        left_N = torch.cat([(left_N & follows_N)[1:], edge]) & high_N
        inside_N |= right_N | left_N
    return inside_N


def overlap(first_N: Tensor, second_N: Tensor) -> float:
    """Jaccard overlap of what two selectors keep, on weights: Σ min / Σ max; 1 where both keep nothing."""
    largest = float(torch.maximum(first_N, second_N).sum())
    return float(torch.minimum(first_N, second_N).sum()) / largest if largest else 1.0
