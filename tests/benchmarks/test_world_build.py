"""The command that makes a pair, and whether the shipped pairs are what their manifests say."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import world_train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from world_build import MANIFEST, described, file_hashes, right_of
from world_corpus import RECIPES, ModelSpec
from world_train import train_model

from rocktokens.stats import wilson_interval
from rocktokens.world import get_world, world_names

every_world = pytest.mark.parametrize("name", world_names())
TINY = ModelSpec(width=16, layers=1, heads=2, mlp=16, steps=7, lr=1e-2, batch=4, grow=4)


@pytest.fixture
def tiny_world():
    return dataclasses.replace(RECIPES["arithmetic"], teacher_model=TINY, student_model=TINY)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


# ---------------------------------------------------------------- the shipped pairs


@every_world
def test_shipped_files_are_what_the_manifest_says(name):
    world = get_world(name)
    manifest = json.loads((world.path / MANIFEST).read_text())
    assert manifest["files"] == file_hashes(world.path)
    assert manifest["recipe"] == json.loads(json.dumps(described(RECIPES[name])))
    assert {"python", "torch", "transformers", "tokenizers", "safetensors"} <= manifest["versions"].keys()
    accuracy = manifest["accuracy"]
    assert accuracy["teacher"]["num_problems"] >= 1000
    assert name != "arithmetic" or accuracy["teacher"]["value"] >= 0.90
    assert 0.30 <= accuracy["student"]["value"] <= 0.60
    problems = world.problems("detection", 100, seed=1)  # other problems than the manifest's
    for who in ("teacher", "student"):
        tokenizer, model = (kind.from_pretrained(world.path / who) for kind in (AutoTokenizer, AutoModelForCausalLM))
        assert tokenizer.get_vocab() == world.vocabulary
        ends = model.generation_config
        assert (ends.eos_token_id, ends.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
        assert {path.suffix for path in (world.path / who).iterdir()} <= {".json", ".safetensors"}
        right = int(right_of(world, model, tokenizer, problems, banned=[]).sum())
        _, low, high, _ = wilson_interval(right, 100, level=0.999)
        assert low <= accuracy[who]["value"] <= high


# ---------------------------------------------------------------- the command


def test_a_killed_training_resumes_and_ends_with_the_same_weights(tiny_world, tmp_path, monkeypatch):
    monkeypatch.setattr(world_train, "CHECKPOINT_EVERY", 2)
    train_model(tiny_world, "teacher", tmp_path / "whole")

    def die(step: int, loss: float) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_model(tiny_world, "teacher", tmp_path / "killed", die)
    seen = []
    train_model(tiny_world, "teacher", tmp_path / "killed", lambda step, loss: seen.append(step))
    assert seen == [5, 6, 7]  # from the checkpoint of step 4 on

    whole, resumed = weights(tmp_path / "whole/teacher"), weights(tmp_path / "killed/teacher")
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert sorted(p.name for p in (tmp_path / "killed").iterdir()) == ["teacher"]
