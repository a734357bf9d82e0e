"""Batched shares of similar contexts against a loop over single pairs, at every size that is computed differently."""

import itertools

import numpy as np
import pytest

from rocktokens.detect import similar
from rocktokens.detect.context import unit


def vectors(rng, number, dims=6):
    """Unit vectors, some of them equal, some empty (no context at all)."""
    found = rng.standard_normal((number, dims), dtype=np.float32)
    found[rng.random(number) < 0.2] = found[0]
    found[rng.random(number) < 0.1] = 0
    return unit(found)


def one_by_one(own, others_index, gamma):
    """Share of the others at a cosine of γ or more, itself left out, by a loop over pairs in double precision."""
    shares = []
    for i, vector in enumerate(own.astype(float)):
        others = [j for j in others_index if j != i]
        similar_ones = [j for j in others if float(vector @ own[j].astype(float)) >= gamma - similar.ROUNDING]
        shares.append(len(similar_ones) / len(others) if others else 0.0)
    return shares


@pytest.mark.parametrize("gamma", [-0.2, 0.0, 0.35, 1.0])
@pytest.mark.parametrize("number", [2, 7, 8, 9, 60, 300])
def test_all_pairs_equal_the_loop(rng, number, gamma):
    own = vectors(rng, number)
    expected = one_by_one(own, range(number), gamma)
    np.testing.assert_allclose(similar.all_pairs(own, [gamma, 0.9])[0], expected, atol=1e-6)
    everything = np.ones(number, bool)
    np.testing.assert_allclose(similar.similar_shares(own, own, everything, [gamma])[0], expected, atol=1e-6)


def test_rows_wider_than_a_byte_can_count(rng):
    own = np.tile(unit(rng.standard_normal((1, 4), dtype=np.float32)), (2500, 1))
    assert (similar.all_pairs(own, [0.5]) == 1).all()  # 2,499 similar ones each, far beyond 255 and 255 × 8
    assert (similar.similar_shares(own[:40], own, np.ones(40, bool), [0.5]) == 1).all()


def test_counts_of_rows_of_any_mask(rng):
    mask = rng.random((5, 8 * 600)) < 0.7
    np.testing.assert_array_equal(similar.row_counts(mask), mask.sum(1))


@pytest.mark.parametrize("gamma", [-0.2, 0.35])
def test_types_of_all_sizes_at_once_equal_each_alone(rng, gamma):
    sizes = np.array([1, 2, 2, 3, 5, 47, 48, 49, 90, 1, 4, 17])
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    encoded = vectors(rng, int(bounds[-1]))
    sampled = np.ones(len(encoded), bool)
    sampled[bounds[8] : bounds[8] + 50] = False  # of one type, others are a sample
    found = similar.shares_of_types(encoded, bounds, sampled, [gamma, 0.8])[0]
    for start, stop in itertools.pairwise(bounds):
        others = np.flatnonzero(sampled[start:stop])
        np.testing.assert_allclose(found[start:stop], one_by_one(encoded[start:stop], others, gamma), atol=1e-6)
