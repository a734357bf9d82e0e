"""The published token selectors, each as its paper defines it; docs/selectors.md lists formulas and sources.

A selector whose source gives weights above 1 states the largest it can give as `bound`. Shares, ranks, extremes and
means are taken over the whole optimiser step, never over a micro-batch.

Shapes: N occurrences of one optimiser step, R rollouts, k most probable tokens of a row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rocktokens.select.basic import Selector, SelectorBatch, TopShare
from rocktokens.settings import require
from rocktokens.values import Row


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
        total_N = rollout_sums(advantage_N, batch.rollout_N)[batch.rollout_N]
        before_N = advantage_N.cumsum(0) - advantage_N
        first_N = _first_row(batch.rollout_N)
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
        count_R = rollout_sums(torch.ones_like(logprob_N), batch.rollout_N)
        mean_R = rollout_sums(logprob_N, batch.rollout_N) / count_R.clamp_min(1)
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
        length_N = rollout_sums(torch.ones(len(batch), dtype=torch.double), batch.rollout_N)[batch.rollout_N]
        place_N = (batch.position_N - batch.position_N[_first_row(batch.rollout_N)]) / length_N
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

    def score(self, batch: SelectorBatch) -> Tensor:
        return batch.measured("value_N")

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


PUBLISHED: tuple[type[Selector], ...]
PUBLISHED = (Tip, Teachable, Iw, Fire, SelectKd, Position, AdaKd)


def rollout_sums(column_N: Tensor, rollout_N: Tensor) -> Tensor:
    """The sum of a column over each rollout, by rollout number."""
    count = int(rollout_N.max()) + 1 if len(rollout_N) else 0
    return torch.zeros(count, dtype=column_N.dtype).index_add_(0, rollout_N, column_N)


def _first_row(rollout_N: Tensor) -> Tensor:
    """For every row the first row of its rollout; rows are in rollout order."""
    starts_N = torch.ones(len(rollout_N), dtype=torch.bool)
    starts_N[1:] = rollout_N[1:] != rollout_N[:-1]
    first = starts_N.nonzero().squeeze(1)
    return first[starts_N.long().cumsum(0) - 1]


def _min_max(column_N: Tensor) -> Tensor:
    """A column scaled to [0, 1] over the step; 0 everywhere where it is constant."""
    column_N = torch.nan_to_num(column_N.double(), posinf=torch.finfo(torch.float32).max)
    low, high = (column_N.min(), column_N.max()) if len(column_N) else (torch.tensor(0.0), torch.tensor(0.0))
    return (column_N - low) / (high - low) if high > low else torch.zeros_like(column_N)


def _clipped(column_N: Tensor) -> Tensor:
    """A column scaled so that its 5th percentile is 0 and its 95th is 1, clipped to [0, 1]; 0 where it is constant."""
    low, high = torch.quantile(column_N, torch.tensor([0.05, 0.95], dtype=column_N.dtype))
    return ((column_N - low) / (high - low)).clamp(0, 1) if high > low else torch.zeros_like(column_N)
