"""Divergence between two models at every response position, its gradient and its telemetry, in one pass.

The pass goes over the rows in chunks: both vocabulary projections, the divergence, every per-row measure and the
gradient of the student's side are taken from a chunk of logits before the next one overwrites it. So no N x V tensor
ever exists, the projections run once (not again in the backward), and a row of weight 0 never reaches either head.
This room knows arrays only: no model, no tokenizer, no padding, no shift between logits and labels.

Shapes: N rows (occurrences), V vocabulary, H student width, G teacher width, C rows of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rocktokens.core.heads import Head, add_outer_, check_head, logits_, times_head
from rocktokens.errors import ConfigError

Kind = Literal["reverse_kl", "forward_kl", "jsd"]
KINDS = ("reverse_kl", "forward_kl", "jsd")

# Floor for log-probabilities: exp of it is 0, and a product with that 0 is 0, where -inf would give NaN.
LOG_ZERO = -1e30
# Logits held at once, per buffer: large enough to keep a matrix multiplication busy, small beside one output head.
CHUNK_ELEMENTS = 6_500_000
# Rows at least: every chunk reads both heads and the head's gradient once, so fewer rows wait for memory.
LEAST_ROWS = 128
# Products held at once while a dot product is summed: they stay in the cache.
DOT_ELEMENTS = 131_072


class Divergence(NamedTuple):
    """The loss and what every row contributed. Rows of weight 0 were never computed: their entries are NaN."""

    loss: Tensor
    """Sum of weight x value / denominator; differentiable in the student's hidden states, head and bias."""
    value_N: Tensor
    """The divergence of the row in nats, >= 0."""
    log_ratio_N: Tensor | None
    """log p_student - log p_teacher at the row's token; may be negative."""
    student_logprob_N: Tensor | None
    teacher_logprob_N: Tensor | None
    student_entropy_N: Tensor
    teacher_entropy_N: Tensor
    grad_norm_N: Tensor
    """Euclidean norm of the gradient of the row's value in the student's logits."""


@dataclass
class _Rows:
    """Per-row results, filled chunk by chunk."""

    value_N: Tensor
    student_logprob_N: Tensor
    teacher_logprob_N: Tensor
    student_entropy_N: Tensor
    teacher_entropy_N: Tensor
    grad_norm_N: Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> _Rows:
        return cls(*(torch.full((num_rows,), torch.nan, device=device) for _ in range(6)))


def fused_divergence(
    student_hidden_NH: Tensor,
    student_head_VH: Tensor,
    teacher_hidden_NG: Tensor,
    teacher_head_VG: Tensor,
    *,
    token_N: Tensor | None = None,
    weight_N: Tensor | None = None,
    kind: Kind = "reverse_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    student_scale: float = 1.0,
    teacher_scale: float = 1.0,
    chunk: int | None = None,
    denominator: Tensor | float | None = None,
    observe: Callable[[Tensor, Tensor], None] | None = None,
) -> Divergence:
    """Divergence of student and teacher from hidden states and output heads; float32 inside, whatever comes in.

    `kind` is KL(student || teacher), KL(teacher || student), or the generalised Jensen-Shannon divergence
    beta KL(teacher || m) + (1 - beta) KL(student || m) with m = (1 - beta) student + beta teacher.
    Logits are `softcap * tanh(scale * (hidden @ head.T + bias) / softcap) / temperature`. Head rows beyond the shared
    vocabulary are left out on both sides. The loss is the sum of weight x value over `denominator` (default: the sum of
    weights); give the count of the whole optimiser step and micro-batches and ranks add up. One backward per call.
    `observe(token_C, grad_CV)` is shown every chunk's gradients of `value` in the student's logits (at temperature 1),
    to be read at once: the next chunk overwrites them. It needs `token_N`.
    """
    student = Head(student_head_VH, student_bias, student_softcap, student_scale)
    teacher = Head(teacher_head_VG, teacher_bias, teacher_softcap, teacher_scale)
    check_head("student", student, student_hidden_NH)
    check_head("teacher", teacher, teacher_hidden_NG)
    _check_settings(kind, beta, temperature, chunk)
    _check_rows(len(student_hidden_NH), len(teacher_hidden_NG), token_N, weight_N, observe, (student, teacher))
    keep_K, weight_K, denominator = _kept(student_hidden_NH, weight_N, denominator)
    student_hidden_KH, teacher_hidden_KG, token_K = student_hidden_NH, teacher_hidden_NG, token_N
    if keep_K is not None:
        student_hidden_KH, teacher_hidden_KG = student_hidden_NH[keep_K], teacher_hidden_NG[keep_K]
        token_K = None if token_N is None else token_N[keep_K]

    options = _Options(kind, beta, temperature, chunk, student, teacher, observe)
    differentiable: tuple[Tensor | None, ...] = (student_hidden_KH, student_head_VH, student_bias)
    if not torch.is_grad_enabled():  # a Function does not see no_grad and would pay for the parameters' gradients
        differentiable = tuple(None if given is None else given.detach() for given in differentiable)
    factor_K = weight_K / denominator
    loss, *columns = _FusedDivergence.apply(*differentiable, teacher_hidden_KG.detach(), token_K, factor_K, options)
    if keep_K is not None:
        columns = [_scatter(column_K, keep_K, len(student_hidden_NH)) for column_K in columns]
    value_N, student_logprob_N, teacher_logprob_N, *rest = columns
    if token_N is None:
        return Divergence(loss, value_N, None, None, None, *rest)
    log_ratio_N = student_logprob_N - teacher_logprob_N
    return Divergence(loss, value_N, log_ratio_N, student_logprob_N, teacher_logprob_N, *rest)


