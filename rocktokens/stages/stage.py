"""What every stage shares: which pair and prompts a run names, and which student a checkpoint name means."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rocktokens.config import PairConfig, PromptsConfig
from rocktokens.config.base import from_mapping
from rocktokens.errors import ConfigError
from rocktokens.runs.store import MANIFEST, Run, open_run


def resolve(path: Path, pair: PairConfig, prompts: PromptsConfig) -> tuple[PairConfig, PromptsConfig]:
    """Fill in the pair: from the run that is there, or the built-in world's own."""
    from rocktokens.world import get_world, world_names

    known: dict[str, Any] = open_run(path).manifest["config"] if (path / MANIFEST).exists() else {}
    if not pair.student and not pair.teacher and "pair" in known:
        pair = dataclasses.replace(from_mapping(PairConfig, known["pair"]), threads=pair.threads)
    if prompts == PromptsConfig() and "prompts" in known:
        prompts = from_mapping(PromptsConfig, known["prompts"])
    if prompts.source in world_names() and not pair.student and not pair.teacher:
        world = get_world(prompts.source)
        pair = dataclasses.replace(pair, student=str(world.student_path), teacher=str(world.teacher_path))
    return pair, prompts


def is_complete(path: Path, stage: str) -> bool:
    """Whether the run at this path lists the stage as complete."""
    return (path / MANIFEST).exists() and open_run(path).done(stage)


def student_source(run: Run, pair: PairConfig, checkpoint: str) -> str:
    """Where the asked-for student lies: a kept checkpoint, or the pair's own."""
    kept = run.checkpoints()
    if checkpoint in ("student", "teacher") or (checkpoint == "last" and not kept):
        return pair.student
    step = kept[-1] if checkpoint == "last" else int(checkpoint) if checkpoint.isdigit() else None
    if step not in kept:
        raise ConfigError(
            f"checkpoint must be last, student, teacher or one of {kept or 'none kept yet'}, got {checkpoint!r}"
        )
    return str(run.checkpoint(step))
