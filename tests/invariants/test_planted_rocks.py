"""Planted truth: after OPD the declared rocks are what cannot be learned, in every built-in world.

OPD runs in plain PyTorch (`examples/minimal_loop.py`) until its loss has stopped falling.
Thresholds are the defaults; only the K of the other definitions is given, the number planted.
"""

from __future__ import annotations

import pytest
import torch
from flat_loop import LONG, QUICK, distilled

from rocktokens.detect.rocks import detect_rocks
from rocktokens.detect.settings import DetectConfig
from rocktokens.world import get_world, world_names

PROMPTS = 400


def found_in(name: str, steps: int, factory: pytest.TempPathFactory):
    """The world, and what detection says of its student after OPD."""
    world, run = get_world(name), distilled(name, steps, factory)
    held_out = [run.tokenizer(p.prompt)["input_ids"] for p in world.problems("detection", PROMPTS, seed=5)]
    rollouts = run.loop.sample(run.student, held_out, rng=torch.Generator().manual_seed(5), **run.ends)
    token_N, (pre_N, post_N) = run.loop.score([run.before, run.student], run.teacher, rollouts)
    _, seen_BT, start = rollouts
    rollout_N, position_N = seen_BT[:, start:].bool().nonzero().unbind(1)
    table = {
        "rollout_id": rollout_N.numpy(),
        "prompt_id": rollout_N.numpy(),
        "position": position_N.numpy(),
        "token_id": token_N.numpy(),
        "loss": post_N.numpy(),
        "loss_pre": pre_N.numpy(),
    }
    embedding_VH = run.student.get_input_embeddings().weight.detach().numpy()
    config = DetectConfig(k=len(world.truth().rocks))
    return world, detect_rocks(table, run.tokenizer, config, embedding_VH=embedding_VH)


# The default world's short distillation serves test_facts too; long ones take a minute each and run with -m slow.
WORLDS = [pytest.param(name, LONG, marks=pytest.mark.slow) for name in world_names()]


@pytest.mark.parametrize(("name", "steps"), [("arithmetic", QUICK), *WORLDS])
def test_what_cannot_be_learned_is_declared_and_nothing_else(name, steps, tmp_path_factory):
    """The declared rocks are what the hidden table chooses; where its markers are learned in part, none is declared."""
    world, report = found_in(name, steps, tmp_path_factory)
    truth = world.truth()
    texts = {token_id: text for text, token_id in world.vocabulary.items()}
    declared = [texts[token_id] for token_id in report.rocks.tolist()]
    costly = {texts[t]: kind for kind, ids in report.classes.items() for t in ids.tolist()}
    if truth.rocks_level_off:
        assert declared == [], costly
        assert all(costly.get(token, "").startswith("learning") for token in truth.rocks.tokens), costly
    else:
        assert set(declared) == set(truth.unlearnable.tokens), costly
        assert set(report.confirmed.tolist()) == set(truth.unlearnable.ids)
        footprints = {row["name"]: row for row in report.tables["footprints"].to_pylist()}
        assert footprints["certified"]["enrichment_low"] >= 3  # on the other half

    planted = set(truth.rocks.ids)
    context = set(report.sets["context"].tolist())
    assert len(planted & context) / len(planted) >= 0.9, [texts[t] for t in sorted(context)]
