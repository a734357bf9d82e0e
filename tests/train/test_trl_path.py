"""The path most people take: their TRL script with our class, then `rocktokens study RUN`."""

from __future__ import annotations

from pathlib import Path

import distilling
import pytest
from datasets import Dataset
from distilling import made
from forking import ending
from story import SETTINGS, child
from test_story import TRUTH, WORLD

from rocktokens import Run, open_run
from rocktokens.cli import parse
from rocktokens.errors import RunError
from rocktokens.sample.stage import sample
from rocktokens.study import load_settings
from rocktokens.train.stage import distill

SCRIPT = """
from trl import DistillationConfig
from rocktokens import RockDistillationTrainer

trainer = RockDistillationTrainer(
    model=STUDENT,
    teacher_model=TEACHER,
    args=DistillationConfig(
        OUT, max_steps=STEPS, per_device_train_batch_size=16, learning_rate=3e-4, max_completion_length=80, bf16=False,
        use_cpu=True, gradient_checkpointing=False, report_to="none", disable_tqdm=True, save_strategy="no",
    ),
    train_dataset=DATA,
    run=RUN,
)
trainer.train()
"""


def saved(path: Path) -> tuple[str, str]:
    for name in ("student", "teacher"):
        getattr(distilling, name)().save_pretrained(path / name)
        distilling.tokenizer().save_pretrained(path / name)
    return str(path / "student"), str(path / "teacher")


def with_answers(answer: str = "7") -> Dataset:
    return Dataset.from_list([{"prompt": own.text, "solution": answer} for own in distilling.prompts()])


def studied(tmp_path: Path, steps: int) -> tuple[Run, str]:
    """A script as a user writes it, and the study of what it leaves."""
    run = tmp_path / "R"
    names = {"STUDENT": str(WORLD.student_path), "TEACHER": str(WORLD.teacher_path), "OUT": str(tmp_path / "out")}
    rows = [{"prompt": own.prompt, "answer": own.answer} for own in WORLD.problems("train", 600, 0)]
    exec(SCRIPT, {**names, "DATA": Dataset.from_list(rows), "RUN": str(run), "STEPS": steps})
    at = SETTINGS.index("--distill.steps")  # the training is the script's
    words = [*SETTINGS[:at], *SETTINGS[SETTINGS.index("--graft.problems") :]]
    log = tmp_path / "study.log"
    status = ending(child(["--workers", "1", "study", str(run), *words], log))
    said = log.with_name(f"{log.name}.err").read_text()
    assert status == 0, said
    assert "distill is complete; nothing to do" in said
    return open_run(run), log.read_text()


def assert_same_verdict(found: Run, wanted: Run) -> None:
    """Planted rocks are declared or not alike, and the intervals of the rocks' share of the loss overlap."""
    assert set(wanted.manifest["stages"]) - {"score/step=3", "score/step=6"} <= set(found.manifest["stages"])
    for run in (found, wanted):
        types = {row["token_id"]: row for row in run.types().to_pylist()}
        assert all(types[token_id]["in_context"] for token_id in TRUTH.rocks.ids)
        census = {row["token_id"]: row["verdict"] for row in run.read("census").to_pylist()}
        assert {census[token_id] for token_id in TRUTH.rocks.ids} == {"Proven Neutral"}
    ours, theirs = (
        {row["name"]: row for row in run.read("footprints").to_pylist()}["context"] for run in (found, wanted)
    )
    assert ours["share_loss_low"] <= theirs["share_loss_high"]
    assert ours["share_loss_high"] >= theirs["share_loss_low"]


def test_a_script_of_a_few_steps_is_studied_to_the_verdict(story, tmp_path):
    found, _ = studied(tmp_path, 6)
    assert found.checkpoints() == [0, 6]
    assert_same_verdict(found, story.run)


@pytest.mark.slow
def test_thirty_steps_give_the_verdict_of_the_commands_own_study(tmp_path):
    found, _ = studied(tmp_path, 30)
    words = [*SETTINGS, "--distill.steps", "30", "--distill.save-every", "30", "--distill.evaluate-every", "30"]
    own = tmp_path / "own"
    assert (
        ending(child(["--workers", "1", "study", "arithmetic", "--path", str(own), *words], tmp_path / "own.log")) == 0
    )
    assert_same_verdict(found, open_run(own))


def test_a_failed_first_attempt_does_not_poison_the_run(tmp_path):
    run, models = tmp_path / "run", saved(tmp_path)
    wrong = with_answers().rename_column("prompt", "question")
    with pytest.raises(KeyError):
        made(tmp_path / "out", models=models, data=wrong, run=str(run)).train()
    (run / "telemetry" / "step=9").mkdir(parents=True)
    made(tmp_path / "out", models=models, data=with_answers(), run=run).train()
    assert load_settings(run).prompts.source == str(run / "prompts.jsonl")
    assert sorted(path.name for path in (run / "telemetry").iterdir()) == ["step=1", "step=2", "step=3"]
    assert open_run(run).checkpoints() == [0, 3]
    asked = parse(["sample", str(run)])
    assert (asked.pair.student, asked.rollouts.max_new_tokens, asked.prompts.checker) == (models[0], 12, "auto")
    with pytest.raises(RunError, match="complete training of 3 steps"):
        made(tmp_path / "out", models=models, data=with_answers(), run=run).train()


def test_names_texts_and_runs_are_taken_as_arguments(tmp_path):
    trainer = made(tmp_path, run=str(tmp_path / "run"), selector="freeze", rocks=["w5", "w7"])
    assert (trainer.selector.name, trainer.selector.token_ids, trainer.rocks) == ("freeze", (5, 7), {5, 7})
    assert isinstance(trainer.run, Run)
    declared = Run.create(tmp_path / "declared")
    declared.finish("detect", {"rocks": [9, 11]})
    for given in (declared, str(declared.path)):
        assert made(tmp_path, selector="soft", rocks=given).selector.token_ids == (9, 11)
    assert made(tmp_path, rocks=declared).rocks == {9, 11}
    assert made(tmp_path, selector="entropy").selector.name == "entropy"


def test_telemetry_thins_out_and_checkpoints_can_be_left_out(tmp_path):
    run = tmp_path / "run"
    trainer = made(tmp_path / "out", models=saved(tmp_path), data=with_answers("yes"), run=run, keep_at=())
    recorded = [step for step in range(1, 401) if trainer.records_at(step)]
    assert recorded == [*range(1, 101), *range(102, 201, 2), *range(204, 401, 4)]
    settings = load_settings(run)
    with pytest.raises(RunError, match="has not ended"):
        distill(run, settings.pair, settings.prompts, settings.distill)
    trainer.train()
    assert load_settings(run).prompts.checker == "none"  # accuracy of 0 would call every token neutral
    asked = parse(["sample", str(run), "--prompts.checker", "exact"])
    with pytest.raises(RunError, match="keep_at"):
        sample(run, asked.pair, asked.prompts, asked.rollouts)
    assert load_settings(run).prompts.checker == "exact"
