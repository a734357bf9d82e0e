"""Saturation: after the warm-up, over the steps that remain; a slow fall is not an end."""

from __future__ import annotations

import numpy as np
import online_runs
import pytest
from scipy import stats as sps

from rocktokens.train.record import saturation


def test_the_slope_is_carried_over_the_remaining_steps():
    """Without noise: a line that falls by 0.1 % of its level a step brings that for every step that remains."""
    loss = 1.0 - 0.0001 * np.arange(300)
    found = saturation(loss, remaining=1000)
    level = loss[200:].mean()
    assert (found.num_steps, found.horizon) == (100, 1000)
    assert found.fall == pytest.approx(0.01 / level)
    assert found.still == pytest.approx(0.1 / level)
    assert not found.saturated
    assert saturation(loss, remaining=900).saturated  # 0.09 of 0.975
    assert saturation(loss).horizon == 100  # at the end of a run: over as many steps as the window has
    assert saturation(loss).saturated


def test_the_line_is_that_of_an_oracle(rng):
    loss = 1.0 - 0.001 * np.arange(240) + rng.normal(0, 0.05, 240)
    found = saturation(loss, share=1.0)
    blocks = loss.reshape(12, 20).mean(1)
    oracle = sps.linregress(np.arange(240).reshape(12, 20).mean(1), blocks)
    assert found.fall == pytest.approx(-oracle.slope * 240 / loss.mean())
    half = sps.t.ppf(0.975, 10) * oracle.stderr * 240 / loss.mean()
    assert (found.low, found.high) == (pytest.approx(found.fall - half), pytest.approx(found.fall + half))
    assert found.p_value == pytest.approx(sps.t.cdf(oracle.slope / oracle.stderr, 10))


def test_the_warm_up_says_nothing():
    loss = np.concatenate([np.ones(150), 1.0 - 0.002 * np.arange(150)])
    assert saturation(loss[:150], remaining=2850).saturated  # flat, for nothing was learned yet
    assert not saturation(loss[150:], remaining=2700).saturated


def test_rows_that_are_not_numbers_are_left_out():
    loss = np.ones(300)
    loss[::7] = np.nan
    assert saturation(loss).saturated
    assert saturation(np.full(300, np.nan)) is None


@pytest.mark.parametrize("kind", ["slow decay", "power law", "linear"])
def test_training_is_not_stopped_while_there_is_more_to_gain(kind):
    """A small version of benchmarks/online.py."""
    ends = [online_runs.simulate_saturation(kind, seed, noise=0.08, warmup=50, steps=1000) for seed in range(5)]
    assert not any(wrong for _, wrong in ends)


def test_a_flat_loss_is_stopped():
    step, wrong = online_runs.simulate_saturation("flat", 0, noise=0.02, warmup=50, steps=1000)
    assert step < 1000
    assert not wrong
