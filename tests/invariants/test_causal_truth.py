"""Planted truth: after OPD the census names pillars, neutrals and the stumbling block; grafts say what rocks are worth.

Minutes a world, so `-m slow`: OPD runs once for each world that ships its pair, through the library's own stages.
"""

from __future__ import annotations

import json

import pytest

from rocktokens.causal.graft import run_graft as graft
from rocktokens.causal.knockout import knockout
from rocktokens.causal.settings import BaselineConfig, GraftConfig, KnockoutConfig
from rocktokens.run import open_run
from rocktokens.world import get_world, world_names

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=world_names())
def distilled(request, tmp_path_factory):
    """A run of the world whose student has been through OPD."""
    from dataclasses import replace

    from rocktokens.study import world_recipe
    from rocktokens.train.stage import distill

    world = get_world(request.param)
    if not (world.student_path / "config.json").exists():
        pytest.skip(f"the pair of {world.name} is not shipped; runs once it is")
    recipe = world_recipe(world.name)
    path = tmp_path_factory.mktemp(world.name) / "run"
    config = replace(recipe.distill, evaluate_every=None)
    distill(path, recipe.pair, recipe.prompts, config)
    return world, path


@pytest.fixture(scope="module")
def census(distilled):
    """The census with the default budget over everything planted."""
    world, path = distilled
    truth = world.truth()
    planted = (truth.rocks, truth.pillars, truth.neutrals, truth.stumbling_blocks)
    candidates = tuple(f"#{token_id}" for tokens in planted for token_id in tokens.ids)
    run = knockout(path, KnockoutConfig(candidates=candidates), BaselineConfig(max_new_tokens=80))
    return world, {row["token_id"]: row for row in run.read("census").to_pylist()}


@pytest.mark.parametrize(
    ("planted", "verdict"),
    [("pillars", "Strong Pillar"), ("neutrals", "Proven Neutral"), ("stumbling_blocks", "Strong Stumbling Block")],
)
def test_planted_types_get_their_verdicts(census, planted, verdict):
    world, rows = census
    ids = getattr(world.truth(), planted).ids
    assert ids
    for row in map(rows.get, ids):
        assert row["verdict"] == verdict, row
        assert verdict == "Proven Neutral" or row["p_bh"] <= 0.05, row


def test_rocks_that_do_not_matter_are_no_pillars(census):
    world, rows = census
    if world.truth().rocks_matter_at_inference:
        pytest.skip(f"the rocks of {world.name} matter at inference by construction")
    for token, token_id in zip(*world.truth().rocks.__dict__.values()):
        row = rows[token_id]
        assert abs(row["delta"]) <= 0.02, (token, row)
        assert row["verdict"] in ("Proven Neutral", "Undecided"), (token, row)


def test_grafts_say_what_rocks_and_content_are_worth(census, distilled):
    world, path = distilled
    rocks = tuple(f"#{token_id}" for token_id in world.truth().rocks.ids)
    run = graft(path, GraftConfig(rocks=rocks, problems=500), BaselineConfig(max_new_tokens=80))
    rows = {row["arm"]: row for row in run.read("grafts").to_pylist()}
    manifest = json.loads((world.path / "manifest.json").read_text())
    ahead = manifest["accuracy"]["teacher"]["value"] - open_run(path).facts("knockout")["accuracy"]
    lead = rows["all"]["gain"]
    assert lead == pytest.approx(ahead, abs=0.05)
    assert rows["rocks"]["gain"] <= 0.02
    if not world.truth().rocks_matter_at_inference:
        assert lead > 0
        assert rows["rest"]["gain"] == pytest.approx(lead, abs=0.04)
    assert open_run(path).facts("graft")["gains"]["rocks"][0] == rows["rocks"]["gain"]
