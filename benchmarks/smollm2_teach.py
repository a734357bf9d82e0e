"""Makes a teacher: supervised fine-tuning on worked solutions until the model solves held-out problems.

The loss is cross-entropy on the solution's tokens and the end token, never on the prompt. Batches depend on the seed
and the step alone, so a killed training goes on from its last checkpoint. Knows a model and token ids; where the texts
come from and how accuracy is measured is the caller's business.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM
from world_train import Text, answer_loss, load_checkpoint, pad_batch, save_checkpoint

from rocktokens.progress import progress
from rocktokens.stats import Estimate

POOL = 16  # batches sorted by length together, so that a batch has hardly any padding


@dataclass(frozen=True, kw_only=True)
class TeachConfig:
    """How long and how fast the teacher learns."""

    lessons: int = 3000
    """Worked solutions; none of their problems is among the prompts of the study."""
    steps: int = 480
    """Optimiser steps at most."""
    batch: int = 8
    """Solutions an optimiser step."""
    learning_rate: float = 5e-4
    """Peak learning rate; it rises over the first steps and falls in a straight line to a tenth."""
    warmup: int = 30
    """Steps in which it rises."""
    target: float = 0.88
    """Accuracy at T = 1 at which teaching stops: a little above 85 %, because the measurement has an error."""
    emphasis: float = 5.0
    """Weight of digits in the loss: the optimum does not depend on it, the time to it does."""
    look_every: int = 60
    """Steps between two evaluations of the accuracy."""
    seed: int = 0
    """Seed of the order of lessons."""


def teach(
    model: LlamaForCausalLM,
    texts: Sequence[Text],
    config: TeachConfig,
    checkpoint: Path,
    *,
    pad_id: int,
    digits: Sequence[int],
    accuracy: Callable[[Any], Estimate],
    say: Callable[[int, float, Estimate], None],
) -> int:
    """Train in place until the target or the last step; returns the steps taken. Each evaluation calls `say`."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0, fused=True)
    weight_V = torch.ones(model.config.vocab_size)
    weight_V[list(digits)] = config.emphasis
    start = load_checkpoint(checkpoint, model, optimiser)
    with progress("teaching", config.steps, "steps") as advance:
        advance.resumed(start)
        for step in range(start, config.steps):
            optimiser.param_groups[0]["lr"] = config.learning_rate * _schedule(step, config)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16_instructions()):
                loss = answer_loss(model, *pad_batch(batch_of(texts, step, config), pad_id), weight_V)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            advance(1)
            if (step + 1) % config.look_every == 0 or step + 1 == config.steps:
                found = accuracy(model)
                say(step + 1, loss.item(), found)
                if found.value >= config.target:
                    return step + 1
                save_checkpoint(checkpoint, model, optimiser, step + 1)
    return config.steps


def bf16_instructions() -> bool:
    """Whether this processor multiplies bfloat16 matrices faster than float32 ones; weights and loss stay float32."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def batch_of(texts: Sequence[Text], step: int, config: TeachConfig) -> list[Text]:
    """The lessons of a step: every epoch in an order of its own, lessons of like length together."""
    per_epoch = max(1, len(texts) // config.batch)
    epoch, place = divmod(step, per_epoch)
    order = list(range(len(texts)))
    random.Random(f"{config.seed}/{epoch}").shuffle(order)
    pool, within = divmod(place, POOL)
    first = pool * POOL * config.batch
    members = sorted(order[first : first + POOL * config.batch], key=lambda index: len(texts[index][0]))
    batches = [members[at : at + config.batch] for at in range(0, len(members), config.batch)]
    random.Random(f"{config.seed}/{epoch}/{pool}").shuffle(batches)
    return [texts[index] for index in batches[within]]


def _schedule(step: int, config: TeachConfig) -> float:
    return min(1.0, (step + 1) / config.warmup) * (1 - 0.9 * step / config.steps)
