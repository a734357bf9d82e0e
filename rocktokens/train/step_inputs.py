"""Small quantities of one micro-batch and of the output heads, shared by the trainer's loss and its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rocktokens.divergence.fused import CHUNK_ELEMENTS, Head
from rocktokens.seeds import derive_seed
from rocktokens.values import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMAGE_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def prompt_names(inputs: list[Batch]) -> list[str]:
    """A name for every row's prompt: its own, or one that follows from its text."""
    return [str(row.get("prompt_id", f"{derive_seed(str(row['prompt'])):x}")) for row in inputs]


def loss_mask(inputs: Batch) -> Tensor:
    """Response positions that the student wrote."""
    mask_BC = inputs["completion_mask"]
    return mask_BC * inputs["tool_mask"] if inputs.get("tool_mask") is not None else mask_BC


def whole(head: Head, dtype: torch.dtype) -> Head:
    """A head sharded by FSDP2, gathered once, differentiably; any other as it is."""
    if not isinstance(head.weight_VH, torch.distributed.tensor.DTensor):
        return head
    bias_V: Any = head.bias_V
    return replace(
        head, weight_VH=head.weight_VH.full_tensor().to(dtype), bias_V=None if bias_V is None else bias_V.full_tensor()
    )


def chunk_rows(vocabulary: int) -> int | None:
    """Rows of logits at once: half of what scoring takes, because in training all activations exist beside them."""
    usual = CHUNK_ELEMENTS // vocabulary
    return max(96, usual // 2 // 16 * 16) if usual >= 96 else None


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model under PEFT's adapters, or the model itself where there are none."""
    wrapped: object = model
    return wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else model


def head_rows(model: PreTrainedModel) -> int:
    """Rows of a model's output head."""
    return int(model.get_output_embeddings().weight.shape[0])
