"""An output head and the three matrix multiplications that touch it, summed in float32 whatever the head's dtype.

A 16-bit head is never widened as a whole: the device multiplies into float32 itself, or a tile is widened at a time.

Shapes: V vocabulary, H width, C rows of one chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rocktokens.errors import ConfigError

# Columns of a 16-bit head that are widened to float32 at a time where the device cannot multiply into float32 itself.
WIDEN_COLUMNS = 8_192


@dataclass(frozen=True)
class Head:
    """An output head: projection, and what the model family does to the logits after it."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0


def check_head(name: str, head: Head, hidden_NH: Tensor) -> None:
    """Refuse a head that does not fit its hidden states, or numbers that no family has; `name` is for the message."""
    weight_VH, bias_V = head.weight_VH, head.bias_V
    if hidden_NH.dim() != 2 or weight_VH.dim() != 2 or hidden_NH.shape[1] != weight_VH.shape[1] or not len(weight_VH):
        raise ConfigError(
            f"{name} hidden states {tuple(hidden_NH.shape)} do not fit its head {tuple(weight_VH.shape)}; "
            "both are two-dimensional and share their last dimension"
        )
    if not (hidden_NH.is_floating_point() and weight_VH.is_floating_point()):
        raise ConfigError(f"{name} hidden states and head must be float, got {hidden_NH.dtype} and {weight_VH.dtype}")
    if bias_V is not None and (bias_V.dim() != 1 or len(bias_V) < len(weight_VH)):
        raise ConfigError(f"{name}_bias {tuple(bias_V.shape)} does not fit its head {tuple(weight_VH.shape)}")
    if head.softcap is not None and not 0 < head.softcap < math.inf:
        raise ConfigError(f"{name}_softcap must be > 0 and finite, got {head.softcap}; None means no soft cap")
    if not math.isfinite(head.scale):
        raise ConfigError(f"{name}_scale must be finite, got {head.scale}")


def logits_(out_CV: Tensor, hidden_CH: Tensor, head: Head) -> None:
    """scale * (hidden @ head.T + bias) for the first V rows of the head, summed in float32."""
    vocabulary = out_CV.shape[1]
    weight_VH = head.weight_VH[:vocabulary].detach()
    hidden_CH = hidden_CH.detach()
    if weight_VH.dtype == torch.float32:
        torch.mm(hidden_CH.float(), weight_VH.t(), out=out_CV)
    elif _multiplies_bf16(hidden_CH, weight_VH):
        torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32, out=out_CV)
    else:
        for start in range(0, vocabulary, WIDEN_COLUMNS):
            tile = slice(start, start + WIDEN_COLUMNS)
            out_CV[:, tile] = hidden_CH.float() @ weight_VH[tile].float().t()
    if head.bias_V is not None:
        out_CV.add_(head.bias_V[:vocabulary].detach().float())
    if head.scale != 1.0:
        out_CV.mul_(head.scale)


def _multiplies_bf16(*tensors: Tensor) -> bool:
    """CUDA sums products of bfloat16 in float32 at full speed; float16 would underflow on the gradient's side."""
    return all(tensor.is_cuda and tensor.dtype == torch.bfloat16 for tensor in tensors)


def times_head(grad_CV: Tensor, head_VH: Tensor) -> Tensor:
    """grad @ head, summed in float32."""
    head_VH = head_VH[: grad_CV.shape[1]].detach()
    if head_VH.dtype == torch.float32:
        return grad_CV @ head_VH
    if _multiplies_bf16(head_VH):
        return torch.mm(grad_CV.bfloat16(), head_VH, out_dtype=torch.float32)
    total_CH = torch.zeros((len(grad_CV), head_VH.shape[1]), device=grad_CV.device)
    for start in range(0, len(head_VH), WIDEN_COLUMNS):
        tile = slice(start, start + WIDEN_COLUMNS)
        total_CH.addmm_(grad_CV[:, tile], head_VH[tile].float())
    return total_CH


def add_outer_(total_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor, factor_C1: Tensor) -> None:
    """total += grad.T @ (factor * hidden), summed in float32."""
    scaled_CH = factor_C1 * hidden_CH.detach().float()
    if _multiplies_bf16(hidden_CH):
        torch.addmm(total_VH, grad_CV.bfloat16().t(), scaled_CH.bfloat16(), out_dtype=torch.float32, out=total_VH)
    else:
        total_VH.addmm_(grad_CV.t(), scaled_CH)
