"""Which occurrences carry loss, and how much: the interface, one rule a class, and every rule by its name.

A selector sees every occurrence of one optimiser step, over all micro-batches and ranks, and gives each a weight in
[0, 1]; the published ones, each as its paper defines it, may state a larger `bound` (docs/selectors.md lists formulas
and sources). What counts is the token PREDICTED at a position, never the one before it. Shares, ranks and means are
taken over the whole step. This module knows token ids, positions and, where a rule asks for them, losses; it knows no
model, trainer or file, and draws only from seeds it was given. The rule that learns while training is in adaptive.py.

Shapes: N occurrences of one optimiser step, in rollout and position order, R rollouts, k most probable tokens of a row.
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
    """The control of `freeze`: as many non-rock occurrences a step, in runs of the same lengths, drawn by seed."""

    name = "random"

    def __init__(
        self,
        *,
        rocks: Iterable[int],
        lam: float = 0.0,
        window: int = 0,
        tau: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(rocks=rocks, lam=lam, window=window, tau=tau)
        self.seed = seed

    def weights(self, batch: SelectorBatch) -> Tensor:
        rock_N = self.rocks_at(batch).numpy()
        if not rock_N.any():
            return torch.ones(len(batch))
        rng = np.random.default_rng(derive_seed(self.seed, "random", batch.step))
        chosen_N = matched_control(rock_N, batch.rollout_N.numpy(), np.zeros(len(batch)), rng=rng).chosen_N
        # Where rocks are dense, runs one free position apart do not all fit: the number is kept, the runs give way.
        missing = int(rock_N.sum() - chosen_N.sum())
        free = np.flatnonzero(~rock_N & ~chosen_N)
        chosen_N[rng.choice(free, min(missing, len(free)), replace=False)] = True
        return torch.where(torch.from_numpy(chosen_N), self.lam, 1.0)


class TopShare(Selector):
    """Keeps the occurrences with the largest scores, over the whole optimiser step."""

    needs_losses = True
    column: ClassVar[str] = "value_N"

    def __init__(self, *, keep: float = 0.5) -> None:
        """`keep`: share of the step's occurrences that keep their loss."""
        require(0 < keep <= 1, f"keep must lie in (0, 1], got {keep}")
        self.keep = float(keep)

    def score(self, batch: SelectorBatch) -> Tensor:
        """What occurrences are ranked by, one number each: a column, unless a rule says otherwise."""
        return batch.measured(self.column)

    def weights(self, batch: SelectorBatch) -> Tensor:
        score_N = torch.nan_to_num(self.score(batch).double(), nan=-math.inf)
        weight_N = torch.zeros(len(batch))
        weight_N[score_N.argsort(descending=True, stable=True)[: math.ceil(self.keep * len(batch))]] = 1.0
        return weight_N


class Entropy(TopShare):
    """Keeps the share of occurrences at which the student is least certain."""

    name = "entropy"
    column = "student_entropy_N"


class HighDivergence(TopShare):
    """Keeps the share of occurrences with the largest loss."""

    name = "divergence"


class Prefix(Selector):
    """Keeps the first share of the longest response allowed, and stops sampling there."""

    name = "prefix"

    def __init__(self, *, keep: float = 0.5) -> None:
        require(0 < keep <= 1, f"keep must lie in (0, 1], got {keep}")
        self.keep = float(keep)

    def length(self, limit: int) -> int:
        return max(1, math.ceil(self.keep * limit))

    def weights(self, batch: SelectorBatch) -> Tensor:
        return (batch.position_N < self.length(batch.length_limit)).float()


# The published rules


class Tip(TopShare):
    """Keeps where the student is uncertain or far from the teacher: h + d - h d, both scaled to [0, 1] in the step.

    Source: TIP, arXiv 2604.14084.
    """

    name = "tip"

    def score(self, batch: SelectorBatch) -> Tensor:
        entropy_N, value_N = _min_max(batch.measured("student_entropy_N")), _min_max(batch.measured("value_N"))
        return entropy_N + value_N - entropy_N * value_N


