"""Numbers with their errors: known answers, calibration, refusals."""

import numpy as np
import pytest
from scipy import stats as sps

from rocktokens import stats


def mean(value_P, **options):
    return stats.bootstrap_estimate(lambda s, n: s / n, [value_P, np.ones(len(value_P))], **options)


def test_ratio_error_equals_the_textbook_formula(rng):
    n_P = rng.poisson(20, 4000) + 1.0
    s_P = rng.gamma(2.0, n_P / 2)
    found = stats.bootstrap_estimate(lambda s, n: s / n, [s_P, n_P], rng=rng)
    ratio = s_P.sum() / n_P.sum()
    error = np.sqrt(((s_P - ratio * n_P) ** 2).sum()) / n_P.sum()
    assert found.value == pytest.approx(ratio)
    assert found.num_prompts == 4000
    assert found.low == pytest.approx(ratio - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(ratio + 1.96 * error, abs=0.15 * error)


def test_many_statistics_at_once_equal_one_at_a_time(rng):
    loss_PV, n_PV = rng.gamma(2.0, 1.0, (40, 7)), rng.poisson(3, (40, 7)) + 1.0
    counts_BP = stats.resample_counts(40, 500, rng)
    together = stats.bootstrap_sums(lambda s, n: s / n, [loss_PV, n_PV], counts_BP)
    for v in range(7):
        alone = stats.bootstrap_sums(lambda s, n: s / n, [loss_PV[:, [v]], n_PV[:, [v]]], counts_BP)
        np.testing.assert_allclose([e[v] for e in together], [e[0] for e in alone])


@pytest.mark.parametrize("num_prompts", [20, 60])
def test_intervals_cover_skewed_prompts(num_prompts):
    rng = np.random.default_rng(3)
    hit, trials = 0, 300
    for _ in range(trials):
        n_P = rng.poisson(30, num_prompts) + 1.0
        s_P = n_P * rng.gamma(2.0, 0.5, num_prompts)
        found = stats.bootstrap_estimate(lambda s, n: s / n, [s_P, n_P], rng=rng, resamples=500)
        hit += found.low <= 1.0 <= found.high
    assert sps.binomtest(hit, trials, 0.95).pvalue > 0.01


def test_very_many_prompts_are_resampled_in_groups(rng):
    value_P = rng.normal(3, 1, 50_000)
    found = mean(value_P, rng=rng, resamples=300)
    assert found.value == pytest.approx(value_P.mean())
    assert found.num_prompts == 50_000
    assert (found.high - found.low) / 2 == pytest.approx(1.96 / np.sqrt(50_000), rel=0.15)


def test_adjusted_p_values_by_hand():
    np.testing.assert_allclose(stats.benjamini_hochberg([0.01, 0.02, 0.03, 0.5]), [0.04, 0.04, 0.04, 0.5])


def test_power_is_reached():
    rng = np.random.default_rng(2)
    effect = stats.smallest_detectable_effect(1.0, 100)
    found = np.mean([sps.ttest_1samp(rng.normal(effect, 1, 100), 0).pvalue < 0.05 for _ in range(600)])
    assert 0.74 < found < 0.86


def test_one_odd_prompt_among_many_gives_no_absurd_interval():
    # All but one of 200 prompts have share 1: resamples without it have no error of their own.
    hits_P = np.full(200, 5.0)
    hits_P[7] = 4.0
    found = mean(hits_P / 5, rng=np.random.default_rng(0), resamples=1000)
    assert found.value == pytest.approx(0.999)
    assert 0.98 < found.low < 0.999 < found.high < 1.01


def test_shares_are_those_of_each_prompt():
    texts = ["4", "5", "4", "4", "x", "7", "7", "x"]
    assert stats.right_shares(texts, ["4", "4", "7", "x"], str.__eq__, rollouts=2).tolist() == [0.5, 1.0, 0.5, 0.5]
    assert stats.right_shares(texts[:2], ["4", "4"], str.__eq__).tolist() == [1.0, 0.0]


def test_single_outcomes_have_wilsons_interval():
    found = stats.accuracy_estimate([1.0] * 7 + [0.0] * 3, rng=np.random.default_rng(0))
    expected = sps.binomtest(7, 10).proportion_ci(method="wilson")
    assert found == pytest.approx((0.7, expected.low, expected.high, 10))
    assert stats.share_estimate([1.0] * 7 + [0.0] * 3)[:3] == pytest.approx(found[:3], abs=0.03)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_outcomes_that_are_all_alike_are_not_certain(share):
    """Seen: the comparison showed [0, 0] after 50 wrong rollouts, as if no right one were possible."""
    found = stats.accuracy_estimate([share] * 50, rng=np.random.default_rng(0))
    assert found.value == share
    assert 0.0 <= found.low <= share <= found.high <= 1.0
    assert found.high - found.low > 0.05


def test_the_interval_covers_the_accuracy_as_often_as_it_says():
    rng, covered, times = np.random.default_rng(5), 0, 300
    for _ in range(times):
        chance_P = rng.beta(2.0, 2.0, 80)
        share_P = rng.binomial(4, chance_P) / 4
        found = stats.accuracy_estimate(share_P, rng=rng, resamples=200)
        covered += found.low <= 0.5 <= found.high
    assert covered / times == pytest.approx(0.95, abs=0.035)
