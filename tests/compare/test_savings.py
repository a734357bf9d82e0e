"""Savings against fair controls, the league at equal tokens, and looks that share the error rate."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rocktokens.compare.conclusions import beyond_sentence
from rocktokens.compare.curves import Arm, Audit
from rocktokens.compare.intervals import crossed_estimate
from rocktokens.compare.judgement import at_tokens, judge, read_regime
from rocktokens.compare.looks import seed_looks
from rocktokens.compare.savings import common_tokens, league, savings
from rocktokens.errors import ConfigError, DataError

PROBLEMS = 400


def arms(regime: str, steps: list[float], spent: list[float], curve: list[float], *, seeds: int = 3, **settings):
    """Trainings whose accuracy follows `curve` over tokens, on prompts whose luck all regimes of a seed share."""
    made = []
    for seed in range(seeds):
        luck_P = (np.random.default_rng(seed).permutation(PROBLEMS) + 0.5) / PROBLEMS
        correct_EP = (luck_P < np.array(curve)[:, None]).astype(float)
        x_E = np.array(steps, float)
        made.append(Arm(regime, seed, x_E, x_E, x_E * 1e9, correct_EP, np.array(spent, float), **settings))
    return made


UNIFORM = arms("uniform", [0, 10, 20], [0, 1000, 2000], [0.30, 0.50, 0.70])
# One rollout in four: as good after 500 tokens as uniform after 2000.
SMALL = arms("small", [0, 20, 40, 80], [0, 500, 1000, 2000], [0.30, 0.70, 0.75, 0.80])


def test_a_saver_is_judged_against_the_best_control_and_not_against_uniform():
    """It needs 1000 tokens: half of uniform's 2000, and twice small's 500. That is no saving."""
    cut = arms("cut", [0, 20, 40], [0, 1000, 2000], [0.30, 0.70, 0.70])
    (found,) = savings({"uniform": UNIFORM, "cut": cut}, margin=0.0, resamples=100)
    assert (found.control, found.answer) == ("uniform", "yes")
    assert found.saved is not None
    assert found.saved.value == pytest.approx(0.5)
    (fair,) = savings({"uniform": UNIFORM, "cut": cut, "small": SMALL}, margin=0.0, resamples=100)
    assert (fair.control, fair.answer) == ("small", "no")
    assert fair.saved is not None
    assert fair.saved.value == pytest.approx(-1.0)
    assert "beyond simply sampling less: no [" in beyond_sentence(fair, margin=0.0)


def test_a_saver_that_beats_every_control_says_yes_with_its_interval():
    own = arms("small_cut", [0, 20, 40], [0, 250, 1000], [0.30, 0.70, 0.75])
    (found,) = savings({"uniform": UNIFORM, "small_cut": own, "small": SMALL}, margin=0.0, resamples=100)
    assert found.answer == "yes"
    assert found.saved is not None
    assert found.saved.low <= found.saved.value <= found.saved.high
    assert found.saved.value == pytest.approx(0.5)
    assert beyond_sentence(found, margin=0.0).startswith(
        "small_cut: saves +50.0 % of the tokens of small beyond simply sampling less: yes ["
    )
    json.dumps(found.row(), allow_nan=False)


def test_a_saver_that_never_arrives_saves_nothing():
    bad = arms("prefix", [0, 20], [0, 500], [0.30, 0.40])
    (found,) = savings({"uniform": UNIFORM, "prefix": bad, "small": SMALL}, resamples=100)
    assert (found.saved, found.answer) == (None, "no")
    assert found.over_control.value == pytest.approx(0.40 - 0.70, abs=0.01)  # small after the same 500 tokens
    assert "did not reach" in beyond_sentence(found, margin=0.01)
    assert found.row()["saved"] is None


def test_controls_and_selectors_are_no_savers():
    assert savings({"uniform": UNIFORM, "small": SMALL}) == []
    others = [Arm(**{**vars(arm), "seed": arm.seed + 7, "regime": "cut"}) for arm in UNIFORM]
    with pytest.raises(DataError, match="every regime was trained with"):
        savings({"uniform": UNIFORM, "cut": others})


def test_equal_tokens_are_read_off_the_curves_by_hand():
    accuracy, change = at_tokens(SMALL, UNIFORM, 500)
    assert accuracy.value == pytest.approx(0.70)
    assert change.value == pytest.approx(0.70 - 0.40)
    assert at_tokens(SMALL, UNIFORM, 1500)[1].value == pytest.approx(0.775 - 0.60, abs=1e-3)
    assert at_tokens(UNIFORM, UNIFORM)[1].value == 0
    assert common_tokens({"uniform": UNIFORM, "small": SMALL[:1]}, ()) == 2000
    short = arms("shorter", [0, 5], [0, 700], [0.3, 0.4])
    assert common_tokens({"uniform": UNIFORM, "shorter": short}, ("shorter",)) == 2000


def read(own, steps=20, tokens=2000.0):
    return read_regime(own, UNIFORM, rng=np.random.default_rng(0), resamples=100, steps=steps, tokens=tokens)


def test_equal_steps_and_equal_tokens_come_from_one_training():
    found = read(SMALL)
    assert found.change.value == pytest.approx(0.0)  # after 20 steps both have 0.70
    assert found.change_same_tokens.value == pytest.approx(0.10)
    assert found.spent_ratio == pytest.approx(0.25)  # at equal steps
    assert found.seconds_ratio.value == pytest.approx(1.0)  # of 20 steps, though it went on to 80


def test_the_league_shares_a_rank_where_intervals_overlap():
    far = read(arms("teachable", [0, 10, 20], [0, 1000, 2000], [0.30, 0.35, 0.40]))
    near = read(arms("tip", [0, 10, 20], [0, 1000, 2000], [0.30, 0.50, 0.695]))
    places = league([read(UNIFORM), far, near, read(SMALL)])
    assert [place.regime for place in places] == ["small", "uniform", "tip", "teachable"]
    assert [place.rank for place in places] == [1, 2, 2, 4]
    assert places[0].accuracy == pytest.approx(0.80)
    for place in places:
        assert place.change_low <= place.change <= place.change_high


def test_bite_counts_what_was_never_sampled_and_lengths_are_set_against_uniforms():
    base = [Arm(**{**vars(arm), "audit": Audit(0.0, 0.0, 0.0, 40.0, 0.0)}) for arm in UNIFORM]
    audit = Audit(0.2, 0.5, 0.1, 60.0, 0.2)
    own = arms("prefix", [0, 20], [0, 1000], [0.3, 0.7], samples_less=True, tokens=0.5, audit=audit)
    found = read_regime(own, base, rng=np.random.default_rng(0), resamples=100)
    assert found.bite_tokens == pytest.approx(1 - 0.8 * 0.5)  # half never sampled, a fifth of the rest changed
    assert (found.bite_loss, found.end_dropped) == (pytest.approx(0.5), pytest.approx(0.1))
    assert found.length_ratio is not None
    assert found.length_ratio.value == pytest.approx(1.5)
    assert found.grew is True
    assert read_regime(base, base, rng=np.random.default_rng(0), resamples=100).grew is False
    assert read(UNIFORM).grew is None  # nothing was recorded


# ---------------------------------------------------------------- looks


def test_looks_share_the_error_rate():
    looks = seed_looks(12, 0.95, until_decided=True)
    assert [look.seeds for look in looks] == [3, 4, 6, 9, 12]
    assert sum(1 - look.level for look in looks) == pytest.approx(0.05)
    assert seed_looks(5, 0.95, until_decided=False) == [(5, 0.95)]
    with pytest.raises(ConfigError, match="at least 3 seeds"):
        seed_looks(2, 0.95, until_decided=True)


@pytest.mark.parametrize(("truth", "wrong"), [(0.0, ("costs", "gains")), (0.03, ("unchanged", "costs"))])
def test_looking_several_times_keeps_the_error_rate(truth, wrong):
    """Simulated: a verdict that is false is settled on in at most 5 % of comparisons, looks at 3 to 9 seeds."""
    looks, rng, errors, number = seed_looks(9, 0.95, until_decided=True), np.random.default_rng(0), 0, 600
    every_look = 0
    for _ in range(number):
        value_SP = truth + 0.02 * rng.normal(size=(9, 1)) + 0.1 * rng.normal(size=60) + 0.2 * rng.normal(size=(9, 60))
        verdicts = [judge(crossed_estimate(value_SP[: k.seeds], level=k.level), 0.03, seeds=k.seeds) for k in looks]
        settled = next((verdict for verdict in verdicts if verdict != "undecided"), "undecided")
        errors += settled in wrong
        naive = [judge(crossed_estimate(value_SP[: k.seeds], level=0.95), 0.03, seeds=k.seeds) for k in looks]
        every_look += next((verdict for verdict in naive if verdict != "undecided"), "undecided") in wrong
    assert errors / number <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / number)
    assert every_look > errors  # looking at the full level each time errs more often


def test_an_interval_in_words_survives_the_terminal(capsys):
    """Rich takes “[never arrives, …]” for a style and prints nothing of it."""
    from rocktokens.progress import console

    found = savings({"uniform": UNIFORM, "prefix": arms("prefix", [0, 20], [0, 500], [0.30, 0.69])}, resamples=100)[0]
    said = beyond_sentence(found, margin=0.01)
    console(width=400).print(said, markup=False)
    assert said in capsys.readouterr().out
