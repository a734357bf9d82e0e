"""Cross-entropy with given tokens from hidden states and an output head, in chunks: no N x V tensor exists.

The hard half of off-policy distillation. Same steps as the fused divergence, one model instead of two: the gradient is
taken while a chunk's logits are at hand, so the projection runs once. Knows arrays only.

Shapes: N rows, V vocabulary, H width, C rows of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rocktokens.divergence.fused import CHUNK_ELEMENTS
from rocktokens.divergence.heads import Head, Projection, add_outer_, sharpen_, times_head
from rocktokens.divergence.measures import log_softmax_


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
