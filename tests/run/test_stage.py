"""A run that cannot go stale: settings and digests of everything read decide whether a stage is complete."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import DETECT, DISTILL, ROLLOUTS, distilled_run, joined, save_pair, scored_run

from rocktokens.detect.stage import detect, detect_table
from rocktokens.errors import ConfigError, DataError, RunError
from rocktokens.geometry.stage import geometry
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.report.stage import report
from rocktokens.run import LOCK, Run, open_run, write_text
from rocktokens.sample import stage as sampling
from rocktokens.sample.stage import sample
from rocktokens.score.settings import ScoreConfig
from rocktokens.score.stage import score
from rocktokens.stage import Stage, inputs_of
from rocktokens.train.stage import distill

DEFAULTS = (PairConfig(), PromptsConfig())


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def scored(pair, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "scored"
    scored_run(path, *pair)
    return path


@pytest.fixture(scope="module")
def distilled(pair, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "distilled"
    distilled_run(path, *pair)
    return path


@pytest.fixture
def run(scored, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(scored, tmp_path / "run"))


# ---------------------------------------------------------------- the rule


def test_a_stage_is_complete_with_the_same_settings_and_inputs_only(tmp_path, caplog):
    run = Run.create(tmp_path / "run")
    (run.path / "in.txt").write_text("one")

    def stage(value: int = 1, **guards) -> Stage:
        return Stage(
            open_run(run.path), "work", {"work": {"value": value}}, inputs_of(run, files=("in.txt",)), **guards
        )

    first = stage()
    assert first.due()
    first.finish({"found": 1})
    with caplog.at_level(logging.INFO):
        assert not stage().due()
    assert "nothing to do" in caplog.text
    assert stage().due(again=True)
    assert stage(2).changed_settings() == ["work.value was 1, now 2"]
    assert stage(2).due()
    with pytest.raises(RunError, match=r"work\.value was 1, now 2.*--again"):
        stage(2, guards=("settings",)).due()
    (run.path / "in.txt").write_text("two")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert stage(guards=("settings",)).due()
    assert "in.txt has changed" in caplog.text
    with pytest.raises(RunError, match=r"in\.txt.*--again"):
        stage(guards=("inputs",)).due()
    (run.path / "in.txt").unlink()
    assert stage().changed_inputs() == ["in.txt"]


def test_a_model_that_is_not_on_this_disk_counts_as_unchanged(tmp_path, pair):
    run = Run.create(tmp_path / "run")
    first = Stage(run, "work", {}, inputs_of(run, models={"student": pair[0].student}))
    first.finish()
    moved = Stage(run, "work", {}, inputs_of(run, models={"student": "/gone"}))
    assert moved.is_complete()


def test_cheap_stages_run_again_and_say_why(run, caplog):
    with caplog.at_level(logging.INFO):
        detect(run, replace(DETECT, seed=5))
    assert "detect runs again: detect.seed was 0, now 5" in caplog.text
    geometry(run)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        detect(run, replace(DETECT, k=2))
        geometry(run)
        report(run)
        report(run)
    assert "geometry runs again: stage detect has changed" in caplog.text
    assert caplog.text.count("nothing to do") == 1


def test_a_checkpoint_can_be_added_and_fewer_must_be_asked_for(distilled, tmp_path):
    path = Path(shutil.copytree(distilled, tmp_path / "run"))
    sample(path, *DEFAULTS, ROLLOUTS, limit=6)
    assert score(path, ScoreConfig(checkpoints="0")).steps() == [0]
    assert score(path, ScoreConfig()).steps() == [0, 2]
    with pytest.raises(RunError, match="--again"):
        score(path, ScoreConfig(checkpoints="2"))
    for wrong in ("7", "0,7", "first"):
        with pytest.raises(ConfigError, match="some of 0, 2"):
            score(path, ScoreConfig(checkpoints=wrong))
    assert score(path, ScoreConfig(checkpoints="2"), again=True).steps() == [2]
    run = score(path, ScoreConfig())
    assert run.facts("score")["steps"] == [0, 2]
    count, same = joined(run)
    assert count == same > 0


# ---------------------------------------------------------------- which pair


def test_no_stage_falls_back_to_the_built_in_pair_inside_a_run(tmp_path):
    run = Run.create(tmp_path / "mine")
    with pytest.raises(RunError, match=r"names no pair.*--pair\.student"):
        sample(run.path, *DEFAULTS, ROLLOUTS)
    with pytest.raises(RunError, match="names no pair"):
        distill(run.path, *DEFAULTS, DISTILL)
    assert open_run(run.path).manifest["config"] == {}


# ---------------------------------------------------------------- nothing is lost


def test_distill_again_replaces_the_training_and_what_rested_on_it(distilled, tmp_path):
    path = Path(shutil.copytree(distilled, tmp_path / "run"))
    sample(path, *DEFAULTS, ROLLOUTS, limit=4)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"distill\.steps was 2, now 4.*--again"):
        distill(path, *DEFAULTS, replace(DISTILL, steps=4), problems=4)
    with pytest.raises(RunError, match=r"evaluation\.problems was 4, now 5"):
        distill(path, *DEFAULTS, DISTILL, problems=5)
    run = distill(path, *DEFAULTS, replace(DISTILL, steps=4), problems=4, again=True)
    assert run.checkpoints() == [0, 4]
    assert set(run.manifest["stages"]) == {"distill"}
    assert not run.has("rollouts")
    assert (path / "notes.txt").read_text() == "mine"
    assert not [item.name for item in path.iterdir() if item.name.startswith(".") and item.name != LOCK]


@pytest.mark.parametrize("death", [1, 4, 8])
def test_a_replacement_that_is_killed_is_completed(distilled, tmp_path, monkeypatch, death):
    """Killed at each rename while the new training takes the old one's place."""
    path = Path(shutil.copytree(distilled, tmp_path / "run"))
    moves = 0
    original = Path.replace

    def killed(self, target):
        nonlocal moves
        if self.parent in (path, path / ".again") and self.suffix != ".tmp":
            moves += 1
            if moves == death:
                raise KeyboardInterrupt
        return original(self, target)

    config = replace(DISTILL, seed=1)
    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        distill(path, *DEFAULTS, config, problems=4, again=True)
    monkeypatch.undo()
    run = distill(path, *DEFAULTS, config, problems=4)
    assert run.manifest["config"]["distill"]["seed"] == 1
    assert run.checkpoints() == [0, 2]
    assert {"training", "monitor"} <= {item.stem for item in path.glob("*.parquet")}
    assert len(run.query("select distinct step from telemetry")) == 2
    assert not [item.name for item in path.iterdir() if item.name.startswith(".") and item.name != LOCK]


