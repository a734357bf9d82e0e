"""Divergence between two models at every response position, its gradient and its telemetry, in one pass.

The pass goes over the rows in chunks: both vocabulary projections, the divergence, every per-row measure and the
gradient of the student's side are taken from a chunk of logits before the next one overwrites it. So memory does not
grow with the rows, the projections run once (not again in the backward), and a row of weight 0 never reaches either
head. A chunk is sized for the matrix products; what is done to its logits between them goes block by block, a few rows
that fit the cache. It knows arrays only: no model, no tokenizer, no padding, no shift between logits and labels.

Shapes: N rows (occurrences), V vocabulary, H student width, G teacher width, C rows of one chunk, R rows of one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rocktokens.divergence.heads import Head, Projection, add_outer_, check_head, logits_, sharpen_, splits, times_head
from rocktokens.divergence.measures import KINDS, LOG_ZERO, Kind, Rule, infinite_rows, log_softmax_, measure_
from rocktokens.divergence.top_tokens import TopChoices
from rocktokens.errors import ConfigError

# Logits of each model held at once: large enough to keep a matrix multiplication busy, small beside one output head.
CHUNK_ELEMENTS = 9_750_000
# Bytes that one of them takes, both models together.
CHUNK_BYTES = 8
# Rows at least: every chunk reads both heads and the head's gradient once, so fewer rows wait for memory.
LEAST_ROWS = 192
# Logits measured at a time on a CPU: the block and its two companions stay in the cache between operations.
BLOCK_ELEMENTS = 600_000
# No finite step lowers these where they are infinite: such a row is shown and adds nothing to loss and gradient.
SILENT_WHERE_INFINITE = ("reverse_kl", "todi")


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
    top: TopChoices | None = None,
) -> Divergence:
    """Divergence of student and teacher from hidden states and output heads; float32 inside, whatever comes in.

    `kind` is KL(student || teacher), KL(teacher || student), the generalised Jensen-Shannon divergence
    beta KL(teacher || m) + (1 - beta) KL(student || m) with m = (1 - beta) student + beta teacher, todi (both KLs mixed
    token by token) or srkl (KL(student || 0.1 student + 0.9 teacher)); formulas in row_measures.py.
    Logits are `softcap * tanh(scale * (hidden @ head.T + bias) / softcap) / temperature`. Head rows beyond the shared
    vocabulary are left out on both sides. The loss is the sum of weight x value over `denominator` (default: the sum of
    weights); give the count of the whole optimiser step and micro-batches and ranks add up. One backward per call. A
    row of infinite reverse KL (the teacher rules out what the student may say) shows as inf and adds nothing.
    `observe(token_R, grad_RV)` is shown the gradients of `value` in the student's logits (at temperature 1), a few rows
    at a time, to be read at once: the next rows overwrite them. It needs `token_N`. `top` is filled with both
    models' most probable tokens, one entry per row.
    """
    student = Head(student_head_VH, student_bias, student_softcap, student_scale)
    teacher = Head(teacher_head_VG, teacher_bias, teacher_softcap, teacher_scale)
    check_head("student", student, student_hidden_NH)
    check_head("teacher", teacher, teacher_hidden_NG)
    _check_settings(kind, beta, temperature, chunk)
    _check_rows(len(student_hidden_NH), len(teacher_hidden_NG), token_N, weight_N, observe, (student, teacher))
    keep_K, weight_K, divided_by = _kept(student_hidden_NH, weight_N, denominator)
    student_hidden_KH, teacher_hidden_KG, token_K = student_hidden_NH, teacher_hidden_NG, token_N
    if keep_K is not None:
        student_hidden_KH, teacher_hidden_KG = student_hidden_NH[keep_K], teacher_hidden_NG[keep_K]
        token_K = None if token_N is None else token_N[keep_K]

    choices = None
    if top is not None:
        choices = top.room_for(keep_K, len(student_hidden_NH), min(len(student_head_VH), len(teacher_head_VG)))
    options = _Options(Rule(kind, beta), temperature, chunk, student, teacher, observe, choices)
    differentiable: tuple[Tensor | None, ...] = (student_hidden_KH, student_head_VH, student_bias)
    if not torch.is_grad_enabled():  # a Function does not see no_grad and would pay for the parameters' gradients
        differentiable = tuple(None if given is None else given.detach() for given in differentiable)
    factor_K = weight_K / divided_by
    loss, *columns = _FusedDivergence.apply(*differentiable, teacher_hidden_KG.detach(), token_K, factor_K, options)
    if keep_K is not None:
        columns = [_scatter(column_K, keep_K, len(student_hidden_NH)) for column_K in columns]
        if top is not None and choices is not None:
            top.put_(keep_K, choices)
    value_N, student_logprob_N, teacher_logprob_N, *rest = columns
    if token_N is None:
        return Divergence(loss, value_N, None, None, None, *rest)
    logprobs = (student_logprob_N - teacher_logprob_N, student_logprob_N, teacher_logprob_N)
    return Divergence(loss, value_N, *logprobs, *rest)


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
    rule: Rule
    temperature: float
    chunk: int | None
    student: Head
    teacher: Head
    observe: Callable[[Tensor, Tensor], None] | None = None
    choices: TopChoices | None = None

    @property
    def vocabulary(self) -> int:
        return min(len(self.student.weight_VH), len(self.teacher.weight_VH))

    def rows_per_chunk(self, num_rows: int, *, sums_in_bf16: bool) -> int:
        """Rows of logits at once. `sums_in_bf16`: the head's gradient needs no float32 sum if there is one chunk.

        Without that sum, and without the copy of it in the head's dtype that a backward makes, there is room for more
        rows at the same peak of memory.
        """
        usual = max(LEAST_ROWS, CHUNK_ELEMENTS // self.vocabulary // 16 * 16)
        if sums_in_bf16:
            width = self.student.weight_VH.shape[1]
            at_once = max(usual + 2 * width // CHUNK_BYTES, 4 * width // CHUNK_BYTES)
            usual = at_once if num_rows <= at_once else max(usual, 2 * width // CHUNK_BYTES)
        return max(1, min(self.chunk or usual, num_rows))


@dataclass
class _Call:
    """One call's rows: what comes in, and the room for what goes out."""

    student_hidden_NH: Tensor
    teacher_hidden_NG: Tensor
    token_N: Tensor | None
    factor_N: Tensor
    rows: _Rows
    options: _Options


