"""`rocktokens.freeze` on a stock trainer of the installed TRL: what it leaves out, and that it changes nothing else."""

from __future__ import annotations

import distilling
import pytest
import torch
from trl import DistillationTrainer

import rocktokens
from rocktokens.errors import ConfigError


def losses(path, ids=None, kind=DistillationTrainer) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Loss of every step and the weights afterwards."""
    trainer = distilling.made(path, kind)
    if ids is not None:
        rocktokens.freeze(trainer, ids)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], distilling.parameters(trainer)


def test_an_empty_list_is_stock(tmp_path):
    (stock, weights), (ours, same) = losses(tmp_path), losses(tmp_path, [])
    assert ours == stock
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_listed_ids_count_nothing_and_the_divisor_stays(tmp_path):
    """Against our trainer, which is tested against full logits: freeze with normalise=all."""
    ids = list(range(5, 30))
    stock = distilling.one_step(tmp_path, trainer=Frozen)[1]
    ours = distilling.one_step(tmp_path, selector="freeze", rocks=ids, normalise="all")[1]
    assert distilling.furthest(stock, ours) < 1e-4 * max(float(own.abs().max()) for own in ours.values())
    assert losses(tmp_path, range(64))[0] == [0.0] * 3


class Frozen(DistillationTrainer):
    """A subclass of somebody's own."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        rocktokens.freeze(self, range(5, 30))


def test_texts_a_block_that_ends_and_evaluation(tmp_path):
    trainer = distilling.made(tmp_path)
    with pytest.raises(ConfigError, match="selector"):
        rocktokens.freeze(trainer, [5])
    trainer = distilling.made(tmp_path, DistillationTrainer)
    rows = [{"prompt": "w3 w4"}] * 4
    before = trainer.evaluate(distilling.dataset(8))["eval_loss"]
    with rocktokens.freeze(trainer, ["w5", "w6"]) as frozen:
        assert frozen.ids == (5, 6)
        trainer.model.train()
        made = trainer._generate_and_score_completions(rows)
        assert torch.equal(made["tool_mask"], (~torch.isin(made["completion_ids"], torch.tensor([5, 6]))).long())
        trainer.model.eval()
        assert "tool_mask" not in trainer._generate_and_score_completions(rows)
    assert "_generate_and_score_completions" not in vars(trainer)
    assert before > 0
