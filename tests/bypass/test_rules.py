"""The rule of the bypass list: every condition alone, and the graft that speaks for the whole set."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocktokens.bypass.conclusions import list_sentence, reason_sentence
from rocktokens.bypass.rules import ACTIONS, Evidence, Graft, chosen_graft, decide, skippable
from rocktokens.stats import Estimate

EPSILON = 0.01
GOOD = Evidence(
    7,
    " roughly",
    "rock",
    True,
    True,
    0.2,
    Estimate(0.05, 0.0, 0.1, 90),
    "Proven Neutral",
    Estimate(0.0, -0.004, 0.004, 500),
)
FLAT = Graft("rocks", frozenset({7, 8, 9}), Estimate(-0.002, -0.006, 0.002, 500))


def reason(*grafts: Graft, **changes):
    (found,) = decide([replace(GOOD, **changes)], grafts, epsilon=EPSILON)
    assert reason_sentence(found, epsilon=EPSILON)
    return found.reason, found.action


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
        ({"kind": "learning"}, ("learning", "keep")),
        ({"kind": "learning, levelled off"}, ("learning, levelled off", "keep")),
        ({"kind": "unclear"}, ("unclear", "undecided")),
        ({"kind": "costly"}, ("no loss before", "undecided")),
        ({"is_end": True}, ("end token", "keep")),
    ],
)
def test_each_condition_alone_keeps_a_type_off_the_list(changes, expected):
    assert reason(FLAT, **changes) == expected


@pytest.mark.parametrize(
    ("grafts", "expected"),
    [
        ((), "no graft"),
        ((Graft("rocks", frozenset({8}), FLAT.gain),), "no graft"),
        ((replace(FLAT, gain=Estimate(0.03, 0.01, 0.05, 500)),), "would gain"),
        ((replace(FLAT, gain=Estimate(0.00, -0.02, 0.02, 50)),), "graft undecided"),
        ((replace(FLAT, gain=Estimate(0.005, 0.001, 0.01, 50)),), "neutral"),
    ],
)
def test_the_upper_bound_of_the_graft_decides(grafts, expected):
    assert reason(*grafts)[0] == expected


def test_the_graft_of_the_set_itself_is_preferred_to_one_around_it():
    own = Graft("skippable", frozenset({7}), Estimate(0.03, 0.02, 0.04, 500))
    assert chosen_graft([7], [FLAT, own]) is own
    assert chosen_graft([7, 8], [FLAT, own]) is FLAT
    assert chosen_graft([], [FLAT]) is None
    assert reason(FLAT, own)[0] == "would gain"


def test_one_graft_must_hold_the_whole_set():
    """Two sets that gain nothing each may gain together: no graft, no claim."""
    other = replace(GOOD, token_id=42, cost_share=0.3)
    halves = [Graft("rocks", frozenset({7}), FLAT.gain), Graft("skippable", frozenset({42}), FLAT.gain)]
    found = decide([GOOD, other], halves, epsilon=EPSILON)
    assert [(item.evidence.token_id, item.reason) for item in found] == [(42, "no graft"), (7, "no graft")]
    assert skippable([GOOD, other]) == (7, 42)


def test_every_reason_has_an_action_and_words():
    for name in ACTIONS:
        found = decide([GOOD], [FLAT], epsilon=EPSILON)[0]
        assert len(reason_sentence(replace(found, reason=name), epsilon=EPSILON)) > 20


def test_the_sentence_counts_declared_rocks_only():
    others = [replace(GOOD, token_id=8, verdict="Strong Pillar"), replace(GOOD, token_id=9, kind="learning")]
    found = decide([GOOD, *others], [FLAT], epsilon=EPSILON)
    assert list_sentence(found).startswith("1 of 2 declared rocks may be skipped (20.0")
    assert "nothing to skip" in list_sentence(decide([replace(GOOD, kind="unclear", declared=False)], [], epsilon=0.01))