class Teachable(TopShare):
    """Keeps where the two models disagree and the teacher still believes in what the student would say.

    Score N(D) N(C): D is KL(teacher || student), both renormalised on the student's top `top` tokens, C the teacher's
    probability of those tokens, N clips to the 5th and 95th percentile and scales to [0, 1]. Source: TA-OPD, arXiv
    2605.26844.
    """

    name = "teachable"

    def __init__(self, *, keep: float = 0.05, top: int = 16) -> None:
        super().__init__(keep=keep)
        require(top >= 2, f"top must be at least 2 tokens, got {top}")
        self.needs_top = top

    def score(self, batch: SelectorBatch) -> Tensor:
        student_Nk, teacher_Nk = (
            batch.measured(name)[:, : self.needs_top].double()
            for name in ("student_top_Nk", "teacher_at_student_top_Nk")
        )
        p_Nk, q_Nk = student_Nk.log_softmax(1), teacher_Nk.clamp_min(-1e30).log_softmax(1)
        disagreement_N = (q_Nk.exp() * (q_Nk - p_Nk)).sum(1)
        compatibility_N = teacher_Nk.exp().sum(1)
        return _clipped(disagreement_N) * _clipped(compatibility_N)


class Iw(Selector):
    """Weighs early positions more: 1 + gamma (1 - share of the rollout's |advantage| that lies before the position).

    The advantage is log q - log p of the sampled token. Source: IW-OPD, arXiv 2606.22600.
    """

    name = "iw"
    needs_losses = True

    def __init__(self, *, gamma: float = 0.5) -> None:
        require(0 <= gamma <= 1, f"gamma must lie in [0, 1], got {gamma}")
        self.gamma = float(gamma)
        self.bound = 1.0 + self.gamma

    def weights(self, batch: SelectorBatch) -> Tensor:
        advantage_N = (batch.measured("teacher_logprob_N") - batch.measured("student_logprob_N")).double().abs()
        advantage_N = torch.nan_to_num(advantage_N, nan=0.0, posinf=0.0)
        total_N = torch.bincount(batch.rollout_N, advantage_N)[batch.rollout_N]
        before_N = advantage_N.cumsum(0) - advantage_N
        first_N = torch.searchsorted(batch.rollout_N, batch.rollout_N)  # the first row of each row's rollout
        share_N = torch.where(total_N > 0, (before_N - before_N[first_N]) / total_N.clamp_min(1e-30), 0.0)
        return (1 + self.gamma * (1 - share_N.clamp(0, 1))).float()


class Fire(Selector):
    """Drops the rollouts that the teacher finds least likely and weighs the rest by both entropies.

    Weight (1 + (1 - H_T / max H_T)) (1 + H_S / max H_S), divided by its mean over the kept occurrences; maxima are the
    step's. The source divides by each rollout's mean. Source: FIRE, arXiv 2606.02684.
    """

    name = "fire"
    needs_losses = True
    bound = 4.0

    def __init__(self, *, drop: float = 0.2) -> None:
        """`drop`: share of the rollouts, those of lowest mean teacher log-probability, that carry no loss."""
        require(0 <= drop < 1, f"drop is a share in [0, 1), got {drop}")
        self.drop = float(drop)

    def weights(self, batch: SelectorBatch) -> Tensor:
        logprob_N = torch.nan_to_num(batch.measured("teacher_logprob_N").double(), nan=0.0, neginf=-1e30)
        count_R = torch.bincount(batch.rollout_N)
        mean_R = torch.bincount(batch.rollout_N, logprob_N) / count_R.clamp_min(1)
        present_M = count_R.nonzero().squeeze(1)  # a rollout without a loss token has no mean and cannot be dropped
        worst_M = present_M[mean_R[present_M].argsort(stable=True)]
        kept_R = torch.ones(len(count_R), dtype=torch.bool)
        kept_R[worst_M[: math.floor(self.drop * len(present_M))]] = False
        kept_N = kept_R[batch.rollout_N]
        teacher_N, student_N = (
            torch.nan_to_num(batch.measured(name).double()) for name in ("teacher_entropy_N", "student_entropy_N")
        )
        weight_N = 2 - teacher_N / teacher_N.max().clamp_min(1e-30)
        weight_N = weight_N * (1 + student_N / student_N.max().clamp_min(1e-30))
        weight_N = torch.where(kept_N, weight_N, 0.0)
        return (weight_N / weight_N[kept_N].mean()).float()


