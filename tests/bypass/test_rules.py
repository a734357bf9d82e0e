"""The rule of the bypass list: every condition alone, and the set that was grafted as a whole."""

from __future__ import annotations

import pytest

from rocktokens.bypass import decide, list_sentence
from rocktokens.causal.graft import sift

EPSILON = 0.01
GOOD = {"token_id": 7, "token": " roughly", "class": "rock", "declared": True, "confirmed": True, "cost_share": 0.2}
GOOD |= {"verdict": "Proven Neutral", "delta": 0.0, "delta_low": -0.004, "delta_high": 0.004, "is_end": False}
GOOD |= {"fall": 0.05, "fall_low": 0.0, "fall_high": 0.1}
FLAT = {
    "arm": "skippable",
    "members": [7, 90],
    "alternatives": [90],
    "gain": -0.002,
    "gain_low": -0.006,
    "gain_high": 0.002,
}


def gains(value, low, high):
    return {**FLAT, "gain": value, "gain_low": low, "gain_high": high}


def reason(*grafts, **changes):
    (found,) = decide([{**GOOD, **changes}], grafts, epsilon=EPSILON)
    assert len(found["why"]) > 20
    return found["reason"], found["decision"]


def test_a_confirmed_neutral_rock_inside_a_flat_graft_is_skipped():
    assert reason(FLAT) == ("neutral", "skip")
    assert reason(FLAT, **{"class": "rock so far"}) == ("neutral", "skip")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"verdict": "Strong Pillar"}, ("pillar", "keep")),
        ({"verdict": "Strong Stumbling Block"}, ("stumbling block", "apart")),
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
        (({**FLAT, "alternatives": []},), "no graft"),  # 90 is no candidate: its graft says nothing of 7 alone
        ((gains(0.03, 0.01, 0.05),), "would gain"),
        ((gains(0.0, -0.02, 0.02),), "graft undecided"),
        ((gains(0.005, 0.001, 0.01),), "neutral"),
    ],
)
def test_the_upper_bound_of_the_graft_decides(grafts, expected):
    assert reason(*grafts)[0] == expected


def test_a_type_that_gains_leaves_the_list_and_the_others_stay():
    """One graft must hold the whole list; what speaks against a type is the smallest set that it was tested in."""
    rows = [{**GOOD, "token_id": token, "cost_share": 0.1} for token in (7, 8, 9)]
    sets = [([7, 8, 9], 0.08), ([7], 0.004), ([7, 8], 0.003), ([9], 0.09)]
    tested = [
        {**gains(high / 2, high / 4, high), "members": own, "arm": f"skippable {n}"}
        for n, (own, high) in enumerate(sets)
    ]
    found = {row["token_id"]: row for row in decide(rows, tested, epsilon=EPSILON)}
    assert {token: row["reason"] for token, row in found.items()} == {7: "neutral", 8: "neutral", 9: "would gain"}
    assert (found[7]["graft"], found[9]["graft"]) == ("skippable 2", "skippable 3")
    apart = [{**tested[1], "members": [7]}, {**tested[1], "members": [8]}]  # each alone: nothing is known of both
    assert [row["decision"] for row in decide(rows[:2], apart, epsilon=EPSILON)].count("skip") == 1


def test_only_a_comparison_puts_a_stumbling_block_on_the_list():
    block = {**GOOD, "token_id": 8, "verdict": "Strong Stumbling Block"}

    def decision(*passed):
        return {
            row["token_id"]: row["decision"] for row in decide([GOOD, block], [FLAT], epsilon=EPSILON, passed=passed)
        }

    assert decision() == {7: "skip", 8: "apart"}
    assert decision([7, 8]) == decision([8]) == {7: "skip", 8: "skip"}
    assert decision([7, 8, 11])[8] == "apart"  # with another type left out too, it says nothing of this list


def test_sifting_finds_what_gains_keeps_units_whole_and_tests_what_it_returns():
    gaining, tried = {3, 11}, []

    def is_flat(members):
        tried.append(members)
        return not members & gaining

    units = [frozenset(own) for own in ([0], [1], [2, 3], [4], [5], [6], [7], [8], [9], [10], [11])]
    assert sift(units, is_flat) == {0, 1, 4, 5, 6, 7, 8, 9, 10}  # 2 goes with 3: they are one choice
    assert frozenset({0, 1, 4, 5, 6, 7, 8, 9, 10}) in tried
    assert len(set(tried)) <= 12
    assert sift(units, lambda members: True) == set(range(12))
    # Two that gain only together: one of them stays, and the set that is returned was tested.
    assert sift([frozenset({1}), frozenset({2})], lambda members: len(members) < 2) == {1}


def test_the_sentence_counts_declared_rocks_only():
    others = [{**GOOD, "token_id": 8, "verdict": "Strong Pillar"}, {**GOOD, "token_id": 9, "class": "learning"}]
    found = decide([GOOD, *others], [FLAT], epsilon=EPSILON)
    assert list_sentence(found).startswith("1 of 2 declared rocks may be skipped (20.0")
    assert "nothing to skip" in list_sentence(
        decide([{**GOOD, "class": "unclear", "declared": False}], [], epsilon=0.01)
    )
