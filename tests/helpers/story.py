"""One small study of the built-in world through the command line, made once per session, and children that are killed.

Children are forked (forking.py): a fresh interpreter would spend seconds on imports.
"""

from __future__ import annotations

import os
import resource
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from forking import ending, fork

import rocktokens.report.stage
import rocktokens.train.trainer  # noqa: F401 - once for all children
from rocktokens import Run, cli, open_run

# An effect of 15 points is one that 80 prompts can show or exclude.
KNOCKOUT = shlex.split(
    "--baseline.problems 80 --knockout.top 10 --knockout.rounds 2 --knockout.epsilon 0.15 --knockout.resamples 500"
)
SETTINGS = KNOCKOUT + shlex.split("""
    --detection-prompts 80 --problems 8 --rollouts.num-rollouts 2 --detect.resamples 100
    --distill.steps 6 --distill.prompts-per-step 8 --distill.keep 2 --distill.save-every 2
    --distill.evaluate-every 6 --distill.telemetry-every 3
    --graft.problems 24 --graft.no-clusters --graft.resamples 200
    --compare.regimes uniform freeze freeze_rocks --compare.steps 2 --compare.seeds 1 --compare.evaluations 1
    --compare.problems 8 --compare.rollouts 1 --compare.contexts 20 --compare.resamples 100
""")


class Story(NamedTuple):
    """A finished study and what it said."""

    run: Run
    said: str
    seconds: float
    """Processor time; the wall clock also tells what else runs here."""


def study_words(path: Path, *stages: str) -> list[str]:
    """The command; all stages unless some are named."""
    return [
        "--workers",
        "1",
        "study",
        "arithmetic",
        "--path",
        str(path),
        *SETTINGS,
        *(["--stages", *stages] if stages else []),
    ]


def study(path: Path) -> Story:
    """Run the command in a process of its own; workers would spend more time on imports than on this study."""
    start, log = _processor(), path.with_suffix(".log")
    status = ending(child(study_words(path), log))
    said = log.with_name(f"{log.name}.err").read_text()
    assert status == 0, said
    assert "Traceback" not in said
    return Story(open_run(path), log.read_text(), _processor() - start)


def child(words: list[str], log: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Start the command in a child with its output beside `log`; returns its process id."""

    def work() -> None:
        os.environ.update(ROCKTOKENS_BROWSER="", COLUMNS="200")
        prepare()
        cli.main(words)

    return fork(work, log)


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