@dataclass
class _Space:
    """One chunk's logits, and one block's: room to put its logits together where they come in parts, and to work in."""

    student: Projection
    teacher: Projection
    student_RV: Tensor | None
    teacher_RV: Tensor | None
    work_RV: Tensor

    @classmethod
    def empty(cls, size: int, call: _Call) -> _Space:
        vocabulary, device = call.options.vocabulary, call.student_hidden_NH.device
        heads = (call.options.student.weight_VH, call.options.teacher.weight_VH)
        student, teacher = (
            Projection.empty(size, vocabulary, hidden, weight)
            for hidden, weight in zip((call.student_hidden_NH, call.teacher_hidden_NG), heads)
        )
        block = size
        if device.type == "cpu":  # elsewhere many small kernels would cost more than memory does
            block = min(size, max(2 * torch.get_num_threads(), BLOCK_ELEMENTS // vocabulary))
        student_RV, teacher_RV = (
            None if side.rest_CV is None else torch.empty((block, vocabulary), device=device)
            for side in (student, teacher)
        )
        return cls(student, teacher, student_RV, teacher_RV, torch.empty((block, vocabulary), device=device))


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
        num_rows = len(student_hidden_NH)
        needs_hidden, needs_head, needs_bias = ctx.needs_input_grad[:3]
        rows = _Rows.empty(num_rows, student_hidden_NH.device)
        call = _Call(student_hidden_NH, teacher_hidden_NG, token_N, factor_N, rows, options)
        in_bf16 = needs_head and splits(student_hidden_NH, student_head_VH)
        size = options.rows_per_chunk(num_rows, sums_in_bf16=in_bf16)
        grad_hidden_NH = torch.empty_like(student_hidden_NH, dtype=torch.float32) if needs_hidden else None
        grad_head_VH = grad_bias_V = None
        if needs_head:
            summed = torch.bfloat16 if in_bf16 and 0 < num_rows <= size else torch.float32
            grad_head_VH = torch.empty_like(student_head_VH, dtype=summed, memory_format=torch.contiguous_format)
            grad_head_VH[options.vocabulary if num_rows else 0 :] = 0
        if student_bias_V is not None and needs_bias:
            grad_bias_V = torch.zeros_like(student_bias_V, dtype=torch.float32)

        space = _Space.empty(size, call)
        with torch.autocast(student_hidden_NH.device.type, enabled=False):
            for start in range(0, num_rows, size):
                at = slice(start, min(start + size, num_rows))
                grad_CV = _chunk_(call, at, space)
                if grad_hidden_NH is not None:
                    grad_hidden_NH[at] = times_head(grad_CV, student_head_VH)
                if grad_head_VH is not None:
                    total_VH = grad_head_VH[: options.vocabulary]
                    add_outer_(total_VH, grad_CV, student_hidden_NH[at], first=start == 0)
                if grad_bias_V is not None:
                    grad_bias_V[: options.vocabulary] += grad_CV.sum(0, dtype=torch.float32)

        ctx.grads = (grad_hidden_NH, grad_head_VH, grad_bias_V)
        inputs = (student_hidden_NH, student_head_VH, student_bias_V)
        ctx.dtypes = tuple(None if given is None else given.dtype for given in inputs)
        silent_N = (factor_N == 0) | (rows.value_N.isposinf() & (options.rule.kind in SILENT_WHERE_INFINITE))
        loss = torch.where(silent_N, 0.0, factor_N * rows.value_N).sum()
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
        factor = grad_outputs[0]
        # A factor of 1 needs no pass over the head's gradient; on a GPU, looking at it would wait for the device.
        if factor.is_cuda or float(factor) != 1.0:
            grads = tuple(None if grad is None else grad.mul_(factor) for grad in grads)
        scaled = [None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes)]
        return (*scaled, None, None, None, None)


def _chunk_(call: _Call, at: slice, space: _Space) -> Tensor:
    """Measure one chunk; returns factor x gradient of each row's value in the student's projection output."""
    options = call.options
    student, teacher = space.student.cut(at.stop - at.start), space.teacher.cut(at.stop - at.start)
    student.fill_(call.student_hidden_NH[at], options.student)
    teacher.fill_(call.teacher_hidden_NG[at], options.teacher)
    block = len(space.work_RV)
    for start in range(0, len(student.first_CV), block):
        inner = slice(start, min(start + block, len(student.first_CV)))
        rows = inner.stop - inner.start
        here = slice(at.start + inner.start, at.start + inner.stop)
        s_RV = student.read(inner, space.student_RV, options.student)
        t_RV = teacher.read(inner, space.teacher_RV, options.teacher)
        if student.rest_CV is not None or teacher.rest_CV is not None:
            student_side = s_RV, call.student_hidden_NH[here], options.student
            sharpen_(student_side, (t_RV, call.teacher_hidden_NG[here], options.teacher))
        grad_RV = _block_(call, here, s_RV, t_RV, space.work_RV[:rows])
        scale = options.student.scale / options.temperature
        student.first_CV[inner] = grad_RV.mul_(call.factor_N[here, None] * scale)
    return student.first_CV


def _block_(call: _Call, at: slice, s_RV: Tensor, t_RV: Tensor, work_RV: Tensor) -> Tensor:
    """Measure a few rows into `call.rows`; returns the gradient of each one's value in what the soft cap was put on."""
    options, rows = call.options, call.rows
    slope_RV = log_softmax_(s_RV, options.student.softcap, options.temperature)
    log_softmax_(t_RV, options.teacher.softcap, options.temperature)
    if call.token_N is not None:
        token_R1 = call.token_N[at, None].clamp(0, options.vocabulary - 1)
        rows.student_logprob_N[at] = s_RV.gather(1, token_R1).squeeze(1)
        rows.teacher_logprob_N[at] = t_RV.gather(1, token_R1).squeeze(1)
    if options.choices is not None:
        options.choices.fill_(at, s_RV, t_RV)

    infinite_R = None
    measures = measure_(s_RV, t_RV, work_RV, options.rule)
    if not measures.finite():
        # Some logit is -inf (or NaN): floor the logs so that impossible tokens contribute 0, and measure again.
        logits_(s_RV, call.student_hidden_NH[at], options.student)
        logits_(t_RV, call.teacher_hidden_NG[at], options.teacher)
        log_softmax_(s_RV, options.student.softcap, options.temperature)
        log_softmax_(t_RV, options.teacher.softcap, options.temperature)
        infinite_R = infinite_rows(s_RV, t_RV, options.rule.kind)
        measures = measure_(s_RV.clamp_(min=LOG_ZERO), t_RV.clamp_(min=LOG_ZERO), work_RV, options.rule)
    grad_RV = measures.grad_RV
    rows.value_N[at] = measures.value_R.clamp_min(0)
    rows.student_entropy_N[at] = measures.student_entropy_R
    rows.teacher_entropy_N[at] = measures.teacher_entropy_R
    rows.grad_norm_N[at] = torch.linalg.vector_norm(grad_RV, dim=1) / options.temperature
    if infinite_R is not None:
        rows.value_N[at].masked_fill_(infinite_R, torch.inf)
        if options.rule.kind in SILENT_WHERE_INFINITE:
            grad_RV[infinite_R] = 0
            rows.grad_norm_N[at].masked_fill_(infinite_R, torch.inf)
    if options.observe is not None and call.token_N is not None:
        shown_R = slice(None) if infinite_R is None else ~infinite_R  # an infinite value has no gradient to show
        options.observe(call.token_N[at][shown_R], grad_RV[shown_R])
    return grad_RV if slope_RV is None else grad_RV.mul_(slope_RV)


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
    observe: object,
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
                f"token_N must hold integer ids of the shared vocabulary of {vocabulary}, got "
                f"{low if low < 0 else high} ({token_N.dtype}); give rows that do not count a weight of 0"
            )


