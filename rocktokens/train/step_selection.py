"""Which rollouts of an optimiser step are sampled and what each of their tokens weighs: the trainer's selecting part.

The selector sees the whole step, over all ranks. What it needs to know of the losses is measured once, without
gradient, and the teacher's states of that pass are kept for the loss. On audit steps everything is measured, whatever
the selector needs, so that the record can say how much a selector changed and what others would have kept.

Shapes: B rollouts of this rank, C columns of the completion grid, N occurrences of the step, K measured rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rocktokens.divergence.fused import Divergence
from rocktokens.divergence.top_tokens import TopChoices
from rocktokens.errors import ConfigError
from rocktokens.select.interface import Selector, SelectorBatch
from rocktokens.train.step_inputs import loss_mask
from rocktokens.train.step_meter import Meter
from rocktokens.train.step_record import TrainingRecord
from rocktokens.train.step_weights import Grid, Rows, decide_weights, everywhere, gather_grid, with_losses
from rocktokens.train.vocabulary import refuse_unknown_ids
from rocktokens.values import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl import DistillationTrainer as _Base

    from rocktokens.train.teacher import StateMemory
else:
    _Base = object

PASSED_ON = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "row")


class Measured(NamedTuple):
    """What a pass without gradient found: this rank's rows, and both models' most probable tokens where asked for."""

    rows: Rows
    choices: TopChoices | None


class SelectionMixin(_Base):
    """Rollouts and weights for the trainer."""

    selector: Selector
    shadows: dict[str, Selector]
    meter: Meter
    record: TrainingRecord
    audit_every: int | None
    vocabulary: int
    length_limit: int | None
    normalise: str
    grid: Grid | None
    audited: SelectorBatch | None
    weight_N: Tensor
    denominator: float
    prompt_lengths: Tensor
    others: list[Rows]
    top: int
    choices: list[TopChoices]
    memory: StateMemory

    def _audits_now(self) -> bool:
        """Whether every position of this step is measured for the record; always in the first step."""
        every = self.audit_every
        return every is not None and self.state.global_step % every == 0

    def _weigh(self, output: Batch) -> None:
        """Decide the weight of every token of the optimiser step, and add this rank's grid of them to the batch."""
        refuse_unknown_ids(output["completion_ids"], self.vocabulary)
        mask_BC = loss_mask(output)
        grid = gather_grid(
            self.accelerator,
            output["completion_ids"],
            mask_BC,
            step=self.state.global_step + 1,
            length_limit=self.length_limit,
        )
        self.prompt_lengths = everywhere(self.accelerator, output["prompt_mask"].sum(1, keepdim=True)).squeeze(1)
        output["row"] = torch.arange(len(mask_BC), device=mask_BC.device) + grid.first_row
        self.memory.clear()
        with self.meter.whole("select"):  # the pass that some selectors need is theirs, teacher and head included
            found = self._measure(output, self.selector.needs_top, keep=True) if self.selector.needs_losses else None
            self._decide(grid, found)
        weight_BC = grid.own(self.weight_N)
        output["loss_weight"] = weight_BC.to(mask_BC.device)
        with self.meter.whole("telemetry"):
            self.audited = self._audit(output, grid)
        if found is not None:
            dropped_K = weight_BC[found.rows.rollout_K - grid.first_row, found.rows.position_K] == 0
            self.others.append(found.rows.at(dropped_K))

    def _decide(self, grid: Grid, found: Measured | None) -> None:
        batch: SelectorBatch | None = grid.batch
        if found is not None:
            batch = with_losses(self.accelerator, grid, *found)
        assert batch is not None
        self.grid = replace(grid, batch=batch)
        kept_before = any(row.get("kept_share") for row in self.record.rows)
        self.weight_N = decide_weights(self.accelerator, self.selector, batch, kept_before=kept_before)
        self.denominator = float(self.weight_N.double().sum()) if self.normalise == "kept" else float(len(batch))
        self.denominator = self.denominator or 1.0  # a step without loss tokens has loss 0

    def _audit(self, output: Batch, grid: Grid) -> SelectorBatch | None:
        """On an audit step: the whole step with its losses, and what shadows need beside them."""
        if not self._audits_now():
            return None
        top = max([self.selector.needs_top, *(shadow.needs_top for shadow in self.shadows.values())])
        if self.selector.needs_losses and top <= self.selector.needs_top:
            assert self.grid is not None
            return self.grid.batch
        return with_losses(self.accelerator, grid, *self._measure(output, top))

    @torch.no_grad()
    def _measure(self, output: Mapping[str, Any], top: int, *, keep: bool = False) -> Measured:
        """Losses of every occurrence of this rank before the step, micro-batch by micro-batch, without gradient.

        Args:
            output: the step's rollouts.
            top: how many of both models' most probable tokens to find beside them.
            keep: whether the loss shall use the teacher's states of this pass again.
        """
        if "pixel_values" in output:
            raise ConfigError(f"selector {self.selector.name} needs losses, which is not supported with images")
        size, parts = self.args.per_device_train_batch_size, []
        self.top, self.choices = top, []
        student = self.accelerator.unwrap_model(self.model_wrapped)
        for start in range(0, len(output["row"]), size):
            part = {key: output[key][start : start + size] for key in PASSED_ON if key in output}
            weight_BC = loss_mask(part).float()
            with self.memory.recording(on=keep):
                _, rows = self._forward_redirection(
                    self.model_wrapped, student, self._divergence, student, part, weight_BC, 1.0
                )
            parts.append(rows)
        joined = TopChoices(*(torch.cat(column).cpu() for column in zip(*self.choices))) if self.choices else None
        self.top, self.choices = 0, []
        return Measured(Rows.joined(parts), joined)

    def _divergence(
        self, unwrapped_student: PreTrainedModel, inputs: Batch, weight_BC: Tensor, denominator: Tensor | float
    ) -> tuple[Divergence, Rows]:
        raise NotImplementedError
