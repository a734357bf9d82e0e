"""Mistakes that were made in other projects, each a named test: the naive way fails here, ours does not."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
import torch
import torch.nn.functional as F
from cases import Case, as_numpy, from_logits, make_case

from rocktokens.core.divergence import KINDS, fused_divergence

# --- the loss ---


def test_loss_averaged_per_micro_batch():
    """verl #7200: every micro-batch divided by its own count, so the step's loss grew with the number of them."""
    case = make_case(rows=8)
    whole = case.run()[0].loss.item()
    sizes = [1, 2, 5]
    parts = [slice(0, 1), slice(1, 3), slice(3, 8)]

    def micro_batch(rows: slice, **options) -> float:
        return fused_divergence(
            case.student_hidden[rows], case.student_head, case.teacher_hidden[rows], case.teacher_head, **options
        ).loss.item()

    summed_means = sum(micro_batch(rows) for rows in parts)
    averaged_means = summed_means / len(parts)
    assert summed_means > 2 * whole
    assert abs(averaged_means - whole) > 1e-3
    assert sum(micro_batch(rows, denominator=sum(sizes)) for rows in parts) == pytest.approx(whole, rel=1e-5)


def test_a_micro_batch_of_which_every_token_is_frozen_neither_breaks_nor_counts():
    """0 / 0 in one micro-batch made the whole step NaN."""
    case = make_case(rows=4)
    weight_N = torch.tensor([1.0, 1.0, 0.0, 0.0])
    whole = case.run(weight_N=weight_N)[0].loss
    frozen = fused_divergence(
        case.student_hidden[2:], case.student_head, case.teacher_hidden[2:], case.teacher_head,
        weight_N=weight_N[2:], denominator=weight_N.sum(),
    )  # fmt: skip
    kept = fused_divergence(
        case.student_hidden[:2], case.student_head, case.teacher_hidden[:2], case.teacher_head,
        weight_N=weight_N[:2], denominator=weight_N.sum(),
    )  # fmt: skip
    assert frozen.loss == 0
    torch.testing.assert_close(kept.loss + frozen.loss, whole)


def test_ignored_rows_are_left_out_of_loss_count_and_gradient():
    """Liger #974: ignore_index was accepted and unused."""
    case = make_case(rows=6)
    weight_N = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    result, grads = case.run(weight_N=weight_N)
    assert result.loss.item() == pytest.approx(case.oracle().value[[0, 2, 5]].mean(), rel=1e-5)
    assert (grads["hidden"][weight_N == 0] == 0).all()


def test_forward_kl_is_not_a_cross_entropy():
    """torchtune's ForwardKLLoss is -sum q log p: for a perfect student it is the teacher's entropy, not 0.

    It has the same gradient, so training hides it; ranking tokens by it ranks the teacher's entropy.
    """
    case = make_case(rows=200, vocabulary=50, spread=2.0, kind="forward_kl")
    case.teacher_hidden, case.teacher_head = case.student_hidden, case.student_head
    result, _ = case.run()
    log_p_NV = F.log_softmax(case.student_hidden @ case.student_head.T, -1)
    cross_entropy_N = -(log_p_NV.exp() * log_p_NV).sum(-1)
    torch.testing.assert_close(cross_entropy_N, result.teacher_entropy_N, rtol=1e-4, atol=1e-5)
    assert cross_entropy_N.mean() > 1
    assert result.value_N.max() < 1e-6


def test_a_difference_of_log_probabilities_is_not_the_divergence():
    """The paper has one name for both. Their means agree over tokens drawn from the student, not row by row."""
    student, teacher = np.log([[0.5, 0.3, 0.2]]), np.log([[0.2, 0.3, 0.5]])
    result, _ = from_logits(np.repeat(student, 3, 0), np.repeat(teacher, 3, 0), tokens=[0, 1, 2]).run()
    assert result.log_ratio_N[1].abs() < 1e-6
    assert result.log_ratio_N[2] < 0 < result.value_N[2]
    mean_ratio = (torch.tensor([0.5, 0.3, 0.2]) * result.log_ratio_N).sum()
    torch.testing.assert_close(mean_ratio, result.value_N[0])


def test_the_temperature_given_is_the_temperature_used():
    """tinker-cookbook's on-policy recipe accepts a temperature and ignores it."""
    values = [make_case(temperature=t, spread=3.0).run()[0].value_N for t in (1.0, 2.0)]
    assert (values[0] - values[1]).abs().min() > 1e-3


