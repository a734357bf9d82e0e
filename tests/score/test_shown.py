"""Which rollouts are shown: both outcomes, spread over the run, within the limits, the same every time."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rocktokens.score.shown import MAX_LENGTH, MAX_ROLLOUTS, MAX_TOKENS, shown_rollouts

rollouts = st.lists(st.tuples(st.sampled_from([True, False, None]), st.integers(0, 5000)), max_size=300)


@given(rollouts)
def test_limits_hold_and_no_rollout_is_shown_twice(rows):
    correct, lengths = [row[0] for row in rows], [row[1] for row in rows]
    places = shown_rollouts(correct, lengths)
    assert len(places) == len(set(places)) <= MAX_ROLLOUTS
    assert not rows or places
    assert sum(min(lengths[place], MAX_LENGTH) for place in places) <= MAX_TOKENS or len(places) == 1
    assert places == shown_rollouts(correct, lengths)


def test_right_and_wrong_in_turn_and_spread_over_the_run():
    places = shown_rollouts([True] * 500 + [False] * 500, [10] * 1000)
    assert len(places) == MAX_ROLLOUTS
    assert [place < 500 for place in places[:6]] == [True, False] * 3
    right = sorted(place for place in places if place < 500)
    assert right[0] < 60
    assert right[-1] > 440
    gaps = [b - a for a, b in itertools.pairwise(right)]
    assert max(gaps) <= 4 * min(gaps)
