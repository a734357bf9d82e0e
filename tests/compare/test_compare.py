"""Regimes against uniform: intervals, curves, targets, verdicts, and the sentences that must follow from them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as sps

from rocktokens.compare.figures import conclusion, sentences, verdict_sentence
from rocktokens.compare.judgement import (
    Trained,
    at_tokens,
    crossed_estimate,
    first_reach,
    judge,
    savings,
    seed_estimate,
    skewed_estimate,
    summary_row,
    values_by_prompt,
    weights_at,
)
from rocktokens.compare.regimes import FrozenSets, common_base, regime_config
from rocktokens.compare.settings import CompareConfig, Regime
from rocktokens.errors import DataError
from rocktokens.select.settings import SelectorConfig
from rocktokens.stats import Estimate
from rocktokens.train.settings import DistillConfig

PROMPTS, STEPS = 400, np.array([0.0, 100.0, 200.0, 300.0])
ROCKS = (5, 9)
CONFIG = CompareConfig(resamples=200)


def trainings(regime, curve, *, pace=1.0, seeds=3, noise=0.005, spent=2.0, **settings):
    """A regime whose accuracy follows `curve`, on prompts whose luck all regimes of a seed share."""
    made = []
    for seed in range(seeds):
        luck_P = np.random.default_rng(seed).random(PROMPTS)
        own = np.random.default_rng([seed, *regime.encode()])
        level_E = np.array(curve) + np.array([0.0, *own.normal(0, noise, len(curve) - 1)])
        x = {"steps": STEPS, "seconds": pace * STEPS / 3, "flops": 1e9 * pace * STEPS, "tokens": spent * STEPS}
        correct_EP = (luck_P < level_E[:, None]).astype(float)
        lengths = {"length_P": np.full(PROMPTS, 40.0), "truncated_P": np.zeros(PROMPTS)}
        made.append(Trained(regime, seed, x, correct_EP, **lengths | {"tokens": 1e6} | settings))
    return made


UNIFORM = trainings("uniform", [0.4, 0.55, 0.65, 0.70])


def read(own, uniform=UNIFORM, config=CONFIG, tokens=600.0):
    return summary_row(own, uniform[: len(own)], config, tokens=tokens)


# ---------------------------------------------------------------- intervals


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_seed_or_two_say_as_much_as_their_prompts(rng, seeds):
    """Student's t over prompts of the seeds' mean."""
    value_P = (values := rng.normal(0.1, 1.0, (seeds, 50))).mean(0)
    low, high = sps.t.interval(0.95, 49, value_P.mean(), value_P.std(ddof=1) / np.sqrt(50))
    assert crossed_estimate(values) == pytest.approx((value_P.mean(), low, high, 50))


def test_three_by_two_by_hand():
    # Means by prompt 2, 4; by seed 1, 3, 5; nothing left over: variance 2/2 + 4/3, df = (7/3)² / (1 + (4/3)²/2).
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
    with pytest.raises(DataError, match="at least 2"):
        crossed_estimate([[1.0], [0.0]])


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


def test_a_target_is_reached_between_two_readings():
    assert first_reach(np.array([0.0, 0.5, 1.0]), 0.75) == pytest.approx(1.5)
    assert first_reach(np.array([0.4, 0.5]), 0.4) == 0
    assert first_reach(np.array([0.4, 0.5]), 0.6) is None
    assert first_reach(np.array([0.2, 0.62, 0.3, 0.4, 0.6]), 0.6) > 3  # one lucky reading is no arrival


# ---------------------------------------------------------------- one regime against uniform, and its words


def test_uniform_against_itself_changes_nothing():
    found = read(UNIFORM)
    assert found["delta"] == found["change_same_seconds"] == found["change_same_tokens"] == 0
    assert (found["seconds_ratio"], found["flops_ratio"], found["ceiling"]) == (pytest.approx(1.0), 1.0, 1.0)
    assert found["steps_to"] < 300  # within a point of its own end before the end
    assert found["grew"] is False


def test_gain():
    found = read(trainings("freeze", [0.4, 0.65, 0.75, 0.80], pace=0.9, kept_share=0.76))
    assert found["verdict"] == "gains"
    assert found["delta_low"] > 0.05
    assert found["ceiling"] == pytest.approx(1 / 0.76)
    assert found["seconds_to"] == pytest.approx(0.9 * found["steps_to"] / 3)
    said = verdict_sentence(found, margin=0.01)
    assert said.startswith("with 24.0\u00a0% of positions left out, it raised accuracy: +")
    for part in ("saved 10.0\u00a0% of the time", "its ceiling is 1.32×"):
        assert part in said
    assert "stumbling blocks" in conclusion({"freeze": found}, margin=0.01)


def test_loss_and_not_reached():
    found = read(trainings("freeze", [0.4, 0.45, 0.5, 0.55], kept_share=0.76))
    assert (found["verdict"], found["steps_to"], found["steps_to_low"]) == ("costs", None, None)
    said = verdict_sentence(found, margin=0.01)
    assert "cost accuracy: −1" in said
    random = read(trainings("random", [0.4, 0.54, 0.64, 0.69], kept_share=0.76))
    told = conclusion({"freeze": found, "random": random}, margin=0.01)
    assert told.startswith("The types on the bypass list are cornerstones here")
    assert "The control, as many other positions," in told
    few = conclusion({"freeze": found, "random": random | {"ceiling": 1 / 0.9}}, margin=0.01)
    assert "The control, 10.0\u00a0% of positions where the frozen types are 24.0\u00a0%, changed it by" in few
    rocks = conclusion({"freeze_rocks": found | {"regime": "freeze_rocks"}}, margin=0.01)
    assert rocks.startswith("There was nothing on the bypass list to freeze. The rocks are cornerstones here")


def test_nothing_within_the_margin_and_nothing_measurable():
    found = read([replace(own, regime="freeze", kept_share=0.76) for own in UNIFORM])
    assert found["verdict"] == "unchanged"
    assert "left accuracy where it was (within ±1.0 points): 0.0" in verdict_sentence(found, margin=0.01)
    assert "can be skipped" in conclusion({"freeze": found}, margin=0.01)
    noisy = read(trainings("freeze", [0.4, 0.55, 0.65, 0.70], noise=0.02))
    assert noisy["verdict"] == "undecided"
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


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("curve", [[0.4, 0.6, 0.8, 0.95], [0.4, 0.35, 0.3, 0.2]])
def test_fewer_than_three_seeds_decide_nothing_however_large_their_effect(curve, seeds):
    """Two seeds of one comparison once gave −3.9 and +12.5 points, the second with an interval above 0."""
    found = read(trainings("freeze", curve, kept_share=0.76, pace=0.86)[:seeds])
    assert found["delta_low"] > 0 or found["delta_high"] < 0
    assert (found["verdict"], found["over_seeds"], found["seconds_ratio_low"]) == ("undecided", False, None)
    said = verdict_sentence(found, margin=0.01)
    assert "over prompts only with" in said
    assert "no saving of time can be told from" in said
    told = conclusion({"freeze": found}, margin=0.01)
    assert told.startswith("Whether the types on the bypass list can be skipped is not decided: ")
    assert told.endswith("It takes three seeds at least.")


def test_a_slower_regime_is_cut_at_uniforms_seconds_and_a_quicker_one_keeps_its_final_student():
    slow = read(trainings("entropy", [0.4, 0.55, 0.65, 0.70], pace=2.0, noise=0.0, kept_share=0.5))
    assert abs(slow["delta"]) < 0.01
    # Uniform's 100 s are its step 150, halfway between 0.55 and 0.65.
    assert slow["change_same_seconds"] == pytest.approx(-0.10, abs=0.03)
    assert "took 100.0\u00a0% more time [+100.0, +100.0]" in verdict_sentence(slow, margin=0.01)
    quick = read(trainings("prefix", [0.4, 0.55, 0.65, 0.70], pace=0.5, noise=0.0, tokens=5e5))
    assert quick["change_same_seconds"] == pytest.approx(quick["delta"])
    assert (quick["ceiling"], quick["kept_share"]) == (pytest.approx(2.0), 1)  # half was never sampled


def test_a_row_goes_into_a_manifest_whatever_is_not_known():
    """run.json holds no NaN; seen: 0 ÷ 0 FLOPs made the whole stage fail at its end."""
    none = [replace(own, x={**own.x, "flops": 0 * STEPS}) for own in UNIFORM]
    freeze = [replace(own, x={**own.x, "flops": 0 * STEPS}) for own in trainings("freeze", [0.4, 0.45, 0.5, 0.55])]
    rows = [read(UNIFORM), read(freeze[:1], none)]
    json.dumps(rows, allow_nan=False)
    assert rows[1]["flops_ratio"] is None
    said = sentences(rows, [], CONFIG)
    assert "floating-point" not in said[1]
    json.dumps(said)


def test_equal_tokens_are_read_off_the_curves_by_hand():
    # One rollout in four: as good after 150 tokens as uniform after 600.
    small = trainings("small", [0.4, 0.55, 0.65, 0.70], noise=0.0, spent=0.5)
    even = trainings("uniform", [0.4, 0.55, 0.65, 0.70], noise=0.0)
    accuracy, change = at_tokens(small, even, 150.0)
    assert accuracy.value == pytest.approx(0.70, abs=0.03)
    # Uniform after 150 tokens is at step 75: three quarters of the way from 0.40 to 0.55.
    assert change.value == pytest.approx(0.70 - 0.5125, abs=0.03)
    assert at_tokens(even, even, 300.0)[1].value == 0
    assert read(small, even, tokens=150.0)["spent_ratio"] == pytest.approx(0.25)


def test_a_saver_is_judged_at_equal_tokens_against_the_best_control_and_not_against_uniform():
    even = trainings("uniform", [0.4, 0.55, 0.65, 0.70], noise=0.0)
    prefix = trainings("prefix", [0.4, 0.55, 0.65, 0.68], noise=0.0, spent=1.0)
    small = trainings("small", [0.4, 0.55, 0.65, 0.75], noise=0.0, spent=0.5)
    (alone,) = savings({"uniform": even, "prefix": prefix}, tokens=300)
    assert (alone["control"], alone["answer"]) == ("uniform", "yes")
    (fair,) = savings({"uniform": even, "prefix": prefix, "small": small}, tokens=300)
    assert (fair["control"], fair["answer"]) == ("small", "no")
    assert fair["over_control"] == pytest.approx(-0.07, abs=0.03)
    said = sentences([read(even, even), read(prefix, even)], [fair], CONFIG)
    assert "prefix: beats simply sampling less: no" in said[-1]
    assert savings({"uniform": even, "small": small}, tokens=300) == []  # a control is no saver


def test_bite_counts_what_was_never_sampled():
    audit = {"bite_tokens": 0.2, "bite_loss": 0.5, "end_dropped": 0.1}
    found = read(trainings("prefix", [0.4, 0.5, 0.6, 0.7], tokens=5e5, audit=audit))
    assert found["bite_tokens"] == pytest.approx(1 - 0.8 * 0.5)  # half never sampled, a fifth of the rest changed
    assert (found["bite_loss"], found["end_dropped"]) == (pytest.approx(0.5), pytest.approx(0.1))


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
    worse_C = values_by_prompt(loss_C + 0.1 * positions_C, positions_C) + rng.normal(0, 1e-3, len(loss_C))
    uniform = [replace(own, loss_C={"rest": values_by_prompt(loss_C, positions_C)}) for own in UNIFORM]
    found = read([replace(own, loss_C={"rest": worse_C}) for own in trainings("freeze", [0.4, 0.5, 0.6, 0.7])], uniform)
    assert found["loss_rest_change"] == pytest.approx(0.1, abs=1e-3)
    assert found["loss_rest"] == pytest.approx(loss_C.sum() / positions_C.sum() + 0.1, abs=1e-3)
    assert 0 <= found["loss_rest_low"] < found["loss_rest"] < found["loss_rest_high"]
    assert found["loss_rest_change_low"] > 0.09  # what both share does not widen it
    assert found["loss_rocks"] is None  # there are none
    same = read([replace(own, regime="soft") for own in uniform], uniform)
    assert (same["loss_rest_change"], same["loss_rest_change_low"]) == (0, None)  # no spread, no interval
    assert read(uniform, uniform)["loss_rest_change"] is None


def test_growth_of_rollouts_is_told_from_one_seed(rng):
    """Against a percentile bootstrap over prompts, which shares nothing with the formula."""
    base_P = rng.gamma(4.0, 8.0, PROMPTS)
    own_P = 1.2 * base_P + rng.normal(0, 4.0, PROMPTS)
    cut_P, own_cut_P = ((rng.random(PROMPTS) < share).astype(float) for share in (0.1, 0.3))
    uniform = [replace(UNIFORM[0], length_P=base_P, truncated_P=cut_P)]
    longer = [replace(trainings("soft", [0.4, 0.5, 0.6, 0.7])[0], length_P=own_P, truncated_P=own_cut_P)]
    found = read(longer, uniform)
    drawn = rng.integers(0, PROMPTS, (4000, PROMPTS))
    ratios, changes = own_P[drawn].mean(1) / base_P[drawn].mean(1), (own_cut_P - cut_P)[drawn].mean(1)
    for name, value, resampled in (
        ("length_ratio", own_P.mean() / base_P.mean(), ratios),
        ("truncated_change", own_cut_P.mean() - cut_P.mean(), changes),
    ):
        low, high = np.quantile(resampled, [0.025, 0.975])
        assert found[name] == pytest.approx(value)
        assert (found[f"{name}_low"], found[f"{name}_high"]) == pytest.approx((low, high), abs=0.1 * (high - low))
    assert found["grew"] is True
    assert read(uniform, uniform)["grew"] is False


# ---------------------------------------------------------------- regimes as configurations


def configs(seed: int = 0, **changes) -> dict[str, DistillConfig]:
    settings, sets = CompareConfig(), FrozenSets(ROCKS, ROCKS[:1])
    base = common_base(DistillConfig(learning_rate=3e-4, max_new_tokens=80, **changes), settings, steps=300)
    return {name: regime_config(name, base, settings, seed=seed, sets=sets) for name in get_args(Regime)}


GIVEN = {"schedule": "constant", "normalise": "all", "seed": 4}  # settings of the run, which all regimes take over


@pytest.mark.parametrize("given", [{}, GIVEN | {"selector": SelectorConfig(name="freeze", rocks=ROCKS)}], ids=len)
def test_regimes_differ_in_nothing_but_selector_and_their_own_settings(given):
    made = configs(**given)
    assert made["uniform"].selector == SelectorConfig()
    assert {name: getattr(made["uniform"], name) for name in GIVEN if given} == (GIVEN if given else {})
    others = {"small": {"rollouts_per_prompt"}, "todi": {"loss"}, "srkl": {"loss"}, "uniform": set()}
    for regime, config in made.items():
        uniform, own = asdict(made["uniform"]), asdict(config)
        assert {name for name in own if own[name] != uniform[name]} == others.get(regime, {"selector"}), regime
    assert made["freeze"].selector.rocks == made["random"].selector.rocks == ROCKS[:1]
    assert made["freeze_rocks"].selector.rocks == made["soft"].selector.rocks == ROCKS


def test_the_part_of_the_seeds_is_never_dropped():
    """Three seeds that look alike by chance prove nothing: the interval is longer than one over prompts alone."""
    values = np.random.default_rng(0).normal(0, 0.3, (3, 200))
    alike = values - values.mean(1, keepdims=True) + np.array([[-0.002], [0.0], [0.002]])
    prompts_only = crossed_estimate(alike.mean(0))
    assert crossed_estimate(alike).high - crossed_estimate(alike).low > prompts_only.high - prompts_only.low
