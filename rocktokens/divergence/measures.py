"""What one row costs, from the logits of two models: divergence, entropies, and the gradient in the student's logits.

This module sees a few rows at a time, so few that they stay in the cache while they are measured. It does not know
where logits come from, nor which rows count.

Shapes: R rows of one block, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Kind = Literal["reverse_kl", "forward_kl", "jsd", "todi", "srkl"]
KINDS = get_args(Kind)
SKEW = 0.1  # the student's share of the mixture in srkl

# Floor for log-probabilities: exp of it is 0, and a product with that 0 is 0, where -inf would give NaN.
LOG_ZERO = -1e30
# Products held at once while a dot product is summed: they stay in the cache.
DOT_ELEMENTS = 131_072


class Measures(NamedTuple):
    """Every row's divergence, both entropies, and the gradient of the divergence in the student's logits."""

    value_R: Tensor
    student_entropy_R: Tensor
    teacher_entropy_R: Tensor
    grad_RV: Tensor

    def finite(self) -> bool:
        """Whether every row has finite numbers; a NaN or an infinity anywhere in the logits shows in them."""
        return bool(torch.isfinite(torch.stack(self[:3])).all())


class TopChoices(NamedTuple):
    """Both models' K most probable tokens at every position, and what the teacher thinks of the student's."""

    student_ids_NK: Tensor
    student_logprobs_NK: Tensor
    teacher_at_student_NK: Tensor  # the teacher's log-probabilities of the student's K tokens
    teacher_ids_NK: Tensor
    teacher_logprobs_NK: Tensor

    @classmethod
    def empty(cls, num_rows: int, k: int, device: torch.device) -> TopChoices:
        """Room for `num_rows` positions: ids -1, log-probabilities NaN."""
        ids, logprobs = (torch.full((num_rows, k), fill, device=device) for fill in (-1, torch.nan))
        return cls(ids, logprobs, logprobs.clone(), ids.clone(), logprobs.clone())

    def fill_(self, at: slice, s_RV: Tensor, t_RV: Tensor) -> None:
        """Read some positions off their log-probabilities."""
        student, teacher = torch.topk(s_RV, self.size, dim=1), torch.topk(t_RV, self.size, dim=1)
        self.student_ids_NK[at], self.student_logprobs_NK[at] = student.indices, student.values
        self.teacher_at_student_NK[at] = t_RV.gather(1, student.indices)
        self.teacher_ids_NK[at], self.teacher_logprobs_NK[at] = teacher.indices, teacher.values

    @property
    def size(self) -> int:
        """Number of tokens kept of each model."""
        return self.student_ids_NK.shape[1]


def infinite_rows(s_RV: Tensor, t_RV: Tensor, kind: Kind) -> Tensor:
    """Rows where the averaging side can emit a token that the other cannot; a mixture can always emit it."""
    if kind == "reverse_kl":
        return (s_RV.isfinite() & t_RV.isneginf()).any(1)
    if kind == "forward_kl":
        return (t_RV.isfinite() & s_RV.isneginf()).any(1)
    if kind == "todi":  # both directions, each where its side is the larger
        return (s_RV.isneginf() != t_RV.isneginf()).any(1)
    return torch.zeros(len(s_RV), dtype=torch.bool, device=s_RV.device)


def measure_(s_RV: Tensor, t_RV: Tensor, work_RV: Tensor, kind: Kind, beta: float) -> Measures:
    """Value, both entropies and the logit gradient of every row; only `s_RV` still holds its log-probabilities after.

    `beta`: the teacher's share of the mixture of the Jensen-Shannon divergence.
    """
    torch.exp(t_RV, out=work_RV)  # teacher probabilities
    teacher_entropy_R = -_dot(work_RV, t_RV)
    if kind == "reverse_kl":
        torch.exp(s_RV, out=work_RV)
        student_entropy_R = -_dot(work_RV, s_RV)
        gap_RV = torch.sub(s_RV, t_RV, out=t_RV)
        value_R = _dot(work_RV, gap_RV)
        grad_RV = gap_RV.sub_(value_R[:, None]).mul_(work_RV)
    elif kind == "forward_kl":
        gap_RV = t_RV.sub_(s_RV)
        value_R = _dot(work_RV, gap_RV)
        student_RV = torch.exp(s_RV, out=gap_RV)
        student_entropy_R = -_dot(student_RV, s_RV)
        grad_RV = student_RV.sub_(work_RV)
    elif kind == "todi":
        value_R, student_entropy_R, grad_RV = _todi(s_RV, t_RV, work_RV)
    elif kind == "srkl":
        value_R, student_entropy_R, grad_RV = _skewed_reverse_kl(s_RV, t_RV)
    else:
        mixture_RV = torch.logaddexp(s_RV + math.log(1 - beta), t_RV + math.log(beta))
        teacher_part_R = _dot(work_RV, t_RV.sub_(mixture_RV))
        torch.exp(s_RV, out=work_RV)
        student_entropy_R = -_dot(work_RV, s_RV)
        gap_RV = torch.sub(s_RV, mixture_RV, out=t_RV)
        student_part_R = _dot(work_RV, gap_RV)
        value_R = beta * teacher_part_R + (1 - beta) * student_part_R
        grad_RV = gap_RV.sub_(student_part_R[:, None]).mul_(work_RV).mul_(1 - beta)
    return Measures(value_R, student_entropy_R, teacher_entropy_R, grad_RV)


def _todi(s_RV: Tensor, t_RV: Tensor, q_RV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token-wise mixture of both KLs: sum of a q ln(q / p) + (1 - a) p ln(p / q), a = sigmoid(ln q / p) held fixed.

    Source: ToDi, arXiv 2505.16297.
    """
    p_RV, gap_RV = s_RV.exp(), s_RV - t_RV
    forward_RV = torch.sigmoid(-gap_RV)
    teacher_RV, student_RV = forward_RV * q_RV, (1 - forward_RV) * p_RV
    value_R = _dot(student_RV, gap_RV) - _dot(teacher_RV, gap_RV)
    slope_RV = student_RV * (gap_RV + 1) - teacher_RV  # in the student's log-probabilities
    return value_R, -_dot(p_RV, s_RV), slope_RV - p_RV * slope_RV.sum(1, keepdim=True)


