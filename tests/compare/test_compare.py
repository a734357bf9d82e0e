"""Readings of regimes: intervals, curves, targets, and the sentences that must follow from them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as sps

from rocktokens.compare.conclusions import SUBJECTS, conclusion, savings_sentence, verdict_sentence
from rocktokens.compare.intervals import skewed_estimate, values_by_prompt
from rocktokens.compare.judgement import (
    Arm,
    Reading,
    area_weights,
    crossed_estimate,
    first_reach,
    frontier,
    judge,
    read_regime,
    seed_estimate,
    weights_at,
)
from rocktokens.compare.regimes import (
    NEED_ROCKS,
    FrozenSets,
    check_arms,
    common_base,
    differences,
    regime_config,
)
from rocktokens.compare.settings import CompareConfig, Regime
from rocktokens.errors import ConfigError, DataError
from rocktokens.select.settings import SelectorConfig
from rocktokens.stats import Estimate
from rocktokens.train.settings import DistillConfig

PROBLEMS, STEPS = 400, np.array([0.0, 100.0, 200.0, 300.0])
ROCKS = (5, 9)


def arms(regime: str, curve: list[float], *, pace: float = 1.0, seeds: int = 3, noise: float = 0.005, **settings):
    """A regime whose accuracy follows `curve`, on problems whose luck all regimes of a seed share."""
    made = []
    for seed in range(seeds):
        luck_P = np.random.default_rng(seed).random(PROBLEMS)
        own = np.random.default_rng([seed, *regime.encode()])
        level_E = np.array(curve) + np.array([0.0, *own.normal(0, noise, len(curve) - 1)])
        correct_EP = (luck_P < level_E[:, None]).astype(float)
        step_E = STEPS[: len(curve)]
        made.append(
            Arm(regime, seed, step_E, pace * step_E / 3, 1e9 * pace * step_E, correct_EP, **{"tokens": 1e6} | settings)
        )
    return made


UNIFORM = arms("uniform", [0.4, 0.55, 0.65, 0.70])


def read(regime: list[Arm], **settings) -> Reading:
    return read_regime(regime, UNIFORM, rng=np.random.default_rng(0), resamples=200, **settings)


# ---------------------------------------------------------------- intervals


def test_one_seed_is_students_t_over_problems(rng):
    value_P = rng.normal(size=50)
    found = crossed_estimate(value_P)
    low, high = sps.t.interval(0.95, 49, value_P.mean(), value_P.std(ddof=1) / np.sqrt(50))
    assert found == pytest.approx((value_P.mean(), low, high, 50))


def test_three_by_two_by_hand():
    # Means by problem 2, 4; by seed 1, 3, 5; nothing left over: variance 2/2 + 4/3, df = (7/3)² / (1 + (4/3)²/2).
    found = crossed_estimate([[0.0, 2.0], [2.0, 4.0], [4.0, 6.0]])
    half = sps.t.ppf(0.975, 49 / 17) * math.sqrt(7 / 3)
    assert found == pytest.approx((3.0, 3.0 - half, 3.0 + half, 2))


@pytest.mark.parametrize("seed_spread", [0.0, 0.02])
def test_crossed_intervals_cover_the_truth(seed_spread):
    rng, hits, number = np.random.default_rng(1), 0, 400
    for _ in range(number):
        value_SP = seed_spread * rng.normal(size=(3, 1)) + 0.2 * rng.normal(size=100) + 0.4 * rng.normal(size=(3, 100))
        found = crossed_estimate(value_SP)
        hits += found.low <= 0 <= found.high
    assert 0.92 <= hits / number <= 0.99


def test_no_difference_at_all_is_no_certainty():
    found = crossed_estimate(np.zeros((3, 100)))
    assert found.value == 0
    assert found.high == pytest.approx(0.0295, abs=1e-3)  # three in a hundred, about


def test_unknown_outcomes_and_single_problems_are_refused():
    with pytest.raises(DataError, match="known"):
        crossed_estimate([[0.0, np.nan]])
    with pytest.raises(DataError, match="at least 2"):
        crossed_estimate([[1.0], [0.0]])
    with pytest.raises(DataError, match="no seeds"):
        seed_estimate([])


def test_a_ratio_of_one_seed_has_no_interval():
    assert seed_estimate([0.5], ratio=True).value == pytest.approx(0.5)
    assert math.isnan(seed_estimate([0.5], ratio=True).low)
    assert seed_estimate([0.5, 2.0], ratio=True).value == pytest.approx(1.0)  # a mean of ratios would say 1.25


# ---------------------------------------------------------------- curves

curves = st.lists(st.tuples(st.floats(0.1, 5), st.floats(0, 1)), min_size=2, max_size=8)


@given(curves, st.floats(0, 1.3))
def test_weights_are_linear_interpolation_held_at_the_end(points, share):
    x_E = np.cumsum([0.0, *(width for width, _ in points[1:])])
    y_E = np.array([y for _, y in points])
    assert weights_at(x_E, share * x_E[-1]) @ y_E == pytest.approx(np.interp(share * x_E[-1], x_E, y_E))


@given(curves, st.floats(0.05, 1.5))
def test_area_is_the_mean_of_the_interpolated_curve(points, share):
    x_E = np.cumsum([0.0, *(width for width, _ in points[1:])])
    y_E = np.array([y for _, y in points])
    fine = np.linspace(0, share * x_E[-1], 20_001)
    expected = np.trapezoid(np.interp(fine, x_E, y_E), fine) / fine[-1]
    assert area_weights(x_E, share * x_E[-1]) @ y_E == pytest.approx(expected, abs=1e-3)


def test_a_target_is_reached_between_two_readings():
    assert first_reach(np.array([0.0, 0.5, 1.0]), 0.75) == pytest.approx(1.5)
    assert first_reach(np.array([0.4, 0.5]), 0.4) == 0
    assert first_reach(np.array([0.4, 0.5]), 0.6) is None


def test_one_lucky_reading_is_no_arrival():
    lucky = np.array([0.2, 0.62, 0.3, 0.4, 0.6])
    place = first_reach(lucky, 0.6)
    assert place is not None
    assert place > 3


# ---------------------------------------------------------------- readings and their words


def test_uniform_against_itself_changes_nothing():
    found = read(UNIFORM)
    assert found.change.value == found.change_same_seconds.value == found.area_steps_change.value == 0
    assert (found.seconds_ratio.value, found.flops_ratio, found.ceiling) == (pytest.approx(1.0), 1.0, 1.0)
    assert found.reach["steps"].value < 300  # within a point of its own end before the end
    assert found.reach["steps"].share_reached == 1


def test_a_training_without_recorded_flops_has_no_ratio_of_them():
    """The row goes into run.json, which holds no NaN; seen: 0 ÷ 0 made the whole stage fail at its end."""
    none = [replace(arm, flops_E=0 * arm.flops_E) for arm in UNIFORM]
    freeze = [replace(arm, flops_E=0 * arm.flops_E) for arm in arms("freeze", [0.4, 0.5, 0.6, 0.7], seeds=1)]
    found = read_regime(freeze, none, rng=np.random.default_rng(0))
    assert math.isnan(found.flops_ratio)
    assert found.row()["flops_ratio"] is None
    json.dumps(found.row(), allow_nan=False)
    said = verdict_sentence(found, margin=0.01)
    assert "nan" not in said
    assert "floating-point" not in said


def test_gain():
    found = read(arms("freeze", [0.4, 0.65, 0.75, 0.80], pace=0.9, kept_share=0.76))
    assert found.verdict == "gains"
    assert found.change.low > 0.05
    assert found.ceiling == pytest.approx(1 / 0.76)
    assert found.reach["seconds"].value == pytest.approx(0.9 * found.reach["steps"].value / 3)
    said = verdict_sentence(found, margin=0.01)
    assert said.startswith("Freezing the bypass list, 24.0\u00a0% of positions, raised accuracy: +")
    assert "saved 10.0\u00a0% of the step" in said
    assert "its ceiling is 1.32×" in said
    assert "It reached uniform's final accuracy less 1.0 points after" in said
    assert "stumbling blocks" in conclusion({"freeze": found}, margin=0.01)


def test_loss_and_not_reached():
    found = read(arms("freeze", [0.4, 0.45, 0.5, 0.55], kept_share=0.76))
    assert found.verdict == "costs"
    assert found.reach["steps"] == (math.inf, math.inf, math.inf, 0.0)
    said = verdict_sentence(found, margin=0.01)
    assert "cost accuracy: −1" in said
    assert "It did not reach uniform's final accuracy less 1.0 points." in said
    random = read(arms("random", [0.4, 0.54, 0.64, 0.69], kept_share=0.76))
    told = conclusion({"freeze": found, "random": random}, margin=0.01)
    assert told.startswith("The types on the bypass list are cornerstones here")
    assert "The control, as many other positions," in told
    few = conclusion({"freeze": found, "random": replace(random, ceiling=1 / 0.9)}, margin=0.01)
    assert "The control, 10.0\u00a0% of positions where the frozen types are 24.0\u00a0%, changed it by" in few
    rocks = conclusion({"freeze_rocks": replace(found, regime="freeze_rocks")}, margin=0.01)
    assert rocks.startswith("There was nothing on the bypass list to freeze. The rocks are cornerstones here")


def test_nothing_within_the_margin_and_nothing_measurable():
    same = [replace(arm, regime="freeze", kept_share=0.76) for arm in UNIFORM]
    found = read(same)
    assert found.verdict == "unchanged"
    assert "left accuracy where it was (within ±1.0 points): 0.0 points" in verdict_sentence(found, margin=0.01)
    assert "can be skipped" in conclusion({"freeze": found}, margin=0.01)

    noisy = read(arms("freeze", [0.4, 0.55, 0.65, 0.70], noise=0.02))
    assert noisy.verdict == "undecided"
    assert "nothing that could be measured" in verdict_sentence(noisy, margin=0.01)
    assert "not decided" in conclusion({"freeze": noisy}, margin=0.01)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.005, 0.005, "unchanged"),
        (-0.008, -0.001, "unchanged"),
        (-0.03, -0.001, "costs"),
        (0.001, 0.03, "gains"),
        (-0.02, 0.02, "undecided"),
    ],
)
def test_what_an_interval_says(low, high, verdict):
    change = Estimate((low + high) / 2, low, high, 10)
    assert judge(change, 0.01, seeds=3) == verdict
    assert judge(change, 0.01, seeds=2) == judge(change, 0.01, seeds=1) == "undecided"


def test_one_seed_decides_nothing_however_large_its_effect():
    """Two seeds of one comparison once gave −3.9 and +12.5 points, the second with an interval above 0."""
    for curve in ([0.4, 0.6, 0.8, 0.95], [0.4, 0.35, 0.3, 0.2]):
        found = read(arms("freeze", curve, kept_share=0.76)[:1])
        assert found.change.low > 0 or found.change.high < 0
        assert found.verdict == "undecided"
        said = verdict_sentence(found, margin=0.01)
        assert "over problems only with one seed, which decides nothing" in said
        told = conclusion({"freeze": found}, margin=0.01)
        assert told.startswith("Whether the types on the bypass list can be skipped is not decided: ")
        assert told.endswith("It takes three seeds at least.")


def test_a_slower_regime_is_cut_at_uniforms_seconds():
    found = read(arms("entropy", [0.4, 0.55, 0.65, 0.70], pace=2.0, noise=0.0, kept_share=0.5))
    assert abs(found.change.value) < 0.01
    # Uniform's 100 s are its step 150, halfway between 0.55 and 0.65.
    assert found.change_same_seconds.value == pytest.approx(-0.10, abs=0.03)
    assert found.area_seconds_change.value < -0.05
    assert "took 100.0\u00a0% more time a step [+100.0, +100.0]" in verdict_sentence(found, margin=0.01)


def test_a_quicker_regime_keeps_its_final_student():
    found = read(arms("prefix", [0.4, 0.55, 0.65, 0.70], pace=0.5, noise=0.0, samples_less=True, tokens=5e5))
    assert found.change_same_seconds.value == pytest.approx(found.change.value)
    assert found.ceiling == pytest.approx(2.0)  # half the positions were never sampled
    assert found.kept_share == 1


def test_frontier_and_goal():
    quick = read(arms("small", [0.4, 0.55, 0.65, 0.70], pace=0.6, noise=0.0))
    slow = read(arms("divergence", [0.4, 0.5, 0.6, 0.65], pace=1.5))
    uniform = read(UNIFORM)
    assert frontier([uniform, slow, quick])[0] == "small"
    assert "divergence" not in frontier([uniform, slow, quick])
    said = savings_sentence([uniform, slow, quick], margin=0.01)
    assert "small was quickest: 0.60× [0.60, 0.60] of uniform's seconds" in said
    assert "the goal of 0.70× is met by the estimate, not proven" in said  # +0.2 points [−0.8, +1.1]
    assert "None ended within 1.0 points" in savings_sentence([uniform, slow], margin=0.01)


def test_the_goal_is_met_where_both_intervals_say_so():
    """The quickest regime is not sure of its accuracy; a slower one is, and it is named too."""
    uniform = read(UNIFORM)
    quickest = read(arms("prefix", [0.4, 0.55, 0.65, 0.70], pace=0.4, noise=0.02), margin=0.02)
    sure = read(arms("small", [0.4, 0.55, 0.65, 0.70], pace=0.5, noise=0.0), margin=0.02)
    assert quickest.verdict == "undecided"
    said = savings_sentence([uniform, quickest, sure], margin=0.02)
    assert "prefix was quickest" in said
    assert "met by the estimate, not proven" in said
    assert "met, both intervals inside it, by small: 0.50× [0.50, 0.50]" in said
    assert "both intervals" not in savings_sentence([uniform, quickest], margin=0.02)
    assert "the goal of 0.70× is met." in savings_sentence([uniform, sure], margin=0.02)


def test_a_reading_is_one_row_that_a_manifest_takes():
    for found in (read(UNIFORM), read(arms("freeze", [0.4, 0.45, 0.5, 0.55], loss_rocks=0.8, loss_rest=0.1))):
        row = found.row()
        json.dumps(row, allow_nan=False)
        assert row["delta_low"] <= row["delta"] <= row["delta_high"]
    assert row["steps_to"] is None
    assert row["loss_rocks"] == pytest.approx(0.8)


# ---------------------------------------------------------------- losses by prompt


def corpus(rng: np.random.Generator, prompts: int = 40, *, tail: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Summed loss and positions of prompts. With a tail, long ones are harder, and some have no such position."""
    positions_C = rng.geometric(1 / 12, prompts) - 1 if tail else rng.integers(10, 60, prompts)
    hardness_C = rng.gamma(2.0, 0.05, prompts) * (1 + positions_C / 20 * tail)
    return positions_C * hardness_C, positions_C


