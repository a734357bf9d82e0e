"""An output head and the three matrix multiplications that touch it, summed in float32 whatever the head's dtype.

A 16-bit head is never widened as a whole. CUDA multiplies bfloat16 into float32 itself. A CPU with bfloat16
instructions sums in float32 too, but torch rounds the result to bfloat16: there the product is taken twice, the second
time minus the rounded first, and the two parts together have 16 bits of the sum. Elsewhere a tile of the head is
widened at a time.

Shapes: V vocabulary, H width, C rows of one chunk, R rows of one block of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rocktokens.settings import require

# Columns of a 16-bit head that are widened to float32 at a time where the device cannot multiply into float32 itself.
WIDEN_COLUMNS = 8_192
# Numbers in a head from which two products of bfloat16 cost less than widening it.
SPLIT_ELEMENTS = 4_000_000
# Most probable tokens of each row whose logits are taken again in float32 after a split product.
EXACT_TOKENS = 16
# Logits that `top_tokens` holds at once.
TOP_ELEMENTS = 6_500_000
# Relative error that the two parts of a split product may have; they have 16 bits, one part alone has 8.
SPLIT_TOLERANCE = 2**-14


@dataclass(frozen=True)
class Head:
    """An output head: projection, and what the model family does to the logits after it."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def refuse_unfit(self, name: str, hidden_NH: Tensor) -> None:
        """Refuse hidden states that do not fit, or numbers that no family has; `name` is for the message."""
        hidden, weight, bias, cap = tuple(hidden_NH.shape), tuple(self.weight_VH.shape), self.bias_V, self.softcap
        require(
            len(hidden) == len(weight) == 2 and hidden[1] == weight[1] and weight[0] > 0,
            f"{name} hidden states {hidden} do not fit its head {weight}: rows of one width are needed on both sides",
        )
        require(
            hidden_NH.is_floating_point() and self.weight_VH.is_floating_point(),
            f"{name} hidden states and head must be float, got {hidden_NH.dtype} and {self.weight_VH.dtype}",
        )
        require(
            bias is None or (bias.dim() == 1 and len(bias) >= weight[0]), f"{name}_bias does not fit its head {weight}"
        )
        require(cap is None or 0 < cap < math.inf, f"{name}_softcap must be > 0 and finite, got {cap}")
        require(math.isfinite(self.scale), f"{name}_scale must be finite, got {self.scale}")


class Projection:
    """Room for hidden @ head.T of one chunk: float32, or two parts in bfloat16 that are to be added.

    After its rows have been read, `first_CV` takes the chunk's gradient, in the dtype that its products are taken in.
    """

    def __init__(self, rows: int, like_RV: Tensor, hidden_NH: Tensor, head: Head) -> None:
        """Room for `rows` rows at a time, four bytes a logit either way, to be read in blocks like `like_RV`."""
        self.hidden_NH, self.head = hidden_NH, head
        self.weight_VH = head.weight_VH[: like_RV.shape[1]].detach()
        self.rest_CV = self.room_RV = None
        dtype = torch.float32
        if splits(hidden_NH, head.weight_VH):
            dtype, self.room_RV = torch.bfloat16, torch.empty_like(like_RV)
            self.rest_CV = like_RV.new_empty((rows, like_RV.shape[1]), dtype=dtype)
        self.first_CV = like_RV.new_empty((rows, like_RV.shape[1]), dtype=dtype)

    def multiply_(self, at: slice) -> None:
        """Project these rows of the hidden states; bias and scale are added where rows are read."""
        hidden_CH = self.hidden_NH[at]
        first_CV = self.first_CV[: len(hidden_CH)]
        if self.rest_CV is None:
            _multiply_(first_CV, hidden_CH, self.weight_VH)
        else:
            torch.mm(hidden_CH, self.weight_VH.t(), out=first_CV)
            torch.addmm(first_CV, hidden_CH, self.weight_VH.t(), beta=-1, out=self.rest_CV[: len(hidden_CH)])

    def read(self, at: slice) -> Tensor:
        """Logits of these rows of the chunk in float32: in place, or put together in the block's room."""
        logits_RV = self.first_CV[at]
        if self.rest_CV is not None and self.room_RV is not None:
            logits_RV = self.room_RV[: len(logits_RV)].copy_(logits_RV).add_(self.rest_CV[at])
        return _finish_(logits_RV, self.head)


def sharpen_(*sides: tuple[Tensor, Tensor, Head]) -> None:
    """Logits, hidden rows and head of each model: take every model's most probable tokens again, in float32.

    Large logits have the largest rounding errors, and probable tokens weigh most in a divergence.
    """
    count = min(EXACT_TOKENS, sides[0][0].shape[1])
    index_RK = torch.cat([logits_RV.topk(count, dim=1, sorted=False).indices for logits_RV, _, _ in sides], dim=1)
    for logits_RV, hidden_RH, head in sides:
        weight_RKH = head.weight_VH.detach()[index_RK].float()
        exact_RK = (weight_RKH @ hidden_RH.detach().float()[:, :, None]).squeeze(2)
        if head.bias_V is not None:
            exact_RK += head.bias_V.detach()[index_RK].float()
        logits_RV.scatter_(1, index_RK, exact_RK.mul_(head.scale))


def logits_(out_RV: Tensor, hidden_RH: Tensor, head: Head) -> Tensor:
    """scale * (hidden @ head.T + bias) for the first V rows of the head, by products in float32; no soft cap yet."""
    _multiply_(out_RV, hidden_RH.detach(), head.weight_VH[: out_RV.shape[1]].detach())
    return _finish_(out_RV, head)


