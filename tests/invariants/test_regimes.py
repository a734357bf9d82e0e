"""Regimes of a comparison differ in nothing but what they leave out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import distilling
import pyarrow.parquet as pq
import pytest
import torch

from rocktokens import make_selector
from rocktokens.compare.regimes import FrozenSets, common_base, regime_config
from rocktokens.compare.settings import CompareConfig
from rocktokens.run import Run
from rocktokens.train.distill import distill as lm_distill
from rocktokens.train.settings import DistillConfig
from rocktokens.train.trainer import RockDistillationTrainer, RockOptions

ROCKS = tuple(range(5, 20))
SETTINGS = CompareConfig(prefix=0.5)
TRAINED = DistillConfig(learning_rate=1e-3, max_new_tokens=12, prompts_per_step=8, rollouts_per_prompt=2)


def training(regime: str, path: Path, *, steps: int = 1, **changes) -> tuple[Run, list[dict]]:
    """A regime trained for a few steps with every occurrence recorded, and its record."""
    base = common_base(TRAINED, SETTINGS, steps=steps)
    config = regime_config(regime, base, SETTINGS, seed=0, sets=FrozenSets(ROCKS, ROCKS))
    run = Run.create(path / regime)
    config = replace(config, telemetry_every=1, **changes)
    found = lm_distill(config, distilling.pair(), distilling.prompts(), run, rocks=ROCKS, show=False)
    return run, found.record.rows


def occurrences(run: Run, step: int) -> dict[tuple[str, int], int]:
    """(rollout, position) → token of one training step."""
    table = pq.read_table(run.path / "telemetry" / f"step={step}")
    return dict(zip(zip(*(table[c].to_pylist() for c in ("rollout_id", "position"))), table["token_id"].to_pylist()))


@pytest.fixture(scope="module")
def uniform(tmp_path_factory) -> dict[tuple[str, int], int]:
    return occurrences(training("uniform", tmp_path_factory.mktemp("uniform"))[0], 1)


@pytest.mark.parametrize(("regime", "longest"), [("freeze", 12), ("random", 12), ("prefix", 6)])
def test_first_step_rollouts_are_the_same(regime, longest, uniform, tmp_path):
    run, rows = training(regime, tmp_path)
    own = occurrences(run, 1)
    assert rows[0]["tokens"] == len(own)
    assert own == {place: token for place, token in uniform.items() if place[1] < longest}


def test_random_freezes_as_many_positions_as_freeze_would(tmp_path):
    run, rows = training("random", tmp_path, steps=3)
    for row in rows:
        tokens = list(occurrences(run, row["step"]).values())
        kept_by_freeze = sum(token not in ROCKS for token in tokens)
        assert row["tokens"] == len(tokens)
        assert abs(row["kept_share"] * row["tokens"] - kept_by_freeze) <= 0.01 * kept_by_freeze, row["step"]


def hidden_gradients(selector: str, path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient at every state that predicts a response token, the token, and whether it counts, for the first step."""
    student, caught = distilling.student(), {}

    def keep(module, arguments, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: caught.setdefault("gradient", gradient.clone()))

    student.model.norm.register_forward_hook(keep)
    args = distilling.arguments(path, per_device_train_batch_size=16, gradient_accumulation_steps=1, max_steps=1)
    options = {"rocks": ROCKS} if selector == "freeze" else {}
    trainer = RockDistillationTrainer(
        student,
        distilling.teacher(),
        args,
        distilling.dataset(),
        processing_class=distilling.tokenizer(),
        selector=make_selector(selector, **options),
        options=RockOptions(normalise="all", generation="ours"),
    )
    step = trainer._compute_loss

    def watched(unwrapped, inputs, number):
        caught.update(token=inputs["completion_ids"], mask=inputs["completion_mask"], row=inputs["row"])
        return step(unwrapped, inputs, number)

    trainer._compute_loss = watched  # reads what goes in; what is computed is the trainer's own
    trainer.train()
    order, width = caught["row"].argsort(), caught["token"].shape[1]
    gradient_BCH = caught["gradient"][:, -width - 1 : -1]
    return gradient_BCH[order], caught["token"][order], caught["mask"][order].bool()


def test_freezing_zeroes_the_rocks_gradient_and_leaves_the_rest(tmp_path):
    uniform_BCH, token_BC, mask_BC = hidden_gradients("uniform", tmp_path / "u")
    freeze_BCH, same_BC, _ = hidden_gradients("freeze", tmp_path / "f")
    assert torch.equal(token_BC, same_BC)
    rock_BC = torch.isin(token_BC, torch.tensor(ROCKS)) & mask_BC
    rest_BC = mask_BC & ~rock_BC
    assert 0.1 < rock_BC.sum() / mask_BC.sum() < 0.5
    assert uniform_BCH[rock_BC].abs().amax(-1).min() > 0
    assert torch.equal(freeze_BCH[rock_BC], torch.zeros_like(freeze_BCH[rock_BC]))
    torch.testing.assert_close(freeze_BCH[rest_BC], uniform_BCH[rest_BC], rtol=1e-5, atol=1e-9)
    assert freeze_BCH[rest_BC].abs().max() > 1e-6
