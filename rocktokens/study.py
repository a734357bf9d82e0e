"""The stages of `rocktokens study` in order. Each is resumable: a stopped study goes on with the same command."""

from __future__ import annotations

import json
import logging
import os
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rocktokens.jobs import Place, keeping_workers, num_gpus
from rocktokens.study_settings import STAGES, Stage, StudyConfig

log = logging.getLogger(__name__)

# Stages that ask a student's or a teacher's servers, where they are named.
ON_STUDENT, ON_TEACHER = ("sample", "knockout", "graft"), ("distill", "score", "graft", "compare")


def study(config: StudyConfig, *, place: Place | None = None, note: str | None = None) -> None:
    """Run the chosen stages in order under one display, and close with what was found.

    Args:
        config: The settings of every stage.
        place: Where work that can be shared out is done; unset: as many processes as suit the pair.
        note: What to say at the very end, such as what a quick study left out.
    """
    start = time.monotonic()
    _require_servers(config)
    _run_stages(config, place or _fitting(config))
    _summary(config.path, time.monotonic() - start)
    if note:
        print("\n" + "\n".join(textwrap.wrap(note, 80)))


def _fitting(config: StudyConfig) -> Place:
    """Where a study works whose command does not say it.

    A built-in pair is so small that one thread is enough for it: without a GPU every core, up to four, gets a process.
    Any other pair is loaded once, unless the user says otherwise.
    """
    from rocktokens.world import world_names

    is_built_in = config.prompts.source in world_names() and not (config.pair.student or config.pair.teacher)
    if not is_built_in or num_gpus() or config.servers.student or config.servers.teacher:
        return Place()
    return Place(workers=min(len(os.sched_getaffinity(0)), 4) if hasattr(os, "sched_getaffinity") else 1)


def _require_servers(config: StudyConfig) -> None:
    """Servers that a stage will ask must be there now, and not after the hours before that stage.

    Which model they serve is asked by the stage itself: a student's checkpoint may not have been trained yet.
    """
    left = _left(config)
    if "graft" in left and config.servers.student:
        _require_writing_teacher(config)
    from rocktokens.servers.pool import ServerPool

    for stages, urls in ((ON_STUDENT, config.servers.student), (ON_TEACHER, config.servers.teacher)):
        if urls and left & set(stages):
            with ServerPool(urls, config.servers) as pool:
                pool.models()


def _left(config: StudyConfig) -> set[str]:
    """Stages that are asked for and not complete; without answers to check some are never run."""
    complete = _complete(config.path)
    pointless = set() if "sample" not in complete or _has_answers(config.path) else {"knockout", "graft", "compare"}
    return {str(stage) for stage in config.stages} - complete - pointless


def _require_writing_teacher(config: StudyConfig) -> None:
    """Grafts on servers need a teacher that generates."""
    from rocktokens.errors import ConfigError
    from rocktokens.servers.connect import generating

    if not generating(config.servers):
        raise ConfigError(
            "with --servers.student the stage graft needs a teacher's server that generates among --servers.teacher, "
            "and there is none; add one, leave graft out of --stages, or run it afterwards without --servers.student"
        )


def _run_stages(config: StudyConfig, place: Place) -> None:
    from rocktokens.lock import working_on
    from rocktokens.progress import stages
    from rocktokens.study_outlook import expected

    with working_on(config.path), keeping_workers(), stages(expected(config, _complete(config.path))) as overall:
        for stage in (stage for stage in STAGES if stage in config.stages):
            began, before = time.monotonic(), _written(config.path)
            with overall.stage(stage), _remembering(config):
                _run_stage(stage, config, place)
            if _written(config.path) != before:  # a stage that was complete, or is left out, took no time
                _clocked(config.path, stage, time.monotonic() - began)
            _tell(overall, stage, config.path)


@contextmanager
def _remembering(config: StudyConfig) -> Iterator[None]:
    """Keep the settings in the run once a stage takes them, so that `rocktokens study RUN` goes on with them.

    Those of a command that is refused take nobody's place; those of one that is stopped or killed do.
    """
    from rocktokens.errors import RockTokensError
    from rocktokens.run import MANIFEST
    from rocktokens.study_plan import SETTINGS, save_settings

    def save() -> None:
        if (config.path / MANIFEST).exists():
            save_settings(config)

    is_new = not _complete(config.path)
    try:
        yield
    except RockTokensError:
        made = [item.name for item in config.path.glob("*") if item.name not in (MANIFEST, SETTINGS)]
        if is_new and made:
            save()
        raise
    except BaseException:  # stopped: it goes on without its flags
        save()
        raise
    save()


