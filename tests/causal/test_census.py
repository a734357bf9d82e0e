"""Verdicts and census: known answers, calibration in small, looks that keep the error rate, sparse effects."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as sps

from rocktokens.causal.census import (
    BannedSet,
    Effects,
    Outcomes,
    census_table,
    make_schedule,
    power_of,
    run_looks,
)
from rocktokens.causal.inference import find, problems_to_decide, verdicts
from rocktokens.causal.settings import KnockoutConfig
from rocktokens.errors import DataError

EPSILON, ALPHA = 0.01, 0.05


def judge(difference_PV, seed=0, resamples=1000, alpha=ALPHA):
    found = find(difference_PV, epsilon=EPSILON, alpha=alpha, resamples=resamples, rng=np.random.default_rng(seed))
    return found, verdicts(found, epsilon=EPSILON)


def drawn(rng, problems, sets, used, effect, changed=0.3, rollouts=2):
    """Rollouts use a set at random; where used, the outcome changes either way, by `effect` on the whole."""
    share = effect / used
    up, down = (
        ((changed + share) / 2, (changed - share) / 2) if changed > abs(share) else (max(share, 0), max(-share, 0))
    )
    use, number = rng.random((2, problems, rollouts, sets))
    return ((use < used) * ((number < up).astype(float) - (number > 1 - down))).mean(1)


@pytest.mark.parametrize(
    ("num_prompts", "changed", "by", "verdict", "known"),
    [
        (100, 0, 0.0, "Undecided", {}),  # 3 % of prompts may have been missed
        (400, 0, 0.0, "Proven Neutral", {"inner_high_V": (np.log(1 / ALPHA) / 400, 1e-4), "p_V": (1, 0)}),
        (2000, 1, 0.5, "Proven Neutral", {"high_V": (sps.beta.isf(ALPHA / 2, 2, 1999), 1e-8)}),  # the binomial bound
        (50, 50, -1.0, "Strong Pillar", {"low_V": (-1, 0), "p_V": (0, 0.01)}),  # the same change everywhere
        (200, 5, 1.0, "Undecided", {"p_V": (2 / 2**5, 0.015)}),  # exact; a percentile bootstrap says 0.01
    ],
)
def test_sparse_changes_have_known_answers(num_prompts, changed, by, verdict, known):
    difference = np.zeros((num_prompts, 1))
    difference[:changed] = by
    found, named = judge(difference, resamples=4000)
    assert named == [verdict]
    for name, (value, tolerance) in known.items():
        assert getattr(found, name)[0] == pytest.approx(value, abs=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    num_prompts=st.integers(4, 300),
    used=st.floats(0.01, 1.0),
    effect=st.floats(-0.5, 0.5),
    alpha=st.sampled_from([0.05, 0.05 / 15, 0.2]),
    seed=st.integers(0, 2**20),
)
def test_interval_p_value_and_verdict_are_one_inversion(num_prompts, used, effect, alpha, seed):
    rng = np.random.default_rng(seed)
    difference = drawn(rng, num_prompts, 8, used, effect * used)
    found, named = judge(difference, seed, resamples=300, alpha=alpha)
    for v, verdict in enumerate(named):
        outside = found.low_V[v] > 0 or found.high_V[v] < 0
        inside = found.inner_low_V[v] > -EPSILON and found.inner_high_V[v] < EPSILON
        assert outside == (found.p_V[v] <= alpha)
        assert inside == (found.p_neutral_V[v] <= alpha)
        assert verdict.startswith("Strong") == (outside and abs(found.value_V[v]) >= EPSILON)
        assert (verdict == "Proven Neutral") == (inside and not verdict.startswith("Strong"))
        assert -1 <= found.low_V[v] <= found.inner_low_V[v] <= found.inner_high_V[v] <= found.high_V[v] <= 1


def test_intervals_are_those_of_an_oracle_where_the_normal_law_holds(rng):
    """Many small differences: bootstrap-t, Student and an independent t interval agree."""
    difference = rng.normal(0.02, 0.1, (2000, 5)).clip(-1, 1)
    found, _ = judge(difference, resamples=4000)
    for v in range(5):
        oracle = sps.ttest_1samp(difference[:, v], 0.0).confidence_interval(0.95)
        assert found.low_V[v] == pytest.approx(oracle.low, abs=6e-4)
        assert found.high_V[v] == pytest.approx(oracle.high, abs=6e-4)


@pytest.mark.parametrize("used", [0.6, 0.05, 0.01])
def test_calibration_in_small(rng, used):
    """benchmarks/census_calibration.py in a minute's worth less: no effect, and twice the smallest that matters."""
    _, named = judge(drawn(rng, 400, 200, used, 0.0))
    assert sum(verdict.startswith("Strong") for verdict in named) <= sps.binom.ppf(0.999, 200, 0.05)
    if used > 2 * EPSILON:
        _, named = judge(drawn(rng, 400, 200, used, 2 * EPSILON))
        assert named.count("Proven Neutral") <= sps.binom.ppf(0.999, 200, 0.05)


