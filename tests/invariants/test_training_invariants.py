"""Things that must be equal: micro-batches, processes, shards, interrupted and uninterrupted runs."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import random
import signal
import time
from pathlib import Path

import distilling
import distilling_worker
import pytest
import torch
from forking import as_torchrun
from safetensors.torch import load_file
from small_runs import DISTILL, save_pair
from transformers import AutoModelForCausalLM

from rocktokens import cli, make_selector
from rocktokens.models.pair import load_pair
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import load_prompts
from rocktokens.run import Run, open_run
from rocktokens.select.settings import SelectorConfig
from rocktokens.train.distill import distill
from rocktokens.train.settings import DistillConfig
from rocktokens.train.stage import distill as distill_stage
from rocktokens.world import get_world


@pytest.mark.parametrize("selector", ["uniform", "soft", "divergence"])
def test_gradient_accumulation_changes_nothing(tmp_path, selector):
    options = {"soft": {"rocks": range(5, 30), "lam": 0.3}}.get(selector, {})
    losses, moved = [], []
    for micro, passes in ((16, 1), (1, 16)):
        trainer, gradient = distilling.one_step(
            tmp_path,
            {"per_device_train_batch_size": micro, "gradient_accumulation_steps": passes},
            selector=make_selector(selector, **options),
            generation="ours",
        )
        losses.append(trainer.record.rows[0]["loss"])
        moved.append(gradient)
    size = max(float(gradient.abs().max()) for gradient in moved[0].values())
    assert size > 1e-3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert distilling.furthest(moved[1], moved[0]) < 1e-5 * size


def launch(kind: str, directory: Path) -> None:
    directory.mkdir()
    as_torchrun(lambda: distilling_worker.main(kind, directory), directory / "logs")


def test_the_command_under_torchrun_makes_one_run(tmp_path):
    """Two processes with torchrun's environment; torchrun itself starts those of the test below."""
    settings = ["--steps", "2", "--prompts-per-step", "4", "--rollouts-per-prompt", "2", "--problems", "8"]
    settings += ["--max-new-tokens", "24", "--keep", "1", "--prompts.limit", "40", "--telemetry-every", "2"]
    words = ["distill", str(tmp_path / "run"), "--prompts.source", "arithmetic", *settings]

    assert as_torchrun(lambda: cli.main(words), tmp_path / "first").count("run: ") == 1
    run = open_run(tmp_path / "run")
    assert run.done("distill")
    assert run.checkpoints() == [0, 2]
    # The global batch is what was asked for, not that much on every process.
    assert run.query("select count(distinct rollout_id) from telemetry where step = 2").column(0).to_pylist() == [8]
    again = as_torchrun(lambda: cli.main(words), tmp_path / "again")
    assert again.count("run: ") == 1  # complete: a second call trains nothing
    assert open_run(tmp_path / "run").manifest == run.manifest


@pytest.mark.slow
def test_a_stage_starts_its_own_processes_and_trains_what_one_trains(tmp_path):
    """--distill.processes 2: torchrun for this stage alone."""
    pair, prompts = save_pair(tmp_path)
    for processes in (1, 2):
        config = dataclasses.replace(DISTILL, processes=processes)
        run = distill_stage(tmp_path / str(processes), pair, prompts, config, problems=4)
        assert run.done("distill")
    one, two = (load_file(tmp_path / name / "checkpoints" / "step=2" / "model.safetensors") for name in "12")
    assert distilling.furthest(one, two) < 1e-6


