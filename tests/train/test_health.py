"""Measures of a training run's health: zero, sign, and a known answer for each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rocktokens.train.health import change, lost_updates, mismatch, numerical_floor, repeated_share


def test_change_compares_the_ends_and_waits_for_both():
    assert change(range(19), 10) is None
    found = change([1.0] * 10 + [5.0] * 30 + [3.0] * 10, 10)
    assert found == (1.0, 3.0)
    assert found.ratio == 3.0
    assert change([np.nan, 2.0, 2.0, np.nan], 1) == (2.0, 2.0)


def test_repetition_is_zero_for_distinct_and_near_one_for_a_loop():
    assert repeated_share(range(100)) == 0.0
    assert repeated_share([1, 2, 3] * 2) == 0.0  # shorter than an n-gram
    # 100 tokens of a loop of three: 93 n-grams of width 8, three of them distinct.
    assert repeated_share(([1, 2, 3] * 40)[:100]) == pytest.approx(1 - 3 / 93)


def test_mismatch_is_zero_for_equal_and_estimates_the_kl_of_two_policies():
    rng = np.random.default_rng(0)
    assert mismatch([-1.0, -2.0], [-1.0, -2.0])[:2] == (0.0, 0.0)
    assert mismatch([np.nan], [-1.0]) is None
    engine, trainer = np.array([0.7, 0.2, 0.1]), np.array([0.6, 0.3, 0.1])
    exact = float((engine * np.log(engine / trainer)).sum())
    drawn = rng.choice(3, size=200_000, p=engine)
    found = mismatch(np.log(engine)[drawn], np.log(trainer)[drawn])
    assert found.kl == pytest.approx(exact, rel=0.03)
    assert found.largest == pytest.approx(np.log(1.5))
    assert drawn[found.at] == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_floor_is_what_rounding_logits_makes(dtype):
    torch.manual_seed(0)
    logits = torch.randn(2000, 500, dtype=torch.float64) * 3
    logits += 10 - logits.amax(-1, keepdim=True)  # the tokens that carry the mass have logits of size 10
    rounded = logits.to(getattr(torch, dtype)).double()
    p, q = logits.log_softmax(-1), rounded.log_softmax(-1)
    made = float((p.exp() * (p - q)).sum(-1).mean())
    assert 0.05 < made / numerical_floor(dtype) < 1.0
    assert numerical_floor("float32") == 1e-7


def test_lost_updates_are_those_that_bfloat16_really_drops():
    weights = torch.randn(20_000).bfloat16()
    rate = 1e-3
    unchanged = float(((weights - rate) == weights).float().mean())
    found = lost_updates(weights.float().numpy(), rate, "bfloat16")
    assert 0.2 < found < 0.9
    assert found == pytest.approx(unchanged, abs=0.25)
    assert lost_updates(weights.float().numpy(), rate, "float32") == 0.0
    with pytest.raises(ValueError, match="unknown format"):
        lost_updates(weights.float().numpy(), rate, "int8")
