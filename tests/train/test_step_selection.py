"""What a step samples and weighs: bite against a slow definition, the teacher run once, other losses, budgets."""

from __future__ import annotations

import distilling
import pytest
import torch

from rocktokens import Selector, SelectorBatch, make_selector
from rocktokens.errors import ConfigError
from rocktokens.run import Run
from rocktokens.select.settings import SelectorConfig
from rocktokens.train.distill import distill
from rocktokens.train.settings import DistillConfig
from rocktokens.train.teacher import LocalTeacher, StateMemory
from rocktokens.train.trainer import RockDistillationTrainer
from rocktokens.train.weights import bite


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


def counted(monkeypatch) -> list[int]:
    calls: list[int] = []
    states = LocalTeacher.states

    def count(self, inputs):
        calls.append(len(inputs["completion_ids"]))
        return states(self, inputs)

    monkeypatch.setattr(LocalTeacher, "states", count)
    return calls


@pytest.mark.parametrize("name", ["tip", "uniform"])
def test_the_teacher_runs_once_over_every_rollout_whatever_the_selector_needs(tmp_path, monkeypatch, name):
    calls = counted(monkeypatch)
    trainer = distilling.trained(RockDistillationTrainer, tmp_path, selector=make_selector(name), generation="ours")
    assert sum(calls) == 3 * 16
    assert [row["scored"] for row in trainer.record.rows] == [row["tokens"] for row in trainer.record.rows]
    assert (trainer.record.rows[0]["flops_teacher"] == 0) == trainer.selector.needs_losses


def test_states_from_memory_train_what_fresh_ones_train(tmp_path, monkeypatch):
    kept = distilling.trained(RockDistillationTrainer, tmp_path, selector=make_selector("tip"), generation="ours")
    monkeypatch.setattr(StateMemory, "states", lambda self, teacher, inputs: teacher.states(inputs))
    fresh = distilling.trained(RockDistillationTrainer, tmp_path, selector=make_selector("tip"), generation="ours")
    assert distilling.furthest(distilling.parameters(kept), distilling.parameters(fresh)) < 1e-6


def test_audits_change_nothing_and_say_what_shadows_would_keep(tmp_path):
    shadows = [make_selector(name, **own) for name, own in (("teachable", {"top": 4}), ("tip", {}), ("prefix", {}))]
    audited = distilling.trained(
        RockDistillationTrainer, tmp_path, generation="ours", shadows=shadows, audit_every=2,
        selector=make_selector("freeze", rocks=[5, 6, 7, 8, 9, 10]),
    )  # fmt: skip
    plain = distilling.trained(
        RockDistillationTrainer, tmp_path, generation="ours", selector=make_selector("freeze", rocks=range(5, 11))
    )
    assert distilling.furthest(distilling.parameters(audited), distilling.parameters(plain)) == 0
    first, second, third = audited.record.rows
    assert {"overlap_teachable_tip", "shadow_kept_teachable", "changed_loss_share"} <= first.keys() & third.keys()
    assert "shadow_kept_tip" not in second
    assert "changed_loss_share" not in second
    assert first["shadow_kept_tip"] == pytest.approx(0.5, abs=0.02)
    assert first["changed_share"] == pytest.approx(1 - first["kept_share"])
    assert 0 < first["changed_loss_share"] < 1


def test_a_shadow_that_needs_top_tokens_is_left_out_where_nobody_measured_them(tmp_path):
    trainer = distilling.trained(
        RockDistillationTrainer, tmp_path, generation="ours", shadows=[make_selector("selectkd"), make_selector("tip")]
    )
    assert "shadow_kept_tip" in trainer.record.rows[0]
    assert "shadow_kept_selectkd" not in trainer.record.rows[0]


# ---------------------------------------------------------------- losses


