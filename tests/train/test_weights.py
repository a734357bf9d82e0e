"""What a step weighs: every selector on one recorded batch, bite by hand, the teacher run once, order of rows."""

from __future__ import annotations

import math
from types import SimpleNamespace

import distilling
import pytest
import torch
from datasets import Dataset

from rocktokens import Selector, SelectorBatch, make_selector
from rocktokens.errors import ConfigError
from rocktokens.select.interface import TopShare, selector_kinds
from rocktokens.train.teacher import LocalTeacher, StateMemory
from rocktokens.train.weights import bite, decide_weights, repeated_prompts


def batch(tokens: list[int], values: list[float] | None = None) -> SelectorBatch:
    count = len(tokens)
    value_N = None if values is None else torch.tensor(values)
    place_N = torch.arange(count)
    return SelectorBatch(torch.tensor(tokens), torch.zeros(count).long(), place_N, 1, 10, value_N=value_N)


def test_bite_by_hand():
    weight_N = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0])
    found = bite(weight_N, batch([4, 5, 6, 1, 1], [1.0, 2.0, 3.0, 4.0, 0.0]), [1])
    assert found["changed_share"] == pytest.approx(3 / 5)
    assert found["changed_loss_share"] == pytest.approx((2 + 3 + 0) / 10)
    assert found["end_dropped_share"] == pytest.approx(1 / 2)
    assert bite(torch.ones(2), batch([4, 5], [1.0, 2.0]), [1]) == {"changed_share": 0.0, "changed_loss_share": 0.0}
    assert bite(torch.ones(2), batch([4, 5]), [1]) == {"changed_share": 0.0}
    assert bite(torch.zeros(2), batch([4, 5], [0.0, 0.0]), [])["changed_loss_share"] is None
    assert bite(torch.zeros(0), batch([]), [1]) == {}


@pytest.mark.parametrize("name", ["tip", "uniform"])
def test_the_teacher_runs_once_over_every_rollout_and_its_states_train_what_fresh_ones_train(
    tmp_path, monkeypatch, name
):
    calls, states = [], LocalTeacher.states

    def count(self, inputs):
        calls.append(len(inputs["completion_ids"]))
        return states(self, inputs)

    monkeypatch.setattr(LocalTeacher, "states", count)
    kept = distilling.trained(tmp_path, selector=make_selector(name), generation="ours")
    assert sum(calls) == 3 * 16
    assert [row["scored"] for row in kept.record.rows] == [row["tokens"] for row in kept.record.rows]
    assert (kept.record.rows[0]["flops_teacher"] == 0) == kept.selector.needs_losses
    monkeypatch.setattr(StateMemory, "states", lambda self, teacher, inputs, keep: teacher.states(inputs))
    fresh = distilling.trained(tmp_path, selector=make_selector(name), generation="ours")
    assert distilling.furthest(distilling.parameters(kept), distilling.parameters(fresh)) < 1e-6


def test_audits_change_nothing_and_say_what_shadows_would_keep(tmp_path):
    shadows = [make_selector(name, **own) for name, own in (("teachable", {"top": 4}), ("tip", {}), ("prefix", {}))]
    audited = distilling.trained(
        tmp_path, generation="ours", shadows=shadows, audit_every=2,
        selector=make_selector("freeze", rocks=[5, 6, 7, 8, 9, 10]),
    )  # fmt: skip
    plain = distilling.trained(tmp_path, generation="ours", selector=make_selector("freeze", rocks=range(5, 11)))
    assert distilling.furthest(distilling.parameters(audited), distilling.parameters(plain)) == 0
    first, second, third = audited.record.rows
    assert {"overlap_teachable_tip", "shadow_kept_teachable", "changed_loss_share"} <= first.keys() & third.keys()
    assert "shadow_kept_tip" not in second
    assert "changed_loss_share" not in second
    assert first["shadow_kept_tip"] == pytest.approx(0.5, abs=0.02)
    assert first["changed_share"] == pytest.approx(1 - first["kept_share"])
    assert 0 < first["changed_loss_share"] < 1


# ---------------------------------------------------------------- one recorded batch, every selector

OPTIONS = {"soft": {"rocks": range(5, 11), "lam": 0.3}, "teachable": {"keep": 0.3, "top": 4}, "selectkd": {"top": 2}}
OPTIONS |= {name: {"rocks": range(5, 11)} for name in ("freeze", "freeze_rocks", "random")}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> SelectorBatch:
    """Everything that is measured of one real step."""
    trainer = distilling.trained(
        tmp_path_factory.mktemp("step"), args=distilling.arguments("out", max_steps=1),
        generation="ours", audit_every=1, shadows=[make_selector("teachable", top=4)],
    )  # fmt: skip
    assert trainer.audited is not None
    return trainer.audited


@pytest.mark.parametrize("name", selector_kinds())
def test_every_selector_weighs_a_real_step(recorded, name):
    selector = make_selector(name, **OPTIONS.get(name, {}))
    weight_N = decide_weights(ALONE, selector, recorded, kept_before=False)
    assert weight_N.dtype == torch.float32
    assert 0 < float(weight_N.sum()) <= selector.bound * len(recorded)
    if isinstance(selector, TopShare):
        assert int(weight_N.sum()) == math.ceil(selector.keep * len(recorded))
    bare = SelectorBatch(recorded.token_N, recorded.rollout_N, recorded.position_N, 1, recorded.length_limit)
    if not selector.needs_losses:  # then nothing that was measured counts
        assert torch.equal(selector.weights(bare), make_selector(name, **OPTIONS.get(name, {})).weights(recorded))


ALONE = SimpleNamespace(is_main_process=True, num_processes=1)


class Given(Selector):
    def __init__(self, weight_N):
        self.weight_N = weight_N

    def weights(self, batch):
        return self.weight_N


@pytest.mark.parametrize(
    ("weight_N", "says"),
    [
        (torch.full((2,), 2.0), "outside"),
        (torch.full((2,), torch.nan), "outside"),
        (torch.ones(3), "shape"),
        (torch.zeros(2), "keeps none"),
    ],
)
def test_weights_that_are_no_weights_are_refused(weight_N, says):
    with pytest.raises(ConfigError, match=says):
        decide_weights(ALONE, Given(weight_N), batch([4, 5]), kept_before=False)


# ---------------------------------------------------------------- prompts that are computed once


def test_a_prompt_is_shared_within_its_micro_batch_only(tmp_path):
    """Counted where the loss is computed: TRL shuffles a step's rollouts before it cuts them into micro-batches."""
    given = {"prompt_ids": torch.tensor([[0, 5], [4, 5], [0, 5], [0, 6]])}
    given["prompt_mask"] = (given["prompt_ids"] > 0).long()
    assert repeated_prompts(given).tolist() == [1]
    prompt = {"prompt": "w3 w4 w5"}
    for size, shared in ((8, 14), (1, 0)):  # 16 rollouts of one prompt
        args = distilling.arguments(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=16 // size, max_steps=2
        )
        trainer = distilling.trained(tmp_path, args=args, data=Dataset.from_list([prompt] * 16))
        assert [length for part in trainer.shared_prompts for length in part.tolist()] == [3] * shared
