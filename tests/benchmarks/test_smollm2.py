"""The generator of the real pair, without the real weights: word problems, layers, teaching, resuming."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
import smollm2_pair as making
import smollm2_teach as teaching
from smollm2_problems import LARGEST, word_problems
from tiny_smollm2 import QUICK, save_base

from rocktokens.prompts.checkers import MathChecker

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
RESULT = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


# --- problems ---


def test_solutions_work_out_the_story_and_end_in_the_answer():
    for problem in word_problems(3000, seed=3):
        sums = [(int(a), sign, int(b), int(c)) for a, sign, b, c in EQUATION.findall(problem.solution)]
        assert len(sums) == problem.steps
        numbers = [int(number) for number in re.findall(r"\d+", problem.prompt)]
        assert [sums[0][0], *(b for _, _, b, _ in sums)] == numbers, problem
        for a, sign, b, c in sums:
            assert RESULT[sign](a, b) == c
            assert 0 < c <= LARGEST
            assert sign != "/" or a % b == 0
        assert all(before[3] == after[0] for before, after in pairwise(sums))
        assert sums[-1][3] == int(problem.answer) == int(re.findall(r"\d+", problem.solution)[-1])
    check = MathChecker()
    for problem in word_problems(100, seed=2):
        assert check(problem.solution, problem.answer)
        assert not check(problem.solution, str(int(problem.answer) + 1))


# --- making ---


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("smollm2") / "base")


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    return making.make_pair(base, tmp_path_factory.mktemp("cache"), QUICK)


def manifest_of(pair):
    return json.loads((pair.path / "run.json").read_text())


class Killed(BaseException):
    """As a kill would: nothing catches it."""


def test_a_killed_making_resumes_and_ends_with_the_same_pair(base, made, tmp_path, monkeypatch):
    usual, calls = teaching.answer_loss, []

    def dying(*arguments, **settings):
        calls.append(1)
        if len(calls) == 4:
            raise Killed
        return usual(*arguments, **settings)

    monkeypatch.setattr(teaching, "answer_loss", dying)
    with pytest.raises(Killed):
        making.make_pair(base, tmp_path, QUICK)
    again = making.make_pair(base, tmp_path, QUICK)
    for stage in ("teacher", "student"):
        assert manifest_of(again)["stages"][stage]["sha256"] == manifest_of(made)["stages"][stage]["sha256"]
    readings = [manifest_of(pair)["stages"]["teacher"]["readings"] for pair in (again, made)]
    assert readings[0] == readings[1]  # those before the kill too
    assert [row["step"] for row in readings[0]] == [2, 4, 6]
