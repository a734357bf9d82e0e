"""The divergences of the field, and the top choices, against definitions in plain numpy that share no code."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
import torch

from rocktokens import fused_divergence
from rocktokens.divergence.top_tokens import TopChoices
from rocktokens.errors import ConfigError


def todi(p, q, fixed=None):
    """Sum of a q ln(q / p) + (1 - a) p ln(p / q), with a = sigmoid(ln(q / p)) of `fixed` where it is given."""
    p0, q0 = (p, q) if fixed is None else fixed
    total = 0.0
    for p_u, q_u, p_a, q_a in zip(p, q, p0, q0):
        a = 1 / (1 + p_a / q_a)
        total += a * q_u * math.log(q_u / p_u) + (1 - a) * p_u * math.log(p_u / q_u)
    return total


def srkl(p, q, fixed=None):
    """KL(p || 0.1 p + 0.9 q)."""
    return oracles.kl(p, 0.1 * p + 0.9 * q)


MEASURES = {"todi": todi, "srkl": srkl}


def case(seed=0, rows=7, vocabulary=23, width=5):
    rng = np.random.default_rng(seed)
    hidden, head, teacher_hidden, teacher_head = (
        torch.tensor(rng.normal(size=size), dtype=torch.float32)
        for size in ((rows, width), (vocabulary, width), (rows, width + 1), (vocabulary, width + 1))
    )
    token = torch.tensor(rng.integers(vocabulary, size=rows))
    return hidden, head, teacher_hidden, teacher_head, token


def rows_of(hidden, head):
    return [oracles.probabilities(oracles.head_logits(row, head)) for row in hidden.numpy()]


@pytest.mark.parametrize("kind", MEASURES)
@pytest.mark.parametrize("chunk", [None, 3])
def test_values_equal_the_definition(kind, chunk):
    hidden, head, teacher_hidden, teacher_head, token = case()
    found = fused_divergence(hidden, head, teacher_hidden, teacher_head, token_N=token, kind=kind, chunk=chunk)
    pairs = zip(rows_of(hidden, head.numpy()), rows_of(teacher_hidden, teacher_head.numpy()))
    wanted = [MEASURES[kind](p, q) for p, q in pairs]
    np.testing.assert_allclose(found.value_N.numpy(), wanted, rtol=2e-5, atol=1e-6)
    assert float(found.loss) == pytest.approx(np.mean(wanted), rel=2e-5)


@pytest.mark.parametrize("kind", MEASURES)
def test_gradients_equal_central_differences_of_the_definition(kind):
    hidden, head, teacher_hidden, teacher_head, token = case(rows=2, vocabulary=9)
    hidden.requires_grad_()
    fused_divergence(hidden, head, teacher_hidden, teacher_head, token_N=token, kind=kind).loss.backward()
    teachers = rows_of(teacher_hidden, teacher_head.numpy())
    start = rows_of(hidden.detach(), head.numpy())
    for row in range(2):
        for column in range(hidden.shape[1]):
            moved = []
            for sign in (1, -1):
                nudged = hidden.detach().double().numpy()[row].copy()
                nudged[column] += sign * 1e-5
                p = oracles.probabilities(oracles.head_logits(nudged, head.numpy()))
                # The mixing weights of todi are held fixed, as its source detaches them.
                moved.append(MEASURES[kind](p, teachers[row], fixed=(start[row], teachers[row])))
            slope = (moved[0] - moved[1]) / 2e-5 / 2
            assert float(hidden.grad[row, column]) == pytest.approx(slope, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", MEASURES)
def test_identical_models_are_at_zero_with_no_gradient(kind):
    hidden, head, *_ = case()
    hidden.requires_grad_()
    found = fused_divergence(hidden, head, hidden.detach(), head, kind=kind)
    assert float(found.value_N.max()) < 1e-6
    found.loss.backward()
    assert float(hidden.grad.abs().max()) < 1e-6


def test_impossible_tokens():
    """What the teacher rules out makes todi infinite and leaves srkl below ln 10; what both rule out counts nothing."""
    hidden, head, teacher_hidden, teacher_head, _ = case(vocabulary=6)
    bias, both = torch.zeros(6), torch.zeros(6)
    bias[2] = both[2] = -torch.inf
    arguments = (hidden, head, teacher_hidden, teacher_head)
    ruled_out = fused_divergence(*arguments, kind="todi", teacher_bias=bias)
    assert bool(ruled_out.value_N.isinf().all())
    skewed = fused_divergence(*arguments, kind="srkl", teacher_bias=bias)
    assert bool((skewed.value_N < math.log(10)).all())
    assert bool(skewed.value_N.isfinite().all())
    for kind in MEASURES:
        shared = fused_divergence(*arguments, kind=kind, teacher_bias=bias, student_bias=both)
        keep = [0, 1, 3, 4, 5]
        cut = fused_divergence(hidden, head[keep], teacher_hidden, teacher_head[keep], kind=kind)
        torch.testing.assert_close(shared.value_N, cut.value_N)


@pytest.mark.parametrize("weighted", [False, True])
def test_top_choices_are_those_of_the_whole_distributions(weighted):
    hidden, head, teacher_hidden, teacher_head, token = case(rows=9)
    weight = torch.ones(9)
    weight[[2, 5]] = 0 if weighted else 1
    found = TopChoices.empty(9, 4, torch.device("cpu"))
    fused_divergence(hidden, head, teacher_hidden, teacher_head, token_N=token, weight_N=weight, top=found, chunk=2)
    students, teachers = rows_of(hidden, head.numpy()), rows_of(teacher_hidden, teacher_head.numpy())
    for row, (p, q) in enumerate(zip(students, teachers)):
        if weight[row] == 0:
            assert found.student_ids_NK[row].tolist() == [-1] * 4
            assert bool(found.teacher_logprobs_NK[row].isnan().all())
            continue
        best_p, best_q = np.argsort(-p)[:4], np.argsort(-q)[:4]
        assert found.student_ids_NK[row].tolist() == best_p.tolist()
        assert found.teacher_ids_NK[row].tolist() == best_q.tolist()
        np.testing.assert_allclose(found.student_logprobs_NK[row], np.log(p[best_p]), rtol=1e-4)
        np.testing.assert_allclose(found.teacher_at_student_NK[row], np.log(q[best_p]), rtol=1e-4)
        np.testing.assert_allclose(found.teacher_logprobs_NK[row], np.log(q[best_q]), rtol=1e-4)


def test_more_choices_than_there_are_tokens_are_refused():
    hidden, head, teacher_hidden, teacher_head, _ = case(vocabulary=6)
    with pytest.raises(ConfigError, match="vocabulary's 6 token types, got 7"):
        fused_divergence(hidden, head, teacher_hidden, teacher_head, top=TopChoices.empty(7, 7, hidden.device))
    with pytest.raises(ConfigError, match="room for 3 rows, and there are 7"):
        fused_divergence(hidden, head, teacher_hidden, teacher_head, top=TopChoices.empty(3, 2, hidden.device))