def weights(directory: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(directory / "run" / "checkpoints" / f"step={step}" / "model.safetensors")


def test_two_processes_take_the_step_of_one(tmp_path):
    launch("plain", tmp_path / "two")
    (tmp_path / "one").mkdir()
    distilling_worker.main("plain", tmp_path / "one")
    assert json.loads((tmp_path / "two" / "facts.json").read_text()) == {
        "processes": 2,
        "wrapped": "DistributedDataParallel",
    }

    assert distilling.furthest(weights(tmp_path / "one", 0), weights(tmp_path / "two", 0)) == 0
    assert distilling.furthest(weights(tmp_path / "one", 0), weights(tmp_path / "one", 2)) > 1e-3
    assert distilling.furthest(weights(tmp_path / "one", 2), weights(tmp_path / "two", 2)) < 1e-6
    one, two = (torch.load(tmp_path / name / "found.pt") for name in ("one", "two"))
    torch.testing.assert_close(one["sums"], two["sums"], rtol=1e-5, atol=1e-3)
    for first, second in zip(one["rows"], two["rows"]):
        for name in first.keys() - {key for key in first if key.startswith("seconds")}:
            if name in ("flops_rollout", "flops_teacher", "flops_student"):  # one process computes a prompt once
                assert first[name] < second[name], name
            else:
                assert second[name] == pytest.approx(first[name], rel=1e-5), name

    # Parts of both ranks lie side by side and hold the rows of the one.
    table = {}
    for name in ("one", "two"):
        files = sorted((tmp_path / name / "run" / "telemetry" / "step=2").glob("*.parquet"))
        assert len(files) == {"one": 1, "two": 2}[name]
        table[name] = open_run(tmp_path / name / "run").query(
            f"select rollout_id, position, token_id, kl from read_parquet('{files[0].parent}/*.parquet') order by 1, 2"
        )
    assert table["one"].select([0, 1, 2]) == table["two"].select([0, 1, 2])


def test_fsdp2_on_two_processes_takes_the_same_step_and_saves_a_model_that_loads_alone(tmp_path):
    launch("fsdp2", tmp_path / "two")
    (tmp_path / "one").mkdir()
    distilling_worker.main("greedy", tmp_path / "one")
    facts = json.loads((tmp_path / "two" / "facts.json").read_text())
    assert facts["processes"] == 2
    assert facts["wrapped"].startswith("FSDP")
    assert distilling.furthest(weights(tmp_path / "one", 2), weights(tmp_path / "two", 2)) < 1e-5
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "run" / "checkpoints" / "step=2")
    moved = distilling.furthest(distilling.parameters(loaded), distilling.parameters(distilling.student()))
    assert moved > 1e-3


def distil_into(path: Path, generation: str) -> None:
    """6 prompts a step of 20 prompts: a new epoch every 3 steps, so that a resume falls into a later one.

    With our sampler on the built-in world, with TRL's generation on a random pair.
    """
    pair, prompts, check, rocks = distilling.pair(), distilling.prompts(20), lambda text, answer: answer in text, (5, 6)
    if generation == "ours":
        world, source = get_world("arithmetic"), PromptsConfig(source="arithmetic", split="train", limit=20)
        pair = load_pair(PairConfig(student=str(world.student_path), teacher=str(world.teacher_path), threads=1))
        prompts, check = load_prompts(source, pair.tokenizer), world.check
        rocks = world.truth().rocks.ids
    config = DistillConfig(
        steps=12,
        prompts_per_step=6,
        rollouts_per_prompt=2,
        micro_batch=4,
        max_new_tokens=8 if generation == "trl" else 24,
        learning_rate=1e-3,
        keep=2,
        save_every=5,
        telemetry_every=4,
        evaluate_every=6,
        selector=SelectorConfig(name="random", lam=0.2),
        shadows=("adaptive",),
        generation=generation,
    )
    distill(config, pair, prompts, Run.create(path, {}), rocks=rocks, problems=prompts, check=check, show=False)


@pytest.mark.parametrize("generation", ["ours", "trl"])
def test_a_run_killed_at_any_moment_ends_as_if_it_had_not_been(tmp_path, generation):
    distil_into(tmp_path / "whole", generation)
    process = multiprocessing.get_context("fork").Process(target=distil_into, args=(tmp_path / "killed", generation))
    process.start()
    resume = tmp_path / "killed" / "checkpoints" / ".resume"
    while not list(resume.glob("checkpoint-*")):
        assert process.is_alive()
        time.sleep(0.005)
    time.sleep(
        random.uniform(0, 1.0 if generation == "ours" else 0.4)
    )  # anywhere: within a step, a checkpoint or an evaluation
    process.kill()
    process.join()
    assert process.exitcode in (-signal.SIGKILL, 0)  # 0: it was done before the signal came
    distil_into(tmp_path / "killed", generation)

    for step in (0, 6, 12):
        name = f"checkpoints/step={step}/model.safetensors"
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
    whole, killed = (open_run(tmp_path / name).read("training") for name in ("whole", "killed"))
    assert whole["step"].to_pylist() == list(range(13))
    columns = [name for name in whole.column_names if not name.startswith("seconds")]
    assert whole.select(columns) == killed.select(columns)
    for name in ("whole", "killed"):
        assert sorted(path.name for path in (tmp_path / name / "telemetry").iterdir()) == sorted(
            f"step={step}" for step in range(4, 13, 4)
        )
