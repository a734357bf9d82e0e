"""Settings of a whole study: one section per stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from msgspec import Meta

from rocktokens.bypass.settings import BypassConfig
from rocktokens.causal.settings import BaselineConfig, GraftConfig, KnockoutConfig
from rocktokens.compare.settings import CompareConfig
from rocktokens.detect.settings import DetectConfig
from rocktokens.geometry.settings import GeometryConfig
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.sample.settings import RolloutConfig
from rocktokens.score.settings import ScoreConfig
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import Count, Pair, Settings
from rocktokens.train.settings import DistillConfig

Stage = Literal["distill", "sample", "score", "detect", "geometry", "knockout", "graft", "bypass", "compare", "report"]


STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True, kw_only=True)
class StudyConfig(Settings):
    """Distil, record what every token costs, find the rocks, test whether they matter, and report."""

    path: Path = field(default_factory=lambda: Path("runs/study"))
    """The run directory; made if it is not there."""
    stages: Annotated[tuple[Stage, ...], Meta(min_length=1)] = STAGES
    """Which stages to run, in their fixed order; those that are complete do nothing."""
    pair: PairConfig = field(default_factory=PairConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    servers: ServersConfig = field(default_factory=ServersConfig)
    problems: Count = 200
    """Held-out prompts on which accuracy is measured while training."""
    detection_prompts: Pair | None = 400
    """Held-out prompts on which rocks are looked for; unset: as many as --prompts.limit says."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    rollouts: RolloutConfig = field(default_factory=RolloutConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    detect: DetectConfig = field(default_factory=DetectConfig)
    geometry: GeometryConfig = field(default_factory=GeometryConfig)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    knockout: KnockoutConfig = field(default_factory=KnockoutConfig)
    graft: GraftConfig = field(default_factory=GraftConfig)
    bypass: BypassConfig = field(default_factory=BypassConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
