"""Faster decoding steps on a CPU: packed weights for the linear layers, and attention made for one new token.

A decoding step multiplies few rows by every weight, and torch would rearrange a weight for the matrix kernel each time:
here it is rearranged once per block, or once for a sampler that is used again. The CPU kernel behind
`scaled_dot_product_attention` handles one query per head at a time, and grouped heads copy their keys; for one new
token two batched products in float32 do the same work in a twentieth of the time. Both hold inside a `with` block
only, and afterwards the model is as it was. On other devices nothing changes.

Shapes: B rows, H query heads, K key heads, G query heads per key head, T positions, D head width, N elements.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "rocktokens_one_query"
# Packing costs about as much as it saves in so many steps.
LEAST_STEPS = 16
# Packed copies may take this share of the memory that is free.
MEMORY_SHARE = 0.5
# Values of a weight that are compared before its packed copy is used again.
PROBES = 1024

Multiplier = Callable[[Tensor], Tensor]
Mark = tuple[object, ...]


@dataclass
class Packed:
    """Packed copies of a model's weights, each with a mark of the weight that it was made from."""

    made: dict[int, tuple[Mark, Multiplier]] = field(default_factory=dict)


@contextmanager
def fast_on_cpu(model: PreTrainedModel, *, steps: int, kept: Packed | None = None) -> Iterator[None]:
    """Inside the block, decoding with `model` is fast; afterwards the model is as before.

    Args:
        model: The model that decodes.
        steps: How many tokens a row will be extended by.
        kept: Where packed copies stay for the next block; weights that changed in between are packed anew. Without it
            they go with the block.
    """
    if model.get_input_embeddings().weight.device.type != "cpu":  # type: ignore[union-attr]
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_one_query_attention(model))
        if steps >= LEAST_STEPS:
            stack.enter_context(_packed(model, Packed() if kept is None else kept))
        yield


@contextmanager
def _packed(model: PreTrainedModel, kept: Packed) -> Iterator[None]:
    """Linear layers multiply by packed copies of their weights, while there is memory for copies."""
    reorder: object = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    room = MEMORY_SHARE * _free_bytes()
    changed: list[nn.Linear] = []
    try:
        for layer in model.modules():
            if reorder is None or type(layer) is not nn.Linear or "forward" in vars(layer):
                continue  # a layer whose forward was replaced belongs to somebody else
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else layer.weight.dtype
            if not _can_pack(layer, dtype):
                continue
            mark = _mark(layer, dtype)
            held = kept.made.get(id(layer))
            if held is None or held[0] != mark:
                kept.made.pop(id(layer), None)  # before its successor is made
                room -= layer.weight.numel() * dtype.itemsize
                if room < 0:
                    continue
                held = kept.made[id(layer)] = mark, _multiplier(layer, dtype)
            layer.forward = held[1]  # type: ignore[method-assign, assignment]
            changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


def _mark(layer: nn.Linear, dtype: torch.dtype) -> Mark:
    """What tells a changed weight: where it lies, how often it was written to, and some of its values.

    The values are looked at because writing through `.data` is not counted.
    """
    marks: list[object] = [dtype]
    for tensor in (layer.weight, layer.bias):
        if tensor is None:
            continue
        flat_N = tensor.detach().flatten()
        some = flat_N[:: max(1, len(flat_N) // PROBES)].float().numpy().tobytes()
        version = 0 if tensor.is_inference() else tensor._version
        marks += [tensor.data_ptr(), version, some]
    return tuple(marks)


def _can_pack(layer: nn.Linear, dtype: torch.dtype) -> bool:
    if type(layer.weight) is not nn.Parameter or layer.weight.device.type != "cpu":
        return False  # sharded or offloaded
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _multiplier(layer: nn.Linear, dtype: torch.dtype) -> Multiplier:
    """What the layer computes, by a packed copy of its weight."""
    with torch.no_grad():
        packed: Any = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(dtype))
        bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    converts = dtype != layer.weight.dtype  # autocast would

    def forward(given: Tensor) -> Tensor:
        if torch.is_grad_enabled() or (given.dtype != dtype and not converts):
            return nn.Linear.forward(layer, given)
        return torch.ops.mkldnn._linear_pointwise(given.to(dtype), packed, bias, "none", [], "")

    return forward


def _free_bytes() -> float:
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not known on this system
        return 0.0


@contextmanager
def _one_query_attention(model: PreTrainedModel) -> Iterator[None]:
    """Attention of models that use torch's own goes through `one_query_attention`."""
    AttentionInterface.register(ATTENTION, one_query_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    configs: dict[int, Any] = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    changed = [
        config for config in configs.values() if getattr(config, "_attn_implementation_internal", None) == "sdpa"
    ]
    try:
        for config in changed:
            config._attn_implementation_internal = ATTENTION
        yield
    finally:
        for config in changed:
            config._attn_implementation_internal = "sdpa"


def one_query_attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: torch's own, except for one new token in 16 bit or with grouped heads."""
    num_rows, num_heads, num_queries, width = query_BHTD.shape
    groups = num_heads // key_BKTD.shape[1]
    special = any(options.get(name) is not None for name in ("softcap", "position_bias", "cache", "s_aux"))
    if (
        num_queries != 1
        or special
        or (groups == 1 and query_BHTD.dtype == torch.float32)
        or (attention_mask is not None and attention_mask.shape[1] != 1)
    ):
        return sdpa_attention_forward(module, query_BHTD, key_BKTD, value_BKTD, attention_mask, **options)

    scaling = options.get("scaling")
    query_KGD = query_BHTD.reshape(-1, groups, width).float() * (width**-0.5 if scaling is None else scaling)
    score_KGT = query_KGD @ key_BKTD.flatten(0, 1).float().transpose(1, 2)
    if attention_mask is not None:
        score_BKGT = score_KGT.view(num_rows, -1, *score_KGT.shape[1:])
        if attention_mask.dtype == torch.bool:
            score_BKGT.masked_fill_(~attention_mask, -torch.inf)
        else:
            score_BKGT.add_(attention_mask)
    mixed_KGD = score_KGT.softmax(-1) @ value_BKTD.flatten(0, 1).float()
    return mixed_KGD.view(num_rows, 1, num_heads, -1).to(query_BHTD.dtype), None