def logits(model, inputs) -> torch.Tensor:
    """Logits that predict each completion token, by a plain forward."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    width = inputs["completion_ids"].shape[1]
    return model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1].double()


def first_step(path, **settings):
    """Gradient of the first step, and the loss that a plain forward gives on the same rollouts."""
    args = distilling.arguments(
        path, per_device_train_batch_size=16, gradient_accumulation_steps=1, max_steps=1, optim="sgd",
        learning_rate=1.0, max_grad_norm=0.0, lr_scheduler_type="constant",
    )  # fmt: skip
    student = distilling.student()
    before = distilling.parameters(student)
    trainer = distilling.trained(
        RockDistillationTrainer, path, args=args, models=(student, distilling.teacher()), generation="ours", **settings
    )
    after = distilling.parameters(trainer)
    return trainer, {name: before[name] - after[name] for name in before}


def todi(p, q):
    alpha = torch.sigmoid((q.log() - p.log()).detach())
    return (alpha * q * (q / p).log() + (1 - alpha) * p * (p / q).log()).sum(-1)


def srkl(p, q):
    return (p * (p / (0.1 * p + 0.9 * q)).log()).sum(-1)


@pytest.mark.parametrize("name", ["todi", "srkl"])
def test_other_losses_against_autograd_on_a_plain_forward(tmp_path, name):
    trainer, gradient = first_step(tmp_path, kind=name)
    inputs = trainer._buffered_inputs[0]
    student, teacher = distilling.student(), distilling.teacher()
    p, q = logits(student, inputs).softmax(-1), logits(teacher, inputs).softmax(-1).detach()
    mask = inputs["completion_mask"].bool()
    value = {"todi": todi, "srkl": srkl}[name](p, q)
    loss = value[mask].mean()
    loss.backward()
    wanted = {key: parameter.grad for key, parameter in student.named_parameters()}
    assert trainer.record.rows[0]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    size = max(float(g.abs().max()) for g in wanted.values())
    assert distilling.furthest(gradient, wanted) < 1e-4 * size


def small(**settings) -> DistillConfig:
    defaults = {"steps": 3, "learning_rate": 1e-3, "max_new_tokens": 8, "prompts_per_step": 4, "keep": 1}
    return DistillConfig(**{**defaults, "rollouts_per_prompt": 2, "telemetry_every": None, **settings})


def test_the_loss_is_a_setting_of_distillation(tmp_path):
    run = Run.create(tmp_path / "run")
    found = distill(small(loss="todi", telemetry_every=1), distilling.pair(), distilling.prompts(), run, show=False)
    assert len(found.record.rows) == 3
    assert not (run.path / "telemetry").exists()  # occurrences would record another divergence


# ---------------------------------------------------------------- bad input


class KeepsNothing(Selector):
    """Drops everything."""

    def weights(self, batch):
        return torch.zeros(len(batch))


def test_a_selector_that_keeps_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"keeps none"):
        distilling.trained(RockDistillationTrainer, tmp_path, selector=KeepsNothing(), generation="ours")


@pytest.mark.parametrize("as_shadow", [False, True])
def test_more_top_tokens_than_the_vocabulary_has_are_refused(tmp_path, as_shadow):
    asks = make_selector("teachable", top=distilling.VOCABULARY + 1)
    settings = {"shadows": [asks]} if as_shadow else {"selector": asks}
    with pytest.raises(ConfigError, match="65 most probable"):
        distilling.trained(RockDistillationTrainer, tmp_path, **settings)


@pytest.mark.parametrize("name", ["tip", "entropy", "divergence", "teachable", "adakd", "prefix"])
@pytest.mark.parametrize("keep", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_outside_its_range_is_refused(name, keep):
    with pytest.raises(ConfigError, match="keep must"):
        make_selector(name, keep=keep)


def test_settings_that_contradict_each_other_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="kind must be one of"):
        distilling.trained(RockDistillationTrainer, tmp_path, kind="kl")
    with pytest.raises(ConfigError, match="window"):
        SelectorConfig(name="tip", window=2)
