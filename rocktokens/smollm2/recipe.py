"""`rocktokens study smollm2`: the settings of the whole study on the real pair, meant for five hours on two cores.

The budget of every stage, and which of its figures are measured and which only estimated, is in docs/smollm2.md.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from rocktokens.causal.graft_settings import GraftConfig
from rocktokens.causal.settings import BaselineConfig, KnockoutConfig
from rocktokens.compare.settings import CompareConfig
from rocktokens.detect.settings import DetectConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.sample.settings import RolloutConfig
from rocktokens.score.settings import ScoreConfig
from rocktokens.smollm2.cache import cache_directory, packaged_weights
from rocktokens.study_settings import Stage, StudyConfig
from rocktokens.train.settings import DistillConfig

NAME: Literal["smollm2"] = "smollm2"
NEED_MODELS: tuple[Stage, ...] = ("distill", "sample", "score", "knockout", "graft", "compare")
LONGEST = 64  # tokens; worked solutions have 37 on average, 61 at most


def smollm2_recipe() -> StudyConfig:
    """SmolLM2-135M taught a task, and a shortened SmolLM2-135M that learns from it."""
    return StudyConfig(
        path=Path("runs") / NAME,
        make=NAME,
        prompts=PromptsConfig(source=NAME, chat=True, checker="math"),
        problems=100,
        detection_prompts=400,
        distill=DistillConfig(
            steps=320,
            until="saturated",
            hours=2.0,
            learning_rate=5e-5,
            prompts_per_step=8,
            rollouts_per_prompt=2,
            max_new_tokens=LONGEST,
            keep=4,
            save_every=20,
            evaluate_every=40,
            telemetry_every=10,
        ),
        rollouts=RolloutConfig(num_rollouts=1, max_new_tokens=LONGEST, batch_size=100),
        score=ScoreConfig(token_budget=4096),
        # No K is stable with 400 rollouts. Eight types carry, where they are chosen, the paper's 60 % of the loss.
        detect=DetectConfig(k=8),
        baseline=BaselineConfig(problems=300, rollouts=1, batch_size=128),
        knockout=KnockoutConfig(top=100),
        graft=GraftConfig(problems=200),
        compare=CompareConfig(
            regimes=("uniform", "freeze", "random", "adaptive"),
            seeds=1,
            steps=24,
            evaluations=2,
            problems=200,
            rollouts=2,
            contexts=100,
        ),
    )


def with_made_pair(config: StudyConfig) -> StudyConfig:
    """The study with the pair and the prompts that it leaves open; they are made now if the cache lacks them."""
    if config.make is None or not set(NEED_MODELS) & set(config.stages):
        return config
    weights = packaged_weights()
    from rocktokens.smollm2.make import MakeConfig, make_pair
    from rocktokens.smollm2.teach import bf16_instructions

    made = make_pair(weights, cache_directory(), MakeConfig(threads=config.pair.threads))
    pair, prompts = config.pair, config.prompts
    if not pair.student and not pair.teacher:
        pair = dataclasses.replace(pair, student=str(made.student), teacher=str(made.teacher))
    if prompts.source == NAME:
        prompts = dataclasses.replace(prompts, source=str(made.prompts))
    distill = config.distill
    if distill.bf16 is None:
        distill = dataclasses.replace(distill, bf16=bf16_instructions())
    return dataclasses.replace(config, pair=pair, prompts=prompts, distill=distill)
