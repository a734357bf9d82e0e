"""Signs between processes: those of an earlier launch of the same name are never believed, early ones always are."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from forking import ending, fork

from rocktokens import ranks
from rocktokens.ranks import SIGNS, greet, has_sign, sign, signs, wait_for

PLAIN = {"WORLD_SIZE": "2", "MASTER_PORT": "29500"}


def start(rank: int, work, folder: Path, **more: str) -> int:
    """A process of that rank, as a plain environment with a fixed port has it."""
    return fork(work, folder / f"{rank}-{time.monotonic_ns()}.log", {**PLAIN, "RANK": str(rank), **more})


def waits(run: Path, name: str):
    return lambda: wait_for(lambda: has_sign(run, name), name)


@pytest.fixture
def run(tmp_path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def test_the_sign_of_an_earlier_launch_with_the_same_port_is_not_believed(run, tmp_path):
    for _ in range(3):
        second = start(1, waits(run, "finished"), tmp_path)
        time.sleep(0.3)
        assert os.waitpid(second, os.WNOHANG) == (0, 0)  # it waits for the first process of its own launch
        assert ending(start(0, lambda: sign(run, "finished"), tmp_path)) == 0
        assert ending(second, timeout=20) == 0
    assert len(list((run / SIGNS).iterdir())) == 1


def test_a_sign_that_was_given_before_the_others_began_is_believed(run, tmp_path):
    for _ in range(2):
        assert ending(start(0, lambda: sign(run, "finished"), tmp_path)) == 0
        time.sleep(0.1)
        assert ending(start(1, waits(run, "finished"), tmp_path), timeout=20) == 0


def test_the_first_process_removes_what_it_finds_when_a_stage_begins(run, tmp_path):
    """Even where the second process of the earlier launch never came to read it."""
    assert ending(start(0, lambda: sign(run, "finished"), tmp_path)) == 0
    assert ending(start(0, lambda: greet(run), tmp_path)) == 0
    second = start(1, waits(run, "finished"), tmp_path)
    time.sleep(0.3)
    assert os.waitpid(second, os.WNOHANG) == (0, 0)
    assert ending(start(0, lambda: sign(run, "finished"), tmp_path)) == 0
    assert ending(second, timeout=20) == 0


def test_a_process_left_over_from_an_earlier_launch_hinders_nobody(run, tmp_path):
    left_over = start(1, waits(run, "finished"), tmp_path)
    time.sleep(0.2)
    second = start(1, waits(run, "finished"), tmp_path)
    time.sleep(0.2)
    assert ending(start(0, lambda: sign(run, "finished"), tmp_path)) == 0
    assert [ending(child, timeout=20) for child in (second, left_over)] == [0, 0]


def test_a_child_works_for_its_parent(run, tmp_path, monkeypatch):
    """What the parent has read is no earlier launch's for the child, which knows the launch by name alone."""
    monkeypatch.setenv("RANK", "1")
    for name, value in PLAIN.items():
        monkeypatch.setenv(name, value)
    first = {ranks.PROCESS: "first"}
    assert ending(start(0, lambda: sign(run, "look-1"), tmp_path, **first)) == 0
    assert signs(run, "look") == ["look-1"]
    own = {ranks.PROCESS: ranks.process_id(), ranks.LAUNCH: ranks.launch(), "MASTER_PORT": "0"}
    time.sleep(0.1)
    assert ending(start(1, waits(run, "look-1"), tmp_path, **own), timeout=20) == 0
    assert ending(start(0, lambda: sign(run, "look-2"), tmp_path, **first, **{ranks.LAUNCH: ranks.launch()})) == 0
    assert signs(run, "look") == ["look-1", "look-2"]


def test_one_process_alone_leaves_no_signs(run):
    greet(run)
    sign(run, "finished")
    assert not (run / SIGNS).exists()
