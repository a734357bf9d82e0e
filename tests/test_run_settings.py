"""A run's recorded settings are the defaults of every command on it, and a flag changes one."""

from __future__ import annotations

import pytest
from forking import ending
from story import child

from rocktokens import Run
from rocktokens.cli import parse
from rocktokens.study import STAGES, load_settings


def test_every_stage_of_a_finished_study_has_nothing_to_do(story, tmp_path):
    """Its flags were those of the study; the commands are called without any."""

    def state() -> dict[str, int]:
        files = [path for path in story.run.path.rglob("*") if path.is_file() and path.name != ".lock"]
        return {str(path): path.stat().st_mtime_ns for path in files}

    before = state()
    for name in STAGES:
        log = tmp_path / f"{name}.log"
        assert ending(child([name, str(story.run.path)], log)) == 0, log.with_name(f"{log.name}.err").read_text()
    assert state() == before


@pytest.mark.parametrize("by", ["study", "config"])
def test_flags_stand_above_the_file_and_the_file_above_the_run(tmp_path, by):
    run = Run.create(tmp_path / "run", {"sample": {"limit": 30}, "evaluation": {"problems": 9}})
    run.manifest.setdefault(by, {}).update({"knockout": {"top": 7, "rounds": 2}, "baseline": {"problems": 80}})
    run.save()
    (tmp_path / "mine.yaml").write_text("knockout: {rounds: 3}")
    asked = parse(["knockout", str(run.path), "--baseline.problems", "90"], str(tmp_path / "mine.yaml"))
    assert (asked.knockout.top, asked.knockout.rounds, asked.baseline.problems) == (7, 3, 90)
    assert parse(["sample", str(run.path)]).detection_prompts == 30
    assert parse(["study", str(run.path)]).problems == 9
    assert parse(["knockout", str(tmp_path / "new")]).knockout.top != 7


def test_a_stage_that_ran_with_other_settings_is_not_undone_by_the_study(story, tmp_path):
    import shutil

    path = tmp_path / "run"
    shutil.copytree(story.run.path, path)
    assert ending(child(["bypass", str(path), "--epsilon", "0.2"], tmp_path / "bypass.log")) == 0
    assert load_settings(path).bypass.epsilon == 0.2
