"""In which precision a training forward runs, and what is said about it.

TRL computes its loss inside `_forward_redirection`, which replaces the model's `forward`; accelerate's autocast lives
in that replaced `forward`. So with `bf16=True` stock TRL samples rollouts in bfloat16 and computes the loss in the
weights' precision. Our trainer enters accelerate's autocast itself unless `autocast=False` asks for stock's behaviour.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rocktokens.divergence.fused import Head

if TYPE_CHECKING:
    from accelerate import Accelerator

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def mixed(accelerator: Accelerator, autocast: bool) -> AbstractContextManager[object]:
    """Accelerate's autocast, where the user asked for mixed precision and for its use in training forwards."""
    return accelerator.autocast() if autocast else nullcontext()


def product_dtype(accelerator: Accelerator, autocast: bool, device: torch.device) -> torch.dtype | None:
    """The dtype in which the output heads' factors are multiplied; None: the dtype they have.

    CUDA multiplies bfloat16 into float32 sums at full speed, where a float32 product would be slow. On a CPU the
    factors would have to be widened again first, so float32 weights stay float32 there. float16 is left alone: its
    gradients would underflow.
    """
    dtype = DTYPES.get(accelerator.mixed_precision) if autocast else None
    return dtype if dtype is torch.bfloat16 and device.type == "cuda" else None


def as_factors(head: Head, states: Tensor, dtype: torch.dtype | None) -> tuple[Head, Tensor]:
    """A head and its hidden states in the dtype of their product, differentiably; sums stay float32."""
    if dtype is None:
        return head, states
    return replace(head, weight_VH=head.weight_VH.to(dtype)), states.to(dtype)


def forward_format(accelerator: Accelerator, autocast: bool, weight: Tensor) -> str:
    """The format in which hidden states are computed: what the loss's numerical floor follows from."""
    dtype = DTYPES.get(accelerator.mixed_precision) if autocast else None
    return str(dtype if dtype is not None else weight.dtype).removeprefix("torch.")


def describe(accelerator: Accelerator, autocast: bool, weight: Tensor) -> str:
    """One sentence on the precision of weights, forward passes and output heads."""
    stored = str(weight.dtype).removeprefix("torch.")
    asked = accelerator.mixed_precision
    if asked not in DTYPES:
        return f"precision: weights and forward passes in {stored}, divergences summed in float32"
    if not autocast:
        return (
            f"precision: weights and training forwards in {stored}, rollouts of TRL in {asked} (autocast=False, "
            "as in TRL itself), divergences summed in float32"
        )
    product = product_dtype(accelerator, autocast, weight.device)
    head = str(product).removeprefix("torch.") if product is not None else stored
    return (
        f"precision: weights in {stored}, forward passes in {asked} autocast, output heads as {head} products summed "
        "in float32"
    )
