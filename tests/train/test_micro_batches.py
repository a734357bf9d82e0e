"""Rows in an order that leaves little padding: nothing is lost, siblings stay together, and the step stays the same."""

from __future__ import annotations

import distilling
import numpy as np
import pytest
import torch

from rocktokens import RockDistillationTrainer
from rocktokens.train import trainer as trainer_module
from rocktokens.train.meter import ModelShape, step_flops
from rocktokens.train.weights import by_length, shared_lengths


def batch(prompts: list[int], lengths: list[int]) -> dict:
    """Prompt n has n + 1 tokens of value n + 3; completions of these lengths."""
    width = max(prompts) + 1
    prompt_mask = torch.tensor([[int(column >= width - n - 1) for column in range(width)] for n in prompts])
    completion_mask = torch.tensor([[int(column < length) for column in range(max(lengths))] for length in lengths])
    return {
        "prompt_ids": prompt_mask * torch.tensor(prompts)[:, None] + 3 * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_mask * 5,
        "completion_mask": completion_mask,
        "row": torch.arange(len(prompts)),
        "names": [f"r{row}" for row in range(len(prompts))],
        "temperature": torch.tensor(1.0),
    }


def test_rows_are_ordered_by_length_and_siblings_stay_together():
    given = batch([2, 0, 2, 0, 1, 1], [9, 1, 1, 2, 4, 5])
    got = by_length(given)
    assert got["row"].tolist() == [1, 3, 4, 5, 2, 0]  # by the longest of a prompt: 1 + 2, 2 + 5, 3 + 9
    assert got["names"] == ["r1", "r3", "r4", "r5", "r2", "r0"]
    assert got["temperature"] == 1
    for name in ("prompt_ids", "completion_mask"):
        assert torch.equal(got[name], given[name][got["row"]])


def test_padding_shrinks(rng):
    lengths = rng.integers(1, 100, 64).tolist()
    given = batch([0] * 4 + list(range(1, 61)), lengths)

    def padded(rows: dict) -> int:
        return sum(int(part.sum(1).max()) * len(part) for part in rows["completion_mask"].split(8))

    assert padded(by_length(given)) < 0.8 * padded(given)


def test_images_are_left_alone():
    given = batch([1, 0], [3, 1]) | {"pixel_values": torch.zeros(5)}
    assert by_length(given)["row"].tolist() == [0, 1]


def test_a_prompt_is_shared_within_its_micro_batch_only():
    given = batch([1, 1, 1, 1, 2, 2, 0, 2], [1] * 8)
    assert shared_lengths(given, 1).tolist() == [2, 2, 2, 3, 3]
    assert shared_lengths(given, 2).tolist() == [2, 2, 2, 3, 3]
    assert shared_lengths(given, 4).tolist() == [2, 2, 3]
    assert shared_lengths(given, 8).tolist() == []


def test_shared_prompts_cost_nothing():
    student, teacher = ModelShape.of(distilling.student()), ModelShape.of(distilling.teacher())
    prompts, rollouts = np.array([5.0, 5.0, 7.0]), np.array([4.0, 6.0, 3.0])

    def flops(measured_first: bool, **shared) -> dict[str, float]:
        return step_flops(student, teacher, prompts, rollouts, kept=13, measured_first=measured_first, **shared)

    prompt = np.array([5.0])
    whole, shared = flops(False), flops(False, shared_S=prompt)
    assert whole["student"] - shared["student"] == pytest.approx(3 * student.backbone(prompt))
    assert whole["teacher"] - shared["teacher"] == pytest.approx(teacher.backbone(prompt))
    select = flops(True)["select"] - flops(True, shared_S=prompt)["select"]
    assert select == pytest.approx(student.backbone(prompt) + teacher.backbone(prompt))
    assert whole["head"] == shared["head"]


def test_a_step_is_the_same_in_any_order(tmp_path, monkeypatch):
    def run(name: str):
        args = distilling.arguments(
            tmp_path / name, gradient_accumulation_steps=4, per_device_train_batch_size=2, max_steps=2
        )
        return distilling.trained(
            RockDistillationTrainer, tmp_path, args=args, rollouts_per_prompt=2, generation="ours"
        )

    orders = []
    monkeypatch.setattr(
        trainer_module,
        "by_length",
        lambda output: orders.append(by_length(output)["row"].tolist()) or by_length(output),
    )
    ordered = run("ordered")
    assert any(order != sorted(order) for order in orders)
    monkeypatch.setattr(trainer_module, "by_length", lambda output: output)
    plain = run("plain")
    assert distilling.furthest(distilling.parameters(ordered), distilling.parameters(plain)) < 1e-5
    assert [row["loss"] for row in ordered.record.rows] == pytest.approx([row["loss"] for row in plain.record.rows])
