"""Savings against fair controls at equal tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rocktokens.compare.conclusions import beyond_sentence
from rocktokens.compare.curves import Arm, Audit
from rocktokens.compare.judgement import at_tokens, read_regime
from rocktokens.compare.savings import common_tokens, savings

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


def test_a_saver_is_judged_at_equal_tokens_against_the_best_control_and_not_against_uniform():
    prefix = arms("prefix", [0, 20, 40], [0, 1000, 2000], [0.30, 0.70, 0.70])
    (found,) = savings({"uniform": UNIFORM, "prefix": prefix}, tokens=1000)
    assert (found.control, found.answer) == ("uniform", "yes")
    assert found.over_control.value == pytest.approx(0.20)
    (fair,) = savings({"uniform": UNIFORM, "prefix": prefix, "small": SMALL}, tokens=1000)
    assert (fair.control, fair.answer) == ("small", "no")
    assert fair.over_control.value == pytest.approx(-0.05)
    assert "beats simply sampling less: no" in beyond_sentence(fair)
    json.dumps(fair.row(), allow_nan=False)
    assert savings({"uniform": UNIFORM, "small": SMALL}, tokens=1000) == []  # controls are no savers


def test_equal_tokens_are_read_off_the_curves_by_hand():
    accuracy, change = at_tokens(SMALL, UNIFORM, 500)
    assert accuracy.value == pytest.approx(0.70)
    assert change.value == pytest.approx(0.70 - 0.40)
    assert at_tokens(SMALL, UNIFORM, 1500)[1].value == pytest.approx(0.775 - 0.60, abs=1e-3)
    assert at_tokens(UNIFORM, UNIFORM)[1].value == 0
    assert common_tokens({"uniform": UNIFORM, "small": SMALL[:1]}) == 2000


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
    assert (
        read_regime(UNIFORM, UNIFORM, rng=np.random.default_rng(0), resamples=100).grew is None
    )  # nothing was recorded