def _skewed_reverse_kl(s_RV: Tensor, t_RV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL(p || m) with m = 0.1 p + 0.9 q, which is finite whatever the teacher rules out."""
    p_RV = s_RV.exp()
    mixture_RV = torch.logaddexp(s_RV + math.log(SKEW), t_RV + math.log(1 - SKEW))
    gap_RV = s_RV - mixture_RV
    value_R = _dot(p_RV, gap_RV)
    slope_RV = p_RV * (gap_RV + 1 - SKEW * gap_RV.exp())
    return value_R, -_dot(p_RV, s_RV), slope_RV - p_RV * slope_RV.sum(1, keepdim=True)


def _dot(a_RV: Tensor, b_RV: Tensor) -> Tensor:
    """Row-wise dot product through a product of a few rows at a time.

    `sum` adds pairwise. A matrix product adds in order: too large by 7e-4 nats at V = 152k, and no faster.
    """
    if a_RV.is_cuda:  # many small kernels would cost more than one product
        return torch.linalg.vecdot(a_RV, b_RV)
    rows = max(1, DOT_ELEMENTS // a_RV.shape[1])
    return torch.cat([(a_RV * b_RV).sum(1) for a_RV, b_RV in zip(a_RV.split(rows), b_RV.split(rows))])


def log_softmax_(logits_RV: Tensor, softcap: float | None, temperature: float) -> Tensor | None:
    """Turn logits into log-probabilities in place; returns the soft cap's slope if there is a cap."""
    slope_RV = None
    if softcap is not None:
        logits_RV.div_(softcap).tanh_()
        slope_RV = 1 - logits_RV.square()
        logits_RV.mul_(softcap)
    if temperature != 1.0:
        logits_RV.div_(temperature)
    torch.log_softmax(logits_RV, dim=1, out=logits_RV)
    return slope_RV
