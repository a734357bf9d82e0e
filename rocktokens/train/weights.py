"""From the rollouts of one optimiser step to a loss weight for each of their tokens.

Grids of all ranks are gathered, the selector sees the whole step once, and each rank takes back its rows. What a weight
means for the loss is the trainer's business.

Shapes: B rollouts of this rank, R of all ranks, C columns of the completion grid, N occurrences, K measured rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate.utils import broadcast
from torch import Tensor

from rocktokens.divergence.measures import TopChoices
from rocktokens.select.interface import Selector, SelectorBatch
from rocktokens.settings import require
from rocktokens.values import Batch, Row

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger(__name__)

# What a selector that needs losses is shown of every occurrence; and one that needs the most probable tokens.
MEASURED = ("value", "student_entropy", "teacher_entropy", "student_logprob", "teacher_logprob")
TOP_COLUMNS = ("student_top_id_Nk", "student_top_Nk", "teacher_at_student_top_Nk", "teacher_top_id_Nk")
# A weight this near to 1 counts as unchanged: rounding of weights that are divided by their mean.
UNCHANGED = 1e-3


class Rows(NamedTuple):
    """Measured occurrences, on the CPU."""

    rollout_K: Tensor
    position_K: Tensor
    token_K: Tensor
    weight_K: Tensor
    value_K: Tensor
    log_ratio_K: Tensor
    student_logprob_K: Tensor
    teacher_logprob_K: Tensor
    student_entropy_K: Tensor
    teacher_entropy_K: Tensor
    grad_norm_K: Tensor

    def at(self, rows_K: Tensor) -> Rows:
        """Some of the rows, by a mask or by their numbers."""
        return Rows(*(column[rows_K] for column in self))

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """All rows of several parts."""
        if not parts:
            longs, floats = torch.zeros(0, dtype=torch.long), torch.zeros(0)
            return Rows(longs, longs, longs, *([floats] * 8))
        return Rows(*(torch.cat(columns) for columns in zip(*parts)))


@dataclass(frozen=True)
class Grid:
    """Occurrences of the step over all ranks, and where this rank's rows lie among them."""

    batch: SelectorBatch
    mask_RC: Tensor
    first_row: int
    shape: tuple[int, int]
    """Rows and columns of this rank's own grid."""

    def own(self, column_N: Tensor) -> Tensor:
        """This rank's part of a column, as its grid; 0 outside the mask."""
        whole_RC = torch.zeros(self.mask_RC.shape, dtype=column_N.dtype)
        whole_RC[self.mask_RC] = column_N
        rows, columns = self.shape
        return whole_RC[self.first_row : self.first_row + rows, :columns]


def loss_mask(inputs: Batch) -> Tensor:
    """Response positions that the student wrote; what a tool wrote carries no loss."""
    mask_BC = inputs["completion_mask"]
    return mask_BC * inputs["tool_mask"] if inputs.get("tool_mask") is not None else mask_BC


def everywhere(accelerator: Accelerator, grid_BC: Tensor, fill: float = 0) -> Tensor:
    """A grid of all ranks' rows in rank order, on the CPU; shorter ranks are filled up on the right."""
    if accelerator.num_processes > 1:
        padded_BC = accelerator.pad_across_processes(grid_BC, dim=1, pad_index=fill)
        grid_BC = accelerator.gather(padded_BC.contiguous())
    return grid_BC.cpu()


def gather_grid(accelerator: Accelerator, output: Batch, *, step: int, length_limit: int | None) -> Grid:
    """The step's occurrences, gathered from every rank."""
    token_BC, mask_BC = output["completion_ids"], loss_mask(output)
    token_RC, mask_RC = everywhere(accelerator, token_BC), everywhere(accelerator, mask_BC.long()).bool()
    rollout_N, position_N = mask_RC.nonzero(as_tuple=True)
    limit = length_limit if length_limit is not None else token_RC.shape[1]  # without one: the longest of the step
    batch = SelectorBatch(token_RC[mask_RC], rollout_N, position_N, step=step, length_limit=limit)
    return Grid(batch, mask_RC, accelerator.process_index * len(token_BC), (token_BC.shape[0], token_BC.shape[1]))