def _written(path: Path) -> int | None:
    """When the run's manifest was written, which every stage does that has done something."""
    from rocktokens.run import MANIFEST

    manifest = path / MANIFEST
    return manifest.stat().st_mtime_ns if manifest.exists() else None


def _clocked(path: Path, stage: Stage, seconds: float) -> None:
    """Add what a stage took to the run's times.json; repeated work counts too."""
    file = path / "times.json"
    try:
        known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        known[stage] = round(float(known.get(stage, 0.0)) + seconds, 1)
        draft = file.with_name(".times.json.tmp")
        draft.write_text(json.dumps(known, indent=2), encoding="utf-8")
        draft.replace(file)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        log.info("how long %s took was not recorded: %s", stage, error)


def _tell(overall: Any, stage: Stage, path: Path) -> None:
    """Print what a stage found as soon as it has found it."""
    from rocktokens.facts import Facts
    from rocktokens.study_terminal import found_by

    if stage in ("distill", "detect", "knockout", "compare"):
        said = found_by(stage, Facts.of(path))
        if said:
            overall.say(f"  {said}")


def _complete(path: Path) -> set[str]:
    from rocktokens.run import MANIFEST, open_run

    return set(open_run(path).manifest["stages"]) if (path / MANIFEST).exists() else set()


def _run_stage(stage: Stage, config: StudyConfig, place: Place) -> None:
    from rocktokens.bypass import stage as bypass
    from rocktokens.causal import graft_stage as graft
    from rocktokens.causal import knockout_stage as knockout
    from rocktokens.compare import stage as compare
    from rocktokens.geometry import stage as geometry
    from rocktokens.report import stage as report
    from rocktokens.sample import stage as sample
    from rocktokens.score import stage as score
    from rocktokens.train import stage as distill

    path = config.path
    if stage in ("knockout", "graft", "compare") and not _has_answers(path):
        log.info("no answers to check: %s is left out, accuracy has no meaning here", stage)
        return
    work: dict[Stage, Callable[[], object]] = {
        "distill": lambda: distill.distill(
            path, config.pair, config.prompts, config.distill, problems=config.problems, servers=config.servers
        ),
        "sample": lambda: sample.sample(
            path,
            config.pair,
            config.prompts,
            config.rollouts,
            limit=config.detection_prompts,
            servers=config.servers,
            place=place,
        ),
        "score": lambda: score.score(path, config.score, servers=config.servers, place=place),
        "detect": lambda: _detect(config),
        "geometry": lambda: geometry.geometry(path, config.geometry),
        "knockout": lambda: knockout.knockout(path, config.knockout, config.baseline, servers=config.servers),
        "graft": lambda: graft.graft(path, config.graft, config.baseline, servers=config.servers),
        "bypass": lambda: bypass.bypass(path, config.bypass),
        "compare": lambda: compare.compare(path, config.compare, servers=config.servers),
        "report": lambda: report.report(path),
    }
    work[stage]()


def _detect(config: StudyConfig) -> None:
    from rocktokens.detect.stage import detect

    detect(config.path, config.detect)


def _has_answers(path: Path) -> bool:
    from rocktokens.run import open_run

    run = open_run(path)
    return not run.done("sample") or bool(run.facts("sample")["checked"])


def _summary(path: Path, seconds: float) -> None:
    """The verdict, as the report's card has it, and where the report lies."""
    from rocktokens.facts import Facts
    from rocktokens.progress import clock, terminal_width
    from rocktokens.run import open_run
    from rocktokens.study_terminal import summary

    run = open_run(path)
    student, teacher = Facts(run).pair
    print(f"\nStudy of {path} ({student} from {teacher}), {clock(seconds)} this time; intervals are 95 %")
    for line in summary(Facts(run), path / "report.html" if run.done("report") else None, width=terminal_width()):
        print(line)
