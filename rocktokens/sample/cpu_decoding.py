"""Faster decoding steps on a CPU: packed weights for the linear layers, and attention made for one new token.

A decoding step multiplies few rows by every weight, and torch would rearrange a weight for the matrix kernel each time:
here it is rearranged once per block. The CPU kernel behind `scaled_dot_product_attention` handles one query per head at
a time, and grouped heads copy their keys; for one new token two batched products in float32 do the same work in a
twentieth of the time. Both hold inside a `with` block only, and afterwards the model is as it was. On other devices
nothing changes.

Shapes: B rows, H query heads, K key heads, G query heads per key head, T positions, D head width, N elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "rocktokens_one_query"
# Below this number of steps packing costs more than it saves.
LEAST_STEPS = 16
# Packed copies may take this share of the memory that is free.
MEMORY_SHARE = 0.5

Multiplier = Callable[[Tensor], Tensor]


@contextmanager
def fast_on_cpu(model: PreTrainedModel, *, steps: int) -> Iterator[None]:
    """Inside the block, decoding with `model` is fast; afterwards the model is as before.

    Args:
        model: the model that decodes.
        steps: how many tokens a row will be extended by.
    """
    if model.get_input_embeddings().weight.device.type != "cpu":  # type: ignore[union-attr]
        yield
        return
    with _one_query_attention(model), _packed(model) if steps >= LEAST_STEPS else nullcontext():
        yield


@contextmanager
def _packed(model: PreTrainedModel) -> Iterator[None]:
    """Linear layers multiply by packed copies of their weights, while there is memory for copies."""
    reorder: object = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    room = MEMORY_SHARE * psutil.virtual_memory().available
    changed: list[nn.Linear] = []
    try:
        for layer in model.modules():
            if reorder is None or type(layer) is not nn.Linear or "forward" in vars(layer):
                continue  # a layer whose forward was replaced belongs to somebody else
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else layer.weight.dtype
            room -= layer.weight.numel() * dtype.itemsize
            if room > 0 and _can_pack(layer, dtype):
                layer.forward = _multiplier(layer, dtype)  # type: ignore[method-assign, assignment]
                changed.append(layer)
        yield
    finally:
        for layer in changed:
            del layer.forward


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
