"""What `bf16=True` does: in stock TRL it never reaches the training forward, in our trainer it does."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import distilling
import pytest
import torch
from trl import DistillationTrainer

from rocktokens import RockDistillationTrainer, fused_divergence
from rocktokens.divergence.fused import Head
from rocktokens.train.forward import Precision


@contextmanager
def projections(model):
    """The dtypes that a projection inside the model puts out: with gradients (training) and without (sampling)."""
    seen: dict[str, set] = {"training": set(), "sampling": set()}

    def note(module, args, out):
        seen["training" if torch.is_grad_enabled() else "sampling"].add(out.dtype)

    handle = model.model.layers[0].self_attn.q_proj.register_forward_hook(note)
    yield seen
    handle.remove()


def one_step(kind, path, **settings):
    student = distilling.student()
    args = distilling.arguments(
        path, bf16=True, max_steps=1, gradient_checkpointing=settings.pop("checkpointing", False)
    )
    with projections(student) as seen:
        trainer = distilling.trained(path, trainer=kind, models=(student, distilling.teacher()), args=args, **settings)
    return trainer, seen


def test_stock_trl_samples_in_bf16_and_trains_in_fp32(tmp_path):
    _, seen = one_step(DistillationTrainer, tmp_path)
    assert seen == {"training": {torch.float32}, "sampling": {torch.bfloat16}}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_ours_trains_in_the_precision_asked_for(tmp_path, caplog, checkpointing):
    caplog.set_level("INFO", "rocktokens")
    trainer, seen = one_step(RockDistillationTrainer, tmp_path, checkpointing=checkpointing)
    assert seen["training"] == seen["sampling"] == {torch.bfloat16}
    assert "training forwards bfloat16" in caplog.text
    assert trainer.record.rows[0]["loss"] > 0
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())


def test_autocast_false_is_stocks_behaviour_number_for_number(tmp_path, caplog):
    caplog.set_level("INFO", "rocktokens")
    ours, seen = one_step(RockDistillationTrainer, tmp_path, autocast=False)
    assert seen["training"] == {torch.float32}
    assert "as in TRL itself" in caplog.text
    stock, _ = one_step(DistillationTrainer, tmp_path)
    assert ours.state.log_history[0]["loss"] == pytest.approx(stock.state.log_history[0]["loss"], rel=1e-5)
    assert distilling.furthest(distilling.parameters(ours), distilling.parameters(stock)) < 1e-5


def test_mixed_precision_changes_the_gradient_by_bf16s_rounding_and_not_more(tmp_path):
    moved = []
    for autocast in (True, False):
        _, gradient = distilling.one_step(tmp_path, {"bf16": True}, autocast=autocast)
        moved.append(torch.cat([own.flatten() for own in gradient.values()]))
    error = (moved[0] - moved[1]).norm() / moved[1].norm()
    assert 1e-5 < error < 0.1


# The output heads


def precision(asked: str, autocast: bool = True) -> Precision:
    return Precision(SimpleNamespace(mixed_precision=asked), torch.zeros(1), autocast=autocast)


def test_the_heads_products_are_bf16_on_cuda_only_and_where_asked():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert precision("bf16").product(cuda) == torch.bfloat16
    assert precision("bf16").product(cpu) is None
    assert precision("bf16", autocast=False).product(cuda) is None
    assert precision("fp16").product(cuda) is None


def test_factors_in_bf16_keep_sums_in_float32_and_send_gradients_to_float32_weights():
    torch.manual_seed(0)
    states_NH, weight_VH = torch.randn(40, 32), torch.randn(500, 32, requires_grad=True)
    teacher_NH, teacher_VH = torch.randn(40, 32), torch.randn(500, 32)
    head, rounded_NH = precision("bf16").factors(Head(weight_VH), states_NH, torch.device("cuda"))
    assert rounded_NH.dtype == head.weight_VH.dtype == torch.bfloat16
    found = fused_divergence(rounded_NH, head.weight_VH, teacher_NH, teacher_VH)
    found.loss.backward()
    # The oracle: the same rounded factors, multiplied and summed in float64.
    logits = rounded_NH.double() @ weight_VH.detach().bfloat16().double().t()
    p, q = logits.log_softmax(-1), (teacher_NH.double() @ teacher_VH.double().t()).log_softmax(-1)
    assert torch.allclose(found.value_N.double(), (p.exp() * (p - q)).sum(-1), rtol=1e-5)
    assert weight_VH.grad is not None
    assert weight_VH.grad.dtype == torch.float32
    assert precision("bf16").factors(Head(weight_VH), states_NH, torch.device("cpu"))[0].weight_VH is weight_VH
