"""Seeds: the same on every machine, and no stream depends on another's use."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rocktokens.seeds import derive_seed, uniforms


def test_seeds_are_the_same_on_every_machine():
    """The first by `printf 'int:0\\x1fstr:p1\\x1fint:2' | b2sum -l 64`, halved; the second recorded from numpy 2."""
    assert derive_seed(0, "p1", 2) == 0x7347208C3C2BC3B8 >> 1
    assert uniforms(7, 3).tolist() == [0.8720734548204873, 0.29536538151378355, 0.4200976785072422]


@given(st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=4), st.data())
def test_every_part_and_its_place_matters(parts, data):
    other = data.draw(st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=4))
    assert (derive_seed(*parts) == derive_seed(*other)) == (parts == other)
    assert 0 <= derive_seed(*parts) < 2**63


@given(st.integers(0, 2**63 - 1), st.integers(0, 50), st.integers(0, 50))
def test_a_longer_stream_begins_like_a_shorter_one(seed, short, more):
    np.testing.assert_array_equal(uniforms(seed, short + more)[:short], uniforms(seed, short))


def test_streams_of_neighbouring_seeds_are_independent():
    first = np.array([uniforms(seed, 4) for seed in range(4_000)])
    assert stats.kstest(first.ravel(), "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(first[:-1, 0], first[1:, 0])[0, 1]) < 0.06
    assert abs(np.corrcoef(first[:, 0], first[:, 1])[0, 1]) < 0.06
    assert ((first >= 0) & (first < 1)).all()