def with_losses(
    accelerator: Accelerator, grid: Grid, rows: Rows, top: TopChoices | None = None
) -> SelectorBatch | None:
    """The batch with what was measured of its rows; None unless every occurrence was measured."""
    local_K = rows.rollout_K - grid.first_row
    columns: Row = {}
    for name in MEASURED:
        column_BC = torch.full(grid.shape, torch.nan)
        # An invalid number is known too: 0 keeps it apart from "not measured".
        column_BC[local_K, rows.position_K] = torch.nan_to_num(getattr(rows, f"{name}_K"), posinf=0.0)
        columns[f"{name}_N"] = everywhere(accelerator, column_BC.to(accelerator.device), torch.nan)[grid.mask_RC]
        if bool(columns[f"{name}_N"].isnan().any()):  # some occurrence was not measured
            return None
    for name, column_Kk in zip(TOP_COLUMNS, top[:4] if top is not None else ()):
        column_BCk = torch.zeros((*grid.shape, column_Kk.shape[1]), dtype=column_Kk.dtype)
        column_BCk[local_K, rows.position_K] = column_Kk
        columns[name] = everywhere(accelerator, column_BCk.to(accelerator.device))[grid.mask_RC]
    return replace(grid.batch, **columns)


def decide_weights(accelerator: Accelerator, selector: Selector, batch: SelectorBatch, *, kept_before: bool) -> Tensor:
    """The selector's weights, decided once on the first rank; refused where they cannot be loss weights.

    A step without loss tokens has loss 0, as in TRL. A selector that keeps nothing from its first step on is refused;
    one that has kept tokens before (`kept_before`) leaves this step out, with a warning.
    """
    weight_N = torch.zeros(len(batch))
    if not len(batch):
        return weight_N
    if accelerator.is_main_process:  # a selector may draw at random: ranks must not disagree
        weight_N = selector.weights(batch)
    if accelerator.num_processes > 1:
        weight_N = broadcast(weight_N.to(accelerator.device), from_process=0).cpu()
    name = type(selector).__name__ if selector.name == "custom" else selector.name
    shape, weight_N = tuple(weight_N.shape), weight_N.float()
    require(shape == (len(batch),), f"selector {name} gave weights of shape {shape} for {len(batch)} occurrences")
    fits = bool(((weight_N >= 0) & (weight_N <= selector.bound * (1 + 1e-6))).all())
    require(fits, f"selector {name} gave weights outside [0, {selector.bound:g}] (or NaN) at step {batch.step}")
    if not bool(weight_N.any()):
        nothing = f"selector {name} keeps none of the {len(batch)} tokens of step {batch.step}"
        require(kept_before, f"{nothing}. Name fewer rocks, raise lam or keep, or take more rollouts a step.")
        log.warning("%s: its loss is 0 and nothing is learned from it", nothing)
    return weight_N


def bite(weight_N: Tensor, batch: SelectorBatch, eos_ids: Iterable[int]) -> dict[str, float | None]:
    """How much a selector changed: the share of tokens and of the loss whose weight is not 1, and of end tokens.

    The loss's share is known where every occurrence was measured; the end tokens' where there are any.
    """
    if not len(batch):
        return {}
    changed_N = (weight_N - 1).abs() > UNCHANGED
    found: dict[str, float | None] = {"changed_share": float(changed_N.double().mean())}
    if batch.value_N is not None:
        value_N = torch.nan_to_num(batch.value_N.double(), posinf=0.0).clamp_min(0)
        total = float(value_N.sum())
        found["changed_loss_share"] = float(value_N[changed_N].sum()) / total if total else None
    end_N = torch.isin(batch.token_N, torch.tensor(sorted(eos_ids), dtype=batch.token_N.dtype))
    if bool(end_N.any()):
        found["end_dropped_share"] = float((weight_N[end_N] == 0).double().mean())
    return found


def repeated_prompts(batch: Batch) -> Tensor:
    """Lengths of the prompts of a micro-batch that an earlier row of it has computed already."""
    whole_BP2 = torch.cat([batch["prompt_ids"] * batch["prompt_mask"], batch["prompt_mask"]], dim=1)
    number_B = torch.unique(whole_BP2, dim=0, return_inverse=True)[1].tolist()
    repeated_B = [number in number_B[:row] for row, number in enumerate(number_B)]
    return batch["prompt_mask"].sum(1).cpu()[torch.tensor(repeated_B, dtype=torch.bool)]
