"""Answers compared in processes of their own: the same verdicts, a limit on each, and no process left behind."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from rocktokens.prompts import answer_pool, checkers
from rocktokens.prompts.answer_pool import AnswerPool, NoProcess
from rocktokens.prompts.checkers import MathChecker, check_all, how_checked

PAIRS = [
    ("so it is $\\frac{1}{2}$", "0.5"),
    ("the answer is $3$", "4"),
    ("#### 1,234", "1234"),
    ("no idea", "7"),
    ("$x^2 + 2x + 1$", "$(x+1)^2$"),
    ("nothing to read", "nor here"),
]


@pytest.fixture(scope="module")
def pool():
    made = AnswerPool(2)
    yield made
    made.close()


def test_processes_decide_as_this_one_does(pool):
    here = MathChecker()
    assert pool.check(PAIRS) == [here.decide(*pair) for pair in PAIRS]
    assert [how for how, _ in pool.check(PAIRS)].count("unreadable") == 2


def test_what_cannot_be_read_is_not_equal(pool):
    assert pool.check([("nothing to read", "nothing to read")]) == [("unreadable", False)]


def worker(tmp_path, monkeypatch, text):
    """A process of our own making in place of the real one."""
    (tmp_path / "stand_in_worker.py").write_text(text)
    monkeypatch.setattr(answer_pool, "WORKER", "stand_in_worker")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


SLOW = """
import json, sys, time
for line in sys.stdin:
    text, answer = json.loads(line)
    if text == "hang":
        while True:
            time.sleep(60)
    if text == "die":
        sys.exit(3)
    print(json.dumps(["math_verify", text == answer]), flush=True)
"""


def test_an_answer_that_takes_for_ever_is_unreadable_and_the_others_are_decided(tmp_path, monkeypatch):
    worker(tmp_path, monkeypatch, SLOW)
    pool = AnswerPool(2, seconds=1.0)
    start = time.monotonic()
    found = pool.check([("1", "1"), ("hang", "1"), ("2", "1"), ("die", "1"), ("3", "3"), ("4", "4")])
    assert time.monotonic() - start < 60
    assert found[1] == found[3] == ("unreadable", False)
    assert [found[i] for i in (0, 2, 4, 5)] == [("math_verify", right) for right in (True, False, True, True)]
    processes = [one.process.pid for one in pool._workers if one.process is not None]
    pool.close()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize("text", ["raise SystemExit(1)", "print('no reply')"])
def test_where_no_process_starts_the_caller_is_told(tmp_path, monkeypatch, text):
    worker(tmp_path, monkeypatch, text)
    with pytest.raises(NoProcess):
        AnswerPool(1).check(PAIRS[:1])


def test_no_interpreter_is_no_process(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(NoProcess):
        AnswerPool(1).check(PAIRS[:1])


def test_the_checker_falls_back_to_this_process_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setattr(checkers, "FOR_PROCESSES", 2)
    check = MathChecker()
    assert check_all(check, PAIRS) == [True, False, True, False, True, False]
    assert "compared one by one in this process" in caplog.text
    assert check.counts == {"math_verify": 4, "last_number": 0, "unreadable": 2}


def test_many_answers_go_to_processes_and_none_twice(monkeypatch):
    asked = []

    class Counting(AnswerPool):
        def check(self, pairs):
            asked.extend(pairs)
            return [MathChecker().decide(*pair) for pair in pairs]

    monkeypatch.setattr(checkers, "AnswerPool", Counting)
    monkeypatch.setattr(checkers, "FOR_PROCESSES", 2)
    check = MathChecker()
    first = check.check_all([*PAIRS, PAIRS[0]])
    assert check.check_all([*PAIRS, PAIRS[0]]) == first == [True, False, True, False, True, False, True]
    assert len(asked) == len(PAIRS)
    facts = how_checked(check, [text for text, _ in PAIRS], [answer for _, answer in PAIRS])
    assert facts == {"checked_by": {"math_verify": 4, "last_number": 0, "unreadable": 2}}
    assert len(asked) == len(PAIRS)


def test_outside_the_main_thread_every_answer_has_a_limit(monkeypatch):
    seen = []

    class Counting(AnswerPool):
        def check(self, pairs):
            seen.extend(pairs)
            return [("math_verify", True)] * len(pairs)

    monkeypatch.setattr(checkers, "AnswerPool", Counting)
    thread = threading.Thread(target=lambda: MathChecker()("$1$", "1"))
    thread.start()
    thread.join()
    assert seen == [("$1$", "1")]
    MathChecker()("$1$", "1")
    assert len(seen) == 1


def test_other_checkers_are_asked_one_by_one():
    assert check_all(lambda text, answer: text == answer, [("a", "a"), ("a", "b")]) == [True, False]