def test_intervals_cover_at_their_level_and_one_problem_has_none(rng):
    with pytest.raises(DataError, match="at least 2 prompts"):
        judge(np.zeros((1, 1)))
    found, _ = judge(drawn(rng, 300, 400, 0.5, 0.03))
    assert ((found.low_V <= 0.03) & (found.high_V >= 0.03)).mean() >= 0.91


def test_problems_to_decide_is_what_the_formula_says():
    sd = 0.2
    strong = problems_to_decide(0.05, sd, 10, epsilon=EPSILON, alpha=ALPHA)
    assert strong == int(np.ceil(((sps.norm.isf(0.025) + sps.norm.ppf(0.8)) * sd / 0.05) ** 2))
    assert problems_to_decide(0.0, 0.0, 10, epsilon=EPSILON, alpha=ALPHA) == 300  # ln(20) / 0.01
    assert problems_to_decide(0.0099, sd, 10, epsilon=EPSILON, alpha=ALPHA) > 10**6
    assert problems_to_decide(0.3, sd, 50, epsilon=EPSILON, alpha=ALPHA) == 51  # never fewer than there are


# ---------------------------------------------------------------- looks


def test_looks_double_and_share_alpha():
    schedule = make_schedule(1000, 4)
    assert [end for end, _ in schedule] == [125, 250, 500, 1000]
    assert sum(share for _, share in schedule) == pytest.approx(1)
    assert make_schedule(1000, 1) == [(1000, 1.0)]
    assert [end for end, _ in make_schedule(3, 4)] == [2, 3]


def sets_of(count):
    return [BannedSet(f"token:{v}", "token", v, f"t{v}", (v,)) for v in range(count)]


def census_of(difference_PV, config, rollouts=1, seed=0, correct=None, used=None, placebo=None):
    """A census of given outcomes: every problem has one rollout that uses every set, unless `used` says otherwise."""
    num_problems, num_sets = difference_PV.shape
    used = np.ones((num_problems, num_sets), bool) if used is None else used
    correct = np.zeros(num_problems) if correct is None else correct
    asked = []

    def measure(look, begin, end, active):
        asked.append((begin, end, list(active)))
        jobs = [(p, v) for p in range(begin, end) for v in active if used[p, v]]
        problem_J, column_J = np.array(jobs, int).reshape(-1, 2).T
        before_J = correct[problem_J]
        return Outcomes(
            problem_N=np.arange(begin, end),
            correct_N=correct[begin:end],
            used_V=used[begin:end].sum(0) * np.isin(np.arange(num_sets), active),
            problem_J=problem_J,
            before_J=before_J,
            column_J=column_J,
            is_knockout_J=np.ones(len(jobs), bool),
            after_J=before_J + difference_PV[problem_J, column_J],
            placebo_problems=0,
        )

    effects = Effects(sets_of(num_sets), num_problems, rollouts)
    schedule = make_schedule(num_problems, config.rounds if config.until == "decided" else 1)
    return run_looks(effects, schedule, measure, config, seed=seed), asked


CONFIG = KnockoutConfig(resamples=1000)


def test_a_set_stops_when_its_verdict_is_in(rng):
    difference = np.zeros((800, 3))
    difference[:, 0] = -1.0 * (rng.random(800) < 0.5)  # a pillar: seen at once
    difference[:, 1] = rng.choice([-1, 1], 800)  # noise: never decided
    census, asked = census_of(difference, CONFIG)
    assert [r.verdict for r in census.results] == ["Strong Pillar", "Undecided", "Proven Neutral"]
    assert [r.num_problems for r in census.results] == [100, 800, 800]
    assert [active for _, _, active in asked] == [[0, 1, 2], [1, 2], [1, 2], [1, 2]]
    assert [(begin, end) for begin, end, _ in asked] == [(0, 100), (100, 200), (200, 400), (400, 800)]
    assert census.of("token:1").more_problems > 0


