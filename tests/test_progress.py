"""What a person sees while something runs: lines without a terminal, one display with one, and the time left."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest

from rocktokens import progress as room
from rocktokens.progress import clock, console, progress, stages
from rocktokens.study import STAGES, recipes


class Terminal(io.StringIO):
    """A terminal that remembers."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise io.UnsupportedOperation


@pytest.fixture
def time(monkeypatch):
    """A clock that tests set."""
    now = [100.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    return now


def test_lines_tell_count_rate_and_time_left(capsys, time):
    with progress("sampling", 100, "rollouts") as advance:
        advance.resumed(60)  # by an earlier run: done, and no part of the pace
        advance(10)  # too soon for a line
        time[0] += 20
        advance(10)
        advance.say("loss 0.5", now=True)
    assert capsys.readouterr().err.splitlines() == [
        "sampling: 80/100 rollouts, 1.0 rollouts/s, 20 s left",
        "sampling: 80/100 rollouts, 1.0 rollouts/s, loss 0.5, 20 s left",
        "sampling: 80/100 rollouts in 20 s",
    ]


def test_the_whole_is_weighed_by_what_each_stage_is_expected_to_take(capsys, time):
    with stages({"one": 10, "two": 30}) as overall:
        with overall.stage("one"):
            time[0] += 5
        assert (overall.done, overall.left) == (pytest.approx(0.25), pytest.approx(15))
        with overall.stage("two"), progress("work", 3) as advance:
            console().print("a table")  # the report of a study holds it
            advance(1)
            assert overall.done == pytest.approx(0.5)
            with progress("more work", 10) as other:
                other(1)
            assert overall.done == pytest.approx(0.5)  # never back
    console().print("another")
    out, said = capsys.readouterr()
    assert out == "another\n"
    assert "— stage 1 of 2: one; 0 s so far" in said
    assert "— stage 2 of 2: two; 5 s so far, about 15 s left" in said


def test_a_terminal_shows_one_display_with_the_stage_and_its_work(monkeypatch, time):
    terminal, gone = Terminal(), io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm-256color")
    handlers = [logging.StreamHandler(terminal), logging.StreamHandler(gone)]
    logging.getLogger().addHandler(handlers[0])
    try:
        with (
            stages({"sample": 1, "score": 1}) as overall,
            overall.stage("sample"),
            progress("sampling", 40, "rollouts") as advance,
        ):
            time[0] += 10
            advance(20)
            overall.bar.refresh()
            logging.getLogger("a.stage").warning("something to know")
        logging.getLogger().addHandler(handlers[1])  # one whose stream was closed does not hinder
        with progress("sampling", 1):
            pass
    finally:
        for handler in handlers:
            logging.getLogger().removeHandler(handler)
    assert [handler.stream for handler in handlers] == [terminal, gone]
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    shown = ("stage 1 of 2: sample", "20/40", "10 s left, 2.0 rollouts/s", "about 30 s left", "something to know\n")
    assert [part for part in shown if part not in text] == []


@pytest.mark.parametrize(("seconds", "said"), [(0.2, "0 s"), (99, "99 s"), (187, "3:07 min"), (7500, "2:05 h")])
def test_clock(seconds, said):
    assert clock(seconds) == said


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_has_an_outlook(name):
    assert all(spec.size(recipes()[name]()) > 0 for spec in STAGES.values())
