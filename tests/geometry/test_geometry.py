"""Gradient geometry against dense matrices; the sketch's error; types beyond the limit; the stage."""

import numpy as np
import oracles_detect as oracle
import pytest
import torch

from rocktokens.geometry.gradients import METRICS, GradientGeometry, compare_groups
from rocktokens.geometry.stage import geometry
from rocktokens.run import Run


def fed(token_N, grad_NV, vocab, **options):
    found = GradientGeometry(vocab, **options)
    found.update(torch.from_numpy(token_N), grad_NV)
    return found


def test_exact_geometry_equals_dense_matrices_in_any_order_and_any_parts(rng):
    token_N, grad_NV = rng.integers(0, 12, 300), torch.from_numpy(rng.normal(size=(300, 50)))
    order, expected = rng.permutation(300), oracle.geometry(token_N, grad_NV.numpy())
    parts = fed(token_N[:101], grad_NV[:101], 50)
    parts.update(torch.from_numpy(token_N[101:102]), grad_NV[101:102])
    parts = GradientGeometry(50).merge(fed(token_N[102:], grad_NV[102:], 50).state()).merge(parts.state())
    for found in (parts, fed(token_N[order], grad_NV[order], 50)):
        assert not found.sketched
        table = found.table({})
        assert table["token_id"].to_pylist() == sorted(expected)
        for name in METRICS:
            wanted = [expected[token][name] for token in sorted(expected)]
            np.testing.assert_allclose(table[name].to_numpy(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["peaked", "flat"])
def test_sketched_cosines_err_by_at_most_two_hundredths(kind):
    """95 % of cosines within 0.02 at the default width, for gradients of language models and for dense noise."""
    rng = np.random.default_rng(6)
    vocab, types, rows = 40_000, 60, 240
    shared, noise = (rng.standard_normal(shape, dtype=np.float32) for shape in (vocab, (rows, vocab)))
    if kind == "peaked":
        logits_NV = torch.from_numpy(2.5 * noise + shared)
        change_NV = torch.from_numpy(0.5 * rng.standard_normal((rows, vocab), dtype=np.float32))
        p_NV = logits_NV.softmax(-1)
        ratio_NV = logits_NV.log_softmax(-1) - (logits_NV + change_NV).log_softmax(-1)
        grad_NV = p_NV * (ratio_NV - (p_NV * ratio_NV).sum(-1, keepdim=True))
    else:
        grad_NV = torch.from_numpy(0.1 * shared + noise * rng.uniform(0.1, 1, (rows, 1)).astype(np.float32))
    token_N = np.arange(rows) % types
    exact = fed(token_N, grad_NV, vocab, exact_vocab=10**6).table({})
    errors = []
    for seed in range(3):
        sketch = fed(token_N, grad_NV, vocab, seed=seed)
        assert sketch.sketched
        table = GradientGeometry(vocab, seed=seed).merge(sketch.state()).table({})
        size, truth = (own["mean_grad_norm"].to_numpy() for own in (table, exact))
        np.testing.assert_allclose(table["grad_share"].to_numpy(), exact["grad_share"].to_numpy(), rtol=1e-5)
        np.testing.assert_allclose(np.median(size / truth), 1, atol=0.05)
        for name in ("cos_balanced", "cos_global", "cos_others"):
            errors.append(np.abs(table[name].to_numpy() - exact[name].to_numpy()))
    assert np.quantile(np.concatenate(errors), 0.95) <= 0.02


def test_types_beyond_the_limit_count_in_the_totals_only(rng):
    table = fed(np.arange(30) % 10, torch.from_numpy(rng.normal(size=(30, 20))), 20, max_types=4).table({})
    assert table["token_id"].to_pylist() == [0, 1, 2, 3]
    assert sum(table["grad_share"].to_pylist()) < 1
    assert sum(table["position_share"].to_pylist()) == pytest.approx(0.4)


def test_groups_are_compared_and_tabled(rng):
    token_N = np.repeat(np.arange(20), 10)
    grad_NV = torch.from_numpy(rng.normal(size=(200, 30)) * np.where(token_N < 10, 5.0, 1.0)[:, None])
    groups = {"rocks": np.arange(10), "rare high-loss": np.array([29]), "random others": np.arange(10, 20)}
    table = fed(token_N, grad_NV, 30).table(groups)
    assert table["group"].to_pylist() == ["rocks"] * 10 + ["random others"] * 10
    rows = {(row["metric"], row["first"], row["second"]): row for row in compare_groups(table)}
    assert len(rows) == len(METRICS)  # a group without a measured type is left out
    row = rows["mean_grad_norm", "rocks", "random others"]
    assert row["share_larger"] == 1.0
    assert row["p_value"] < 1e-3


def test_the_stage_follows_the_detection_it_rests_on(tmp_path, caplog):
    run = Run.create(tmp_path / "run", {})
    run.write_tensors("gradients", fed(np.arange(40) % 8, torch.randn(40, 8), 8).state())
    shares = []
    for rocks in ([1], [1], [1, 2, 3]):
        run = Run.create(run.path, {})
        run.finish("detect", {"rocks": rocks, "groups": {"rocks": rocks, "random others": [5, 6]}})
        caplog.clear()
        with caplog.at_level("INFO"):
            run = geometry(run.path)
        shares.append((run.facts("geometry")["rock_position_share"], "nothing to do" in caplog.text))
    assert shares == [(pytest.approx(1 / 8), False), (pytest.approx(1 / 8), True), (pytest.approx(3 / 8), False)]
