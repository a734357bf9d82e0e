"""Gradient geometry against dense matrices; the sketch's error; bounded memory; the optimiser hypothesis."""

import numpy as np
import oracles_detect as oracle
import pytest
import torch

from rocktokens.errors import DataError
from rocktokens.geometry.gradients import METRICS, GeometryConfig, GradientGeometry, compare_groups, logit_gradient


def log_probabilities(rng, rows, vocab, sharp=3.0):
    return torch.from_numpy(rng.normal(0, sharp, (rows, vocab))).log_softmax(-1)


def fed(geometry, token_N, grad_NV, sizes):
    start = 0
    for size in sizes:
        geometry.update(torch.from_numpy(token_N[start : start + size]), grad_NV[start : start + size])
        start += size
    return geometry


def check_against_oracle(result, expected, tolerance):
    assert result.token_id_T.tolist() == sorted(expected)
    for name in METRICS:
        wanted = [expected[token][name] for token in sorted(expected)]
        np.testing.assert_allclose(getattr(result, f"{name}_T"), wanted, rtol=tolerance, atol=tolerance)


def test_gradient_is_that_of_reverse_kl(rng):
    student, teacher = (torch.from_numpy(rng.normal(0, 2, (5, 11))).requires_grad_() for _ in range(2))
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    (p.exp() * (p - q)).sum().backward()
    found = logit_gradient(p.detach(), q.detach())
    np.testing.assert_allclose(found.numpy(), student.grad.numpy(), atol=1e-6)
    np.testing.assert_allclose(found[0], oracle.gradient(p.detach()[0].exp(), q.detach()[0].exp()), atol=1e-6)


def test_what_the_student_never_emits_contributes_nothing():
    never = torch.tensor([[0.0, -torch.inf]])
    assert logit_gradient(never, torch.tensor([[0.5, 0.5]]).log()).tolist() == [[0.0, 0.0]]
    assert logit_gradient(never, never).tolist() == [[0.0, 0.0]]


def test_exact_geometry_equals_dense_matrices(rng):
    token_N = rng.integers(0, 12, 300)
    grad_NV = logit_gradient(log_probabilities(rng, 300, 50), log_probabilities(rng, 300, 50))
    parts = fed(GradientGeometry(50), token_N[:101], grad_NV[:101], [100, 1])
    parts.merge(fed(GradientGeometry(50), token_N[101:], grad_NV[101:], [199]))  # in any order and any parts
    order = rng.permutation(300)
    for result in (parts.result(), fed(GradientGeometry(50), token_N[order], grad_NV[order], [300]).result()):
        assert not result.sketched
        check_against_oracle(result, oracle.geometry(token_N, grad_NV.double().numpy()), 1e-9)