# --- precision ---


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_log_softmax_gives_no_divergence_for_equal_logits(kind):
    """log_softmax and softmax rounded to bfloat16 disagree, and equal models seem to differ."""
    case = make_case(rows=64, vocabulary=2_000, student_width=64, spread=4.0, dtype=torch.bfloat16, kind=kind)
    case.teacher_hidden, case.teacher_head = case.student_hidden, case.student_head
    logits_NV = case.student_hidden @ case.student_head.T
    naive_N = F.kl_div(F.log_softmax(logits_NV, -1), F.softmax(logits_NV, -1), reduction="none").float().sum(-1)
    assert naive_N.abs().max() > 1e-3
    assert case.run()[0].value_N.max() < 1e-6


def test_bf16_log_softmax_spoils_the_gradient_of_a_converging_student():
    """The differences that are left to learn are smaller than bfloat16's rounding of a log-probability."""
    case = make_case(rows=32, vocabulary=200, student_width=32, spread=3.0)
    nudge = 0.01 * torch.randn(case.student_hidden.shape, generator=torch.Generator().manual_seed(1))
    case.teacher_hidden, case.teacher_head = case.student_hidden + nudge, case.student_head
    oracle = case.oracle()

    student_NV = (case.student_hidden @ case.student_head.T).bfloat16().requires_grad_()
    log_p_NV = F.log_softmax(student_NV, -1)
    log_q_NV = F.log_softmax((case.teacher_hidden @ case.teacher_head.T).bfloat16(), -1)
    (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1).mean().backward()
    naive_NH = student_NV.grad.float() @ case.student_head

    def error(gradient: torch.Tensor) -> float:
        return float(np.linalg.norm(as_numpy(gradient) - oracle.grad_hidden) / np.linalg.norm(oracle.grad_hidden))

    assert error(naive_NH) > 0.3
    assert error(case.run()[1]["hidden"]) < 1e-3


# --- vocabulary ---


def padded_pair() -> Case:
    """Identical models, of which the teacher's head has 8 more rows; training never touched them."""
    case = make_case(rows=10, vocabulary=40)
    noise = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))
    case.teacher_hidden, case.teacher_head = case.student_hidden, torch.cat([case.student_head, noise])
    return case


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("filling", ["zeros", "the other model's logits"])
def test_vocabulary_padding_rows_leak_no_probability(kind, filling):
    """Filled with zero logits (Liger) or with the other model's, padding takes probability from real tokens."""
    case = padded_pair()
    student_NV = case.student_hidden @ case.student_head.T
    teacher_NV = case.teacher_hidden @ case.teacher_head.T
    extra_NV = torch.zeros(10, 8) if filling == "zeros" else teacher_NV[:, 40:]
    if filling != "zeros":  # the same student: a constant changes no softmax, but the borrowed rows do not follow
        student_NV = student_NV + 3.0
    student, teacher = as_numpy(torch.cat([student_NV, extra_NV], 1)), as_numpy(teacher_NV)
    measure = oracles.MEASURES[kind]
    naive = [measure(oracles.probabilities(s), oracles.probabilities(t)) for s, t in zip(student, teacher)]
    assert min(naive) > 1e-3
    result, grads = case.run(kind=kind)
    assert result.value_N.max() < 1e-6
    assert grads["head"].abs().max() < 1e-6


def test_entropies_do_not_count_vocabulary_padding():
    case = padded_pair()
    result, _ = case.run()
    torch.testing.assert_close(result.teacher_entropy_N, result.student_entropy_N)


def test_top_k_divergence_can_be_negative_where_the_full_one_is_not():
    """verl #7856: the sum over the teacher's top k went below 0, was clamped, and 89 % of steps had no gradient."""
    student, teacher = np.array([0.55, 0.43, 0.01, 0.01]), np.array([0.4, 0.3, 0.15, 0.15])
    top_2 = np.argsort(-teacher)[:2]
    assert np.sum(teacher[top_2] * np.log(teacher[top_2] / student[top_2])) < 0
    result, _ = from_logits(np.log([student]), np.log([teacher]), kind="forward_kl").run()
    assert result.value_N.item() == pytest.approx(oracles.forward_kl(student, teacher), rel=1e-5)
    assert result.grad_norm_N.item() > 0.1


def test_a_ban_on_the_output_head_leaks_under_soft_capping():
    """-inf becomes -cap, and the token keeps probability: bans belong after the cap, in the sampler.

    Scoring must not turn such a logit into NaN either.
    """
    bias = torch.zeros(4)
    bias[2] = -torch.inf
    result, _ = from_logits(
        torch.zeros(1, 4), torch.zeros(1, 4), tokens=[2], student_bias=bias, teacher_bias=bias,
        student_softcap=2.0, teacher_softcap=2.0,
    ).run()  # fmt: skip
    assert result.student_logprob_N.exp().item() == pytest.approx(np.exp(-2) / (3 + np.exp(-2)), rel=1e-5)
    assert result.value_N.item() < 1e-6
