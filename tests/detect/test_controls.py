"""Controls: same count, same run lengths, apart, and the same loss mass where there is enough of it."""

from collections import Counter

import numpy as np
import pytest

from rocktokens.detect.controls import matched_control, run_starts_lengths
from rocktokens.errors import DataError


def rocks(rng, rollouts=50, length=60, share=0.12):
    rock_N = rng.random(rollouts * length) < share
    rock_N[1:] |= rock_N[:-1] & (rng.random(rollouts * length - 1) < 0.4)
    return rock_N, np.repeat(np.arange(rollouts), length)


def lengths(mask_N, rollout_N):
    return Counter(run_starts_lengths(mask_N, rollout_N)[1].tolist())


def test_runs_end_with_their_rollout():
    starts, sizes = run_starts_lengths(np.array([1, 1, 1, 0, 1], bool), np.array([0, 0, 1, 1, 1]))
    assert starts.tolist() == [0, 2, 4]
    assert sizes.tolist() == [2, 1, 1]


@pytest.mark.parametrize("match_loss", [False, True])
def test_same_count_and_run_lengths_and_no_rock(rng, match_loss):
    rock_N, rollout_N = rocks(rng)
    loss_N = rng.exponential(size=len(rock_N)).astype(np.float32)
    control = matched_control(rock_N, rollout_N, loss_N, rng=rng, match_loss=match_loss)
    assert not (control.chosen_N & rock_N).any()
    assert control.num_placed == control.num_wanted == rock_N.sum()
    assert lengths(control.chosen_N, rollout_N) == lengths(rock_N, rollout_N)


def test_loss_mass_is_matched_where_there_is_enough(rng):
    rock_N, rollout_N = rocks(rng, rollouts=400, share=0.05)
    loss_N = np.where(rock_N, 1.5, 1.0) * rng.exponential(size=len(rock_N))
    plain = matched_control(rock_N, rollout_N, loss_N, rng=rng)
    matched = matched_control(rock_N, rollout_N, loss_N, rng=rng, match_loss=True)
    assert plain.loss_placed / plain.loss_wanted == pytest.approx(1 / 1.5, abs=0.05)
    assert matched.loss_placed / matched.loss_wanted == pytest.approx(1, abs=0.03)


def test_loss_mass_that_cannot_be_reached_is_said(rng):
    rock_N, rollout_N = rocks(rng)
    control = matched_control(rock_N, rollout_N, np.where(rock_N, 100.0, 1.0), rng=rng, match_loss=True)
    assert control.num_placed == control.num_wanted
    assert control.loss_placed / control.loss_wanted == pytest.approx(0.01)


def test_places_are_uniform(rng):
    rock_N, rollout_N = np.zeros(3000, bool), np.repeat(np.arange(30), 100)
    rock_N[50::100] = True
    drawn = sum(
        matched_control(rock_N, rollout_N, np.ones(3000), rng=rng).chosen_N.reshape(30, 100).sum(0) for _ in range(300)
    )
    assert drawn[50] == 0
    halves = drawn[:50].sum(), drawn[51:].sum()
    assert abs(halves[0] / sum(halves) - 50 / 99) < 0.03


def test_too_little_room_splits_runs_and_says_how_many_were_placed(rng):
    rock_N = np.tile([True] * 6 + [False] * 3, 40)
    control = matched_control(rock_N, np.zeros(360, int), np.ones(360), rng=rng)
    assert control.num_runs_split > 0
    assert 0 < control.num_placed < control.num_wanted
    assert not (control.chosen_N & rock_N).any()


def test_no_rocks_no_control(rng):
    with pytest.raises(DataError):
        matched_control(np.zeros(5, bool), np.zeros(5, int), np.ones(5), rng=rng)