class SelectKd(Selector):
    """Weight 1 where the student's most probable token is among the teacher's top `top`, else `low`.

    Source: SelecTKD, arXiv 2510.24021.
    """

    name = "selectkd"
    needs_losses = True

    def __init__(self, *, top: int = 5, low: float = 0.01) -> None:
        require(top >= 1, f"top must be at least 1 token, got {top}")
        require(0 <= low <= 1, f"low is a weight in [0, 1], got {low}")
        self.needs_top, self.low = top, float(low)

    def weights(self, batch: SelectorBatch) -> Tensor:
        first_N1 = batch.measured("student_top_id_Nk")[:, :1]
        agreed_N = (batch.measured("teacher_top_id_Nk")[:, : self.needs_top] == first_N1).any(1)
        return torch.where(agreed_N, 1.0, self.low)


class Position(Selector):
    """Weighs late positions more: 0.25 + 0.75 sigmoid((position / length - 0.30) / 0.10). Source: arXiv 2605.21606."""

    name = "position"

    def weights(self, batch: SelectorBatch) -> Tensor:
        length_N = torch.bincount(batch.rollout_N)[batch.rollout_N].double()
        first_N = torch.searchsorted(batch.rollout_N, batch.rollout_N)
        place_N = (batch.position_N - batch.position_N[first_N]) / length_N
        return (0.25 + 0.75 * torch.sigmoid((place_N - 0.30) / 0.10)).float()


class AdaKd(TopShare):
    """Keeps the top share by loss, a share that shrinks as the smoothed loss falls and grows as it rises.

    Whenever the smoothed loss is 10 % below the level at the last change the share is multiplied by 0.9, whenever it is
    10 % above by 1.1. Source: AdaKD, arXiv 2510.11615.
    """

    name = "adakd"
    CHANGE = 0.1
    SMOOTHING = 0.9  # weight of the past in the smoothed loss, per optimiser step
    LEAST = 0.05

    def __init__(self, *, keep: float = 0.5) -> None:
        """`keep`: share of the occurrences that is kept at first."""
        super().__init__(keep=keep)
        self._smoothed: float | None = None
        self._level: float | None = None

    def weights(self, batch: SelectorBatch) -> Tensor:
        mean = float(torch.nan_to_num(batch.measured("value_N").double(), posinf=0.0).mean())
        if self._smoothed is None or self._level is None:
            self._smoothed = self._level = mean
            return super().weights(batch)
        self._smoothed = self.SMOOTHING * self._smoothed + (1 - self.SMOOTHING) * mean
        if self._smoothed <= (1 - self.CHANGE) * self._level:
            self.keep, self._level = max(self.LEAST, self.keep * (1 - self.CHANGE)), self._smoothed
        elif self._smoothed >= (1 + self.CHANGE) * self._level:
            self.keep, self._level = min(1.0, self.keep * (1 + self.CHANGE)), self._smoothed
        return super().weights(batch)

    def state_dict(self) -> Row:
        return {"keep": self.keep, "smoothed": self._smoothed, "level": self._level}

    def load_state_dict(self, state: Row) -> None:
        self.keep, self._smoothed, self._level = float(state["keep"]), state["smoothed"], state["level"]


def _min_max(column_N: Tensor) -> Tensor:
    """A column scaled to [0, 1] over the step; 0 everywhere where it is constant."""
    column_N = torch.nan_to_num(column_N.double(), posinf=torch.finfo(torch.float32).max)
    low, high = (column_N.min(), column_N.max()) if len(column_N) else (torch.tensor(0.0), torch.tensor(0.0))
    return (column_N - low) / (high - low) if high > low else torch.zeros_like(column_N)


def _clipped(column_N: Tensor) -> Tensor:
    """A column scaled so that its 5th percentile is 0 and its 95th is 1, clipped to [0, 1]; 0 where it is constant."""
    low, high = torch.quantile(column_N, torch.tensor([0.05, 0.95], dtype=column_N.dtype))
    return ((column_N - low) / (high - low)).clamp(0, 1) if high > low else torch.zeros_like(column_N)


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