def test_values_by_prompt_have_the_mean_loss_of_a_position_as_their_mean():
    value_C = values_by_prompt([6.0, 0.0, 2.0], [3, 0, 1])
    assert value_C.mean() == pytest.approx(8 / 4)
    assert value_C == pytest.approx([2.0, 2.0, 2.0])  # both prompts lose 2 a position, the empty one says nothing
    assert values_by_prompt([4.0, 0.0], [2, 2]) == pytest.approx([2.0, 0.0])
    with pytest.raises(DataError, match="no positions"):
        values_by_prompt([0.0], [0])


@pytest.mark.parametrize(("prompts", "tail", "least"), [(40, False, 0.92), (200, True, 0.90)])
def test_intervals_of_a_mean_loss_hold_it_about_as_often_as_they_say(prompts, tail, least):
    """95 % intervals on 800 corpora, against the mean of a very large one. With a tail and 40 prompts: 87 %."""
    rng = np.random.default_rng(3)
    loss, positions = corpus(rng, 400_000, tail=tail)
    truth = loss.sum() / positions.sum()
    found = [skewed_estimate(values_by_prompt(*corpus(rng, prompts, tail=tail))) for _ in range(800)]
    assert least < np.mean([low <= truth <= high for _, low, high, _ in found]) < 0.98


