"""`rocktokens study --dry-run`: what a study would do, before anything is done; and the settings that let one go on.

Time, memory and disk are estimates from the models' shapes and the settings; nothing is sampled or trained. A study
writes its settings into the run (study.json), so that `rocktokens study RUN` goes on without repeating a flag.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path

from rocktokens.errors import ConfigError, RunError
from rocktokens.files import reading
from rocktokens.progress import clock
from rocktokens.run import MANIFEST, open_run
from rocktokens.settings import from_mapping, without_permissions
from rocktokens.study_settings import STAGES, StudyConfig
from rocktokens.values import Json

SETTINGS = "study.json"
# Bytes on disk of one scored occurrence (Parquet, zstd), of one sampled token; estimates from the built-in world.
OCCURRENCE_BYTES, TOKEN_BYTES = 36, 6
# How much slower than one large matrix product sampling, scoring and training run: an estimate. Small models are slower
# against that bound than large ones.
SLOWER = 2.0
REPORT_BYTES = 8_000_000


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a planned study."""

    name: str
    does: str
    tokens: int
    """Response tokens it samples, scores or trains on, at most."""
    seconds: float | None
    """Estimate; None where it hardly depends on the settings."""
    complete: bool


def plan(config: StudyConfig) -> list[PlannedStage]:
    """The chosen stages in order, with how much work each is."""
    from rocktokens.check.needs import needs_of
    from rocktokens.stage import resolve
    from rocktokens.study_outlook import expected

    pair, _ = resolve(config.path, config.pair, config.prompts)
    needs = needs_of(pair, config.rollouts)
    complete = set(open_run(config.path).manifest["stages"]) if (config.path / MANIFEST).exists() else set()
    length, per_rollout = config.rollouts.max_new_tokens, SLOWER * needs.sample_seconds / 1000
    work = expected(config)
    found = []
    for stage in (stage for stage in STAGES if stage in config.stages):
        rollouts = work.get(stage, 0.0)
        fixed = stage in ("detect", "geometry", "report")
        tokens = 0 if fixed else int(rollouts * (config.distill.max_new_tokens if stage == "distill" else length))
        seconds = None if fixed else per_rollout * tokens
        found.append(PlannedStage(stage, does(stage, config), tokens, seconds, stage in complete))
    return found


def does(stage: str, config: StudyConfig) -> str:
    """What a stage will do with these settings, in a few words."""
    distill, compare, base = config.distill, config.compare, config.baseline
    batch = distill.prompts_per_step * distill.rollouts_per_prompt
    said = {
        "distill": f"{distill.steps} steps of {batch} rollouts; {distill.keep} checkpoints kept",
        "sample": f"{detection_prompts(config)} prompts × {config.rollouts.num_rollouts} rollouts of the last student",
        "score": f"those rollouts under {distill.keep + 1} checkpoints and the teacher",
        "detect": "declares the rocks; loads no model",
        "geometry": "gradients per token type; loads no model",
        "knockout": f"bans up to {config.knockout.top} candidates, {base.problems} prompts × {base.rollouts} rollouts",
        "graft": f"lets the teacher draw the rocks, {min(config.graft.problems, base.problems)} prompts",
        "bypass": "writes the list of what may be skipped",
        "compare": f"{len({'uniform', *compare.regimes})} regimes, {compare.seeds} seed{'s' * (compare.seeds != 1)}, "
        f"{compare.steps or distill.steps} steps, {compare.problems} prompts",
        "report": "writes report.html and the figures",
    }
    return said.get(stage, "")


def detection_prompts(config: StudyConfig) -> int:
    """Prompts on which rocks are looked for, as far as the settings say."""
    return config.detection_prompts or config.prompts.limit or 0


def prompts_needed(config: StudyConfig) -> dict[str, int]:
    """Prompts by what they are for; each part is held out from the others."""
    parts = {
        "training (seen again after an epoch)": config.distill.prompts_per_step * config.distill.steps,
        "accuracy while training": config.problems,
        "detection": detection_prompts(config),
        "census and grafts": config.baseline.problems,
        "comparison": config.compare.problems,
    }
    needs = {"detection": "sample", "census and grafts": "knockout", "comparison": "compare"}
    return {name: count for name, count in parts.items() if needs.get(name, "distill") in config.stages}