def chunked_cross_entropy(hidden_NH: Tensor, head: Head, token_N: Tensor, factor_N: Tensor, vocabulary: int) -> Tensor:
    """Sum of factor x -log p(token); differentiable in the hidden states, the head and its bias. One backward."""
    return _CrossEntropy.apply(hidden_NH, head.weight_VH, head.bias_V, token_N, factor_N.detach(), head, vocabulary)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        token_N: Tensor,
        factor_N: Tensor,
        head: Head,
        vocabulary: int,
    ) -> Tensor:
        device, size = hidden_NH.device, min(max(16, CHUNK_ELEMENTS // vocabulary), max(1, len(hidden_NH)))
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32)
        grad_head_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None else None
        total = torch.zeros((), device=device)
        room = Projection.empty(size, vocabulary, hidden_NH, weight_VH)
        with torch.autocast(device.type, enabled=False):
            for start in range(0, len(hidden_NH), size):
                at = slice(start, start + size)
                chunk = room.cut(len(hidden_NH[at]))
                chunk.fill_(hidden_NH[at], head)
                log_CV = chunk.read(slice(None), None if chunk.rest_CV is None else chunk.first_CV.float(), head)
                if chunk.rest_CV is not None:
                    sharpen_((log_CV, hidden_NH[at], head))
                slope_CV = log_softmax_(log_CV, head.softcap, 1.0)
                token_C1, factor_C1 = token_N[at, None], factor_N[at, None]
                total -= (factor_C1 * log_CV.gather(1, token_C1)).sum()
                grad_CV = log_CV.exp_().scatter_add_(1, token_C1, -torch.ones_like(factor_C1))
                if slope_CV is not None:
                    grad_CV.mul_(slope_CV)
                grad_CV = chunk.first_CV.copy_(grad_CV.mul_(factor_C1 * head.scale))
                grad_hidden_NH[at] = times_head(grad_CV, weight_VH)
                if grad_head_VH is not None:
                    add_outer_(grad_head_VH[:vocabulary], grad_CV, hidden_NH[at], first=start == 0)
                if grad_bias_V is not None:
                    grad_bias_V[:vocabulary] += grad_CV.sum(0, dtype=torch.float32)
        ctx.grads = (grad_hidden_NH, grad_head_VH, grad_bias_V)
        ctx.dtypes = (hidden_NH.dtype, weight_VH.dtype, None if bias_V is None else bias_V.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        scaled = [
            None if grad is None else grad.mul_(grad_outputs[0]).to(dtype) for grad, dtype in zip(ctx.grads, ctx.dtypes)
        ]
        return (*scaled, None, None, None, None)
