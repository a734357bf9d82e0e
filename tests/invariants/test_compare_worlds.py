"""The verdict differs where the truth differs: full comparisons in the built-in worlds, many minutes each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rocktokens.compare.settings import CompareConfig, Regime
from rocktokens.compare.stage import compare
from rocktokens.study import study, world_recipe
from rocktokens.world import get_world

pytestmark = pytest.mark.slow


def compared(name: str, path: Path, *regimes: Regime) -> tuple[dict[str, dict], list[str]]:
    """A comparison over three seeds, from the world's shipped pair: readings by regime, and the sentences."""
    study(replace(world_recipe(name), path=path, stages=("distill", "sample")))
    planted = get_world(name).truth().rocks.ids
    facts = compare(path, CompareConfig(regimes=("uniform", *regimes), rocks=planted)).facts("compare")
    return {row["regime"]: row for row in facts["regimes"]}, facts["verdicts"]


def test_in_the_default_world_rocks_can_be_skipped(tmp_path):
    found, _ = compared("arithmetic", tmp_path / "run", "freeze")
    assert abs(found["freeze"]["delta"]) <= 0.02
    assert found["freeze"]["verdict"] != "costs"


def test_in_the_cornerstone_world_freezing_costs_and_the_verdict_says_so(tmp_path):
    found, verdicts = compared("cornerstone", tmp_path / "run", "freeze", "random")
    assert found["freeze"]["delta"] <= -0.05
    assert found["freeze"]["verdict"] == "costs"
    assert verdicts[0].startswith("The types on the bypass list are cornerstones here")