def test_an_interval_of_a_mean_loss_is_students_where_nothing_is_skewed_and_inverts_halls_test_where_it_is(rng):
    even_C = np.concatenate([base := rng.normal(1, 0.2, 20), 2 - base])
    assert skewed_estimate(even_C)[:3] == pytest.approx(crossed_estimate(even_C)[:3], rel=1e-6)
    value_C = rng.gamma(0.5, 1.0, 40)
    found, skew = skewed_estimate(value_C), sps.skew(value_C, bias=False)
    for end, sign in ((found.low, 1), (found.high, -1)):  # the transformation as in Hall (1992), written out again
        w = (value_C.mean() - end) / value_C.std(ddof=1)
        transformed = w + skew * w**2 / 3 + skew**2 * w**3 / 27 + skew / (6 * 40)
        assert math.sqrt(40) * transformed == pytest.approx(sign * sps.t.ppf(0.975, 39))
    assert found.high - found.value > found.value - found.low  # the long side is the right one
    assert math.isnan(skewed_estimate([1.0, 2.0]).low)


def test_the_change_of_a_loss_is_paired_by_prompt(rng):
    loss_C, positions_C = corpus(rng)
    base = {"loss_rest": 1.0, "loss_rest_C": values_by_prompt(loss_C, positions_C)}
    worse = {"loss_rest": 1.0, "loss_rest_C": values_by_prompt(loss_C + 0.1 * positions_C, positions_C)}
    uniform = [replace(arm, **base) for arm in UNIFORM]
    found = read_regime(
        [replace(arm, **worse) for arm in arms("freeze", [0.4, 0.5, 0.6, 0.7])], uniform, rng=rng, resamples=100
    )
    assert found.loss_rest_change.value == pytest.approx(0.1)
    assert found.loss_rest.value == pytest.approx(loss_C.sum() / positions_C.sum() + 0.1)
    assert 0 <= found.loss_rest.low < found.loss_rest.value < found.loss_rest.high
    noisy = {**worse, "loss_rest_C": worse["loss_rest_C"] + rng.normal(0, 1e-3, len(loss_C))}
    found = read_regime(
        [replace(arm, **noisy) for arm in arms("freeze", [0.4, 0.5, 0.6, 0.7])], uniform, rng=rng, resamples=100
    )
    assert found.loss_rest_change.low > 0.09  # what both share does not widen it
    assert found.loss_rest_change.high - found.loss_rest_change.low < 0.1 * (found.loss_rest.high - found.loss_rest.low)
    assert found.row()["loss_rest_change_low"] == found.loss_rest_change.low
    assert found.loss_rocks_change is None  # not on record
    same = read_regime([replace(arm, regime="soft") for arm in uniform], uniform, rng=rng, resamples=100)
    assert same.loss_rest_change.value == 0
    assert same.row()["loss_rest_change_low"] is None  # no spread, no interval
    assert read_regime(uniform, uniform, rng=rng, resamples=100).loss_rest_change is None


