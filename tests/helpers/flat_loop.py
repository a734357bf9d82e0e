"""The functions of `examples/minimal_loop.py`, which is a script and no module of the package, and its runs, made once.

A run is kept in the directory that the processes of one test session share, so that two test files, or two processes,
that need the same distillation do it once.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from made_once import made_once
from transformers import AutoModelForCausalLM, AutoTokenizer

from rocktokens.world import get_world

SEED, ROLLOUTS, TRAIN_PROMPTS = 5, 64, 5000
QUICK, LONG = 40, 150
LEARNING_RATES = {QUICK: 8e-4, LONG: 3e-4}  # by steps: the loss has stopped falling after either


class FlatRun(NamedTuple):
    """A world's pair before and after distillation in plain PyTorch."""

    loop: ModuleType
    tokenizer: Any
    before: Any
    student: Any
    teacher: Any
    history: torch.Tensor
    """Loss by step."""
    ends: dict[str, int]


def load_minimal_loop() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "minimal_loop.py"
    spec = importlib.util.spec_from_file_location("minimal_loop", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def distilled(name: str, steps: int, factory: pytest.TempPathFactory) -> FlatRun:
    """On-policy distillation of a built-in world's student, once per test session."""
    loop, world = load_minimal_loop(), get_world(name)
    tokenizer = AutoTokenizer.from_pretrained(world.student_path)
    before, teacher = map(AutoModelForCausalLM.from_pretrained, (world.student_path, world.teacher_path))
    student = copy.deepcopy(before)
    ends = {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}

    def make(folder: Path) -> None:
        prompts = [tokenizer(p.prompt)["input_ids"] for p in world.problems("train", TRAIN_PROMPTS, seed=SEED)]
        settings = {"steps": steps, "lr": LEARNING_RATES[steps], "rollouts": ROLLOUTS, "seed": SEED, "log_every": 0}
        history = loop.distil(student, teacher, prompts, **settings, **ends)
        torch.save({"student": student.state_dict(), "history": torch.tensor(history)}, folder / "found.pt")

    found = torch.load(made_once(factory, f"distilled-{name}-{steps}", make)[0] / "found.pt")
    student.load_state_dict(found["student"])
    return FlatRun(loop, tokenizer, before, student, teacher, found["history"], ends)
