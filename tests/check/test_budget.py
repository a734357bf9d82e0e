"""Budgets: sizes of a real pair from its shapes, hours that scale as they must, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import tiny
from transformers import Qwen3Config, Qwen3MoeConfig

from rocktokens.check.budget import MACHINES, MachineSpec, _active, budget_of, in_flight, machine_of
from rocktokens.check.plan_settings import BudgetConfig, Machine
from rocktokens.errors import ConfigError
from rocktokens.models.requirements import model_size
from rocktokens.models.settings import PairConfig
from rocktokens.sample.settings import RolloutConfig

ROLLOUTS = RolloutConfig(num_rollouts=4, max_new_tokens=4096)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> PairConfig:
    """Shapes of Qwen3-4B and Qwen3-30B-A3B, as their configurations on the hub have them; no weights."""
    folder: Path = tmp_path_factory.mktemp("qwen3")
    shared = {"vocab_size": 151936, "head_dim": 128, "num_attention_heads": 32, "max_position_embeddings": 40960}
    Qwen3Config(
        **shared,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ).save_pretrained(folder / "student")
    Qwen3MoeConfig(
        **shared,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    ).save_pretrained(folder / "teacher")
    return PairConfig(student=str(folder / "student"), teacher=str(folder / "teacher"))


def test_sizes_of_a_mixture_and_its_active_share(qwen3):
    teacher, student = model_size(qwen3.teacher, qwen3), model_size(qwen3.student, qwen3)
    assert teacher.parameters == pytest.approx(30.5e9, rel=0.01)  # as its card says
    assert _active(qwen3.teacher, qwen3, teacher) == pytest.approx(3.3e9, rel=0.03)
    assert student.parameters == pytest.approx(4.02e9, rel=0.01)
    assert _active(qwen3.student, qwen3, student) == student.parameters


def test_the_paper_pairs_budget_is_of_the_order_planned(qwen3):
    asked = BudgetConfig(prompts=20_000, checkpoints=8, steps=300, step_rollouts=512, candidates=200)
    found = {stage.stage: stage for stage in budget_of(qwen3, ROLLOUTS, asked)}
    assert 3 < found["sample"].device_hours < 30
    assert 5 < found["score"].device_hours < 40
    assert 10 < found["distill"].device_hours < 60
    assert 10 < found["census"].device_hours < 150
    assert 50e9 < found["score"].disk < 120e9
    assert found["score"].memory > 60e9  # the teacher alone has 61 GB in 16 bits


def test_memory_is_for_the_rollouts_in_flight_that_the_time_is_for(qwen3):
    """Sampling never takes more than the devices have that it is reckoned for: 256 long rollouts would."""
    asked = BudgetConfig(prompts=1000)
    found = {stage.stage: stage for stage in budget_of(qwen3, ROLLOUTS, asked)}
    student, teacher = model_size(qwen3.student, qwen3), model_size(qwen3.teacher, qwen3)
    devices, flight = in_flight(student, MACHINES["h100"], ROLLOUTS.max_new_tokens)
    assert (devices, 50 < flight < 256) == (1, True)
    assert found["sample"].memory == pytest.approx(
        2 * student.parameters + flight * 2 * student.cache_per_token * ROLLOUTS.max_new_tokens
    )
    assert found["sample"].memory < MACHINES["h100"].memory
    assert found["census"].memory == found["sample"].memory
    held = 2 * teacher.parameters + 16 * student.parameters
    assert found["distill"].memory == pytest.approx(held + found["sample"].memory - 2 * student.parameters)


def test_hours_are_linear_in_the_work_and_fall_with_the_machine(qwen3):
    one = budget_of(qwen3, ROLLOUTS, BudgetConfig(prompts=1000))
    two = budget_of(qwen3, ROLLOUTS, BudgetConfig(prompts=2000))
    slow = budget_of(qwen3, ROLLOUTS, BudgetConfig(prompts=1000, machine="a100"))
    for index in (0, 1):
        assert two[index].device_hours == pytest.approx(2 * one[index].device_hours)
        assert two[index].disk == pytest.approx(2 * one[index].disk)
        assert slow[index].device_hours > one[index].device_hours


def test_every_machine_that_can_be_named_is_known():
    assert {*MACHINES, "cpu"} == set(get_args(Machine))
    assert MACHINES["b200"].flops > MACHINES["mi300x"].flops > MACHINES["h200"].flops


def test_own_figures_take_the_place_of_the_machines(qwen3, monkeypatch):
    figures = {"tflops": 500.0, "bandwidth": 2.5, "memory": 96.0}
    whole = BudgetConfig(prompts=1000, machine="cpu", **figures)
    monkeypatch.setattr("rocktokens.check.budget.multiply_rate", lambda: pytest.fail("nothing is left to measure"))
    assert machine_of(whole) == MachineSpec(500e12, 2.5e12, 96e9)
    assert whole.where == "this machine with your own tflops and bandwidth and memory"
    assert BudgetConfig(devices=2, machine="b200").where == "2 x b200"
    h100 = MACHINES["h100"]
    assert machine_of(BudgetConfig(memory=96.0)) == MachineSpec(h100.flops, h100.bandwidth, 96e9)
    half = BudgetConfig(prompts=1000, tflops=h100.flops / 2e12)
    slow, fast = (budget_of(qwen3, ROLLOUTS, asked)[1] for asked in (half, BudgetConfig(prompts=1000)))
    assert slow.device_hours == pytest.approx(2 * fast.device_hours)


def test_on_this_machine(tmp_path):
    pair = PairConfig(
        student=tiny.save_model(tmp_path / "s", tiny.tiny_model()),
        teacher=tiny.save_model(tmp_path / "t", tiny.tiny_model(width=64)),
    )
    found = budget_of(pair, RolloutConfig(max_new_tokens=32), BudgetConfig(machine="cpu", prompts=100))
    assert all(0 < stage.device_hours < 1 for stage in found)


@pytest.mark.parametrize(
    "settings", [{"prompts": 0}, {"resumed_share": 0.0}, {"utilisation": 1.5}, {"memory": 0.0}], ids=str
)
def test_what_is_refused(settings):
    with pytest.raises(ConfigError, match=r"budget\."):
        BudgetConfig(**settings)