def test_growth_of_rollouts_is_told_from_one_seed_where_it_is_known_by_prompt(rng):
    """Against a percentile bootstrap over prompts, which shares nothing with the formula."""
    base_P = rng.gamma(4.0, 8.0, PROBLEMS)
    own_P = 1.2 * base_P + rng.normal(0, 4.0, PROBLEMS)
    cut_P, own_cut_P = rng.random(PROBLEMS) < 0.1, rng.random(PROBLEMS) < 0.3
    uniform = [replace(UNIFORM[0], length_P=base_P, truncated_P=cut_P.astype(float))]
    longer = [
        replace(arms("soft", [0.4, 0.5, 0.6, 0.7], seeds=1)[0], length_P=own_P, truncated_P=own_cut_P.astype(float))
    ]
    found = read_regime(longer, uniform, rng=rng, resamples=100)
    assert found.length_ratio.value == pytest.approx(own_P.mean() / base_P.mean())
    assert found.truncated_change.value == pytest.approx(own_cut_P.mean() - cut_P.mean())
    drawn = rng.integers(0, PROBLEMS, (4000, PROBLEMS))
    low, high = np.quantile(own_P[drawn].mean(1) / base_P[drawn].mean(1), [0.025, 0.975])
    assert found.length_ratio[1:3] == pytest.approx((low, high), abs=0.1 * (high - low))
    low, high = np.quantile((own_cut_P.astype(float) - cut_P)[drawn].mean(1), [0.025, 0.975])
    assert found.truncated_change[1:3] == pytest.approx((low, high), abs=0.1 * (high - low))
    assert found.grew is True
    assert read_regime(uniform, uniform, rng=rng, resamples=100).grew is False
    assert read_regime([replace(longer[0], length_P=None)], uniform, rng=rng, resamples=100).grew is None


