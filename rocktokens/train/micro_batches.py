"""The order in which a step's rollouts are divided into micro-batches: alike lengths together, and a prompt's rollouts.

A micro-batch is as wide as its longest text, and a prompt is computed once per micro-batch. TRL cuts a step's rollouts
into micro-batches in the order they come; here they are put in order first. Weights, telemetry and normalisation go by
each rollout's own number, so nothing but the amount of padding depends on the order.

Shapes: B rollouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rocktokens.values import Batch


def by_length(batch: Batch) -> Batch:
    """One of TRL's batches ordered by length; rollouts of one prompt stay together, placed by the longest of them.

    A batch with images, whose rows belong to several entries of other lists, is returned as it is.
    """
    if "pixel_values" in batch:
        return batch
    prompt_B = _prompts(batch)
    length_B = batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)
    longest_B = length_B.new_zeros(len(prompt_B)).scatter_reduce(0, prompt_B, length_B, "amax")[prompt_B]
    keys = zip(longest_B.tolist(), prompt_B.tolist(), length_B.tolist())
    order = [row for row, _ in sorted(enumerate(keys), key=lambda pair: pair[1])]
    return {name: _reordered(value, order) for name, value in batch.items()}


def shared_lengths(batch: Batch, parts: int) -> Tensor:
    """Lengths of the prompts that came before in the same of `parts` equal micro-batches, once per repetition."""
    size = len(batch["prompt_mask"]) // parts
    length_B = batch["prompt_mask"].sum(1).cpu()
    seen: set[tuple[int, int]] = set()
    found = []
    for row, prompt in enumerate(_prompts(batch).tolist()):
        place = row // max(size, 1), prompt
        found.append(place in seen)
        seen.add(place)
    return length_B[torch.tensor(found, dtype=torch.bool)]


def _prompts(batch: Batch) -> Tensor:
    """A number for every row's prompt; equal prompts have equal numbers."""
    whole_BP2 = torch.cat([batch["prompt_ids"] * batch["prompt_mask"], batch["prompt_mask"]], dim=1)
    return torch.unique(whole_BP2, dim=0, return_inverse=True)[1]


def _reordered(value: object, order: list[int]) -> object:
    if isinstance(value, Tensor) and value.ndim and len(value) == len(order):
        return value[torch.tensor(order, device=value.device)]
    if isinstance(value, list) and len(value) == len(order):
        return [value[row] for row in order]
    return value
