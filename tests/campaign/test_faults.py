"""Killed or out of space at every file operation of a small study: the same command goes on to the same tables."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from attacks import PART, PARTS, SEED, SHARE, STAGES, Account, attempt, disagreement, pair_and_prompts, run_stage

from rocktokens.errors import RockTokensError
from rocktokens.runs.store import open_run

TABLES = ("rollouts", "types", "geometry", "knockouts", "census", "grafts")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def pair(home):
    return pair_and_prompts(home)


def counting(at: int | None, act: Callable[[], None]) -> tuple[Callable[[], int], Callable[[], None]]:
    """Patch every rename of a finished file; `act` is called before the one with this number."""
    original, state = Path.replace, {"count": 0}

    def patched(self, target):
        state["count"] += 1
        if state["count"] == at:
            act()
        return original(self, target)

    Path.replace = patched  # type: ignore[method-assign]
    return (lambda: state["count"]), (lambda: setattr(Path, "replace", original))


def study(path: Path, pair) -> None:
    for name in STAGES:
        run_stage(path, name, *pair)


@pytest.fixture(scope="module")
def whole(home, pair) -> tuple[Path, int]:
    """The uninterrupted study, and how many files it puts in place."""
    count, undo = counting(None, lambda: None)
    try:
        study(home / "whole", pair)
    finally:
        undo()
    return home / "whole", count()


def differs(path: Path, whole: Path) -> str | None:
    missing = set(open_run(whole).manifest["stages"]) - set(open_run(path).manifest["stages"])
    if missing:
        return f"not complete: {sorted(missing)}"
    for name in TABLES:
        if not pq.read_table(path / f"{name}.parquet").equals(pq.read_table(whole / f"{name}.parquet")):
            return f"{name}.parquet differs from the uninterrupted run's"
    return disagreement(path)


def points(count: int, kind: str, most: int) -> list[int]:
    rng = random.Random(f"{SEED}/{kind}")
    return sorted(rng.sample(range(1, count + 1), min(count, max(2, round(SHARE * most)))))[PART - 1 :: PARTS]


@pytest.mark.campaign
def test_kills(home, pair, whole):
    account = Account("kills")
    for at in points(whole[1], account.kind, 50):
        path = home / f"killed-{at}"
        child = os.fork()
        if child == 0:
            counting(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            try:
                study(path, pair)
            finally:
                os._exit(3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        problem = None if status == -9 else f"not killed: {status}"
        try:
            study(path, pair)
            problem = problem or differs(path, whole[0])
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        account.note({"at": at}, problem)
    account.close()


@pytest.mark.campaign
def test_full_disk(home, pair, whole):
    account = Account("full disk")

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for at in points(whole[1], account.kind, 36):
        path, problem = home / f"full-{at}", None
        _, undo = counting(at, full)
        try:
            study(path, pair)
            problem = "the full disk was not noticed"
        except RockTokensError as error:
            problem = None if "disk is full" in str(error) or "No space left" in str(error) else f"said: {error}"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        finally:
            undo()
        try:
            study(path, pair)
            problem = problem or differs(path, whole[0])
        except Exception as error:
            problem = problem or f"after it: {type(error).__name__}: {error}"
        account.note({"at": at}, problem)
    account.close()


@pytest.mark.campaign
def test_foreign_files(tmp_path, pair):
    account = Account("foreign files")
    rng = random.Random(f"{SEED}/foreign")
    deep = "[" * 100_000
    contents = {
        "empty": b"",
        "bytes": rng.randbytes(500),
        "latin": "prompt: caf\xe9".encode("latin-1"),
        "json": b'{"a": 1}',
        "list": b"[1, 2, 3]\n",
        "deep": deep.encode(),
        "surrogate": b'{"prompt": "\\ud800", "answer": "1"}\n',
        "huge number": b'{"prompt": ' + b"9" * 5000 + b"}\n",
        "no prompt": b'{"question": "1"}\n',
        "number": b'{"prompt": 5}\n',
        "nul": b'{"prompt": "a\\u0000b"}\n' * 20,
        "nested": b'{"prompt": {"a": [1]}}\n',
    }
    models = ["--pair.student", pair[0].student, "--pair.teacher", pair[0].teacher]
    for name, content in contents.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_bytes(content)
        for command in (
            ["sample", str(tmp_path / "new"), "--prompts.source", str(file), *models],
            ["distill", str(tmp_path / "new"), "--prompts.source", str(file), *models],
            ["detect", "--occurrences", str(file), "--out", str(tmp_path / "out")],
            ["study", str(tmp_path / f"{name}.yaml"), "--path", str(tmp_path / "new")],
            ["sample", str(tmp_path / "new"), "--pair.student", str(file), "--pair.teacher", pair[0].teacher],
            ["report", str(file)],
        ):
            (tmp_path / f"{name}.yaml").write_bytes(content)
            status, said, problem = attempt(command)
            accepted = name == "nul" and command[0] in ("sample", "distill")
            if not problem and status == 0 and not accepted:
                problem = f"accepted: {said[-200:]}"
            account.note({"content": name, "command": command[0]}, problem)
    account.close()
