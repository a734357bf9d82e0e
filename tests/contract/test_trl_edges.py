"""Edges of the drop-in: places where our trainer once behaved differently from stock TRL, each as a test."""

from __future__ import annotations

import re
from pathlib import Path

import distilling
import pytest
import torch
from distilling import made
from tiny import save_model
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import TrainOutput
from trl import DistillationTrainer

from rocktokens import RockDistillationTrainer, make_selector
from rocktokens.errors import ConfigError
from rocktokens.models.settings import PairConfig
from rocktokens.settings import from_mapping


def saved(path: Path, model, tokenizer=None) -> str:
    return save_model(path, model, tokenizer or distilling.tokenizer())


# What train() returns


def test_a_resumed_finished_run_returns_a_train_output(tmp_path):
    args = distilling.arguments(tmp_path, save_strategy="steps", save_steps=3)
    first = made(tmp_path, args=args).train()
    again = made(tmp_path, args=args)
    found = again.train(resume_from_checkpoint=True)
    assert isinstance(found, TrainOutput)
    assert found.global_step == first.global_step == 3
    assert found.metrics.keys() >= {"train_runtime", "train_loss", "train_samples_per_second"}
    assert found.training_loss == pytest.approx(first.training_loss, rel=0.5)
    again.log_metrics("train", found.metrics)  # what stock scripts do next


# Vocabularies that differ by padding


@pytest.mark.parametrize(("wider", "by_name"), [("student", ("teacher",)), ("teacher", ("student", "teacher"))])
def test_padding_rows_fit_however_the_models_are_given(tmp_path, wider, by_name):
    models = {"student": distilling.student(), "teacher": distilling.teacher()}
    models[wider] = getattr(distilling, wider)(vocabulary=72)
    given = [saved(tmp_path / name, m) if name in by_name else m for name, m in models.items()]
    trainer = made(tmp_path, models=given, args=distilling.arguments(tmp_path, max_steps=1))
    assert trainer.vocabulary == 64
    trainer.train()
    assert 0 < trainer.record.rows[0]["loss"] < 20


@pytest.mark.parametrize("generation", ["trl", "ours"])
def test_ids_beyond_the_teachers_rows_are_never_sampled(tmp_path, generation):
    # A student that puts nearly all its mass on its own padding rows.
    student = distilling.student(vocabulary=96, tie_word_embeddings=False)
    with torch.no_grad():
        student.get_output_embeddings().weight[64:] *= 8
    args = distilling.arguments(tmp_path, max_steps=1)
    trainer = made(tmp_path, models=(student, distilling.teacher()), args=args, generation=generation)
    trainer.train()
    sampled = set(trainer.grid.batch.token_N.tolist())
    assert len(sampled) > 10
    assert max(sampled) < 64
    assert trainer.evaluate(distilling.dataset(8))["eval_loss"] > 0


@pytest.mark.parametrize("by_name", [True, False])
def test_a_teacher_of_another_tokenizer_is_refused_at_construction(tmp_path, by_name):
    other = distilling.tokenizer(range(63, 2, -1))
    teacher = saved(tmp_path / "teacher", distilling.teacher(vocabulary=72), other)
    given = teacher if by_name else AutoModelForCausalLM.from_pretrained(teacher)
    with pytest.raises(ConfigError, match=r"id 3 is 'w3' for the student.*'w63' for the teacher"):
        made(tmp_path, models=(distilling.student(), given))


def test_a_head_too_small_for_the_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"ids up to 63.*40 rows"):
        made(tmp_path, models=(distilling.student(), distilling.teacher(vocabulary=40)))


# A step without loss tokens


def test_a_selector_that_keeps_none_of_one_step_makes_it_a_step_of_loss_zero(tmp_path, caplog):
    class Odd(type(make_selector("uniform"))):
        def weights(self, batch):
            return torch.full((len(batch),), float(batch.step % 2))

    trainer = made(tmp_path, selector=Odd())
    trainer.train()
    assert [row["loss"] > 0 for row in trainer.record.rows] == [True, False, True]
    assert "keeps none of the" in caplog.text


# Arguments stay the user's


def test_arguments_are_the_users_own_object(tmp_path):
    args = distilling.arguments(tmp_path)
    trainer = made(tmp_path, args=args, selector=make_selector("prefix", keep=0.5))
    assert trainer.args is args
    assert args.max_completion_length == 12
    assert trainer.max_completion_length == trainer.generation_config.max_new_tokens == 6


def test_a_length_limit_of_none_stays_trls(tmp_path):
    args = distilling.arguments(tmp_path, max_completion_length=None, max_steps=1)
    losses = []
    for kind in (RockDistillationTrainer, DistillationTrainer):
        trainer = made(tmp_path, kind, args=args)
        assert trainer.max_completion_length is trainer.generation_config.max_new_tokens is None
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "needs"),
    [({"selector": make_selector("prefix", keep=0.5)}, "prefix"), ({"generation": "ours"}, "generation='ours'")],
)
def test_what_needs_a_length_limit_says_so(tmp_path, settings, needs):
    with pytest.raises(ConfigError, match=f"{needs}.*max_completion_length"):
        made(tmp_path, args=distilling.arguments(tmp_path, max_completion_length=None), **settings)


# The documented script


def test_the_documented_config_runs_on_any_machine(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "trainer.md").read_text()
    script = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    student = saved(tmp_path / "student", distilling.student())
    teacher = saved(tmp_path / "teacher", distilling.teacher(vocabulary=72))
    script = re.sub(r"model=\"Qwen/Qwen2.5-0.5B[^\"]*\"", f"model={student!r}", script)
    script = re.sub(r"teacher_model=\"Qwen/[^\"]*\"", f"teacher_model={teacher!r}", script)
    script = re.sub(r"load_dataset\([^\n]*\)", "DATA", script.replace("from datasets import load_dataset", ""))
    monkeypatch.chdir(tmp_path)
    limits = "max_steps=1, max_completion_length=6, per_device_train_batch_size=4"
    script, count = re.subn(r'Config\("out",', f'Config("out", {limits},', script)
    assert count == 1
    names: dict = {"DATA": distilling.dataset()}
    exec(script, names)
    assert names["trainer"].state.global_step == 1


# From a training to rocks


def test_a_trainers_run_is_detected_from_its_telemetry_and_can_be_sampled(tmp_path, caplog):
    from rocktokens import Run
    from rocktokens.detect.settings import DetectConfig
    from rocktokens.detect.stage import detect

    student, teacher = (saved(tmp_path / name, getattr(distilling, name)()) for name in ("student", "teacher"))
    args = distilling.arguments(tmp_path / "out", max_steps=4)
    run = Run.create(tmp_path / "run")
    trainer = made(tmp_path, models=(student, teacher), args=args, run=run, telemetry_every=1)
    trainer.train()
    found = detect(tmp_path / "run", DetectConfig(resamples=100))
    assert found.facts("detect")["num_occurrences"] > 50
    assert set(found.types()["token"].to_pylist()) & {f"w{i}" for i in range(3, 64)}
    assert "telemetry" in caplog.text
    assert from_mapping(PairConfig, found.manifest["config"]["pair"]) == PairConfig(student=student, teacher=teacher)
