"""The teacher as the trainer sees it: its states for a batch, and its head. In this process, or served elsewhere.

A local teacher is TRL's: prepared by accelerate, run through its own wrapper. A served one takes no memory here but its
output head's; its states are asked for rollout by rollout and put on the batch's grid. Under FSDP accelerate does not
shard a model in evaluation mode, and under DeepSpeed's ZeRO-3 the head is in pieces, so that a large teacher has to be
served there; this module says so.

Shapes: B rollouts of a micro-batch, C columns of the completion grid, G the teacher's width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from rocktokens.divergence.fused import Head
from rocktokens.errors import ConfigError
from rocktokens.models.pair import head_of
from rocktokens.models.states import Sequences, StateSource
from rocktokens.train.precision import mixed
from rocktokens.train.step_meter import ModelShape
from rocktokens.values import Batch

if TYPE_CHECKING:
    from rocktokens.train.trainer import RockDistillationTrainer

log = logging.getLogger(__name__)

# A replicated teacher that takes more of each device than this leaves no room to train beside it.
REPLICA_SHARE = 0.4


class Teacher(Protocol):
    """States and head of the teacher."""

    @property
    def rows(self) -> int:
        """Rows of its output head."""
        ...

    @property
    def shape(self) -> ModelShape:
        """What its forward passes cost on this machine."""
        ...

    def head(self) -> Head:
        """Its output head, on the device that trains."""
        ...

    def states(self, inputs: dict[str, object]) -> Tensor:
        """The states that predict each completion token, (B, C, G); without gradient."""
        ...


class LocalTeacher:
    """The trainer's `teacher_model`."""

    def __init__(self, trainer: RockDistillationTrainer) -> None:
        self.trainer = trainer
        self._refuse_sharding()

    @property
    def _model(self) -> Any:
        return self.trainer.accelerator.unwrap_model(self.trainer.teacher_model)

    @property
    def rows(self) -> int:
        """Rows of its output head."""
        return int(self._model.get_output_embeddings().weight.shape[0])

    @property
    def shape(self) -> ModelShape:
        """What its forward passes cost."""
        return ModelShape.of(self._model)

    def head(self) -> Head:
        """Its output head."""
        return head_of(self._model)

    def states(self, inputs: Batch) -> Tensor:
        """One forward pass through accelerate's wrapper."""
        trainer, model = self.trainer, self._model
        model.eval()
        with torch.no_grad(), mixed(trainer.accelerator, trainer.autocast):
            found: Tensor = trainer._forward_redirection(trainer.teacher_model, model, trainer._states, model, inputs)
            return found

    def _refuse_sharding(self) -> None:
        """A teacher that sharded training cannot hold is refused, saying where it should live instead."""
        trainer = self.trainer
        serve = "serve it: start vLLM with --runner pooling and name its URL with --servers.teacher (docs/scale.md)"
        if trainer.is_deepspeed_enabled and trainer.args.deepspeed_plugin.zero_stage == 3:
            raise ConfigError(f"DeepSpeed's ZeRO-3 cuts the teacher's output head into pieces; {serve}")
        if not trainer.is_fsdp_enabled:
            return
        weights = sum(p.numel() * p.element_size() for p in self._model.parameters())
        log.info("FSDP does not shard the teacher: each process holds all of it, %.1f GB", weights / 1e9)
        device = trainer.accelerator.device
        if device.type == "cuda":
            whole = torch.cuda.get_device_properties(device).total_memory
            if weights > REPLICA_SHARE * whole:
                raise ConfigError(
                    f"FSDP does not shard the teacher, and its {weights / 1e9:.0f} GB would fill "
                    f"{100 * weights / whole:.0f} % of every device; {serve}"
                )


class ServedTeacher:
    """A teacher behind a source of states."""

    def __init__(self, trainer: RockDistillationTrainer, source: StateSource) -> None:
        self.trainer, self.source = trainer, source
        device = trainer.accelerator.device
        head = source.head
        bias = None if head.bias_V is None else head.bias_V.to(device)
        self._head = replace(head, weight_VH=head.weight_VH.to(device), bias_V=bias)

    @property
    def rows(self) -> int:
        """Rows of its output head."""
        return len(self._head.weight_VH)

    @property
    def shape(self) -> ModelShape:
        """Its backbone costs this machine nothing; its head is projected here."""
        return ModelShape(0, 0, self._head.weight_VH.numel())

    def head(self) -> Head:
        """Its output head."""
        return self._head

    @torch.no_grad()
    def states(self, inputs: Batch) -> Tensor:
        """One sequence a rollout, without padding; its states at their places on the grid, 0 elsewhere."""
        if "pixel_values" in inputs:
            raise ConfigError("a served teacher sees token ids only; images need the teacher in this process")
        mask_BC = inputs["completion_mask"].bool().cpu()
        prompts = _rows(inputs["prompt_ids"], inputs["prompt_mask"])
        responses = _rows(inputs["completion_ids"], mask_BC)
        filled = [index for index, response in enumerate(responses) if response]
        sequences = Sequences(
            tuple((*prompts[index], *responses[index]) for index in filled),
            tuple(len(prompts[index]) for index in filled),
            tuple(f"{index + 1} of step {self.trainer.state.global_step + 1}" for index in filled),
        )
        device, width = self._head.weight_VH.device, self._head.weight_VH.shape[1]
        state_BCG = torch.zeros((*mask_BC.shape, width), device=device)
        if filled:
            state_BCG[mask_BC.to(device)] = self.source.response_states(sequences).to(device)
        return state_BCG


class StateMemory:
    """The teacher's states of one optimiser step by rollout, so that what a selector had measured is not run twice."""

    def __init__(self) -> None:
        self._state_by_row: dict[int, Tensor] = {}
        self._records = False

    @contextmanager
    def recording(self, *, on: bool) -> Iterator[None]:
        """Inside the block states are kept as they are made."""
        self._records = on
        try:
            yield
        finally:
            self._records = False

    def states(self, teacher: Teacher, inputs: Batch) -> Tensor:
        """The teacher's states of a micro-batch; from memory, once, where all of its rollouts are there."""
        rows = inputs["row"].tolist() if "row" in inputs else []
        if rows and not self._records and all(row in self._state_by_row for row in rows):
            width = inputs["completion_ids"].shape[1]
            kept = [self._state_by_row.pop(row)[:width] for row in rows]
            return torch.stack([nn.functional.pad(state_CG, (0, 0, 0, width - len(state_CG))) for state_CG in kept])
        found_BCG = teacher.states(inputs)
        if self._records:
            self._state_by_row |= dict(zip(rows, found_BCG))
        return found_BCG

    def clear(self) -> None:
        """Forget everything: the next step begins."""
        self._state_by_row = {}


def _rows(ids_BC: Tensor, mask_BC: Tensor) -> list[tuple[int, ...]]:
    """The unmasked ids of every row."""
    mask_BC = mask_BC.bool().cpu()
    return [tuple(ids[mask].tolist()) for ids, mask in zip(ids_BC.cpu(), mask_BC)]