def disk_needed(config: StudyConfig, student_bytes: int) -> int:
    """Bytes that a run will take, at most."""
    scored = detection_prompts(config) * config.rollouts.num_rollouts * config.rollouts.max_new_tokens
    checkpoints = (config.distill.keep + 1) * student_bytes + 3 * student_bytes  # and a resume checkpoint with moments
    occurrences = scored * OCCURRENCE_BYTES * (config.distill.keep + 1)
    every = config.distill.telemetry_every
    trained = config.distill.prompts_per_step * config.distill.rollouts_per_prompt * config.distill.max_new_tokens
    telemetry = 0 if every is None else trained * OCCURRENCE_BYTES * (config.distill.steps // every)
    baseline = config.baseline.problems * config.baseline.rollouts * config.rollouts.max_new_tokens * TOKEN_BYTES
    return int(checkpoints + occurrences + telemetry + baseline + REPORT_BYTES)


def dry_run(config: StudyConfig) -> list[str]:
    """Lines that say what the study would take; nothing is run."""
    import psutil

    from rocktokens.check.needs import needs_of
    from rocktokens.stage import resolve

    pair, prompts = resolve(config.path, config.pair, config.prompts)
    needs, stages = needs_of(pair, config.rollouts), plan(config)
    lines = [f"A study in {config.path}: student {pair.student}, teacher {pair.teacher}, prompts {prompts.source}.", ""]
    for item in stages:
        time = (
            "complete, nothing to do" if item.complete else "seconds" if item.seconds is None else clock(item.seconds)
        )
        about = "about " if not item.complete and item.seconds is not None else ""
        lines.append(f"  {item.name:9} {about}{time}: {item.does}")
    total = sum(item.seconds or 5.0 for item in stages if not item.complete)
    memory = max(needs.score_bytes, needs.distill_bytes if "distill" in config.stages else 0)
    free = psutil.virtual_memory().available
    disk = disk_needed(config, 4 * needs.student.parameters)
    there = shutil.disk_usage(_existing(config.path)).free
    lines += [
        "",
        f"  time      about {clock(total)} on this machine if every rollout is as long as allowed; a rough estimate",
        f"  memory    about {memory / 1e9:.2f} GB; {free / 1e9:.1f} GB are free",
        f"  disk      up to {disk / 1e9:.2f} GB; {there / 1e9:.1f} GB are free",
        "  prompts   " + "; ".join(f"{count} for {name}" for name, count in prompts_needed(config).items()),
    ]
    if memory > free or disk > there:
        lines.append("  This machine has too little of it: choose smaller settings or another machine.")
    return [
        part
        for line in [*lines, "", "Nothing was run: this was --dry-run."]
        for part in textwrap.wrap(line, 80, subsequent_indent=" " * 12, break_long_words=False) or [""]
    ]


def _existing(path: Path) -> Path:
    """The nearest directory above that exists."""
    path = path.absolute()
    return path if path.is_dir() else _existing(path.parent)


def save_settings(config: StudyConfig) -> None:
    """Keep the settings of a study in its run, beside the manifest; the same settings are not written again."""
    path = config.path / SETTINGS
    draft = path.with_name(f".{SETTINGS}.tmp")
    values = without_permissions(StudyConfig, json.loads(json.dumps(dataclasses.asdict(config), default=str)))
    values.pop("path")
    text = json.dumps(values, indent=2)
    try:
        if path.is_file() and path.read_bytes() == text.encode():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; choose a directory you can write to") from error


def load_settings(path: Path) -> StudyConfig:
    """The settings of the study in a run: those it was started with, else what its stages recorded.

    What permits code or pickles is asked for on the command line of every call and never taken from a run.
    """
    run = open_run(path)
    names = {item.name for item in dataclasses.fields(StudyConfig)} - {"path"}
    kept = path / SETTINGS
    values: Json = {}
    if kept.is_file():
        with reading(kept, "remove it, and give the settings as flags"):
            values = json.loads(kept.read_text(encoding="utf-8"))
    else:
        values = dict(run.manifest["config"])
    if not isinstance(values, dict):
        raise RunError(f"{kept} holds no settings; remove it, and give them as flags")
    known = {name: value for name, value in values.items() if name in names}
    try:
        return from_mapping(StudyConfig, {**without_permissions(StudyConfig, known), "path": str(path)})
    except ConfigError as error:
        file = kept if kept.is_file() else path / MANIFEST
        raise RunError(f"{file} holds settings that cannot be used: {error}; mend or remove it") from error
