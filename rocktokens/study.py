"""`rocktokens study`: the whole story of a pair, stage after stage, each resumable; and the recipes that fill it in.

A recipe is a function that returns a configuration. A study that was stopped goes on with the same command.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from rocktokens.config import (
    BaselineConfig,
    CompareConfig,
    DetectConfig,
    DistillConfig,
    GeometryConfig,
    GraftConfig,
    KnockoutConfig,
    PairConfig,
    PromptsConfig,
    RolloutConfig,
    ScoreConfig,
    require,
)
from rocktokens.world import world_names

log = logging.getLogger(__name__)

Stage = Literal["distill", "sample", "score", "detect", "geometry", "knockout", "graft", "compare", "report"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Distil, record what every token costs, find the rocks, test whether they matter, and report."""

    path: Path = Path("runs/study")
    """The run directory; made if it is not there."""
    stages: tuple[Stage, ...] = STAGES
    """Which stages to run, in their fixed order; those that are complete do nothing."""
    make: Literal["smollm2"] | None = None
    """A pair, and prompts for it, to make first, once, in the user's cache, where `pair` and `prompts` name none."""
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
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    knockout: KnockoutConfig = field(default_factory=KnockoutConfig)
    graft: GraftConfig = field(default_factory=GraftConfig)
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
        knockout=KnockoutConfig(top=40),
        graft=GraftConfig(problems=500),
        # The loss has stopped falling by then; `rocktokens compare` takes three seeds and all of the steps.
        compare=CompareConfig(regimes=("uniform", "freeze", "random"), seeds=1, steps=150, evaluations=5),
    )


def recipes() -> dict[str, Callable[[], StudyConfig]]:
    """Every named recipe."""
    worlds = {name: (lambda name=name: world_recipe(name)) for name in world_names()}  # type: ignore[misc]
    return {**worlds, "smollm2": _smollm2_recipe}


def _smollm2_recipe() -> StudyConfig:
    from rocktokens.smollm2.recipe import smollm2_recipe  # it fills in a StudyConfig, so it is read after this module

    return smollm2_recipe()


def study(config: StudyConfig) -> None:
    """Run the chosen stages in order under one display, and close with what was found."""
    from rocktokens.outlook import expected
    from rocktokens.progress import stages
    from rocktokens.smollm2.recipe import with_made_pair

    start = time.monotonic()
    config = with_made_pair(config)
    with stages(expected(config, _complete(config.path))) as overall:
        for stage in (stage for stage in STAGES if stage in config.stages):
            with overall.stage(stage):
                _run_stage(stage, config)
    _summary(config.path, time.monotonic() - start)


def _complete(path: Path) -> set[str]:
    from rocktokens.runs.store import MANIFEST, open_run

    return set(open_run(path).manifest["stages"]) if (path / MANIFEST).exists() else set()


def _run_stage(stage: Stage, config: StudyConfig) -> None:
    from rocktokens import causal, comparing, finding, pipeline, reporting

    path = config.path
    if stage in ("knockout", "graft", "compare") and not _has_answers(path):
        log.info("no answers to check: %s is left out, accuracy has no meaning here", stage)
        return
    if stage == "graft" and not config.graft.rocks and _found_no_rocks(path):
        log.info("detect found no rocks: there is nothing to graft, and the stage is left out")
        return
    work: dict[Stage, Callable[[], object]] = {
        "distill": lambda: pipeline.distill(
            path, config.pair, config.prompts, config.distill, problems=config.problems
        ),
        "sample": lambda: pipeline.sample(
            path, config.pair, config.prompts, config.rollouts, limit=config.detection_prompts
        ),
        "score": lambda: pipeline.score(path, config.score),
        "detect": lambda: finding.detect(path, config.detect),
        "geometry": lambda: finding.geometry(path, config.geometry),
        "knockout": lambda: causal.knockout(path, config.knockout, config.baseline),
        "graft": lambda: causal.graft(path, config.graft, config.baseline),
        "compare": lambda: comparing.compare(path, config.compare),
        "report": lambda: reporting.report(path),
    }
    work[stage]()


def _has_answers(path: Path) -> bool:
    from rocktokens.runs.store import open_run

    run = open_run(path)
    return not run.done("sample") or bool(run.facts("sample")["checked"])


def _found_no_rocks(path: Path) -> bool:
    from rocktokens.runs.store import open_run

    run = open_run(path)
    return run.done("detect") and not run.facts("detect")["rocks"]


def _summary(path: Path, seconds: float) -> None:
    """Ten lines: what was found, every number with its interval, and where the report lies."""
    from rocktokens.progress import clock
    from rocktokens.report.facts import Facts
    from rocktokens.report.summary import summary
    from rocktokens.runs.store import open_run

    run = open_run(path)
    student, teacher = Facts(run).pair
    print(f"\nStudy of {path} ({student} from {teacher}), {clock(seconds)} this time; intervals are 95 %")
    for name, text in summary(Facts(run), path / "report.html" if run.done("report") else None):
        print(f"  {name:10}  {text}")