def test_parts_of_two_students_are_never_mixed(pair, tmp_path, monkeypatch):
    original = sampling.sample_part

    def stopping(part, **arguments):
        if part.stem == "00003":
            raise KeyboardInterrupt
        original(part, **arguments)

    monkeypatch.setattr(sampling, "PART_PROMPTS", 5)
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "sample_part", stopping)
        with pytest.raises(KeyboardInterrupt):
            sample(tmp_path / "stopped", *pair, ROLLOUTS)
    assert len(list((tmp_path / "stopped").glob("sample.parts/*/*.parquet"))) == 3
    mixed = sample(tmp_path / "stopped", *pair, ROLLOUTS, checkpoint="teacher").read("rollouts")
    alone = sample(tmp_path / "alone", *pair, ROLLOUTS, checkpoint="teacher").read("rollouts")
    assert mixed.equals(alone)


def test_a_table_of_ones_own_never_overwrites_a_study(run):
    with pytest.raises(RunError, match="--out"):
        detect_table(next((run / "occurrences").rglob("*.parquet")), run, DETECT)
    assert not open_run(run).damaged_files("detect")


def test_a_run_deleted_while_a_stage_works_is_not_recorded_as_complete(run):
    opened = open_run(run)
    shutil.rmtree(run)
    with pytest.raises(RunError, match="moved, deleted"):
        opened.finish("distill", {})
    assert not run.exists()


def test_flipped_bytes_are_noticed(run):
    part = next((run / "occurrences").rglob("*.parquet"))
    for path, stage in ((run / "rollouts.parquet", "sample"), (part, "score")):
        content = path.read_bytes()
        for place in range(8, len(content) - 8, len(content) // 12):
            path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
            with pytest.raises(DataError, match=rf"{path.name} is damaged.*rocktokens {stage}"):
                open_run(run).query(f"select * from {'rollouts' if stage == 'sample' else 'occurrences'}")
    with pytest.raises(DataError, match="is damaged"):
        open_run(run).read("rollouts")


# ---------------------------------------------------------------- several processes


HOLD = """
import sys, time
from pathlib import Path
from rocktokens.run import working_on
with working_on(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(run):
    """Another process that works on the run."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_second_process_is_told_who_works_on_the_run_and_takes_over_from_one_that_was_killed(run, holder, caplog):
    with pytest.raises(RunError, match=f"in use: process {holder.pid}"):
        detect(run, DETECT)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with caplog.at_level(logging.INFO):
        detect(run, replace(DETECT, seed=3))
    assert "was stopped" in caplog.text
    assert (run / LOCK).read_text() == ""


def test_a_lock_that_is_a_link_is_refused(run, tmp_path):
    (tmp_path / "precious").write_text("mine")
    (run / LOCK).unlink(missing_ok=True)
    (run / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(RunError, match="symbolic link"):
        detect(run, DETECT)
    assert (tmp_path / "precious").read_text() == "mine"


def test_only_drafts_of_ended_processes_are_removed(tmp_path):
    other, dead = (tmp_path / f".run.json.{number}-abc.tmp" for number in (os.getppid(), 999999999))
    other.write_text("")
    dead.write_text("")
    write_text(tmp_path / "run.json", "{}")
    assert other.exists()
    assert not dead.exists()
