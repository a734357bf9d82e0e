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
from rocktokens.divergence.measures import KINDS, LOG_ZERO, Kind, TopChoices, infinite_rows, log_softmax_, measure_
from rocktokens.errors import ConfigError
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
    cross_entropy: float = 0.0,
    observe: Callable[[Tensor, Tensor], None] | None = None,
    top: TopChoices | None = None,
) -> Divergence:
    """Divergence of student and teacher from hidden states and output heads; float32 inside, whatever comes in.

    `kind` is KL(student || teacher), KL(teacher || student), the generalised Jensen-Shannon divergence
    beta KL(teacher || m) + (1 - beta) KL(student || m) with m = (1 - beta) student + beta teacher, todi (both KLs mixed
    token by token) or srkl (KL(student || 0.1 student + 0.9 teacher)); formulas in measures.py.
    Logits are `softcap * tanh(scale * (hidden @ head.T + bias) / softcap) / temperature`. Head rows beyond the shared
    vocabulary are left out on both sides. The loss is the sum of weight x value over `denominator` (default: the sum of
    weights); give the count of the whole optimiser step and micro-batches and processes add up. One backward a call. A
    row of infinite reverse KL (the teacher rules out what the student may say) shows as inf and adds nothing.
    `cross_entropy` is the share of the loss that is -log p_student(token) instead of the divergence.
    `observe(token_R, grad_RV)` is shown the gradients of `value` in the student's logits (at temperature 1), a few rows
    at a time, to be read at once: the next rows overwrite them. `top` is filled with both models' most probable tokens,
    one entry per row. `cross_entropy` and `observe` need `token_N`.
    """
    student = Head(student_head_VH, student_bias, student_softcap, student_scale)
    teacher = Head(teacher_head_VG, teacher_bias, teacher_softcap, teacher_scale)
    student.refuse_unfit("student", student_hidden_NH)
    teacher.refuse_unfit("teacher", teacher_hidden_NG)
    num_rows, device = len(student_hidden_NH), student_hidden_NH.device
    vocabulary = min(len(student_head_VH), len(teacher_head_VG))
    require(kind in KINDS, f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    require(
        kind != "jsd" or 0 < beta < 1,
        f"beta must lie between 0 and 1, got {beta}; the ends are forward_kl (0) and reverse_kl (1)",
    )
    require(0 < temperature < math.inf, f"temperature must be > 0 and finite, got {temperature}")
    require(chunk is None or chunk >= 1, f"chunk must be at least 1 row, got {chunk}; None chooses one")
    require(token_N is not None or (observe is None and not cross_entropy), "observe and cross_entropy need token_N")
    for name, given in (("teacher_hidden_NG", teacher_hidden_NG[:, 0]), ("token_N", token_N), ("weight_N", weight_N)):
        if given is not None and given.shape != (num_rows,):
            raise ConfigError(
                f"{name} has {len(given)} rows of shape {tuple(given.shape[1:])}; it needs {num_rows} rows"
            )
    if token_N is not None and num_rows:
        low, high = int(token_N.min()), int(token_N.max())
        require(
            not token_N.is_floating_point() and low >= 0 and high < vocabulary,
            f"token_N must hold integer ids of the shared vocabulary of {vocabulary}, got "
            f"{low if low < 0 else high} ({token_N.dtype}); give rows that do not count a weight of 0",
        )

    keep_K, weight_K, token_K, choices = None, torch.ones(num_rows, device=device), token_N, top
    student_hidden_KH, teacher_hidden_KG = student_hidden_NH, teacher_hidden_NG
    if weight_N is not None:
        weight_K = weight_N.detach().to(device=device, dtype=torch.float32)
        require(bool(((weight_K >= 0) & (weight_K < math.inf)).all()), "weights must be >= 0 and finite")
        if not bool((weight_K != 0).all()):  # rows of weight 0 leave before either projection
            keep_K = weight_K.nonzero().squeeze(1)
            weight_K, student_hidden_KH, teacher_hidden_KG = (
                given[keep_K] for given in (weight_K, student_hidden_NH, teacher_hidden_NG)
            )
            token_K = None if token_N is None else token_N[keep_K]
    if top is not None:
        fits = len(top[0]) == num_rows and 1 <= top.size <= vocabulary
        require(fits, f"top is {len(top[0])} x {top.size}; it needs {num_rows} rows of 1 to {vocabulary} tokens")
        choices = top if keep_K is None else TopChoices.empty(len(keep_K), top.size, device)
    if denominator is None:
        denominator = weight_K.sum().clamp_min(torch.finfo(torch.float32).tiny)
    elif len(weight_K):
        require(0 < float(denominator) < math.inf, f"denominator must be > 0 and finite, got {float(denominator)}")

    differentiable: tuple[Tensor | None, ...] = (student_hidden_KH, student_head_VH, student_bias)
    if not torch.is_grad_enabled():  # a Function does not see no_grad and would pay for the parameters' gradients
        differentiable = tuple(None if given is None else given.detach() for given in differentiable)
    call = _Call(
        student_hidden_NH=student_hidden_KH.detach(),
        teacher_hidden_NG=teacher_hidden_KG.detach(),
        token_N=token_K,
        factor_N=weight_K / denominator,
        student=student,
        teacher=teacher,
        kind=kind,
        beta=beta,
        temperature=temperature,
        cross_entropy=cross_entropy,
        vocabulary=vocabulary,
        chunk=chunk,
        observe=observe,
        choices=choices,
    )
    loss, measured_6N = _FusedDivergence.apply(*differentiable, call)
    if keep_K is not None:
        measured_6N = measured_6N.new_full((6, num_rows), torch.nan).index_copy_(1, keep_K, measured_6N)
        for target, own in zip(top or (), choices or ()):
            target[keep_K] = own
    value_N, student_logprob_N, teacher_logprob_N, *rest = measured_6N
    if token_N is None:
        return Divergence(loss, value_N, None, None, None, *rest)
    return Divergence(loss, value_N, student_logprob_N - teacher_logprob_N, student_logprob_N, teacher_logprob_N, *rest)


@dataclass(frozen=True)
class _Call:
    """What one call works on; every row has a weight."""

    student_hidden_NH: Tensor
    teacher_hidden_NG: Tensor
    token_N: Tensor | None
    factor_N: Tensor  # weight over denominator
    student: Head
    teacher: Head
    kind: Kind
    beta: float
    temperature: float
    cross_entropy: float
    vocabulary: int
    chunk: int | None
    observe: Callable[[Tensor, Tensor], None] | None
    choices: TopChoices | None

    def rows_per_chunk(self, *, sums_in_bf16: bool) -> int:
        """Rows of logits at once. `sums_in_bf16`: a single chunk needs no float32 sum of the head's gradient.

        Without that sum and its copy in the head's dtype there is room for more rows at the same peak of memory.
        """
        num_rows = len(self.factor_N)
        usual = max(LEAST_ROWS, CHUNK_ELEMENTS // self.vocabulary // 16 * 16)
        if sums_in_bf16:
            width = self.student.weight_VH.shape[1]
            at_once = max(usual + 2 * width // CHUNK_BYTES, 4 * width // CHUNK_BYTES)
            usual = at_once if num_rows <= at_once else max(usual, 2 * width // CHUNK_BYTES)
        return max(1, min(self.chunk or usual, num_rows))


class _FusedDivergence(torch.autograd.Function):
    """Takes the gradients during the forward pass, while a chunk's logits exist, and hands them out in the backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden_NH: Tensor, head_VH: Tensor, bias_V: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor]:
        num_rows, vocabulary, device = len(hidden_NH), call.vocabulary, hidden_NH.device
        needs_hidden, needs_head, needs_bias = ctx.needs_input_grad[:3]
        in_bf16 = needs_head and splits(hidden_NH, head_VH)
        size = call.rows_per_chunk(sums_in_bf16=in_bf16)
        # Value, both log-probabilities of the token, both entropies, gradient norm; filled block by block.
        measured_6N = torch.full((6, num_rows), torch.nan, device=device)
        grad_hidden_NH = torch.empty_like(hidden_NH, dtype=torch.float32) if needs_hidden else None
        grad_head_VH = grad_bias_V = None
        if needs_head:
            summed = torch.bfloat16 if in_bf16 and 0 < num_rows <= size else torch.float32
            grad_head_VH = torch.empty_like(head_VH, dtype=summed, memory_format=torch.contiguous_format)
            grad_head_VH[vocabulary if num_rows else 0 :] = 0  # the first chunk writes the other rows
        if bias_V is not None and needs_bias:
            grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32)

        block = size
        if device.type == "cpu":  # elsewhere many small kernels would cost more than memory does
            block = min(size, max(2 * torch.get_num_threads(), BLOCK_ELEMENTS // vocabulary))
        work_RV = torch.empty((block, vocabulary), device=device)
        student = Projection(size, work_RV, call.student_hidden_NH, call.student)
        teacher = Projection(size, work_RV, call.teacher_hidden_NG, call.teacher)
        with torch.autocast(device.type, enabled=False):
            for start in range(0, num_rows, size):
                at = slice(start, min(start + size, num_rows))
                student.multiply_(at)
                teacher.multiply_(at)
                for first in range(at.start, at.stop, block):
                    here = slice(first, min(first + block, at.stop))
                    within = slice(here.start - start, here.stop - start)
                    s_RV, t_RV = student.read(within), teacher.read(within)
                    if student.rest_CV is not None or teacher.rest_CV is not None:
                        student_side = s_RV, call.student_hidden_NH[here], call.student
                        sharpen_(student_side, (t_RV, call.teacher_hidden_NG[here], call.teacher))
                    grad_RV = _block_(call, here, s_RV, t_RV, work_RV[: len(s_RV)], measured_6N[:, here])
                    grad_RV.mul_(call.factor_N[here, None] * (call.student.scale / call.temperature))
                    student.first_CV[within] = (
                        grad_RV  # the block's logits have been read: its gradient takes their room
                    )
                grad_CV = student.first_CV[: at.stop - start]
                if grad_hidden_NH is not None:
                    grad_hidden_NH[at] = times_head(grad_CV, head_VH)
                if grad_head_VH is not None:
                    add_outer_(grad_head_VH[:vocabulary], grad_CV, hidden_NH[at], first=start == 0)
                if grad_bias_V is not None:
                    grad_bias_V[:vocabulary] += grad_CV.sum(0, dtype=torch.float32)

        ctx.grads = (grad_hidden_NH, grad_head_VH, grad_bias_V)
        ctx.dtypes = tuple(None if given is None else given.dtype for given in (hidden_NH, head_VH, bias_V))
        ctx.mark_non_differentiable(measured_6N)
        value_N, logprob_N = measured_6N[:2]
        silent_N = (call.factor_N == 0) | (value_N.isposinf() & (call.kind in SILENT_WHERE_INFINITE))
        loss = torch.where(silent_N, 0.0, call.factor_N * value_N).sum()
        if call.cross_entropy:
            loss = (1 - call.cross_entropy) * loss - call.cross_entropy * (call.factor_N * logprob_N).sum()
        return loss, measured_6N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError("fused_divergence has no second derivative; call backward without create_graph")
        if ctx.grads is None:
            raise RuntimeError("fused_divergence keeps its gradients for one backward; call it again for a second one")
        grads, ctx.grads, factor = ctx.grads, None, grad_outputs[0]
        # A factor of 1 needs no pass over the head's gradient; on a GPU, looking at it would wait for the device.
        if factor.is_cuda or float(factor) != 1.0:
            grads = tuple(None if grad is None else grad.mul_(factor) for grad in grads)
        return (*(None if grad is None else grad.to(dtype) for grad, dtype in zip(grads, ctx.dtypes)), None)


def _block_(call: _Call, at: slice, s_RV: Tensor, t_RV: Tensor, work_RV: Tensor, measured_6R: Tensor) -> Tensor:
    """Measure a few rows; returns the gradient of each one's loss in what the soft cap was put on."""
    slope_RV = log_softmax_(s_RV, call.student.softcap, call.temperature)
    log_softmax_(t_RV, call.teacher.softcap, call.temperature)
    if call.token_N is not None:
        token_R1 = call.token_N[at, None]
        measured_6R[1] = s_RV.gather(1, token_R1).squeeze(1)
        measured_6R[2] = t_RV.gather(1, token_R1).squeeze(1)
    if call.choices is not None:
        call.choices.fill_(at, s_RV, t_RV)

    infinite_R = None
    measures = measure_(s_RV, t_RV, work_RV, call.kind, call.beta)
    if not measures.finite():
        # Some logit is -inf (or NaN): floor the logs so that impossible tokens contribute 0, and measure again.
        for log_RV, hidden_NH, head in (
            (s_RV, call.student_hidden_NH, call.student),
            (t_RV, call.teacher_hidden_NG, call.teacher),
        ):
            log_softmax_(logits_(log_RV, hidden_NH[at], head), head.softcap, call.temperature)
        infinite_R = infinite_rows(s_RV, t_RV, call.kind)
        measures = measure_(s_RV.clamp_(min=LOG_ZERO), t_RV.clamp_(min=LOG_ZERO), work_RV, call.kind, call.beta)
    grad_RV = measures.grad_RV
    measured_6R[0] = measures.value_R.clamp_min(0)
    measured_6R[3], measured_6R[4] = measures.student_entropy_R, measures.teacher_entropy_R
    measured_6R[5] = torch.linalg.vector_norm(grad_RV, dim=1) / call.temperature
    if infinite_R is not None:
        measured_6R[0].masked_fill_(infinite_R, torch.inf)
        if call.kind in SILENT_WHERE_INFINITE:
            grad_RV[infinite_R] = 0
            measured_6R[5].masked_fill_(infinite_R, torch.inf)
    if call.token_N is not None and call.observe is not None:
        shown_R = slice(None) if infinite_R is None else ~infinite_R  # an infinite value has no gradient to show
        call.observe(call.token_N[at][shown_R], grad_RV[shown_R])
    if call.token_N is not None and call.cross_entropy:  # its gradient: probabilities, minus 1 at the token
        hard_RV = s_RV.exp_().scatter_add_(1, token_R1, -torch.ones_like(s_RV[:, :1]))
        grad_RV.mul_(1 - call.cross_entropy).add_(hard_RV, alpha=call.cross_entropy)
    return grad_RV if slope_RV is None else grad_RV.mul_(slope_RV)
