"""A training that is continued: the same optimiser, old and new checkpoints, later stages due, exact after a kill."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from forking import ending
from story import child

from rocktokens import open_run
from rocktokens.stage import stale_stages


def die(name: str) -> None:
    """Arrange for this process to be killed before a file of that name is put in place."""
    replace = Path.replace

    def counted(self: Path, target: Path) -> Path:
        if Path(target).name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    Path.replace = counted  # type: ignore[method-assign]


def said(log) -> str:
    return log.with_name(f"{log.name}.err").read_text()


def test_more_steps_continue_and_a_killed_continuation_ends_the_same(story, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for path in (whole, killed):
        shutil.copytree(story.run.path, path)
    first = story.run.read("training").to_pylist()
    assert ending(child(["distill", str(whole), "--more", "4"], tmp_path / "whole.log")) == 0, said(
        tmp_path / "whole.log"
    )
    words = ["distill", str(killed), "--more", "4"]
    assert ending(child(words, tmp_path / "killed.log", lambda: die("training.parquet"))) == -9
    assert not open_run(killed).done("distill")
    assert ending(child([*words[:-1], "5"], tmp_path / "other.log")) == 1  # the continuation that was begun has 4
    assert ending(child(words, tmp_path / "last.log")) == 0, said(tmp_path / "last.log")
    for path in [*whole.glob("checkpoints/step=*/*.safetensors"), *whole.glob("telemetry/step=*/*.parquet")]:
        assert path.read_bytes() == (killed / path.relative_to(whole)).read_bytes(), path
    timed = [name for name in open_run(whole).read("training").column_names if "second" in name]
    assert open_run(whole).read("training").drop(timed).equals(open_run(killed).read("training").drop(timed))

    run = open_run(whole)
    assert (run.facts("distill")["steps"], run.facts("distill")["steps_before"]) == (10, [6])
    assert run.checkpoints() == [0, 3, 6, 10]
    rows = run.read("training").to_pylist()
    assert [row["step"] for row in rows] == list(range(11))
    assert [row["loss"] for row in rows[:7]] == [row["loss"] for row in first]
    # A line from the peak after one step of warm-up to 0 at step 10: what is left of it at step 7.
    assert rows[7]["learning_rate"] == pytest.approx(3e-4 * 4 / 9)
    assert "from step 6 to 10" in said(tmp_path / "whole.log")
    assert "compare" in stale_stages(run)
    assert ending(child(["distill", str(whole)], tmp_path / "again.log")) == 0
    assert "nothing to do" in said(tmp_path / "again.log")
    assert ending(child(["sample", str(whole)], tmp_path / "sample.log")) == 0
    assert "sample runs again: model last has changed" in said(tmp_path / "sample.log")
