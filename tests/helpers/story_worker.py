"""Runs one study again and again in children of this process, each of which is interrupted or killed somewhere.

A child dies by SIGKILL: in every stage before its second file is put in place, and before the stage is recorded as
complete. The first of all is interrupted by SIGINT, as Ctrl-C does.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from forking import ending, fork

from rocktokens import cli, study
from rocktokens.run import Run

DEATHS = ("second file", "finish")
STAGES = (
    "sample.stage",
    "score.stage",
    "detect.stage",
    "geometry.stage",
    "causal.knockout_stage",
    "causal.graft_stage",
    "bypass.stage",
    "compare.stage",
    "report.stage",
)
LOADED = ("rocktokens.train.distill", "rocktokens.train.trainer", "rocktokens.report.build", "plotly.io")


def load_everything() -> None:
    """Import what the stages import when they run, once for all children."""
    for name in (*LOADED, *(f"rocktokens.{stage}" for stage in STAGES)):
        importlib.import_module(name)


def child(words: list[str], log: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Run the command in a child with its output beside `log`; returns its process id."""

    def work() -> None:
        prepare()
        cli.main(words)

    return fork(work, log)


def die(stage: str, death: str) -> None:
    """Arrange for this process to be killed in a stage."""
    run_stage, finish, replace = study._run_stage, Run.finish, Path.replace
    state = {"stage": "", "files": 0}

    def watched(name, *rest):
        state.update(stage=name, files=0)
        return run_stage(name, *rest)

    def counted(self, target):
        state["files"] += 1
        if death == "second file" and state["stage"] == stage and state["files"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    def recorded(self, name, facts=None):
        if death == "finish" and name == stage:
            os.kill(os.getpid(), signal.SIGKILL)
        return finish(self, name, facts)

    study._run_stage, Path.replace, Run.finish = watched, counted, recorded


def interrupt(words: list[str], run: Path, log: Path) -> int:
    """Start, wait until it trains, and send what Ctrl-C sends."""
    number = child(words, log)
    deadline = time.monotonic() + 120
    while not list(run.glob("checkpoints/step=*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(number, signal.SIGINT)
    return ending(number)


def interrupted(folder: Path, words: list[str]) -> dict[str, int]:
    """Interrupt a study once, kill it everywhere, then run it to the end; how each child ended."""
    load_everything()
    run = Path(words[words.index("--path") + 1])
    found = {"interrupt": interrupt(words, run, folder / "interrupt.log")}
    for stage in study.STAGES:
        for death in DEATHS:
            name = f"{stage}, {death}"
            number = child(words, folder / f"{name}.log", lambda stage=stage, death=death: die(stage, death))
            found[name] = ending(number)
    found["last"] = ending(child(words, folder / "last.log"))
    return found
