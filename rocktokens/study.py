"""`rocktokens study`: the whole story of a pair, stage after stage, each resumable; and the recipes that fill it in.

A recipe is a function that returns a configuration. A study that was stopped goes on with the same command.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rocktokens.config import (
    CompareConfig,
    DetectConfig,
    DistillConfig,
    GeometryConfig,
    PairConfig,
    PromptsConfig,
    RolloutConfig,
    ScoreConfig,
    require,
)
from rocktokens.world import world_names

log = logging.getLogger(__name__)

Stage = Literal["distill", "sample", "score", "detect", "geometry", "compare"]
STAGES: tuple[Stage, ...] = ("distill", "sample", "score", "detect", "geometry", "compare")


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Distil, record what every token costs, find the rocks, test whether they matter, and report."""

    path: Path = Path("runs/study")
    """The run directory; made if it is not there."""
    stages: tuple[Stage, ...] = STAGES
    """Which stages to run, in their fixed order; those that are complete do nothing."""
    pair: PairConfig = field(default_factory=PairConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    problems: int = 200
    """Held-out problems on which accuracy is measured while training."""
    detection_prompts: int = 400
    """Held-out prompts on which rocks are looked for."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    detect: DetectConfig = field(default_factory=DetectConfig)
    geometry: GeometryConfig = field(default_factory=GeometryConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)

    def __post_init__(self) -> None:
        require(bool(self.stages), f"name at least one stage of {', '.join(STAGES)}")
        require(self.detection_prompts >= 2, "detection_prompts must be at least 2: one half chooses, one measures")


def world_recipe(name: str) -> StudyConfig:
    """A built-in world: a tiny pair with planted truth, offline, minutes on two cores."""
    return StudyConfig(
        path=Path("runs") / name,
        prompts=PromptsConfig(source=name, limit=5000),
        distill=DistillConfig(learning_rate=3e-4, max_new_tokens=80, evaluate_every=50, telemetry_every=50),
        rollouts=RolloutConfig(max_new_tokens=80, batch_size=256),
        compare=CompareConfig(seeds=1, evaluations=6),  # minutes; `rocktokens compare` alone takes three seeds
    )


def recipes() -> dict[str, Callable[[], StudyConfig]]:
    """Every named recipe."""
    return {name: (lambda name=name: world_recipe(name)) for name in world_names()}  # type: ignore[misc]


def study(config: StudyConfig) -> None:
    """Run the chosen stages in order."""
    start = time.monotonic()
    chosen = [stage for stage in STAGES if stage in config.stages]
    for number, stage in enumerate(chosen, start=1):
        log.info("— stage %d of %d: %s (%.0f s so far)", number, len(chosen), stage, time.monotonic() - start)
        _run_stage(stage, config)
    log.info("— study complete in %.0f s: %s", time.monotonic() - start, config.path)


def _run_stage(stage: Stage, config: StudyConfig) -> None:
    from rocktokens import comparing, finding, pipeline

    if stage == "distill":
        pipeline.distill(config.path, config.pair, config.prompts, config.distill, problems=config.problems)
    elif stage == "sample":
        pipeline.sample(config.path, config.pair, config.prompts, config.rollouts, limit=config.detection_prompts)
    elif stage == "score":
        pipeline.score(config.path, config.score)
    elif stage == "detect":
        finding.detect(config.path, config.detect)
    elif stage == "geometry":
        finding.geometry(config.path, config.geometry)
    elif stage == "compare":
        comparing.compare(config.path, config.compare)
