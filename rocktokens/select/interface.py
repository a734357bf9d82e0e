"""Selectors: which occurrences carry loss, and how much. The interface, every rule, and rules by name.

A selector sees every occurrence of one optimiser step, over all micro-batches and processes, and gives each a weight
in [0, 1]; a published rule may state a larger `bound`. What counts is the token PREDICTED at a position, never the one
before it. Shares, places and means are taken over the whole step. docs/selectors.md has formulas and sources. Nothing
here knows a model, a trainer or a file.

Shapes: N occurrences of one optimiser step, in rollout and position order, R rollouts, k most probable tokens of a row,
V vocabulary.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy import stats as sps
from torch import Tensor

from rocktokens.detect.measures import matched_control
from rocktokens.divergence.monitor import HALF_LIFE, LEAST_ROWS, TokenMonitor
from rocktokens.errors import ConfigError
from rocktokens.seeds import derive_seed
from rocktokens.select.settings import SelectorConfig
from rocktokens.settings import require
from rocktokens.values import Row

TAU_QUANTILE = 0.8  # of the step's losses: threshold of a high-divergence window where none is given
Z = 1.96  # standard errors on the safe side of a comparison: one-sided 97.5 %


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
    # Measured only for a selector that sets `needs_losses`.
    value_N: Tensor | None = None
    """Loss of each occurrence in nats."""
    student_entropy_N: Tensor | None = None
    teacher_entropy_N: Tensor | None = None
    student_logprob_N: Tensor | None = None
    """Log-probability of the token."""
    teacher_logprob_N: Tensor | None = None
    # Measured only for a selector that asks for k tokens with `needs_top`; best first.
    student_top_id_Nk: Tensor | None = None
    student_top_Nk: Tensor | None = None
    """The student's log-probabilities of its most probable tokens."""
    teacher_at_student_top_Nk: Tensor | None = None
    """The teacher's log-probabilities of the same tokens."""
    teacher_top_id_Nk: Tensor | None = None

    def __len__(self) -> int:
        return len(self.token_N)

    def measured(self, name: str) -> Tensor:
        """A column that a selector asked for; refused where the step did not measure it."""
        column: Tensor | None = getattr(self, name)
        if column is None:
            raise ConfigError(f"this selector needs {name}, which the step did not measure")
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
        """Called once after every optimiser step with what each token type has cost so far, over all processes."""

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
        """`window`: how far a window may reach on either side; 0 is off. `tau`: its threshold in nats."""
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
        value_N = batch.measured("value_N")
        return high_divergence_window(rock_N, value_N, batch.rollout_N, width=self.window, tau=self.tau)

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
        self, *, rocks: Iterable[int], lam: float = 0.0, window: int = 0, tau: float | None = None, seed: int = 0
    ) -> None:
        super().__init__(rocks=rocks, lam=lam, window=window, tau=tau)
        self.seed = seed

    def weights(self, batch: SelectorBatch) -> Tensor:
        rock_N = self.rocks_at(batch).numpy()
        if not rock_N.any():
            return torch.ones(len(batch))
        rng = np.random.default_rng(derive_seed(self.seed, "random", batch.step))
        chosen_N = matched_control(rock_N, batch.rollout_N.numpy(), np.zeros(len(batch)), rng=rng)
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
        """What occurrences are ordered by, one number each: a column, unless a rule says otherwise."""
        return batch.measured(self.column)

    def weights(self, batch: SelectorBatch) -> Tensor:
        weight_N = torch.zeros(len(batch))
        if len(batch):  # a step may hold no loss token at all
            score_N = torch.nan_to_num(self.score(batch).double(), nan=-math.inf)
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


# ---------------------------------------------------------------- the published rules


class Tip(TopShare):
    """Keeps where the student is uncertain or far from the teacher: h + d - h d, both scaled to [0, 1] in the step.

    Source: TIP, arXiv 2604.14084.
    """

    name = "tip"

    def score(self, batch: SelectorBatch) -> Tensor:
        entropy_N, value_N = (
            torch.nan_to_num(batch.measured(name).double(), posinf=torch.finfo(torch.float32).max)
            for name in ("student_entropy_N", "value_N")
        )
        h_N, d_N = (_scaled(column_N, column_N.amin(), column_N.amax()) for column_N in (entropy_N, value_N))
        return h_N + d_N - h_N * d_N


