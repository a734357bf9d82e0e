"""Named studies: a recipe is a function that returns a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rocktokens.causal.settings import BaselineConfig, GraftConfig, KnockoutConfig
from rocktokens.compare.settings import CompareConfig
from rocktokens.detect.settings import DetectConfig
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.sample.settings import RolloutConfig
from rocktokens.score.settings import ScoreConfig
from rocktokens.study_settings import StudyConfig
from rocktokens.train.settings import DistillConfig
from rocktokens.world import world_names


def world_recipe(name: str) -> StudyConfig:
    """A built-in world: a tiny pair with planted truth, offline, minutes on two cores."""
    return StudyConfig(
        path=Path("runs") / name,
        prompts=PromptsConfig(source=name, limit=5000),
        distill=DistillConfig(learning_rate=3e-4, max_new_tokens=80, evaluate_every=50, telemetry_every=50),
        rollouts=RolloutConfig(max_new_tokens=80, batch_size=256),
        knockout=KnockoutConfig(top=40),
        graft=GraftConfig(problems=500),
        # Three seeds: fewer decide nothing. `rocktokens compare` takes all of the steps.
        compare=CompareConfig(regimes=("uniform", "freeze", "random"), seeds=3, steps=60, evaluations=2),
    )


QWEN_STUDENT = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
QWEN_TEACHER = "Qwen/Qwen2.5-Coder-1.5B-Instruct"
QWEN_LENGTH = 64  # tokens; four rollouts of five are shorter (docs/results/qwen.md)
QWEN_TASK = ("min_terms=3", "max_terms=3", "min_digits=1", "max_digits=2")


def qwen_recipe() -> StudyConfig:
    """Two models that others trained apart, on a reasoning-gym task that was chosen by measurement (docs/qwen.md).

    Memory of the training, of 20 GB at most: the student's float32 weights, gradients and Adam moments (10 GB with a
    head of its own), the teacher in bfloat16 (3.6 GB), activations and rows of logits.
    """
    return StudyConfig(
        path=Path("runs") / "qwen",
        # Weights that are trained are float32 whatever this says; the teacher, and what only samples or scores, is not.
        pair=PairConfig(student=QWEN_STUDENT, teacher=QWEN_TEACHER, dtype="bfloat16"),
        prompts=PromptsConfig(source="reasoning-gym:chain_sum", options=QWEN_TASK, chat=True, limit=4000),
        problems=64,
        detection_prompts=400,
        distill=DistillConfig(
            steps=240,
            hours=5.0,
            learning_rate=3e-6,  # by pilots: 1e-5 and 3e-5 lower the accuracy (docs/results/qwen.md)
            prompts_per_step=4,
            rollouts_per_prompt=2,
            max_new_tokens=QWEN_LENGTH,
            micro_batch=8,
            bf16=True,
            keep=6,
            save_every=10,
            evaluate_every=40,
            telemetry_every=10,
        ),
        rollouts=RolloutConfig(num_rollouts=1, max_new_tokens=QWEN_LENGTH, batch_size=64),
        score=ScoreConfig(token_budget=4096),
        detect=DetectConfig(k=100),
        baseline=BaselineConfig(problems=400, rollouts=1, batch_size=64),
        knockout=KnockoutConfig(top=100, kinds=("token", "window", "family"), wider_sets_of="rocks"),
        graft=GraftConfig(problems=200),
        compare=CompareConfig(
            # The bypass list where there is one; beside it what the paper would leave out.
            regimes=("uniform", "freeze", "freeze_rocks", "random"),
            definition="context",
            seeds=3,  # fewer decide nothing
            steps=40,
            evaluations=2,
            problems=200,
            rollouts=2,
            contexts=100,
        ),
    )


def quick_left_out(recipe: str | None) -> str:
    """What a quick study leaves out, for its last lines; `recipe` is the word that the study was called with."""
    return (
        "This was --quick: 60 training steps, 150 detection prompts, a census of 12 candidates on 150 prompts, one "
        "seed and 30 steps in the comparison, no controls. Effects below several points cannot be seen. The whole "
        f"study: rocktokens study {recipe or 'arithmetic'}."
    )


def quick(config: StudyConfig) -> StudyConfig:
    """The same study, true but small: every stage runs, on as little data as still says something."""
    return replace(
        config,
        path=config.path.with_name(f"{config.path.name}-quick"),
        problems=100,
        detection_prompts=150,
        distill=replace(config.distill, steps=60, keep=3, evaluate_every=60, telemetry_every=20),
        baseline=replace(config.baseline, problems=150),
        knockout=replace(config.knockout, top=12, controls=False, resamples=2000),
        graft=replace(config.graft, problems=60, clusters=False, resamples=2000),
        compare=replace(
            config.compare,
            regimes=("uniform", "freeze_rocks"),
            seeds=1,
            steps=30,
            evaluations=1,
            problems=200,
            rollouts=2,
        ),
    )


def recipes() -> dict[str, Callable[[], StudyConfig]]:
    """Every named recipe."""
    worlds = {name: (lambda name=name: world_recipe(name)) for name in world_names()}  # type: ignore[misc]
    return {**worlds, "qwen": qwen_recipe}
