"""The optimiser hypothesis, read from a trainer: does Adam give the rocks less of the step than of the gradient?

Takes the gradient and Adam's moments of the output head right after an optimiser step, while both exist. It covers one
step: the gradient is that of its own rollouts, the moments remember the steps before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch

from rocktokens.geometry.gradients import update_shares

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers import PreTrainedModel


def head_update_table(student: PreTrainedModel, optimizer: Optimizer) -> pa.Table | None:
    """Per token type, its share of the head's gradient and of the head's update; None where they cannot be had.

    That is so where the head is not trained (LoRA), is sharded, or the optimiser is not of Adam's kind.
    """
    weight_VH = student.get_output_embeddings().weight
    if weight_VH.grad is None or isinstance(weight_VH, torch.distributed.tensor.DTensor):
        return None
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the one that holds the state
    state = inner.state.get(weight_VH, {})
    if not {"exp_avg", "exp_avg_sq", "step"} <= state.keys() or not bool(weight_VH.grad.any()):
        return None
    group = next(group for group in inner.param_groups if any(p is weight_VH for p in group["params"]))
    shares = update_shares(
        weight_VH.grad,
        state["exp_avg"],
        state["exp_avg_sq"],
        step=int(state["step"]),
        betas=tuple(group["betas"]),
        eps=group["eps"],
    )
    seen = np.flatnonzero(shares.grad_share_V + shares.update_share_V)
    tied = weight_VH is student.get_input_embeddings().weight
    return pa.table(
        {
            "token_id": seen,
            "grad_share": shares.grad_share_V[seen],
            "update_share": shares.update_share_V[seen],
            "tied": np.full(len(seen), tied),
        }
    )