def test_with_a_fixed_budget_everything_is_looked_at_once(rng):
    _, asked = census_of(-(rng.random((200, 2)) < 0.5).astype(float), KnockoutConfig(until="budget", resamples=500))
    assert asked == [(0, 200, [0, 1])]


def test_looks_keep_the_error_rate(rng):
    """200 sets without an effect, looked at four times."""
    census, _ = census_of(drawn(rng, 400, 200, 0.5, 0.0, rollouts=1), CONFIG)
    strong = sum(r.verdict.startswith("Strong") for r in census.results)
    assert strong <= sps.binom.ppf(0.999, 200, 0.05)


def test_never_used_is_not_neutral(rng):
    used = np.zeros((800, 2), bool)
    used[:, 0] = True
    census, _ = census_of(np.zeros((800, 2)), CONFIG, used=used)
    assert [r.verdict for r in census.results] == ["Proven Neutral", "Never Used"]
    assert np.isnan(census.of("token:1").p_bh)


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_a_baseline_that_is_always_right_or_wrong_is_warned_about(right):
    census, _ = census_of(np.zeros((400, 1)), CONFIG, correct=np.full(400, right))
    assert "no room for an effect" in census.notes[0]


def test_power_before_the_census_is_that_of_independent_outcomes():
    """By hand: sd = sqrt(share * 2 * accuracy * (1 - accuracy) / rollouts), effect = (1.96 + 0.84) * sd / sqrt(P)."""
    config = KnockoutConfig(power=0.8, alpha=0.05)
    found = power_of(np.array([1.0] * 30 + [0.0] * 10), np.array([4, 8, 20]), config, 4, 100)
    for name, share in (("median", 0.2), ("most used", 0.5)):
        expected = 2.80159 * np.sqrt(share * 2 * 0.75 * 0.25 / 4) / 10
        assert found[name] == (share, pytest.approx(expected, rel=1e-4))


def test_multiple_testing_stands_beside_the_verdict(rng):
    difference = np.zeros((400, 20))
    difference[:, 0] = -1.0 * (rng.random(400) < 0.5)
    difference[:, 1:] = drawn(rng, 400, 19, 0.5, 0.0, rollouts=1)
    census, _ = census_of(difference, KnockoutConfig(until="budget", resamples=1000))
    first = census.of("token:0")
    assert first.p <= first.p_bh <= 20 * first.p <= 0.05
    assert sum(r.p_bh <= 0.05 for r in census.results[1:]) <= 1


def test_proven_neutral_stands_beside_the_interval_that_proves_it(rng):
    difference = drawn(rng, 700, 40, 0.5, 0.0, changed=0.02)
    census, _ = census_of(difference, KnockoutConfig(until="budget", resamples=500))
    rows = census_table(census).to_pylist()
    neutral = [row for row in rows if row["verdict"] == "Proven Neutral"]
    assert any(row["outer_high"] >= EPSILON or row["outer_low"] <= -EPSILON for row in neutral)
    for row in rows:
        shown = "inner" if row["verdict"] == "Proven Neutral" else "outer"
        assert (row["delta_low"], row["delta_high"]) == (row[f"{shown}_low"], row[f"{shown}_high"])
    assert all(row["delta_low"] > -EPSILON and row["delta_high"] < EPSILON for row in neutral)


def test_accuracy_without_is_measured_on_the_prompts_of_its_delta(rng):
    """The first half is easy: a set that stops there must not be set against the accuracy of all prompts."""
    correct = np.repeat([1.0, 0.0], 400)
    difference = np.zeros((800, 2))
    difference[:, 0] = -(rng.random(800) < 0.5).astype(float) * correct
    difference[:, 1] = rng.choice([-1, 1], 800)
    census, _ = census_of(difference, CONFIG, correct=correct)
    early, late = census_table(census).to_pylist()
    assert early["num_problems"] == 100
    assert early["accuracy_with"] == 1
    assert early["accuracy_without"] == pytest.approx((correct + difference[:, 0])[:100].mean())
    assert late["accuracy_with"] == 0.5