def test_only_pairs_are_compared():
    with pytest.raises(DataError, match="same seeds"):
        read([replace(arm, seed=arm.seed + 10) for arm in UNIFORM])
    with pytest.raises(DataError, match="other problems"):
        read([replace(arm, correct_EP=arm.correct_EP[:, :10]) for arm in UNIFORM])
    with pytest.raises(DataError, match="a curve needs"):
        replace(UNIFORM[0], step_E=STEPS[:1])


# ---------------------------------------------------------------- regimes as configurations


SETS = FrozenSets(ROCKS, ROCKS[:1])


def configs(seed: int = 0, **changes) -> dict[str, DistillConfig]:
    settings = CompareConfig()
    base = common_base(DistillConfig(learning_rate=3e-4, max_new_tokens=80, **changes), settings, steps=300)
    names = ("uniform", *SUBJECTS)
    return {name: regime_config(name, base, settings, seed=seed, sets=SETS) for name in names}


def test_regimes_differ_in_nothing_but_selector_and_schedule():
    made = configs()
    check_arms(made)
    others = {"small": {"rollouts_per_prompt"}, "todi": {"loss"}, "srkl": {"loss"}, "uniform": set()}
    for regime in get_args(Regime):
        different = differences(made["uniform"], made[regime])
        if regime in others:
            assert different == others[regime], regime
        else:
            assert different, regime
            assert all(name.startswith("selector.") for name in different), (regime, different)
    assert made["freeze"].selector.rocks == made["random"].selector.rocks == ROCKS[:1]
    assert made["freeze_rocks"].selector.rocks == made["soft"].selector.rocks == ROCKS