def _kept(
    hidden_NH: Tensor, weight_N: Tensor | None, denominator: Tensor | float | None
) -> tuple[Tensor | None, Tensor, Tensor | float]:
    """Which rows stay (None: all), their weights, and what the loss is divided by."""
    keep_K = None
    weight_K = torch.ones(len(hidden_NH), device=hidden_NH.device)
    if weight_N is not None:
        weight_K = weight_N.detach().to(device=hidden_NH.device, dtype=torch.float32)
        if not bool((weight_K != 0).all()):
            keep_K = weight_K.nonzero().squeeze(1)
            weight_K = weight_K[keep_K]
    if denominator is None:
        denominator = weight_K.sum().clamp_min(torch.finfo(torch.float32).tiny)
    elif len(weight_K) and not 0 < float(denominator) < math.inf:
        raise ConfigError(
            f"denominator must be > 0 and finite, got {float(denominator)}; it is the step's sum of weights"
        )
    return keep_K, weight_K, denominator


def _scatter(column_K: Tensor, keep_K: Tensor, num_rows: int) -> Tensor:
    return column_K.new_full((num_rows,), torch.nan).index_copy_(0, keep_K, column_K)


@dataclass(frozen=True)
class _Options:
    kind: Kind
    beta: float
    temperature: float
    chunk: int | None
    student: Head
    teacher: Head
    observe: Callable[[Tensor, Tensor], None] | None = None

    @property
    def vocabulary(self) -> int:
        return min(len(self.student.weight_VH), len(self.teacher.weight_VH))

    @property
    def rows_per_chunk(self) -> int:
        return self.chunk or max(LEAST_ROWS, CHUNK_ELEMENTS // self.vocabulary // 16 * 16)


class _FusedDivergence(torch.autograd.Function):
    """Takes the gradients during the forward pass, while a chunk's logits exist, and hands them out in the backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        student_hidden_NH: Tensor,
        student_head_VH: Tensor,
        student_bias_V: Tensor | None,
        teacher_hidden_NG: Tensor,
        token_N: Tensor | None,
        factor_N: Tensor,
        options: _Options,
    ) -> tuple[Tensor, ...]:
        num_rows, device = len(student_hidden_NH), student_hidden_NH.device
        needs_hidden, needs_head, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.empty_like(student_hidden_NH, dtype=torch.float32) if needs_hidden else None
        grad_head_VH = torch.zeros_like(student_head_VH, dtype=torch.float32) if needs_head else None
        grad_bias_V = None
        if student_bias_V is not None and needs_bias:
            grad_bias_V = torch.zeros_like(student_bias_V, dtype=torch.float32)
        rows = _Rows.empty(num_rows, device)

        size = min(options.rows_per_chunk, max(num_rows, 1))
        buffers = [torch.empty((size, options.vocabulary), device=device) for _ in range(3)]
        with torch.autocast(device.type, enabled=False):
            for start in range(0, num_rows, size):
                at = slice(start, min(start + size, num_rows))
                grad_CV = _chunk(student_hidden_NH[at], teacher_hidden_NG[at], token_N, at, rows, buffers, options)
                factor_C1 = factor_N[at, None]
                if grad_hidden_NH is not None:
                    grad_hidden_NH[at] = factor_C1 * times_head(grad_CV, student_head_VH)
                if grad_head_VH is not None:
                    add_outer_(grad_head_VH[: options.vocabulary], grad_CV, student_hidden_NH[at], factor_C1)
                if grad_bias_V is not None:
                    grad_bias_V[: options.vocabulary].addmv_(grad_CV.t(), factor_N[at])

        ctx.grads = (grad_hidden_NH, grad_head_VH, grad_bias_V)
        ctx.dtypes = (
            student_hidden_NH.dtype,
            student_head_VH.dtype,
            None if student_bias_V is None else student_bias_V.dtype,
        )
        loss = torch.where(factor_N == 0, 0.0, factor_N * rows.value_N).sum()
        telemetry = (
            rows.value_N,
            rows.student_logprob_N,
            rows.teacher_logprob_N,
            rows.student_entropy_N,
            rows.teacher_entropy_N,
            rows.grad_norm_N,
        )
        ctx.mark_non_differentiable(*telemetry)
        return (loss, *telemetry)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError("fused_divergence has no second derivative; call backward without create_graph")
        if ctx.grads is None:
            raise RuntimeError("fused_divergence keeps its gradients for one backward; call it again for a second one")
        grads, ctx.grads = ctx.grads, None
        scaled = [
            None if grad is None else grad.mul_(grad_outputs[0]).to(dtype) for grad, dtype in zip(grads, ctx.dtypes)
        ]
        return (*scaled, None, None, None, None)


def _chunk(
    student_hidden_CH: Tensor,
    teacher_hidden_CG: Tensor,
    token_N: Tensor | None,
    at: slice,
    rows: _Rows,
    buffers: list[Tensor],
    options: _Options,
) -> Tensor:
    """Measure one chunk into `rows`; returns the gradient of each row's value in the student's projection output."""
    s_CV, t_CV, work_CV = (buffer[: len(student_hidden_CH)] for buffer in buffers)
    slope_CV = _log_softmax_(s_CV, student_hidden_CH, options.student, options.temperature)
    _log_softmax_(t_CV, teacher_hidden_CG, options.teacher, options.temperature)
    if token_N is not None:
        token_C1 = token_N[at, None].clamp(0, options.vocabulary - 1)
        rows.student_logprob_N[at] = s_CV.gather(1, token_C1).squeeze(1)
        rows.teacher_logprob_N[at] = t_CV.gather(1, token_C1).squeeze(1)

    infinite_C = None
    measures = _measure_(s_CV, t_CV, work_CV, options)
    if not bool(torch.isfinite(torch.stack(measures[:3])).all()):
        # Some logit is -inf (or NaN): floor the logs so that impossible tokens contribute 0, and measure again.
        _log_softmax_(s_CV, student_hidden_CH, options.student, options.temperature)
        _log_softmax_(t_CV, teacher_hidden_CG, options.teacher, options.temperature)
        infinite_C = _infinite(s_CV, t_CV, options.kind)
        measures = _measure_(s_CV.clamp_(min=LOG_ZERO), t_CV.clamp_(min=LOG_ZERO), work_CV, options)
    value_C, student_entropy_C, teacher_entropy_C, grad_CV = measures
    rows.value_N[at] = value_C.clamp_min(0)
    rows.student_entropy_N[at] = student_entropy_C
    rows.teacher_entropy_N[at] = teacher_entropy_C
    rows.grad_norm_N[at] = torch.linalg.vector_norm(grad_CV, dim=1) / options.temperature
    if infinite_C is not None:
        rows.value_N[at].masked_fill_(infinite_C, torch.inf)
        if options.kind == "reverse_kl":
            rows.grad_norm_N[at].masked_fill_(infinite_C, torch.inf)
    if options.observe is not None and token_N is not None:
        shown_C = slice(None) if infinite_C is None else ~infinite_C  # an infinite value has no gradient to show
        options.observe(token_N[at][shown_C], grad_CV[shown_C])
    if slope_CV is not None:
        grad_CV.mul_(slope_CV)
    if options.student.scale != 1.0 or options.temperature != 1.0:
        grad_CV.mul_(options.student.scale / options.temperature)
    return grad_CV


def _infinite(s_CV: Tensor, t_CV: Tensor, kind: Kind) -> Tensor:
    """Rows where the averaging side can emit a token that the other cannot; a mixture can always emit it."""
    if kind == "reverse_kl":
        return (s_CV.isfinite() & t_CV.isneginf()).any(1)
    if kind == "forward_kl":
        return (t_CV.isfinite() & s_CV.isneginf()).any(1)
    return torch.zeros(len(s_CV), dtype=torch.bool, device=s_CV.device)


def _measure_(s_CV: Tensor, t_CV: Tensor, work_CV: Tensor, options: _Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Value, both entropies and the logit gradient of every row from log-probabilities; all three buffers are spent."""
    torch.exp(t_CV, out=work_CV)  # teacher probabilities
    teacher_entropy_C = -_dot(work_CV, t_CV)
    if options.kind == "reverse_kl":
        torch.exp(s_CV, out=work_CV)
        student_entropy_C = -_dot(work_CV, s_CV)
        gap_CV = torch.sub(s_CV, t_CV, out=t_CV)
        value_C = _dot(work_CV, gap_CV)
        grad_CV = gap_CV.sub_(value_C[:, None]).mul_(work_CV)
    elif options.kind == "forward_kl":
        gap_CV = t_CV.sub_(s_CV)
        value_C = _dot(work_CV, gap_CV)
        student_CV = torch.exp(s_CV, out=gap_CV)
        student_entropy_C = -_dot(student_CV, s_CV)
        grad_CV = student_CV.sub_(work_CV)
    else:
        beta = options.beta
        mixture_CV = torch.logaddexp(s_CV + _log(1 - beta), t_CV + _log(beta))
        teacher_part_C = _dot(work_CV, t_CV.sub_(mixture_CV))
        torch.exp(s_CV, out=work_CV)
        student_entropy_C = -_dot(work_CV, s_CV)
        gap_CV = torch.sub(s_CV, mixture_CV, out=t_CV)
        student_part_C = _dot(work_CV, gap_CV)
        value_C = beta * teacher_part_C + (1 - beta) * student_part_C
        grad_CV = gap_CV.sub_(student_part_C[:, None]).mul_(work_CV).mul_(1 - beta)
    return value_C, student_entropy_C, teacher_entropy_C, grad_CV


def _log(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).log())


