"""Problems of reasoning-gym are the same in every process, whatever its hashes; the process that makes them may die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from rocktokens.errors import ConfigError
from rocktokens.prompts import gym_process
from rocktokens.prompts.gym_process import CannotMake, make_problem

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed; runs with the dev dependencies")

# Followed the order of sets, or drew from Python's shared random numbers (list_functions), in release 0.1.25.
UNSTEADY = ["isomorphic_strings", "ransom_note", "polynomial_multiplication", "codeio", "word_ladder", "list_functions"]
PROGRAM = """
import json, sys
from itertools import islice
from rocktokens.prompts.gym_tasks import gym_rows
for task in sys.argv[2:]:
    rows = islice(gym_rows(f"reasoning-gym:{task}", (), 0), int(sys.argv[1]))
    print(json.dumps([task, [[name, question, str(answer), repr(answer.entry)] for name, question, answer in rows]]))
"""


def problems_of(number: int, tasks: list[str]) -> list[dict[str, list]]:
    """Problems of these tasks, made for two processes whose hashes differ."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(number), *tasks],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    return [dict(map(json.loads, process.communicate()[0].splitlines())) for process in started]


def test_problems_are_the_same_in_every_process():
    one, other = problems_of(16, UNSTEADY)
    assert list(one) == UNSTEADY
    for task in UNSTEADY:
        assert len(one[task]) == 16
        assert one[task] == other[task], task


@pytest.mark.slow  # seconds per problem
def test_puzzles_that_take_long_are_the_same_too():
    one, other = problems_of(4, ["knight_swap"])
    assert len(one["knight_swap"]) == 4
    assert one == other


def made(number: int = 0, **settings: object) -> object:
    return make_problem("chain_sum", settings, seed=5, size=10, number=number)


def test_a_problem_does_not_depend_on_those_before_it():
    def question(number):
        return make_problem("list_functions", {}, seed=5, size=40, number=number)["question"]

    backwards = [question(number) for number in reversed(range(40))]
    assert backwards[::-1] == [question(number) for number in range(40)]


def test_a_process_that_ended_is_started_again():
    before = made()
    process = gym_process._PROCESSES[os.getpid()]._process
    assert made() == before
    assert gym_process._PROCESSES[os.getpid()]._process is process
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert made() == before


def test_a_task_that_fails_says_why_and_the_next_is_served():
    with pytest.raises(CannotMake, match="must be positive"):
        made(min_terms=-2)
    assert made()


def test_what_is_interrupted_leaves_no_reply_behind(monkeypatch):
    first, second = made(0), made(1)
    load = gym_process.pickle.load

    def interrupted(source):
        monkeypatch.setattr(gym_process.pickle, "load", load)
        raise KeyboardInterrupt

    monkeypatch.setattr(gym_process.pickle, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(0)
    assert (made(1), made(0)) == (second, first)


def test_where_no_process_can_be_started_it_is_said(monkeypatch):
    monkeypatch.setattr(gym_process, "WORKER", "rocktokens.nosuch")
    monkeypatch.setattr(gym_process, "_PROCESSES", {})
    with pytest.raises(ConfigError, match="ended without a reply"):
        made()
