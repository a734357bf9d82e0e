"""Where the time of a training step went, and what it should have cost: seconds by stage, FLOPs from model shapes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rocktokens.tables import STEP_STAGES, TRAINING_STAGES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Meter:
    """Seconds spent in named stages since the last `take`; stages may nest, and only the innermost one runs."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._synchronise = torch.cuda.synchronize if device is not None and device.type == "cuda" else lambda: None
        self._seconds: dict[str, float] = dict.fromkeys(STEP_STAGES, 0.0)
        self._processor, self._processor_aside = time.process_time(), 0.0

    def now(self) -> float:
        """The clock, after the device has caught up."""
        self._synchronise()
        return time.perf_counter()

    @contextmanager
    def whole(self, name: str) -> Iterator[None]:
        """Count the block under `name`, whatever stages are named inside."""
        start, kept = self.now(), self._seconds
        self._seconds = dict.fromkeys(STEP_STAGES, 0.0)
        try:
            yield
        finally:
            self._seconds = kept
            self._seconds[name] += self.now() - start

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the block under `name`, less what inner stages claim."""
        start, claimed, processor = self.now(), sum(self._seconds.values()), time.process_time()
        try:
            yield
        finally:
            if name not in TRAINING_STAGES:  # what records, evaluates or saves is no part of training's cost
                self._processor_aside += time.process_time() - processor
            self._seconds[name] += self.now() - start - (sum(self._seconds.values()) - claimed)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._seconds[name] += seconds

    def take(self) -> dict[str, float]:
        """Seconds by stage, and processor seconds of training, since the last call; as columns of the record."""
        now = time.process_time()
        taken = {"seconds_processor": now - self._processor - self._processor_aside}
        taken |= {f"seconds_{stage}": seconds for stage, seconds in self._seconds.items()}
        self._processor, self._processor_aside = now, 0.0
        self._seconds = dict.fromkeys(STEP_STAGES, 0.0)
        return taken


@dataclass(frozen=True)
class ModelShape:
    """What a forward pass of a model costs, read off its parameters. A mixture of experts counts its active share."""

    backbone_parameters: int
    attention_width: int
    """Layers x heads x head width: what attention's cost grows with, per position attended to."""
    head_elements: int
    """Vocabulary x width."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelShape:
        """The shape of a causal language model; output head and input embeddings are no part of the backbone."""
        config, head = model.config.get_text_config(), model.get_output_embeddings().weight
        outside = {id(head), id(model.get_input_embeddings().weight)}
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        active = getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0
        backbone = 0.0
        for name, parameter in model.named_parameters():
            if id(parameter) not in outside:
                backbone += parameter.numel() * (active if ".experts." in name else 1.0)
        heads = getattr(config, "num_attention_heads", 1)
        head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(round(backbone), config.num_hidden_layers * heads * head_width, head.numel())

    def backbone(self, length_R: np.ndarray) -> float:
        """FLOPs of a forward pass without the head over sequences of these lengths, padding not counted."""
        tokens = float(length_R.sum())
        attended = float((length_R * (length_R + 1.0) / 2).sum())
        return 2.0 * self.backbone_parameters * tokens + 4.0 * self.attention_width * attended

    def head(self, rows: float) -> float:
        """FLOPs of one vocabulary projection of these rows."""
        return 2.0 * self.head_elements * rows


def step_flops(
    student: ModelShape,
    teacher: ModelShape,
    prompt_R: np.ndarray,
    response_R: np.ndarray,
    *,
    kept: int,
    measured_first: bool,
    sampled: bool = True,
    shared_S: np.ndarray | None = None,
) -> dict[str, float]:
    """FLOPs of one optimiser step by stage. A backward costs two forwards; the loss projects once and back twice.

    Where a selector had losses measured first, the teacher's states of that pass serve the loss, too.

    Args:
        student: What the student's forward pass costs.
        teacher: What the teacher's costs.
        prompt_R: Tokens of every rollout's prompt.
        response_R: Tokens of every rollout.
        kept: Tokens whose loss was trained on.
        measured_first: Whether the selector needed the losses before the step.
        sampled: Whether the rollouts were sampled in this step.
        shared_S: Tokens of every prompt that was not computed because another rollout of it already had been.
    """
    whole_R, tokens = prompt_R + response_R, float(response_R.sum())
    shared_S = np.zeros(0) if shared_S is None else shared_S
    student_forward, teacher_forward = (
        shape.backbone(whole_R) - shape.backbone(shared_S) for shape in (student, teacher)
    )
    selecting = student_forward + teacher_forward + student.head(tokens) + teacher.head(tokens)
    return {
        "rollout": student_forward + student.head(tokens) if sampled else 0.0,
        "select": selecting if measured_first else 0.0,
        "teacher": 0.0 if measured_first else teacher_forward,
        "student": 3.0 * student_forward,
        "head": 3.0 * student.head(kept) + teacher.head(kept),
    }
