"""Burden, coverage and enrichment from counts alone, against sums done by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rocktokens.detect.counted import CorpusTotals, TypeCounts, detect_counted
from rocktokens.errors import ConfigError, DataError

# Burdens 50, 40, 20, 4: together 114 nats on 550 positions.
FOUR = TypeCounts(np.array([7, 3, 9, 1]), np.array([100, 400, 10, 40]), np.array([0.5, 0.1, 2.0, 0.1]))


def test_types_are_ranked_by_burden_and_coverage_is_of_what_is_listed():
    report = detect_counted(FOUR, CorpusTotals(), 2)
    assert report.rocks.tolist() == [7, 3]
    assert report.chosen.share_of_listed == pytest.approx(90 / 114)
    assert (report.chosen.share_loss, report.chosen.share_positions, report.chosen.enrichment) == (None, None, None)
    assert report.chosen.mean_loss == pytest.approx(90 / 500)


def test_enrichment_takes_both_totals():
    report = detect_counted(FOUR, CorpusTotals(1000, 200.0), 2)
    assert report.chosen.share_positions == pytest.approx(0.5)
    assert report.chosen.share_loss == pytest.approx(0.45)
    assert report.chosen.enrichment == pytest.approx(0.9)
    assert detect_counted(FOUR, CorpusTotals(1000), 2).chosen.enrichment is None
    assert detect_counted(FOUR, CorpusTotals(None, 200.0), 2).chosen.share_loss == pytest.approx(0.45)


def test_types_that_cost_what_every_token_costs_have_an_enrichment_of_one():
    flat = TypeCounts(np.arange(6), np.array([1, 2, 3, 4, 5, 6]), np.full(6, 0.3))
    for k in range(1, 7):
        assert detect_counted(flat, CorpusTotals(21, 6.3), k).chosen.enrichment == pytest.approx(1.0)


def test_the_sweep_ends_with_everything_and_k_is_the_papers_where_none_is_given():
    many = TypeCounts(np.arange(300), np.full(300, 2), np.linspace(1, 2, 300))
    report = detect_counted(many, CorpusTotals())
    assert report.k == 100
    assert [held.k for held in report.sweep] == [1, 2, 5, 10, 20, 50, 100, 200, 300]
    assert report.sweep[-1].share_of_listed == pytest.approx(1.0)
    assert detect_counted(FOUR, CorpusTotals()).k == 4


def test_equal_burdens_are_ordered_by_id():
    even = TypeCounts(np.array([5, 2, 8]), np.array([10, 10, 10]), np.array([0.5, 0.5, 0.5]))
    assert detect_counted(even, CorpusTotals(), 3).rocks.tolist() == [2, 5, 8]


def test_types_that_do_not_occur_are_never_among_the_first():
    some = TypeCounts(np.array([7, 5, 2]), np.array([0, 10, 4]), np.array([0.3, 0.1, -0.5]))
    report = detect_counted(some, CorpusTotals(), 3)
    assert report.rocks.tolist() == [5, 2]
    assert (report.k, report.chosen.k, report.sweep[-1].k) == (2, 2, 2)
    assert some.token_id_V[report.order_V].tolist() == [5, 2, 7]


def test_totals_below_what_is_listed_are_refused():
    with pytest.raises(DataError, match="said to have 500 positions, but the types listed have 550"):
        detect_counted(FOUR, CorpusTotals(500))
    with pytest.raises(DataError, match="not their mean"):
        detect_counted(FOUR, CorpusTotals(1000, 0.2))
    for bad in ({"positions": 0}, {"loss": -1.0}, {"loss": float("nan")}):
        with pytest.raises(ConfigError, match="above 0"):
            CorpusTotals(**bad)