@pytest.mark.parametrize("exact_vocab", [8192, 10])
def test_saved_and_restored_goes_on_where_it_stood(rng, exact_vocab):
    config = GeometryConfig(exact_vocab=exact_vocab, sketch_dims=16)
    token_N = rng.integers(0, 40, 900)
    grad_NV = torch.from_numpy(rng.normal(size=(900, 40)))
    whole = fed(GradientGeometry(40, config), token_N, grad_NV, [900]).result()
    first = fed(GradientGeometry(40, config), token_N[:500], grad_NV[:500], [500])
    second = GradientGeometry.restore(first.state(), config)
    again = fed(second, token_N[500:], grad_NV[500:], [400]).result()
    for name in ("token_id_T", "count_T", "mean_grad_norm_T", "cos_global_T", "contrib_T", "grad_share_T"):
        np.testing.assert_allclose(getattr(whole, name), getattr(again, name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["peaked", "flat"])
def test_sketched_cosines_err_by_at_most_two_hundredths(kind):
    """95 % of cosines within 0.02 at the default width, for gradients of language models and for dense noise."""
    rng = np.random.default_rng(6)
    vocab, types, rows = 40_000, 60, 240
    shared = rng.normal(size=vocab)
    if kind == "peaked":
        student = log_probabilities(rng, rows, vocab, sharp=2.5) + torch.from_numpy(shared)
        teacher = student + 0.5 * torch.from_numpy(rng.normal(size=(rows, vocab)))
        grad_NV = logit_gradient(student.log_softmax(-1), teacher.log_softmax(-1)).float()
    else:
        grad_NV = torch.from_numpy(
            0.1 * shared + rng.normal(size=(rows, vocab)) * rng.uniform(0.1, 1, (rows, 1))
        ).float()
    token_N = np.arange(rows) % types
    exact = fed(GradientGeometry(vocab, GeometryConfig(exact_vocab=10**6)), token_N, grad_NV, [rows]).result()
    errors = []
    for seed in range(3):
        sketched = fed(GradientGeometry(vocab, GeometryConfig(seed=seed)), token_N, grad_NV, [rows]).result()
        assert sketched.sketched
        np.testing.assert_allclose(sketched.grad_share_T, exact.grad_share_T, rtol=1e-5)
        np.testing.assert_allclose(np.median(sketched.mean_grad_norm_T / exact.mean_grad_norm_T), 1, atol=0.05)
        for name in ("cos_balanced_T", "cos_global_T", "cos_others_T"):
            errors.append(np.abs(getattr(sketched, name) - getattr(exact, name)))
    assert np.quantile(np.concatenate(errors), 0.95) <= 0.02


def test_types_beyond_the_limit_count_in_the_totals_only(rng):
    token_N = np.arange(30) % 10
    grad_NV = torch.from_numpy(rng.normal(size=(30, 20)))
    result = fed(GradientGeometry(20, GeometryConfig(max_types=4), types=[7, 9]), token_N, grad_NV, [30]).result()
    assert {7, 9} <= set(result.token_id_T.tolist())
    assert len(result.token_id_T) == 4
    assert result.num_pooled_types == 6
    assert result.grad_share_T.sum() < 1
    assert result.position_share_T.sum() == pytest.approx(0.4)


def test_groups_are_compared_and_tabled(rng):
    token_N = np.repeat(np.arange(20), 10)
    grad_NV = torch.from_numpy(rng.normal(size=(200, 30)) * np.where(token_N < 10, 5.0, 1.0)[:, None])
    result = fed(GradientGeometry(30), token_N, grad_NV, [200]).result()
    groups = {"rocks": np.arange(10), "random others": np.arange(10, 20), "absent": np.array([29])}
    rows = {(row.metric, row.first, row.second): row for row in compare_groups(result, groups)}
    row = rows["mean_grad_norm", "rocks", "random others"]
    assert row.share_larger == 1.0
    assert row.p_value < 1e-3
    assert not any("absent" in key for key in rows)
    table = result.table(groups)
    assert table["group"].to_pylist() == ["rocks"] * 10 + ["random others"] * 10
    assert table["grad_share"].to_numpy().sum() == pytest.approx(1.0)


def test_bad_gradients_are_refused():
    geometry = GradientGeometry(4)
    with pytest.raises(DataError, match="must be"):
        geometry.update(torch.tensor([1]), torch.zeros(1, 5))
    with pytest.raises(DataError, match="not finite"):
        geometry.update(torch.tensor([1]), torch.full((1, 4), torch.nan))
    with pytest.raises(DataError, match="no gradients"):
        geometry.result()
    with pytest.raises(DataError, match="do not add up"):
        geometry.merge(GradientGeometry(5))


def test_the_stage_follows_the_detection_it_rests_on(tmp_path, caplog):
    from rocktokens.geometry.stage import geometry
    from rocktokens.run import Run

    torch.manual_seed(0)
    token_N, grad_NV = np.arange(40) % 8, torch.randn(40, 8)
    run = Run.create(tmp_path / "run", {})
    run.write_tensors("gradients", fed(GradientGeometry(8), token_N, grad_NV, [40]).state())
    shares = []
    for rocks in ([1], [1], [1, 2, 3]):
        run = Run.create(run.path, {})
        run.finish("detect", {"rocks": rocks, "groups": {"rocks": rocks, "random others": [5, 6]}})
        caplog.clear()
        with caplog.at_level("INFO"):
            run = geometry(run.path)
        shares.append((run.facts("geometry")["rock_position_share"], "nothing to do" in caplog.text))
    assert shares == [(pytest.approx(1 / 8), False), (pytest.approx(1 / 8), True), (pytest.approx(3 / 8), False)]
