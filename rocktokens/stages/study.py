"""The stages of `rocktokens study` in order. Each is resumable: a stopped study goes on with the same command."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rocktokens.config.study import STAGES, Stage, StudyConfig
from rocktokens.stages.until_decided import prompts_for_detection, until_decided

log = logging.getLogger(__name__)


def study(config: StudyConfig) -> None:
    """Run the chosen stages in order under one display, and close with what was found."""
    from rocktokens.progress import stages
    from rocktokens.runs.lock import working_on
    from rocktokens.smollm2.recipe import with_made_pair
    from rocktokens.stages.study_outlook import expected

    start = time.monotonic()
    config = with_made_pair(config)
    with working_on(config.path), stages(expected(config, _complete(config.path))) as overall:
        for stage in (stage for stage in STAGES if stage in config.stages):
            with overall.stage(stage):
                _run_stage(stage, config)
            _tell(overall, stage, config.path)
    _summary(config.path, time.monotonic() - start)


def _tell(overall: Any, stage: Stage, path: Path) -> None:
    """Print what a stage found as soon as it has found it."""
    from rocktokens.report.run_facts import Facts
    from rocktokens.report.terminal.study import found_by

    if stage in ("distill", "detect", "knockout", "compare"):
        said = found_by(stage, Facts.of(path))
        if said:
            overall.say(f"  {said}")


def _complete(path: Path) -> set[str]:
    from rocktokens.runs.store import MANIFEST, open_run

    return set(open_run(path).manifest["stages"]) if (path / MANIFEST).exists() else set()


def _run_stage(stage: Stage, config: StudyConfig) -> None:
    from rocktokens.stages import compare, distill, geometry, graft, knockout, report, sample, score

    path = config.path
    if stage in ("knockout", "graft", "compare") and not _has_answers(path):
        log.info("no answers to check: %s is left out, accuracy has no meaning here", stage)
        return
    if stage == "graft" and not config.graft.rocks and _found_no_rocks(path):
        log.info("detect found no rocks: there is nothing to graft, and the stage is left out")
        return
    work: dict[Stage, Callable[[], object]] = {
        "distill": lambda: distill.distill(path, config.pair, config.prompts, config.distill, problems=config.problems),
        "sample": lambda: sample.sample(
            path, config.pair, config.prompts, config.rollouts, limit=prompts_for_detection(config)
        ),
        "score": lambda: score.score(path, config.score),
        "detect": lambda: _detect(config),
        "geometry": lambda: geometry.geometry(path, config.geometry),
        "knockout": lambda: knockout.knockout(path, config.knockout, config.baseline),
        "graft": lambda: graft.graft(path, config.graft, config.baseline),
        "compare": lambda: compare.compare(path, config.compare),
        "report": lambda: report.report(path),
    }
    work[stage]()


def _detect(config: StudyConfig) -> None:
    from rocktokens.stages.detect import detect

    detect(config.path, config.detect)
    if config.detect.until_decided:
        until_decided(config)


def _has_answers(path: Path) -> bool:
    from rocktokens.runs.store import open_run

    run = open_run(path)
    return not run.done("sample") or bool(run.facts("sample")["checked"])


def _found_no_rocks(path: Path) -> bool:
    from rocktokens.runs.store import open_run

    run = open_run(path)
    return run.done("detect") and not run.facts("detect")["rocks"]


def _summary(path: Path, seconds: float) -> None:
    """The verdict, as the report's card has it, and where the report lies."""
    from rocktokens.progress import clock, terminal_width
    from rocktokens.report.run_facts import Facts
    from rocktokens.report.terminal.study import summary
    from rocktokens.runs.store import open_run

    run = open_run(path)
    student, teacher = Facts(run).pair
    print(f"\nStudy of {path} ({student} from {teacher}), {clock(seconds)} this time; intervals are 95 %")
    for line in summary(Facts(run), path / "report.html" if run.done("report") else None, width=terminal_width()):
        print(line)
