"""What training writes down: seconds and FLOPs, the slope test against an oracle, and alarms that fire on a fault."""

from __future__ import annotations

import time

import distilling
import numpy as np
import online_runs
import pytest
import torch
from scipy import stats as sps

from rocktokens import TokenMonitor
from rocktokens.train.record import (
    TrainingRecord,
    alarms,
    change,
    numerical_floor,
    saturation,
)
from rocktokens.train.step import Meter, ModelShape, step_flops

# ---------------------------------------------------------------- meter


def test_stages_nest_and_only_the_innermost_runs():
    meter = Meter()
    with meter.stage("student"):
        with meter.stage("head"):
            pass
        meter.add("teacher", 5.0)  # claimed inside, so it is not the student's
    taken = meter.take()
    assert taken["seconds_teacher"] == 5.0
    assert taken["seconds_student"] < 0
    with meter.stage("student"), meter.whole("select"), meter.stage("teacher"):
        time.sleep(0.02)
    taken = meter.take()
    assert taken["seconds_select"] >= 0.02
    assert taken["seconds_teacher"] == 0
    assert 0 <= taken["seconds_student"] < 0.02


def test_flops_follow_from_shapes_and_shared_prompts_cost_nothing():
    student, teacher = ModelShape.of(distilling.student()), ModelShape.of(distilling.teacher())
    # Two layers, each: q and o 32 x 32, k and v 32 x 16, three of 32 x 64, two norms; and a last norm.
    assert student.backbone_parameters == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32
    assert (student.attention_width, student.head_elements) == (2 * 4 * 8, 64 * 32)
    assert student.backbone(np.array([3.0])) == 2 * student.backbone_parameters * 3 + 4 * 64 * 6
    prompts, rollouts = np.array([5.0, 5.0, 7.0]), np.array([4.0, 6.0, 3.0])

    def flops(measured_first: bool, **shared) -> dict[str, float]:
        return step_flops(student, teacher, prompts, rollouts, kept=9, measured_first=measured_first, **shared)

    prompt, whole = np.array([5.0]), flops(False)
    shared = flops(False, shared_S=prompt)
    assert whole["student"] == 3 * student.backbone(prompts + rollouts)
    assert whole["head"] == shared["head"] == 2 * 9 * (3 * 64 * 32 + 64 * 48)
    assert whole["select"] == flops(True)["teacher"] == 0
    assert whole["student"] - shared["student"] == pytest.approx(3 * student.backbone(prompt))
    assert whole["teacher"] - shared["teacher"] == pytest.approx(teacher.backbone(prompt))


# ---------------------------------------------------------------- saturation


def test_the_slope_is_carried_over_the_remaining_steps():
    """Without noise: a line that falls by 0.1 % of its level a step brings that for every step that remains."""
    loss = 1.0 - 0.0001 * np.arange(300)
    found = saturation(loss, remaining=1000)
    level = loss[200:].mean()
    assert (found.num_steps, found.horizon) == (100, 1000)
    assert found.fall == pytest.approx(0.01 / level)
    assert found.still_high == pytest.approx(0.1 / level)
    assert not found.saturated
    assert saturation(loss, remaining=900).saturated  # 0.09 of 0.975
    assert saturation(loss).horizon == 100  # at the end of a run: over as many steps as the window has
    assert saturation(loss).saturated


def test_the_line_is_that_of_an_oracle(rng):
    loss = 1.0 - 0.001 * np.arange(240) + rng.normal(0, 0.05, 240)
    found = saturation(loss, share=1.0)
    blocks = loss.reshape(12, 20).mean(1)
    oracle = sps.linregress(np.arange(240).reshape(12, 20).mean(1), blocks)
    assert found.fall == pytest.approx(-oracle.slope * 240 / loss.mean())
    half = sps.t.ppf(0.975, 10) * oracle.stderr * 240 / loss.mean()
    assert (found.low, found.high) == (pytest.approx(found.fall - half), pytest.approx(found.fall + half))


@pytest.mark.parametrize(
    ("kind", "noise"), [("slow decay", 0.08), ("power law", 0.08), ("linear", 0.08), ("flat", 0.02)]
)
def test_training_is_stopped_when_there_is_no_more_to_gain_and_not_before(kind, noise):
    """A small version of benchmarks/online.py."""
    ends = [online_runs.simulate_saturation(kind, seed, noise=noise, warmup=50, steps=1000) for seed in range(3)]
    assert not any(wrong for _, wrong in ends)
    assert kind != "flat" or max(step for step, _ in ends) < 1000


