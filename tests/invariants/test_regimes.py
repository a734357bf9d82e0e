"""Regimes of a comparison differ in nothing but what they leave out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import distilling
import pyarrow.parquet as pq
import pytest

from rocktokens.compare.regimes import FrozenSets, common_base, regime_config
from rocktokens.compare.settings import CompareConfig
from rocktokens.run import Run
from rocktokens.train.distill import distill as lm_distill
from rocktokens.train.settings import DistillConfig

ROCKS = tuple(range(5, 20))
SETTINGS = CompareConfig(prefix=0.5)
TRAINED = DistillConfig(learning_rate=1e-3, max_new_tokens=12, prompts_per_step=8, rollouts_per_prompt=2)


def first_step(regime: str, path: Path) -> tuple[dict[tuple[str, int], int], dict]:
    """A regime trained for one step: (rollout, position) → token, and the step's record."""
    base = common_base(TRAINED, SETTINGS, steps=1)
    config = regime_config(regime, base, SETTINGS, seed=0, sets=FrozenSets(ROCKS, ROCKS))
    run = Run.create(path / regime)
    config = replace(config, telemetry_every=1)
    found = lm_distill(config, distilling.pair(), distilling.prompts(), run, rocks=ROCKS, show=False)
    rows = pq.read_table(run.path / "telemetry" / "step=1").to_pylist()
    return {(row["rollout_id"], row["position"]): row["token_id"] for row in rows}, found.record.rows[0]


def test_first_step_rollouts_are_the_same_and_random_freezes_as_many_as_freeze(tmp_path):
    uniform, _ = first_step("uniform", tmp_path)
    kept = {}
    for regime, longest in (("freeze", 12), ("random", 12), ("prefix", 6)):
        own, row = first_step(regime, tmp_path)
        kept[regime] = row["kept_share"] * row["tokens"]
        assert row["tokens"] == len(own)
        assert own == {place: token for place, token in uniform.items() if place[1] < longest}
    assert kept["random"] == pytest.approx(kept["freeze"], rel=0.01)
    assert kept["freeze"] == pytest.approx(sum(token not in ROCKS for token in uniform.values()))
