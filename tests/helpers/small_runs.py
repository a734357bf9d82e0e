"""Runs over a tiny random pair, made in about a second by the real stages, for tests of stages and of the campaign."""

from __future__ import annotations

import json
from pathlib import Path

from tiny import save_model, tiny_model

from rocktokens.detect.settings import DetectConfig
from rocktokens.detect.stage import detect
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.sample.stage import sample
from rocktokens.score.settings import ScoreConfig
from rocktokens.score.stage import score
from rocktokens.train.settings import DistillConfig
from rocktokens.train.stage import distill

ROLLOUTS = RolloutConfig(num_rollouts=2, max_new_tokens=12)
DETECT = DetectConfig(resamples=100)
DISTILL = DistillConfig(steps=2, prompts_per_step=4, rollouts_per_prompt=2, max_new_tokens=8, keep=1, telemetry_every=1)


def save_pair(home: Path, *, prompts: int = 40) -> tuple[PairConfig, PromptsConfig]:
    """A student, a teacher and prompts with answers, on disk."""
    student = save_model(home / "student", tiny_model(seed=1))
    teacher = save_model(home / "teacher", tiny_model(seed=2, width=48, vocabulary=66))
    rows = [{"prompt": f"w{3 + i} w{4 + i % 50} w{5 + i % 7}", "answer": f"w{6 + i % 40}"} for i in range(prompts)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pair = PairConfig(student=student, teacher=teacher, threads=1)
    return pair, PromptsConfig(source=str(home / "prompts.jsonl"), checker="exact")


def scored_run(path: Path, pair: PairConfig, prompts: PromptsConfig) -> Run:
    """Sampled, scored and detected."""
    sample(path, pair, prompts, ROLLOUTS)
    score(path, ScoreConfig())
    return detect(path, DETECT)


def distilled_run(path: Path, pair: PairConfig, prompts: PromptsConfig) -> Run:
    """Two steps of distillation."""
    return distill(path, pair, prompts, DISTILL, problems=4)


def joined(run: Run) -> tuple[int, int]:
    """Occurrences, and how many of them name the token that rollouts.parquet has at their place."""
    row = run.query(
        "select count(*) as n, count_if(o.token_id = r.token_ids[o.position + 1]) as same "
        "from occurrences o left join rollouts r using (rollout_id)"
    ).to_pylist()[0]
    return row["n"], row["same"]
