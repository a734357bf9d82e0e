"""A toy stage that is killed at every rename: what run.json lists is whole, and a repeat completes the same run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow as pa
from forking import ending, fork

from rocktokens.jobs import Job
from rocktokens.jobs import run as run_jobs
from rocktokens.run import LOCK, Run, open_run, read_parquet, working_on, write_parquet
from rocktokens.stage import Stage, inputs_of


def make_part(part: Path, *, number: int, log: str) -> None:
    """A job: one row."""
    with open(log, "a") as file:
        file.write(f"{part.stem}\n")
    write_parquet(pa.table({"number": [number], "square": [number * number]}), part)


def toy_stage(path: Path, log: Path, factor: int) -> None:
    """Jobs, two tables made of their parts, occurrences that replace older ones, and the record."""
    with working_on(path):
        run = Run.create(path, {"toy": {"kind": "squares"}})
        stage = Stage(run, "toy", {"work": {"factor": factor}}, inputs_of(run))
        if not stage.due():
            return
        jobs = [Job(str(n), stage.parts / f"{n}.parquet", {"number": factor * n, "log": str(log)}) for n in range(4)]
        run_jobs(jobs, make_part, what="squaring")
        table = pa.concat_tables([read_parquet(job.part) for job in jobs])
        run.replace_occurrences(0, {"occurrences": [job.part for job in jobs]}, stage="toy")
        stage.publish({"squares": table, "roots": table.select(["number"])}, {"rows": len(table)})


def content(path: Path) -> dict[str, bytes]:
    files = [file for file in path.rglob("*") if file.is_file() and file.name != LOCK]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def killed_at(number: int, path: Path, log: Path, factor: int) -> int:
    """Run the stage in a process that is killed before its n-th rename; how it ended."""

    def work() -> None:
        left, original = [number], Path.replace

        def replace(self: Path, target: Path) -> Path:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, target)

        Path.replace = replace  # type: ignore[method-assign, assignment]
        toy_stage(path, log, factor)

    return ending(fork(work, log.with_suffix(".out")))


def test_a_stage_that_is_killed_at_any_rename_is_completed_by_a_repeat(tmp_path: Path) -> None:
    """Once from nothing, and once over an older result, which stays listed only as long as it is whole."""
    for factor in (1, 2):
        toy_stage(tmp_path / "whole", tmp_path / "whole.log", factor)
        for number in range(100):
            path, log = tmp_path / f"{factor}-{number}", tmp_path / f"{factor}-{number}.txt"
            if factor == 2:
                toy_stage(path, log, 1)
            log.write_text("")
            status = killed_at(number, path, log, factor)
            if (path / "run.json").exists() and (run := open_run(path)).done("toy"):
                assert len(run.read("squares")) == len(run.read("roots")) == 4
                assert not run.damaged_files("toy")
            toy_stage(path, log, factor)
            assert content(path) == content(tmp_path / "whole")
            done = log.read_text().split()
            assert sorted(done) == sorted(set(done)) or len(done) == 5  # the one whose rename never came is done again
            if status == 0:
                break
        assert number > 8