class TopTokens(NamedTuple):
    """Ids and log-probabilities (over the whole shared vocabulary) of the K most probable tokens, best first."""

    ids_NK: Tensor
    logprobs_NK: Tensor


def top_tokens(hidden_NH: Tensor, head: Head, k: int, *, vocabulary: int) -> TopTokens:
    """The K most probable tokens at every position, at temperature 1, among the first `vocabulary` types."""
    kept = []
    rows = max(1, TOP_ELEMENTS // vocabulary)
    for hidden_CH in hidden_NH.split(rows):  # in chunks, so that no positions x vocabulary tensor ever exists
        logits_CV = logits_(torch.empty((len(hidden_CH), vocabulary), device=hidden_NH.device), hidden_CH, head)
        if head.softcap is not None:
            logits_CV.div_(head.softcap).tanh_().mul_(head.softcap)
        best = torch.topk(logits_CV, min(k, vocabulary), dim=1)
        kept.append((best.indices, best.values - torch.logsumexp(logits_CV, dim=1, keepdim=True)))
    return TopTokens(*map(torch.cat, zip(*kept)))


def _multiply_(out_CV: Tensor, hidden_CH: Tensor, weight_VH: Tensor) -> None:
    if weight_VH.dtype == torch.float32:
        torch.mm(hidden_CH.float(), weight_VH.t(), out=out_CV)
    elif _multiplies_bf16(hidden_CH, weight_VH):
        torch.mm(hidden_CH, weight_VH.t(), out_dtype=torch.float32, out=out_CV)
    else:
        for start in range(0, len(weight_VH), WIDEN_COLUMNS):
            tile = slice(start, start + WIDEN_COLUMNS)
            out_CV[:, tile] = hidden_CH.float() @ weight_VH[tile].float().t()


def _finish_(logits_RV: Tensor, head: Head) -> Tensor:
    if head.bias_V is not None:
        logits_RV.add_(head.bias_V[: logits_RV.shape[1]].detach().float())
    if head.scale != 1.0:
        logits_RV.mul_(head.scale)
    return logits_RV


def _multiplies_bf16(*tensors: Tensor) -> bool:
    """CUDA sums products of bfloat16 in float32 at full speed; float16 would underflow on the gradient's side."""
    return all(tensor.is_cuda and tensor.dtype == torch.bfloat16 for tensor in tensors)


def splits(hidden_NH: Tensor, weight_VH: Tensor) -> bool:
    """Whether the product is taken as two parts in bfloat16: large, on a CPU that has instructions for it."""
    return (
        all(tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" for tensor in (hidden_NH, weight_VH))
        and weight_VH.numel() >= SPLIT_ELEMENTS
        and has_bf16_products()
    )


@cache
def has_bf16_products() -> bool:
    """Whether this CPU multiplies bfloat16 fast, and a second product gives back what rounding took from the first."""
    checks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    if not any(check is not None and check() for check in checks):
        return False
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 1024, generator=generator).bfloat16() for rows in (32, 256))
    first = hidden @ weight.t()
    rest = torch.addmm(first, hidden, weight.t(), beta=-1)
    exact = hidden.double() @ weight.double().t()
    error = (first.double() + rest.double() - exact).abs().max() / exact.abs().max()
    return bool(error < SPLIT_TOLERANCE)


def times_head(grad_CV: Tensor, head_VH: Tensor) -> Tensor:
    """grad @ head in float32; summed in float32, and rounded after it where both come in bfloat16 on a CPU."""
    head_VH = head_VH[: grad_CV.shape[1]].detach()
    if head_VH.dtype == torch.float32:
        return grad_CV @ head_VH
    if grad_CV.dtype == torch.bfloat16:
        return (grad_CV @ head_VH).float()
    if _multiplies_bf16(head_VH):
        return torch.mm(grad_CV.bfloat16(), head_VH, out_dtype=torch.float32)
    total_CH = torch.zeros((len(grad_CV), head_VH.shape[1]), device=grad_CV.device)
    for start in range(0, len(head_VH), WIDEN_COLUMNS):
        tile = slice(start, start + WIDEN_COLUMNS)
        total_CH.addmm_(grad_CV[:, tile], head_VH[tile].float())
    return total_CH


def add_outer_(total_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor, *, first: bool) -> None:
    """total += grad.T @ hidden, summed in float32; the first time the total is written, whatever it holds.

    A bfloat16 total is for a single chunk: nothing can be added to it without rounding again.
    """
    hidden_CH = hidden_CH.detach()
    if grad_CV.dtype == total_VH.dtype == torch.bfloat16:
        assert first, "a bfloat16 total takes one chunk"
        torch.mm(grad_CV.t(), hidden_CH, out=total_VH)
    elif grad_CV.dtype == torch.bfloat16:
        for start in range(0, len(total_VH), WIDEN_COLUMNS):
            tile = slice(start, start + WIDEN_COLUMNS)
            outer_VH = grad_CV[:, tile].t() @ hidden_CH
            total_VH[tile] = outer_VH if first else total_VH[tile].add_(outer_VH)
    elif _multiplies_bf16(hidden_CH):
        total_VH = total_VH.zero_() if first else total_VH
        torch.addmm(total_VH, grad_CV.bfloat16().t(), hidden_CH, out_dtype=torch.float32, out=total_VH)
    elif first:
        torch.mm(grad_CV.t(), hidden_CH.float(), out=total_VH)
    else:
        total_VH.addmm_(grad_CV.t(), hidden_CH.float())
