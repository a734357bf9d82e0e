"""Runs one study again and again in children of this process, each of which is killed somewhere; prints what became
of every child as JSON.

python tests/story_worker.py FOLDER WORDS...    the words after `rocktokens`

A child dies by SIGKILL: in every stage before its second file is put in place, and before the stage is recorded as
complete. The first of all is interrupted by SIGINT, as Ctrl-C does. Children are forked from a parent that has loaded
the libraries once, so that each costs only what it does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import rocktokens.lm.training.distill  # noqa: F401 - loaded once, before the first fork
from rocktokens import cli
from rocktokens.runs.store import Run
from rocktokens.stages import study

DEATHS = ("second file", "finish")


def child(words: list[str], log: Path, prepare: Callable[[], None]) -> int:
    """Fork, run the command in the child with its output in `log`, and return its process id."""
    sys.stdout.flush()
    number = os.fork()
    if number:
        return number
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        prepare()
        status = 70
        try:
            cli.main(words)
        except SystemExit as ended:
            status = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()  # a child that fails here says why in its log
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


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


def ending(number: int) -> int:
    """How a child ended: its exit status, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def interrupt(words: list[str], run: Path, log: Path) -> int:
    """Start, wait until it trains, and send what Ctrl-C sends."""
    number = child(words, log, lambda: None)
    while not list(run.glob("checkpoints/step=*")) and os.waitpid(number, os.WNOHANG)[0] == 0:
        time.sleep(0.01)
    os.kill(number, signal.SIGINT)
    return ending(number)


def main(folder: Path, words: list[str]) -> None:
    """Interrupt once, kill everywhere, then run to the end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would pass over Ctrl-C
    run = Path(words[words.index("--path") + 1])
    found = {"interrupt": interrupt(words, run, folder / "interrupt.log")}
    for stage in study.STAGES:
        for death in DEATHS:
            name = f"{stage}, {death}"
            number = child(words, folder / f"{name}.log", lambda stage=stage, death=death: die(stage, death))
            found[name] = ending(number)
    found["last"] = ending(child(words, folder / "last.log", lambda: None))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