def test_a_flat_loss_is_believed_and_its_interval_covers(rng):
    found = [saturation(1 + rng.normal(0, 0.05, 300)) for _ in range(300)]
    assert 0.92 <= np.mean([f.low <= 0 <= f.high for f in found]) <= 0.98
    assert not saturation(1 + rng.normal(0, 2, 90)).saturated  # too noisy to say
    assert saturation(np.ones(60)) is None  # 20 steps are too few
    assert saturation(np.full(300, np.nan)) is None
    assert saturation(np.where(np.arange(300) % 7, 1.0, np.nan)).saturated  # what is not a number is left out


# ---------------------------------------------------------------- health and alarms


def test_change_compares_the_ends_and_waits_for_both():
    assert change(range(19), 10) is None
    found = change([1.0] * 10 + [5.0] * 30 + [3.0] * 10, 10)
    assert (found, found.ratio) == ((1.0, 3.0), 3.0)
    assert change([np.nan, 2.0, 2.0, np.nan], 1) == (2.0, 2.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_floor_is_what_rounding_logits_makes(dtype):
    torch.manual_seed(0)
    logits = torch.randn(2000, 500, dtype=torch.float64) * 3
    logits += 10 - logits.amax(-1, keepdim=True)  # the tokens that carry the mass have logits of size 10
    p, q = logits.log_softmax(-1), logits.to(getattr(torch, dtype)).double().log_softmax(-1)
    made = float((p.exp() * (p - q)).sum(-1).mean())
    assert 0.05 < made / numerical_floor(dtype) < 1.0
    assert numerical_floor("float32") == 1e-7


def looked(dtype="float32", **series):
    """Alarms after 60 steps; what is not given is healthy."""
    healthy = {"mean_length": 100.0, "truncated_share": 0.02, "entropy": 0.5, "loss": 0.2, "kept_share": 1.0}
    record, raised = TrainingRecord(), {}
    for step in range(60):
        row = {name: value[step] if np.ndim(value) else value for name, value in {**healthy, **series}.items()}
        record.rows.append({"step": step + 1, "tokens": 1000, "invalid": 0, **row})
        raised |= alarms(record, dtype)
    return raised


FAULTS = {
    "length": {"mean_length": np.linspace(100, 400, 60), "truncated_share": np.linspace(0, 0.9, 60)},
    "entropy": {"entropy": np.geomspace(0.5, 1e-3, 60)},
    "floor": {"loss": np.geomspace(0.1, 1e-9, 60)},
    "invalid": {"invalid": [0] * 50 + [5] * 10},
}


HEALTHY = [
    {"mean_length": np.linspace(100, 180, 60), "entropy": np.geomspace(0.5, 0.06, 60)},
    {"mean_length": np.linspace(100, 400, 60)},  # longer rollouts, but none is cut
    {"loss": 0.0, "kept_share": 0.0},  # steps without loss tokens
    {"loss": 1e-4},
]


def test_each_fault_raises_its_alarm_and_no_other_and_a_healthy_course_raises_none():
    assert {name: list(looked(**series)) for name, series in FAULTS.items()} == {name: [name] for name in FAULTS}
    assert [looked(**series) for series in HEALTHY] == [{}] * 4
    assert list(looked("bfloat16", loss=1e-4)) == ["floor"]  # the floor follows the precision of the forward


def test_a_diverging_model_alarms(tmp_path, caplog):
    teacher = distilling.teacher()
    with torch.no_grad():
        teacher.get_output_embeddings().weight[5] = torch.inf
    args = distilling.arguments(tmp_path, max_steps=1)
    trainer = distilling.trained(tmp_path, models=(distilling.student(), teacher), args=args)
    assert "alarm at step 1, invalid: " in caplog.text
    assert trainer.record.rows[0]["alarm_invalid"] == 1
    assert trainer.state.log_history[0]["alarm/invalid"] == 1


def test_rocks_found_online_and_what_trl_logs_are_recorded(tmp_path, caplog):
    class Sure(TokenMonitor):
        def rocks(self, *args, **settings):
            return [7, 9]

        def gathered(self):
            return self

    caplog.set_level("INFO", "rocktokens")
    trainer = distilling.trained(tmp_path, monitor=Sure(64))
    assert "2 rocks so far: 'w7', 'w9'" in caplog.text
    assert caplog.text.count("rocks so far") == 1
    assert trainer.state.log_history[0]["rocks/online"] == 2
    row, logged = trainer.record.rows[0], trainer.state.log_history[0]
    assert row["rocks_online"] == 2
    assert row["entropy"] == pytest.approx(logged["entropy"], rel=1e-3)  # TRL takes the mean over micro-batches
    assert row["mean_length"] == pytest.approx(logged["completions/mean_length"])
    assert row["truncated_share"] == pytest.approx(logged["completions/clipped_ratio"])