def _dot(a_CV: Tensor, b_CV: Tensor) -> Tensor:
    """Row-wise dot product through a product of a few rows at a time.

    `sum` adds pairwise. A matrix product adds in order: too large by 7e-4 nats at V = 152k, and no faster.
    """
    if a_CV.is_cuda:  # many small kernels would cost more than one product
        return torch.linalg.vecdot(a_CV, b_CV)
    rows = max(1, DOT_ELEMENTS // a_CV.shape[1])
    return torch.cat([(a_RV * b_RV).sum(1) for a_RV, b_RV in zip(a_CV.split(rows), b_CV.split(rows))])


def _log_softmax_(out_CV: Tensor, hidden_CH: Tensor, head: Head, temperature: float) -> Tensor | None:
    """Log-probabilities of the shared vocabulary, in float32, into `out_CV`; returns the soft cap's slope if any."""
    logits_(out_CV, hidden_CH, head)
    slope_CV = None
    if head.softcap is not None:
        out_CV.div_(head.softcap).tanh_()
        slope_CV = 1 - out_CV.square()
        out_CV.mul_(head.softcap)
    if temperature != 1.0:
        out_CV.div_(temperature)
    torch.log_softmax(out_CV, dim=1, out=out_CV)
    return slope_CV


def _check_settings(kind: str, beta: float, temperature: float, chunk: int | None) -> None:
    if kind not in KINDS:
        raise ConfigError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if kind == "jsd" and not 0 < beta < 1:
        raise ConfigError(f"beta must lie between 0 and 1, got {beta}; the ends are forward_kl (0) and reverse_kl (1)")
    if not 0 < temperature < math.inf:
        raise ConfigError(f"temperature must be > 0 and finite, got {temperature}")
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk must be at least 1 row, got {chunk}; None chooses one")


def _check_rows(
    num_rows: int,
    teacher_rows: int,
    token_N: Tensor | None,
    weight_N: Tensor | None,
    observe: Any,
    heads: tuple[Head, ...],
) -> None:
    if teacher_rows != num_rows:
        raise ConfigError(f"teacher_hidden_NG has {teacher_rows} rows, student_hidden_NH {num_rows}")
    for name, given in (("token_N", token_N), ("weight_N", weight_N)):
        if given is not None and given.shape != (num_rows,):
            raise ConfigError(f"{name} has the shape {tuple(given.shape)}; one entry a row would be ({num_rows},)")
    if weight_N is not None and not bool(((weight_N >= 0) & (weight_N < math.inf)).all()):
        raise ConfigError("weights must be >= 0 and finite")
    if observe is not None and token_N is None:
        raise ConfigError("observe needs token_N")
    if token_N is not None and token_N.numel():
        vocabulary = min(len(head.weight_VH) for head in heads)
        low, high = int(token_N.min()), int(token_N.max())
        if token_N.is_floating_point() or low < 0 or high >= vocabulary:
            raise ConfigError(
                f"token_N must hold integer ids of the shared vocabulary of {vocabulary}, "
                f"got {low if low < 0 else high} ({token_N.dtype}); give rows that do not count a weight of 0"
            )
