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
        advance(10)  # too soon for a line
        time[0] += 20
        advance(10)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["sampling: 20/100 rollouts, 1.0 rollouts/s, 80 s left", "sampling: 20/100 rollouts in 20 s"]


def test_what_an_earlier_run_did_is_done_but_no_pace(capsys, time):
    with progress("training", 100, "steps") as advance:
        advance.resumed(80)
        time[0] += 20
        advance(10)
    assert "90/100 steps, 0.5 steps/s, 20 s left" in capsys.readouterr().err


def test_what_there_is_to_say_is_said_at_once(capsys, time):
    with progress("training", 4, "steps") as advance:
        time[0] += 1
        advance(2)
        advance.say("loss 0.5", now=True)
    assert "training: 2/4 steps, 2.0 steps/s, loss 0.5, 1 s left" in capsys.readouterr().err


def test_the_whole_is_weighed_by_what_each_stage_is_expected_to_take(capsys, time):
    with stages({"one": 10, "two": 30}) as overall:
        with overall.stage("one"):
            time[0] += 5
        assert overall.done == pytest.approx(0.25)
        assert overall.left == pytest.approx(15)
        with overall.stage("two"), progress("work", 3) as advance:
            advance(1)
            assert overall.done == pytest.approx(0.5)
            with progress("more work", 10) as other:
                other(1)
            assert overall.done == pytest.approx(0.5)  # never back
    said = capsys.readouterr().err
    assert "— stage 1 of 2: one; 0 s so far" in said
    assert "— stage 2 of 2: two; 5 s so far, about 15 s left" in said


def test_tables_of_a_stage_stay_out_of_a_studys_display(capsys):
    console().print("a table")
    with stages({"one": 1}):
        console().print("another")
    assert capsys.readouterr().out == "a table\n"


def test_a_terminal_shows_one_display_with_the_stage_and_its_work(monkeypatch, time):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm-256color")
    log = logging.getLogger("a.stage")
    handler = logging.StreamHandler(terminal)
    logging.getLogger().addHandler(handler)
    try:
        with (
            stages({"sample": 1, "score": 1}) as overall,
            overall.stage("sample"),
            progress("sampling", 40, "rollouts") as advance,
        ):
            time[0] += 10
            advance(20)
            overall._bar.refresh()
            log.warning("something to know")
    finally:
        logging.getLogger().removeHandler(handler)
    assert handler.stream is terminal
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert "stage 1 of 2: sample" in text
    assert "20/40" in text
    assert "10 s left, 2.0 rollouts/s" in text
    assert "about 30 s left" in text
    assert "something to know\n" in text


def test_a_handler_whose_stream_was_closed_does_not_hinder_the_display(monkeypatch):
    terminal, gone = Terminal(), io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stderr", terminal)
    handler = logging.StreamHandler(gone)
    logging.getLogger().addHandler(handler)
    try:
        with stages({"sample": 1}) as overall, overall.stage("sample"):
            pass
    finally:
        logging.getLogger().removeHandler(handler)
    assert handler.stream is gone


@pytest.mark.parametrize(("seconds", "said"), [(0.2, "0 s"), (99, "99 s"), (187, "3:07 min"), (7500, "2:05 h")])
def test_clock(seconds, said):
    assert clock(seconds) == said


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_recipe_has_an_outlook(name):
    assert all(spec.size(recipes()[name]()) > 0 for spec in STAGES.values())
