"""Our trainer against the installed TRL: the same training without a selector, and the seams we stand on, pinned."""

from __future__ import annotations

import inspect
from importlib.metadata import requires, version

import distilling
import pytest
import torch
from packaging.requirements import Requirement
from transformers import Trainer
from trl import DistillationConfig, DistillationTrainer

from rocktokens import RockDistillationTrainer


@pytest.mark.parametrize(("beta", "temperature"), [(1.0, 1.0), (0.5, 1.0), (0.0, 1.0), (1.0, 0.7)])
def test_loss_and_gradients_equal_stock_trl(tmp_path, beta, temperature):
    given = {"beta": beta, "temperature": temperature}
    ours, gradient = distilling.one_step(tmp_path, given)
    stock, wanted = distilling.one_step(tmp_path, given, trainer=DistillationTrainer)
    size = max(float(own.abs().max()) for own in wanted.values())
    assert size > 1e-3
    for name in ("loss", "entropy"):
        assert ours.state.log_history[0][name] == pytest.approx(stock.state.log_history[0][name], rel=1e-5)
    assert distilling.furthest(gradient, wanted) < 1e-5 * size


def test_installed_trl_is_in_the_supported_range():
    wanted = next(r for r in map(Requirement, requires("rocktokens")) if r.name == "trl")
    assert str(wanted.specifier) == "<2,>=1.16"
    assert version("trl") in wanted.specifier


# Method of TRL or transformers that we override or call → its parameters.
SEAMS = {
    "_compute_loss": ["unwrapped_student", "inputs", "num_items_in_batch"],
    "_generate_single_turn": ["prompt_ids", "images", "multimodal_fields", "has_tool_images"],
    "_generate_and_score_completions": ["inputs"],
    "_tokenize_prompts": ["prompts"],
    "_get_train_sampler": ["dataset"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "_save_checkpoint": ["model", "trial"],
    "_save_rng_state": ["output_dir"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
}
CALLED = ("_get_last_hidden_state", "save_model", "_save", "_get_output_dir")


def test_what_we_override_and_call_is_still_there_with_its_parameters():
    found = {name: list(inspect.signature(getattr(DistillationTrainer, name)).parameters)[1:] for name in SEAMS}
    assert found == SEAMS
    assert all(callable(getattr(DistillationTrainer, name)) for name in CALLED)
    assert "logits_to_keep" in inspect.signature(DistillationTrainer._get_last_hidden_state).parameters


def test_nothing_else_of_trl_is_overridden():
    ours = {
        name
        for kind in RockDistillationTrainer.__mro__
        if kind.__module__.startswith("rocktokens")
        for name in vars(kind)
    }
    theirs = {name for kind in DistillationTrainer.__mro__ for name in vars(kind)}
    overridden = {name for name in ours & theirs if not name.startswith("__")}
    assert overridden == {*SEAMS, "train"}


def test_a_checkpoint_is_complete_when_trainer_state_json_is_there():
    # Our state is saved with the random state; the file that says "complete" must come later, rotation after that.
    source = inspect.getsource(Trainer._save_checkpoint)
    order = [
        source.index(part) for part in ("save_model", "_save_rng_state", "TRAINER_STATE_NAME", "rotate_checkpoints")
    ]
    assert order == sorted(order)


def test_trl_still_generates_a_whole_optimiser_step_at_once():
    source = inspect.getsource(DistillationTrainer._prepare_inputs)
    assert "generate_every = self.args.gradient_accumulation_steps" in source
    assert "shuffle_sequence_dict" in source  # weights and row numbers travel through it as tensors
    assert DistillationTrainer.loss_is_scaled_for_ga is True


def test_defaults_are_chosen_for_the_device(tmp_path):
    from rocktokens.train.trainer import device_arguments

    stock, ours = DistillationConfig(str(tmp_path), use_cpu=True), device_arguments(str(tmp_path))
    assert stock.bf16
    assert stock.gradient_checkpointing
    if not torch.cuda.is_available():
        assert not ours.bf16
        assert not ours.gradient_checkpointing
    assert device_arguments(str(tmp_path), gradient_checkpointing=True).gradient_checkpointing
    assert (ours.beta, ours.temperature, ours.top_p) == (1.0, 1.0, 1.0)