class Teachable(TopShare):
    """Keeps where the two models disagree and the teacher still believes in what the student would say.

    Score N(D) N(C): D is KL(teacher || student), both renormalised on the student's top tokens, C the teacher's
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
        ends = torch.tensor([0.05, 0.95], dtype=torch.double)
        d_N, c_N = (_scaled(column_N, *column_N.quantile(ends)) for column_N in (disagreement_N, compatibility_N))
        return d_N * c_N


class Iw(Selector):
    """Weighs early positions more: 1 + gamma (1 - share of the rollout's |advantage| that lies before the position).

    The advantage is log q - log p of the sampled token. Source: IW-OPD, arXiv 2606.22600.
    """

    name = "iw"
    needs_losses = True
    GAMMA = 0.5
    bound = 1.0 + GAMMA

    def weights(self, batch: SelectorBatch) -> Tensor:
        advantage_N = (batch.measured("teacher_logprob_N") - batch.measured("student_logprob_N")).double().abs()
        advantage_N = torch.nan_to_num(advantage_N, nan=0.0, posinf=0.0)
        total_N = torch.bincount(batch.rollout_N, advantage_N)[batch.rollout_N]
        before_N = advantage_N.cumsum(0) - advantage_N
        first_N = torch.searchsorted(batch.rollout_N, batch.rollout_N)  # the first row of each row's rollout
        share_N = torch.where(total_N > 0, (before_N - before_N[first_N]) / total_N.clamp_min(1e-30), 0.0)
        return (1 + self.GAMMA * (1 - share_N.clamp(0, 1))).float()


class Fire(Selector):
    """Drops the rollouts that the teacher finds least likely and weighs the rest by both entropies.

    Weight (1 + (1 - H_T / max H_T)) (1 + H_S / max H_S), divided by its mean over the kept occurrences; maxima are the
    step's. The source divides by each rollout's mean. Source: FIRE, arXiv 2606.02684.
    """

    name = "fire"
    needs_losses = True
    bound = 4.0
    DROP = 0.2  # share of the rollouts, those of lowest mean teacher log-probability, that carry no loss

    def weights(self, batch: SelectorBatch) -> Tensor:
        logprob_N = torch.nan_to_num(batch.measured("teacher_logprob_N").double(), nan=0.0, neginf=-1e30)
        count_R = torch.bincount(batch.rollout_N)
        mean_R = torch.bincount(batch.rollout_N, logprob_N) / count_R.clamp_min(1)
        present_M = count_R.nonzero().squeeze(1)  # a rollout without a loss token has no mean and cannot be dropped
        worst_M = present_M[mean_R[present_M].argsort(stable=True)]
        kept_R = torch.ones(len(count_R), dtype=torch.bool)
        kept_R[worst_M[: math.floor(self.DROP * len(present_M))]] = False
        kept_N = kept_R[batch.rollout_N]
        teacher_N, student_N = (
            torch.nan_to_num(batch.measured(name).double()) for name in ("teacher_entropy_N", "student_entropy_N")
        )
        weight_N = 2 - teacher_N / teacher_N.max().clamp_min(1e-30)
        weight_N = weight_N * (1 + student_N / student_N.max().clamp_min(1e-30))
        return torch.where(kept_N, weight_N / weight_N[kept_N].mean(), 0.0).float()


class SelectKd(Selector):
    """Weight 1 where the student's most probable token is among the teacher's top ones, else 0.01.

    Source: SelecTKD, arXiv 2510.24021.
    """

    name = "selectkd"
    needs_losses = True

    def __init__(self, *, top: int = 5) -> None:
        require(top >= 1, f"top must be at least 1 token, got {top}")
        self.needs_top = top

    def weights(self, batch: SelectorBatch) -> Tensor:
        first_N1 = batch.measured("student_top_id_Nk")[:, :1]
        agreed_N = (batch.measured("teacher_top_id_Nk")[:, : self.needs_top] == first_N1).any(1)
        return torch.where(agreed_N, 1.0, 0.01)


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
    LEAST = 0.05  # of the occurrences are always kept
    _smoothed: float | None = None
    _level: float | None = None

    def weights(self, batch: SelectorBatch) -> Tensor:
        mean = float(torch.nan_to_num(batch.measured("value_N").double(), posinf=0.0).mean())
        if self._smoothed is None or self._level is None:
            self._smoothed = self._level = mean
            return super().weights(batch)
        self._smoothed = 0.9 * self._smoothed + 0.1 * mean
        if self._smoothed <= 0.9 * self._level:
            self.keep, self._level = max(self.LEAST, self.keep * 0.9), self._smoothed
        elif self._smoothed >= 1.1 * self._level:
            self.keep, self._level = min(1.0, self.keep * 1.1), self._smoothed
        return super().weights(batch)

    def state_dict(self) -> Row:
        return {"keep": self.keep, "smoothed": self._smoothed, "level": self._level}

    def load_state_dict(self, state: Row) -> None:
        self.keep, self._smoothed, self._level = float(state["keep"]), state["smoothed"], state["level"]


def _scaled(column_N: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """A column scaled so that `low` is 0 and `high` is 1, clipped to [0, 1]; 0 everywhere where it is constant."""
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


# ---------------------------------------------------------------- the rule that learns while the model trains


def least_updates(half_life: float = HALF_LIFE) -> int:
    """Updates that `Adaptive` watches before it can freeze anything: one half-life early, one late."""
    return 2 * max(1, round(half_life)) + 1


class Adaptive(Selector):
    """Freezes what is expensive and does not learn while the rest does; thaws what moves again.

    "Does not learn" is relative to what learns. Everything is taken from losses that were computed anyway.
    """

    name = "adaptive"

    MAX_FALL = 0.15  # a frozen type thaws when its audited mean has moved by more than this share
    LEAST_FALL = 0.30  # nothing is frozen before the median fall of the run's own types, by rows, is this large
    SLOWER = 1 / 3  # a type is frozen if its fall and its error are below this share of the median fall
    MAX_POSITIONS = 0.5  # largest share of positions ever frozen at once

    def __init__(
        self, *, budget: float = 0.005, audit: float = 0.05, allowed: Iterable[int] | None = None, seed: int = 0
    ) -> None:
        """Settings of the rule.

        Args:
            budget: least share of the recent loss that makes a type worth freezing.
            audit: share of frozen positions left in the loss, so that a type that moves again is seen and thawed.
            allowed: the only types that may be frozen, e.g. a bypass list; None: any.
            seed: decides which frozen positions are audited.
        """
        for option, value in (("budget", budget), ("audit", audit)):
            require(0 < value < 1, f"{option} must lie between 0 and 1, got {value}")
        self.budget, self.audit, self.seed = budget, audit, seed
        self.allowed = None if allowed is None else tuple(sorted({int(token) for token in allowed}))
        self.median_fall = float("nan")
        self._frozen: dict[int, tuple[float, float, float]] = {}  # type: mean, loss share, position share when frozen
        self._thawed: dict[int, tuple[float, int]] = {}  # type: mean and number of updates when thawed

    @property
    def frozen(self) -> tuple[int, ...]:
        """Token types frozen now."""
        return tuple(sorted(self._frozen))

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.allowed or ()

    def weights(self, batch: SelectorBatch) -> Tensor:
        frozen_N = torch.isin(batch.token_N, torch.tensor(self.frozen, dtype=torch.long))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "audit", batch.step))
        audited_N = torch.rand(len(batch), generator=generator) < self.audit
        return torch.where(frozen_N & ~audited_N, 0.0, 1.0)

    def observe(self, monitor: TokenMonitor) -> None:
        if monitor.num_updates < least_updates(monitor.half_life) or not monitor.sums("recent", "value").sum() > 0:
            return
        # Let go of types whose audited mean has moved, either way, by more than MAX_FALL and its error.
        mean_V, mean_error_V = monitor.mean("recent"), monitor.standard_error("recent")
        for token, (reference, _, _) in list(self._frozen.items()):
            # An unknown error (too few audited rows) compares as False: what is not known to move stays.
            if abs(mean_V[token] - reference) > self.MAX_FALL * reference + Z * mean_error_V[token]:
                del self._frozen[token]
                self._thawed[token] = (float(mean_V[token]), monitor.num_updates)
        fall_V, error_V = (column_V.copy() for column_V in monitor.fall())
        rows_V = monitor.sums("early", "weight")
        known_V = np.isfinite(fall_V) & (rows_V > 0)
        self.median_fall = math.nan
        if known_V.any():  # by rows: the median occurrence, not the median type
            self.median_fall = float(np.quantile(fall_V[known_V], 0.5, weights=rows_V[known_V], method="inverted_cdf"))
        if self.median_fall >= self.LEAST_FALL:
            self._freeze(monitor, fall_V, error_V)

    def _freeze(self, monitor: TokenMonitor, fall_V: np.ndarray, error_V: np.ndarray) -> None:
        """Freeze the open types that are costly and stay; a thawed type's fall counts from where it was thawed."""
        rows_V = np.minimum(monitor.effective_rows("early"), monitor.effective_rows("late"))
        mean_V, mean_error_V = monitor.mean("recent"), monitor.standard_error("recent")
        frozen_V = np.isin(np.arange(len(rows_V)), self.frozen)
        open_V = (rows_V >= LEAST_ROWS) & ~frozen_V
        if self.allowed is not None:
            open_V &= np.isin(np.arange(len(open_V)), self.allowed)
        for token, (mean, updates) in list(self._thawed.items()):
            fall_V[token], error_V[token] = 1.0 - mean_V[token] / mean, mean_error_V[token] / mean
            open_V[token] &= monitor.num_updates - updates >= monitor.half_life
            if open_V[token] and fall_V[token] > self.MAX_FALL:  # still on its way: compare with where it is now
                self._thawed[token] = (float(mean_V[token]), monitor.num_updates)

        weight_V, value_V = monitor.sums("recent", "weight"), monitor.sums("recent", "value")
        # Frozen types are seen only where audited; what they carried when frozen stands for what they carry now.
        loss_left = 1.0 - sum(loss for _, loss, _ in self._frozen.values())
        rows_left = 1.0 - sum(rows for _, _, rows in self._frozen.values())
        loss_share_V = loss_left * value_V / max(value_V[~frozen_V].sum(), np.finfo(float).tiny)
        rows_share_V = rows_left * weight_V / max(weight_V[~frozen_V].sum(), np.finfo(float).tiny)

        worth_V = open_V & (loss_share_V > self.budget)
        # Standard errors on the safe side of a fall: 1.96 or, where that is more, Student's quantile for the rows of
        # each type with the 2.5 % shared among all types tested (Bonferroni). With 1.96 alone, about one type in forty
        # that learns would be frozen for its noise.
        tail = float(sps.norm.sf(Z)) / max(int(worth_V.sum()), 1)
        quantile_V = np.maximum(sps.t.isf(tail, np.maximum(rows_V - 1, 1)), Z)
        with np.errstate(invalid="ignore"):
            stayed_V = fall_V + quantile_V * error_V < self.SLOWER * self.median_fall
            costly_V = mean_V - Z * mean_error_V > value_V.sum() / weight_V.sum()
        chosen = np.flatnonzero(worth_V & stayed_V & costly_V)
        for token in sorted(chosen.tolist(), key=lambda v: (-loss_share_V[v], v)):
            if 1.0 - rows_left + rows_share_V[token] > self.MAX_POSITIONS:
                break
            self._frozen[token] = (float(mean_V[token]), float(loss_share_V[token]), float(rows_share_V[token]))
            self._thawed.pop(token, None)
            rows_left -= rows_share_V[token]

    def state_dict(self) -> Row:
        return {"frozen": dict(self._frozen), "thawed": dict(self._thawed)}

    def load_state_dict(self, state: Row) -> None:
        self._frozen, self._thawed = dict(state["frozen"]), dict(state["thawed"])


# ---------------------------------------------------------------- by name


def selector_kinds() -> dict[str, type[Selector]]:
    """Every selector of ours by name."""
    ours: tuple[type[Selector], ...] = (Uniform, Freeze, FreezeRocks, Soft, Random, Adaptive, Entropy, HighDivergence)
    ours += (Prefix, Tip, Teachable, Iw, Fire, SelectKd, Position, AdaKd)
    return {kind.name: kind for kind in ours}


def make_selector(name: str, **options: object) -> Selector:
    """A selector by name, e.g. make_selector("freeze", rocks=[11, 42]); or your own class as "package.module:Class"."""
    kinds = selector_kinds()
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            kind = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"selector {name} cannot be loaded: {error}") from None
        is_one = isinstance(kind, type) and issubclass(kind, Selector)
        require(is_one, f"{name} is not a Selector; derive it from rocktokens.Selector")
    else:
        near = difflib.get_close_matches(name, kinds, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        known = f"There are: {', '.join(kinds)}; or package.module:Class."
        require(name in kinds, f"no selector is called {name!r}.{hint} {known}")
        kind = kinds[name]
    signature = inspect.signature(kind)
    takes = f"it takes: {', '.join(signature.parameters)}" if signature.parameters else "it takes no options"
    for option in options:
        require(option in signature.parameters, f"selector {name} has no option {option!r}; {takes}")
    return kind(**options)


def selector_of(config: SelectorConfig, rocks: Iterable[int] = (), bypass: Iterable[int] | None = None) -> Selector:
    """The selector a configuration asks for.

    Args:
        config: which selector, and its settings.
        rocks: the declared rocks; they stand in where a selector needs some and the configuration names none.
        bypass: the bypass list, likewise for `freeze` (unset: there is no such list, and `freeze` takes the rocks); for
            `adaptive` it counts where the configuration asks for one.
    """
    options = config.options()
    if config.name == "adaptive":
        named = options.pop("rocks", ())
        options["allowed"] = (() if bypass is None else tuple(bypass)) if config.bypass else (named or None)
    elif "rocks" in options and not config.rocks:
        options["rocks"] = tuple(bypass if config.name == "freeze" and bypass is not None else rocks)
    return make_selector(config.name, **options)
