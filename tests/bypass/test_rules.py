"""The rule of the bypass list: every condition alone, and the graft that speaks for the whole set."""

from __future__ import annotations

import pytest

from rocktokens.bypass import chosen_graft, decide, list_sentence

EPSILON = 0.01
GOOD = {"token_id": 7, "token": " roughly", "class": "rock", "declared": True, "confirmed": True, "cost_share": 0.2}
GOOD |= {"verdict": "Proven Neutral", "delta": 0.0, "delta_low": -0.004, "delta_high": 0.004, "is_end": False}
GOOD |= {"fall": 0.05, "fall_low": 0.0, "fall_high": 0.1}
FLAT = {"arm": "rocks", "members": [7, 8, 9], "gain": -0.002, "gain_low": -0.006, "gain_high": 0.002}


def gains(value, low, high):
    return {**FLAT, "gain": value, "gain_low": low, "gain_high": high}


def reason(*grafts, **changes):
    (found,) = decide([{**GOOD, **changes}], grafts, epsilon=EPSILON)
    assert len(found["why"]) > 20
    return found["reason"], found["decision"]


def test_a_confirmed_neutral_rock_inside_a_flat_graft_is_skipped():
    assert reason(FLAT) == ("neutral", "skip")
    assert reason(FLAT, verdict="Strong Stumbling Block") == ("stumbling block", "skip")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"verdict": "Strong Pillar"}, ("pillar", "keep")),
        ({"verdict": "Undecided"}, ("census undecided", "undecided")),
        ({"verdict": "Never Used"}, ("never used", "undecided")),
        ({"verdict": None}, ("not tested", "undecided")),
        ({"confirmed": False}, ("not confirmed", "undecided")),
        ({"declared": False}, ("not declared", "undecided")),
        ({"class": "learning"}, ("learning", "keep")),
        ({"class": "learning, levelled off"}, ("learning, levelled off", "keep")),
        ({"class": "unclear"}, ("unclear", "undecided")),
        ({"class": "costly"}, ("no loss before", "undecided")),
        ({"is_end": True}, ("end token", "keep")),
    ],
)
def test_each_condition_alone_keeps_a_type_off_the_list(changes, expected):
    assert reason(FLAT, **changes) == expected


@pytest.mark.parametrize(
    ("grafts", "expected"),
    [
        ((), "no graft"),
        (({**FLAT, "members": [8]},), "no graft"),
        ((gains(0.03, 0.01, 0.05),), "would gain"),
        ((gains(0.0, -0.02, 0.02),), "graft undecided"),
        ((gains(0.005, 0.001, 0.01),), "neutral"),
    ],
)
def test_the_upper_bound_of_the_graft_decides(grafts, expected):
    assert reason(*grafts)[0] == expected


def test_the_graft_of_the_set_itself_is_preferred_to_one_around_it():
    own = {**gains(0.03, 0.02, 0.04), "arm": "skippable", "members": [7]}
    assert chosen_graft([7], [FLAT, own]) is own
    assert chosen_graft([7, 8], [FLAT, own]) is FLAT
    assert chosen_graft([], [FLAT]) is None
    assert reason(FLAT, own)[0] == "would gain"


def test_one_graft_must_hold_the_whole_set():
    """Two sets that gain nothing each may gain together: no graft, no claim."""
    other = {**GOOD, "token_id": 42, "cost_share": 0.3}
    halves = [{**FLAT, "members": [7]}, {**FLAT, "arm": "skippable", "members": [42]}]
    found = decide([GOOD, other], halves, epsilon=EPSILON)
    assert [(row["token_id"], row["reason"]) for row in found] == [(42, "no graft"), (7, "no graft")]


def test_the_sentence_counts_declared_rocks_only():
    others = [{**GOOD, "token_id": 8, "verdict": "Strong Pillar"}, {**GOOD, "token_id": 9, "class": "learning"}]
    found = decide([GOOD, *others], [FLAT], epsilon=EPSILON)
    assert list_sentence(found).startswith("1 of 2 declared rocks may be skipped (20.0")
    assert "nothing to skip" in list_sentence(
        decide([{**GOOD, "class": "unclear", "declared": False}], [], epsilon=0.01)
    )
