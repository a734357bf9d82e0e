"""fused_divergence against TRL's chunked loss: values, gradients, precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import Case, as_numpy, make_case

chunked_divergence = pytest.importorskip(
    "trl.kernels.chunked_divergence", reason="TRL is not installed; runs with the pinned dependencies"
)

# TRL's beta: 0 is forward KL, 1 reverse KL, between them the generalised JSD.
BETAS = {0.0: {"kind": "forward_kl"}, 0.5: {"kind": "jsd", "beta": 0.5}, 0.3: {"kind": "jsd", "beta": 0.3}, 1.0: {}}


# What of a call TRL takes by place, and its value where nothing is said.
PLACES = {"temperature": 1.0, "student_scale": 1.0, "student_softcap": None}
PLACES |= {"teacher_scale": 1.0, "teacher_softcap": None}


def trl(case: Case, beta: float, weight_N: torch.Tensor, student_bias=None, teacher_bias=None, **options):
    """Weighted mean of TRL's per-token divergence; its gradients and its entropy."""
    leaves = [case.student_hidden, case.student_head, student_bias]
    leaves = [None if leaf is None else leaf.detach().clone().requires_grad_() for leaf in leaves]
    teacher = (case.teacher_hidden, case.teacher_head, teacher_bias)
    given = (options.get(name, usual) for name, usual in PLACES.items())
    value_N, entropy_N = chunked_divergence.ChunkedDivergenceFunction.apply(*leaves, *teacher, beta, *given)
    ((value_N * weight_N).sum() / weight_N.sum()).backward()
    return value_N, entropy_N, [None if leaf is None else leaf.grad for leaf in leaves]


CAPS = {"student_softcap": 2.0, "teacher_softcap": 3.0}
FAMILIES = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "scale": {"student_scale": 0.3, "teacher_scale": 1.6},
    "softcap": CAPS,
    "everything": {**CAPS, "student_scale": 1.4, "teacher_scale": 0.6, "temperature": 0.8},
    "several tiles": {"vocabulary": chunked_divergence.VOCAB_CHUNK_SIZE + 77},
}


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("beta", BETAS)
def test_values_and_gradients_equal_trl(beta, family, with_bias, generator):
    options = dict(FAMILIES[family])
    vocabulary = options.pop("vocabulary", 101)
    if with_bias:
        options["student_bias"], options["teacher_bias"] = torch.randn(2, vocabulary, generator=generator)
    weight_N = torch.rand(33, generator=generator)
    case = make_case(rows=33, vocabulary=vocabulary, spread=3.0)
    value_N, entropy_N, expected = trl(case, beta, weight_N, **options)
    result, grads = case.run(weight_N=weight_N, chunk=10, **options, **BETAS[beta])
    torch.testing.assert_close(result.value_N, value_N, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.student_entropy_N, entropy_N, rtol=1e-4, atol=1e-5)
    for name, want in zip(("hidden", "head", "bias"), expected):
        if want is not None:
            torch.testing.assert_close(grads[name], want, rtol=1e-3 if vocabulary > 101 else 1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_bfloat16_is_at_least_as_close_to_the_truth_as_trl(beta):
    """Both sum in float32; TRL rounds the logits' gradient to bfloat16 before the products, ours does not on a CPU."""
    case = make_case(rows=16, vocabulary=101, spread=2.0, dtype=torch.bfloat16)
    _, _, theirs = trl(case, beta, torch.ones(16))
    result, grads = case.run(**BETAS[beta])
    oracle = case.oracle(**BETAS[beta])
    np.testing.assert_allclose(as_numpy(result.value_N), oracle.value, rtol=1e-4, atol=1e-6)
    for ours, their, want in (
        (grads["hidden"], theirs[0], oracle.grad_hidden),
        (grads["head"], theirs[1], oracle.grad_head),
    ):
        assert np.linalg.norm(as_numpy(ours) - want) <= 1.05 * np.linalg.norm(as_numpy(their) - want)
