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

from rocktokens.divergence.heads import Head, Projection, add_outer_, logits_, sharpen_, splits, times_head
from rocktokens.divergence.measures import KINDS, LOG_ZERO, Kind, Rule, infinite_rows, log_softmax_, measure_
from rocktokens.divergence.top_tokens import TopChoices
from rocktokens.settings import require

# Logits of each model held at once: enough to keep a matrix multiplication busy, few compared with one output head.
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
    token by token) or srkl (KL(student || 0.1 student + 0.9 teacher)); formulas in measures.py.
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
    student.refuse_unfit("student", student_hidden_NH)
    teacher.refuse_unfit("teacher", teacher_hidden_NG)
    num_rows, device, vocabulary = len(student_hidden_NH), student_hidden_NH.device, min(student.rows, teacher.rows)
    require(kind in KINDS, f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    require(
        kind != "jsd" or 0 < beta < 1,
        f"beta must lie between 0 and 1, got {beta}; the ends are forward_kl (0) and reverse_kl (1)",
    )
    require(0 < temperature < math.inf, f"temperature must be > 0 and finite, got {temperature}")
    require(chunk is None or chunk >= 1, f"chunk must be at least 1 row, got {chunk}; None chooses one")
    teacher_rows = len(teacher_hidden_NG)
    require(teacher_rows == num_rows, f"{teacher_rows} rows of the teacher, {num_rows} of the student")
    require(observe is None or token_N is not None, "observe needs token_N")
    for name, given in (("token_N", token_N), ("weight_N", weight_N)):
        if given is not None:
            require(given.shape == (num_rows,), f"{name} has the shape {tuple(given.shape)}; it needs ({num_rows},)")
    if token_N is not None and token_N.numel():
        low, high = int(token_N.min()), int(token_N.max())
        require(
            not token_N.is_floating_point() and low >= 0 and high < vocabulary,
            f"token_N must hold integer ids of the shared vocabulary of {vocabulary}, got "
            f"{low if low < 0 else high} ({token_N.dtype}); give rows that do not count a weight of 0",
        )

    # Rows of weight 0 leave here.
    keep_K, weight_K = None, torch.ones(num_rows, device=device)
    student_hidden_KH, teacher_hidden_KG, token_K, choices = student_hidden_NH, teacher_hidden_NG, token_N, top
    if weight_N is not None:
        weight_K = weight_N.detach().to(device=device, dtype=torch.float32)
        require(bool(((weight_K >= 0) & (weight_K < math.inf)).all()), "weights must be >= 0 and finite")
        if not bool((weight_K != 0).all()):
            keep_K = weight_K.nonzero().squeeze(1)
            weight_K, student_hidden_KH, teacher_hidden_KG = (
                given[keep_K] for given in (weight_K, student_hidden_NH, teacher_hidden_NG)
            )
            token_K = None if token_N is None else token_N[keep_K]
    if top is not None:
        require(1 <= top.size <= vocabulary, f"top must be 1 to the vocabulary's {vocabulary} types, got {top.size}")
        require(len(top[0]) == num_rows, f"top has room for {len(top[0])} rows, and there are {num_rows}")
        choices = top if keep_K is None else TopChoices.empty(len(keep_K), top.size, device)
    if denominator is None:
        denominator = weight_K.sum().clamp_min(torch.finfo(torch.float32).tiny)
    elif len(weight_K):
        require(0 < float(denominator) < math.inf, f"denominator must be > 0 and finite, got {float(denominator)}")

    differentiable: tuple[Tensor | None, ...] = (student_hidden_KH, student_head_VH, student_bias)
    if not torch.is_grad_enabled():  # a Function does not see no_grad and would pay for the parameters' gradients
        differentiable = tuple(None if given is None else given.detach() for given in differentiable)
    call = _Call(
        student_hidden_KH.detach(),
        teacher_hidden_KG.detach(),
        token_K,
        weight_K / denominator,
        student,
        teacher,
        Rule(kind, beta),
        temperature,
        vocabulary,
        chunk,
        observe,
        choices,
    )
    loss, measured_6N = _FusedDivergence.apply(*differentiable, call)
    if keep_K is not None:
        measured_6N = measured_6N.new_full((6, num_rows), torch.nan).index_copy_(1, keep_K, measured_6N)
        if top is not None and choices is not None:
            for target, own in zip(top, choices):
                target[keep_K] = own
    value_N, student_logprob_N, teacher_logprob_N, *rest = measured_6N
    if token_N is None:
        return Divergence(loss, value_N, None, None, None, *rest)
    logprobs = (student_logprob_N - teacher_logprob_N, student_logprob_N, teacher_logprob_N)
    return Divergence(loss, value_N, *logprobs, *rest)


@dataclass
class _Call:
    """What one call works on; every row has a weight."""

    student_hidden_NH: Tensor
    teacher_hidden_NG: Tensor
    token_N: Tensor | None
    factor_N: Tensor
    """Weight over denominator."""
    student: Head
    teacher: Head
    rule: Rule
    temperature: float
    vocabulary: int
    chunk: int | None
    observe: Callable[[Tensor, Tensor], None] | None
    choices: TopChoices | None

    def rows_per_chunk(self, *, sums_in_bf16: bool) -> int:
        """Rows of logits at once. `sums_in_bf16`: the head's gradient needs no float32 sum if there is one chunk.

        Without that sum, and without the copy of it in the head's dtype that a backward makes, there is room for more
        rows at the same peak of memory.
        """
        num_rows = len(self.factor_N)
        usual = max(LEAST_ROWS, CHUNK_ELEMENTS // self.vocabulary // 16 * 16)
        if sums_in_bf16:
            width = self.student.weight_VH.shape[1]
            at_once = max(usual + 2 * width // CHUNK_BYTES, 4 * width // CHUNK_BYTES)
            usual = at_once if num_rows <= at_once else max(usual, 2 * width // CHUNK_BYTES)
        return max(1, min(self.chunk or usual, num_rows))


class _Space:
    """One chunk's logits, and one block's: room to put its logits together where they come in parts, and to work in."""

    def __init__(self, size: int, call: _Call) -> None:
        vocabulary, device = call.vocabulary, call.factor_N.device
        self.student = Projection.empty(size, vocabulary, call.student_hidden_NH, call.student.weight_VH)
        self.teacher = Projection.empty(size, vocabulary, call.teacher_hidden_NG, call.teacher.weight_VH)
        block = size
        if device.type == "cpu":  # elsewhere many small kernels would cost more than memory does
            block = min(size, max(2 * torch.get_num_threads(), BLOCK_ELEMENTS // vocabulary))
        self.work_RV = torch.empty((block, vocabulary), device=device)
        self.student_RV, self.teacher_RV = (
            None if side.rest_CV is None else torch.empty_like(self.work_RV) for side in (self.student, self.teacher)
        )


class _FusedDivergence(torch.autograd.Function):
    """Takes the gradients during the forward pass, while a chunk's logits exist, and hands them out in the backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden_NH: Tensor, head_VH: Tensor, bias_V: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor]:
        num_rows, vocabulary = len(hidden_NH), call.vocabulary
        needs_hidden, needs_head, needs_bias = ctx.needs_input_grad[:3]
        # Value, both log-probabilities of the token, both entropies, gradient norm; filled chunk by chunk.
        measured_6N = torch.full((6, num_rows), torch.nan, device=hidden_NH.device)
        in_bf16 = needs_head and splits(hidden_NH, head_VH)
        size = call.rows_per_chunk(sums_in_bf16=in_bf16)
        grad_hidden_NH = torch.empty_like(hidden_NH, dtype=torch.float32) if needs_hidden else None
        grad_head_VH = grad_bias_V = None
        if needs_head:
            summed = torch.bfloat16 if in_bf16 and 0 < num_rows <= size else torch.float32
            grad_head_VH = torch.empty_like(head_VH, dtype=summed, memory_format=torch.contiguous_format)
            grad_head_VH[vocabulary if num_rows else 0 :] = 0
        if bias_V is not None and needs_bias:
            grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32)

        space = _Space(size, call)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for start in range(0, num_rows, size):
                at = slice(start, min(start + size, num_rows))
                grad_CV = _chunk_(call, at, space, measured_6N)
                if grad_hidden_NH is not None:
                    grad_hidden_NH[at] = times_head(grad_CV, head_VH)
                if grad_head_VH is not None:
                    add_outer_(grad_head_VH[:vocabulary], grad_CV, hidden_NH[at], first=start == 0)
                if grad_bias_V is not None:
                    grad_bias_V[:vocabulary] += grad_CV.sum(0, dtype=torch.float32)

        ctx.grads = (grad_hidden_NH, grad_head_VH, grad_bias_V)
        ctx.dtypes = tuple(None if given is None else given.dtype for given in (hidden_NH, head_VH, bias_V))
        value_N = measured_6N[0]
        silent_N = (call.factor_N == 0) | (value_N.isposinf() & (call.rule.kind in SILENT_WHERE_INFINITE))
        loss = torch.where(silent_N, 0.0, call.factor_N * value_N).sum()
        ctx.mark_non_differentiable(measured_6N)
        return loss, measured_6N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError("fused_divergence has no second derivative; call backward without create_graph")
        return (*_given_out(ctx, grad_outputs[0]), None)


def _given_out(ctx: Any, factor: Tensor) -> list[Tensor | None]:
    """The gradients that the forward pass took, times the factor of what came after the loss; once."""
    if ctx.grads is None:
        raise RuntimeError("fused_divergence keeps its gradients for one backward; call it again for a second one")
    grads, ctx.grads = ctx.grads, None
    # A factor of 1 needs no pass over the head's gradient; on a GPU, looking at it would wait for the device.
    if factor.is_cuda or float(factor) != 1.0:
        grads = tuple(None if grad is None else grad.mul_(factor) for grad in grads)
    return [None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes)]


def _chunk_(call: _Call, at: slice, space: _Space, measured_6N: Tensor) -> Tensor:
    """Measure one chunk; returns factor x gradient of each row's value in the student's projection output."""
    student, teacher = space.student.cut(at.stop - at.start), space.teacher.cut(at.stop - at.start)
    student.fill_(call.student_hidden_NH[at], call.student)
    teacher.fill_(call.teacher_hidden_NG[at], call.teacher)
    block = len(space.work_RV)
    for start in range(0, len(student.first_CV), block):
        inner = slice(start, min(start + block, len(student.first_CV)))
        here = slice(at.start + inner.start, at.start + inner.stop)
        s_RV = student.read(inner, space.student_RV, call.student)
        t_RV = teacher.read(inner, space.teacher_RV, call.teacher)
        if student.rest_CV is not None or teacher.rest_CV is not None:
            student_side = s_RV, call.student_hidden_NH[here], call.student
            sharpen_(student_side, (t_RV, call.teacher_hidden_NG[here], call.teacher))
        grad_RV = _block_(call, here, s_RV, t_RV, space.work_RV[: inner.stop - inner.start], measured_6N[:, here])
        student.first_CV[inner] = grad_RV.mul_(call.factor_N[here, None] * (call.student.scale / call.temperature))
    return student.first_CV


def _block_(call: _Call, at: slice, s_RV: Tensor, t_RV: Tensor, work_RV: Tensor, measured_6R: Tensor) -> Tensor:
    """Measure a few rows; returns the gradient of each one's value in what the soft cap was put on."""
    slope_RV = log_softmax_(s_RV, call.student.softcap, call.temperature)
    log_softmax_(t_RV, call.teacher.softcap, call.temperature)
    if call.token_N is not None:
        token_R1 = call.token_N[at, None].clamp(0, call.vocabulary - 1)
        measured_6R[1] = s_RV.gather(1, token_R1).squeeze(1)
        measured_6R[2] = t_RV.gather(1, token_R1).squeeze(1)
    if call.choices is not None:
        call.choices.fill_(at, s_RV, t_RV)

    infinite_R = None
    measures = measure_(s_RV, t_RV, work_RV, call.rule)
    if not measures.finite():
        # Some logit is -inf (or NaN): floor the logs so that impossible tokens contribute 0, and measure again.
        logits_(s_RV, call.student_hidden_NH[at], call.student)
        logits_(t_RV, call.teacher_hidden_NG[at], call.teacher)
        log_softmax_(s_RV, call.student.softcap, call.temperature)
        log_softmax_(t_RV, call.teacher.softcap, call.temperature)
        infinite_R = infinite_rows(s_RV, t_RV, call.rule.kind)
        measures = measure_(s_RV.clamp_(min=LOG_ZERO), t_RV.clamp_(min=LOG_ZERO), work_RV, call.rule)
    grad_RV = measures.grad_RV
    measured_6R[0] = measures.value_R.clamp_min(0)
    measured_6R[3], measured_6R[4] = measures.student_entropy_R, measures.teacher_entropy_R
    measured_6R[5] = torch.linalg.vector_norm(grad_RV, dim=1) / call.temperature
    if infinite_R is not None:
        measured_6R[0].masked_fill_(infinite_R, torch.inf)
        if call.rule.kind in SILENT_WHERE_INFINITE:
            grad_RV[infinite_R] = 0
            measured_6R[5].masked_fill_(infinite_R, torch.inf)
    if call.observe is not None and call.token_N is not None:
        shown_R = slice(None) if infinite_R is None else ~infinite_R  # an infinite value has no gradient to show
        call.observe(call.token_N[at][shown_R], grad_RV[shown_R])
    return grad_RV if slope_RV is None else grad_RV.mul_(slope_RV)


def chunked_cross_entropy(hidden_NH: Tensor, head: Head, token_N: Tensor, factor_N: Tensor, vocabulary: int) -> Tensor:
    """Sum of factor x -log p(token), in chunks; differentiable in the hidden states, the head and its bias, once."""
    return _CrossEntropy.apply(hidden_NH, head.weight_VH, head.bias_V, token_N, factor_N.detach(), head, vocabulary)


class _CrossEntropy(torch.autograd.Function):
    """The same steps for one model: the gradient is taken while a chunk's logits are at hand."""

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
        return (*_given_out(ctx, grad_outputs[0]), None, None, None, None)
