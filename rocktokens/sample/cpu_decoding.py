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
from contextlib import contextmanager
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


@contextmanager
def fast_on_cpu(model: PreTrainedModel, *, steps: int) -> Iterator[None]:
    """Inside the block, extending rows of `model` by `steps` tokens is fast; afterwards the model is as before."""
    if model.get_input_embeddings().weight.device.type != "cpu":  # type: ignore[union-attr]
        yield
        return
    AttentionInterface.register(ATTENTION, one_query_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    configs: dict[int, Any] = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    own = [config for config in configs.values() if getattr(config, "_attn_implementation_internal", None) == "sdpa"]
    room = MEMORY_SHARE * psutil.virtual_memory().available
    packed: list[nn.Linear] = []
    try:
        for config in own:
            config._attn_implementation_internal = ATTENTION
        for layer in model.modules() if steps >= LEAST_STEPS else ():
            if type(layer) is not nn.Linear or "forward" in vars(layer):
                continue  # a layer whose forward was replaced belongs to somebody else
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else layer.weight.dtype
            room -= layer.weight.numel() * dtype.itemsize
            if room > 0 and _can_pack(layer, dtype):
                layer.forward = _multiplier(layer, dtype)  # type: ignore[method-assign, assignment]
                packed.append(layer)
        yield
    finally:
        for config in own:
            config._attn_implementation_internal = "sdpa"
        for layer in packed:
            del layer.forward


def _can_pack(layer: nn.Linear, dtype: torch.dtype) -> bool:
    if type(layer.weight) is not nn.Parameter or layer.weight.device.type != "cpu":
        return False  # sharded or offloaded
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _multiplier(layer: nn.Linear, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The layer's forward, by a packed copy of its weight."""
    with torch.no_grad():
        packed: Any = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(dtype))
        bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    converts = dtype != layer.weight.dtype  # autocast would

    def forward(given: Tensor) -> Tensor:
        if torch.is_grad_enabled() or (given.dtype != dtype and not converts):
            return nn.Linear.forward(layer, given)
        return torch.ops.mkldnn._linear_pointwise(given.to(dtype), packed, bias, "none", [], "")

    return forward


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