def test_another_learning_rate_is_not_another_regime():
    made = configs()
    made["freeze"] = replace(made["freeze"], learning_rate=1e-3)
    with pytest.raises(ConfigError, match=r"freeze differs from uniform in learning_rate"):
        check_arms(made)


def test_all_share_one_schedule_whatever_the_run_had():
    made = configs(until="saturated", normalise="all", selector=SelectorConfig(name="freeze", rocks=ROCKS), seed=4)
    assert {config.schedule for config in made.values()} == {"constant"}
    assert {config.normalise for config in made.values()} == {"all"}
    assert made["uniform"].until == "steps"
    assert made["uniform"].selector == SelectorConfig()
    assert {config.seed for config in made.values()} == {4}
    assert {config.seed for config in configs(seed=2).values()} == {2}


@pytest.mark.parametrize("regime", [*NEED_ROCKS, "random"])
def test_without_rocks_their_regimes_are_refused(regime):
    base = common_base(DistillConfig(), CompareConfig(), steps=10)
    with pytest.raises(ConfigError, match="needs rocks"):
        regime_config(regime, base, CompareConfig(), seed=0)


def test_with_an_empty_list_freeze_is_refused_and_controls_stand_for_the_rocks():
    base = common_base(DistillConfig(), CompareConfig(), steps=10)
    sets = FrozenSets(ROCKS)
    with pytest.raises(ConfigError, match="needs a bypass list that names token types"):
        regime_config("freeze", base, CompareConfig(), seed=0, sets=sets)
    assert regime_config("random", base, CompareConfig(), seed=0, sets=sets).selector.rocks == ROCKS
    assert regime_config("freeze_rocks", base, CompareConfig(), seed=0, sets=sets).selector.rocks == ROCKS


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_have_no_interval_over_seeds_and_no_saving(seeds):
    """A one-seed study once printed "in 86 % of its time" where the FLOPs ratio was 0.997."""
    found = read(arms("freeze", [0.4, 0.55, 0.65, 0.70], pace=0.86)[:seeds])
    assert not found.over_seeds
    assert math.isnan(found.seconds_ratio.low)
    assert found.row()["over_seeds"] is False
    said = verdict_sentence(found, margin=0.01)
    assert "no saving of time can be told from" in said
    assert "saved" not in said
    assert "over problems only" in conclusion({"freeze": found}, margin=0.01)
    assert savings_sentence([read(UNIFORM), found], margin=0.01).startswith("Seconds are not compared")


def test_two_seeds_say_as_much_as_their_problems():
    """The interval over problems of the seeds' mean, by hand."""
    values = np.random.default_rng(0).normal(0.1, 1.0, (2, 50))
    found = crossed_estimate(values)
    oracle = sps.ttest_1samp(values.mean(0), 0.0).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(oracle.low), pytest.approx(oracle.high))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"seeds": 0}, "seeds"),
        ({"lam": 0.0}, "lam"),
        ({"prefix": 1.5}, "prefix"),
        ({"keep": 0.0}, "keep"),
        ({"teachable": -0.1}, "teachable"),
        ({"problems": 1}, "problems"),
        ({"regimes": ()}, "regimes"),
    ],
)
def test_bad_settings_are_refused(bad, said):
    with pytest.raises(ConfigError, match=said):
        CompareConfig(**bad)
