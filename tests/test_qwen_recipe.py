"""The recipe `qwen` without its models: its settings, its own path on tiny random Qwen2 models, a GGUF student."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_files import qwen2, write_gguf
from safetensors.torch import load_file
from tiny import letter_tokenizer, save_model, tiny_model

from rocktokens import open_run
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.settings import from_mapping
from rocktokens.study import STAGES, StudyConfig, recipes, study
from rocktokens.train.settings import DistillConfig
from rocktokens.train.stage import distill

REGIMES = ("uniform", "freeze_rocks", "random")
ROCKS = tuple(range(40, 60))
GYM = pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install rocktokens[tasks]")


def small(config, path, pair):
    """The recipe with its own kinds of settings and as little work as goes through every stage."""
    short = {"max_new_tokens": 12}
    compared = {"seeds": 1, "steps": 2, "problems": 4, "rollouts": 1, "contexts": 4, "evaluations": 1, "resamples": 100}
    compared |= {"regimes": REGIMES, "rocks": ROCKS, "definition": None}  # random models have no rocks of their own
    distill = {"steps": 4, "keep": 2, "save_every": 2, "evaluate_every": 4, "telemetry_every": 2, **short}
    return from_mapping(
        StudyConfig,
        {
            **{"path": path, "pair": pair, "prompts": {"limit": 40}, "problems": 4, "detection_prompts": 16},
            **{"distill": distill, "rollouts": {"num_rollouts": 1, **short}, "detect": {"k": 5, "resamples": 100}},
            **{"baseline": {"problems": 8, "rollouts": 1}, "knockout": {"top": 3, "resamples": 200}},
            **{"graft": {"problems": 4, "resamples": 200, "clusters": False}, "compare": compared},
        },
        default=config,
    )


def test_the_whole_study_runs_on_tiny_qwen2_models(tmp_path):
    """The recipe's own path, stage after stage, on reasoning-gym prompts: bfloat16 teacher, float32 master weights."""
    wide = {"vocabulary": 99, "max_position_embeddings": 256}
    pair = {
        "student": save_model(tmp_path / "student", tiny_model("qwen2", **wide), letter_tokenizer()),
        "teacher": save_model(tmp_path / "teacher", tiny_model("qwen2", seed=1, width=48, **wide), letter_tokenizer()),
    }
    study(small(recipes()["qwen"](), tmp_path / "run", pair))
    run = open_run(tmp_path / "run")
    assert all(run.done(stage) for stage in STAGES)
    assert set(run.read("compare")["regime"].to_pylist()) == set(REGIMES)
    assert set(REGIMES) < set(recipes()["qwen"]().compare.regimes)
    assert run.checkpoints() == [0, 2, 4]
    assert run.facts("sample")["rollouts"] == 16
    kept = [load_file(run.checkpoint(step) / "model.safetensors") for step in (0, 4)]
    name = "model.layers.0.mlp.up_proj.weight"
    assert kept[1][name].dtype == torch.float32
    moved = (kept[0][name] != kept[1][name]).float().mean()
    assert moved > 0.9  # bfloat16 weights would stand still at this rate
    asked = letter_tokenizer().decode(run.read("rollouts")["prompt_ids"][0].as_py()).replace(" ", "")
    assert asked.startswith("<start>user:")
    assert asked.endswith("=<eos><start>assistant:")  # a sum of the recipe's task


def test_a_quantised_qwen2_student_learns_from_a_quantised_teacher(tmp_path):
    """As Qwen's own files are: packed weights, byte-level tokenizer, chat template inside the file."""
    student = write_gguf(tmp_path / "student.gguf", qwen2(), "Q8_0")
    teacher = write_gguf(tmp_path / "teacher.gguf", qwen2(1), "Q4_0")
    run = distill(
        tmp_path / "run",
        PairConfig(student=student, teacher=teacher),
        PromptsConfig(source="reasoning-gym:chain_sum", limit=8, chat=True),
        DistillConfig(steps=2, keep=1, prompts_per_step=2, rollouts_per_prompt=2, max_new_tokens=6, learning_rate=1e-3),
    )
    before, after = (load_file(run.checkpoint(step) / "model.safetensors") for step in (0, 2))
    name = "model.layers.0.mlp.up_proj.weight"
    assert before[name].dtype == torch.float32
    assert (before[name] != after[name]).float().mean() > 0.9
    exact = qwen2().state_dict()[name]
    error = (before[name] - exact).abs().max() / exact.abs().max()
    assert 0 < error < 0.01  # rounded to 8 bits, and only that
    assert "quantization_config" not in (Path(run.checkpoint(2)) / "config.json").read_text()
