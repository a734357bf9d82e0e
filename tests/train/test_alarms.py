"""Alarms while training: each fires on a run that has the fault, and is silent on one that has not."""

from __future__ import annotations

import distilling
import numpy as np
import pytest
import torch

from rocktokens import RockDistillationTrainer, make_selector
from rocktokens.errors import ConfigError
from rocktokens.train.record import Alarms, TrainingRecord
from rocktokens.train.settings import AlarmConfig


def looked(dtype="float32", config=None, steps=60, **series):
    """Alarms after a course of so many steps; what is not given is healthy."""
    healthy = {"mean_length": 100.0, "truncated_share": 0.02, "entropy": 0.5, "loss": 0.2, "kept_share": 1.0}
    record, alarms = TrainingRecord(), Alarms(config or AlarmConfig(), dtype)
    for step in range(steps):
        row = {name: value[step] if np.ndim(value) else value for name, value in {**healthy, **series}.items()}
        record.rows.append({"step": step + 1, "tokens": 1000, "invalid": 0, **row})
        record.rows[-1] |= alarms.look(record, step + 1)
    return alarms, record


def test_a_healthy_course_raises_nothing(caplog):
    alarms, _ = looked(mean_length=np.linspace(100, 180, 60), entropy=np.geomspace(0.5, 0.06, 60))
    assert not alarms.raised
    assert not caplog.text


@pytest.mark.parametrize(
    ("name", "series", "says"),
    [
        (
            "length",
            {"mean_length": np.linspace(100, 400, 60), "truncated_share": np.linspace(0, 0.9, 60)},
            "cut at the length limit",
        ),
        ("entropy", {"entropy": np.geomspace(0.5, 1e-3, 60)}, "hardly explores"),
        ("floor", {"loss": np.geomspace(0.1, 1e-9, 60)}, "rounding in float32"),
        ("invalid", {"invalid": [0] * 50 + [5] * 10}, "not a number"),
    ],
)
def test_each_fault_raises_its_alarm_once(caplog, name, series, says):
    alarms, record = looked(**series)
    assert list(alarms.raised) == [name]
    assert caplog.text.count(f", {name}: ") == 1
    assert says in caplog.text
    assert record.rows[-1][f"alarm_{name}"] == 1
    assert f"alarm_{name}" not in record.rows[0]


def test_the_floor_follows_the_precision_of_the_forward():
    assert not looked(loss=1e-4)[0].raised
    assert list(looked("bfloat16", loss=1e-4)[0].raised) == ["floor"]


def test_longer_rollouts_alone_and_steps_without_tokens_are_no_alarm():
    assert not looked(mean_length=np.linspace(100, 400, 60))[0].raised
    assert not looked(loss=0.0, kept_share=0.0)[0].raised
    assert not looked(config=None, steps=1)[0].raised


# In the trainer


def test_a_diverging_model_alarms_and_stops_where_asked(tmp_path, caplog):
    teacher = distilling.teacher()
    with torch.no_grad():
        teacher.get_output_embeddings().weight[5] = torch.inf

    def run(max_steps, **settings):
        args = distilling.arguments(tmp_path, max_steps=max_steps)
        models = (distilling.student(), teacher)
        return distilling.trained(RockDistillationTrainer, tmp_path, models=models, args=args, **settings)

    warned = run(1)
    assert "alarm at step 1, invalid" in caplog.text
    assert warned.state.log_history[0]["alarm/invalid"] == 1
    assert run(3, alarms=AlarmConfig(stop=True)).state.global_step == 1
    assert not run(1, alarms=None).alarms.raised


def test_lengths_entropy_and_cut_rollouts_are_recorded(tmp_path):
    trainer = distilling.trained(RockDistillationTrainer, tmp_path, selector=make_selector("freeze", rocks=[5]))
    row, logged = trainer.record.rows[0], trainer.state.log_history[0]
    assert row["mean_length"] == pytest.approx(logged["completions/mean_length"])
    assert row["truncated_share"] == pytest.approx(logged["completions/clipped_ratio"])
    assert row["entropy"] == pytest.approx(logged["entropy"], rel=1e-4)


def test_rocks_found_online_are_logged(tmp_path, caplog):
    from rocktokens.divergence.monitor import TokenMonitor

    class Sure(TokenMonitor):
        def rocks(self, *args, **settings):
            return [7, 9]

        def gathered(self):
            return self

    caplog.set_level("INFO", "rocktokens")
    trainer = distilling.trained(RockDistillationTrainer, tmp_path, monitor=Sure(64))
    assert "2 rocks so far: 'w7', 'w9'" in caplog.text
    assert caplog.text.count("rocks so far") == 1
    assert trainer.state.log_history[0]["rocks/online"] == 2
    assert trainer.record.rows[0]["rocks_online"] == 2


def test_limits_that_cannot_work_are_refused():
    for settings in ({"window": 0}, {"length_growth": 1.0}, {"truncated": 0.0}, {"entropy": 0.0}):
        with pytest.raises(ConfigError):
            AlarmConfig(**settings)
