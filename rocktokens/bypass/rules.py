"""Which costly token types may be skipped in training: what detection, census and graft say together, type by type.

A type may be skipped if (a) it is a declared and confirmed rock, (b) the census proves that it is neutral or a
stumbling block, and (c) it is inside a set whose graft gains no more than ε, by the upper bound (docs/method.md §6).
This module knows verdicts and intervals and returns codes; the words are report/conclusions/bypass.py's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rocktokens.causal.inference import NEUTRAL, NEVER_USED, PILLAR, STUMBLING_BLOCK
from rocktokens.stats import Estimate

Action = Literal["skip", "keep", "undecided"]
Reason = Literal[
    "neutral",
    "stumbling block",
    "learning",
    "learning, levelled off",
    "pillar",
    "would gain",
    "end token",
    "unclear",
    "no loss before",
    "not declared",
    "not confirmed",
    "not tested",
    "census undecided",
    "never used",
    "no graft",
    "graft undecided",
]
ACTIONS: dict[Reason, Action] = {
    "neutral": "skip",
    "stumbling block": "skip",
    "learning": "keep",
    "learning, levelled off": "keep",
    "pillar": "keep",
    "would gain": "keep",
    "end token": "keep",
    "unclear": "undecided",
    "no loss before": "undecided",
    "not declared": "undecided",
    "not confirmed": "undecided",
    "not tested": "undecided",
    "census undecided": "undecided",
    "never used": "undecided",
    "no graft": "undecided",
    "graft undecided": "undecided",
}
# Classes that detection gives to a costly type, beside `rock`, and what follows from them alone.
CLASSES: dict[str, Reason] = {
    "learning": "learning",
    "learning, levelled off": "learning, levelled off",
    "unclear": "unclear",
    "costly": "no loss before",
}


@dataclass(frozen=True)
class Evidence:
    """What is known about one costly token type."""

    token_id: int
    token: str
    kind: str
    """The class that detection gave it: rock, learning, "learning, levelled off", unclear, or costly."""
    declared: bool
    """Whether it is in the declared set."""
    confirmed: bool
    """Whether the half of the prompts that did not choose it agrees."""
    cost_share: float
    """Share of the whole loss."""
    fall: Estimate | None = None
    """Share by which its loss fell during distillation."""
    verdict: str | None = None
    """Of the census; None: it was not among the candidates, or there is no census."""
    delta: Estimate | None = None
    """Change of accuracy when it is banned, with the interval that the verdict inverts."""
    is_end: bool = False
    """Whether it ends rollouts; such a token cannot be banned."""


@dataclass(frozen=True)
class Graft:
    """A set of token types that the teacher drew in the student's place, and the accuracy gained."""

    name: str
    members: frozenset[int]
    gain: Estimate


@dataclass(frozen=True)
class Decision:
    """What may be done with one costly type, and why."""

    evidence: Evidence
    reason: Reason
    graft: Graft | None = None
    """The graft that was looked at; None where the decision did not get that far, or there is none."""

    @property
    def action(self) -> Action:
        """skip, keep or undecided."""
        return ACTIONS[self.reason]


def before_graft(evidence: Evidence) -> Reason:
    """The reason as far as detection and census go; neutral and stumbling block may yet fail the graft."""
    if evidence.is_end:
        return "end token"
    if evidence.kind != "rock":
        return CLASSES.get(evidence.kind, "unclear")
    if not evidence.declared:
        return "not declared"
    if not evidence.confirmed:
        return "not confirmed"
    tested: dict[str | None, Reason] = {
        None: "not tested",
        NEVER_USED: "never used",
        PILLAR: "pillar",
        NEUTRAL: "neutral",
        STUMBLING_BLOCK: "stumbling block",
    }
    return tested.get(evidence.verdict, "census undecided")


def skippable(evidence: Iterable[Evidence]) -> tuple[int, ...]:
    """Types that detection and census would let be skipped: the set that has to be grafted together."""
    return tuple(sorted(item.token_id for item in evidence if ACTIONS[before_graft(item)] == "skip"))


def chosen_graft(members: Iterable[int], grafts: Sequence[Graft]) -> Graft | None:
    """The graft that speaks for a set: that of the set itself, else of the smallest set around it."""
    wanted = frozenset(members)
    around = [graft for graft in grafts if wanted <= graft.members]
    return min(around, key=lambda graft: (len(graft.members), graft.name), default=None) if wanted else None


def decide(evidence: Sequence[Evidence], grafts: Sequence[Graft], *, epsilon: float) -> list[Decision]:
    """A decision for every costly type, largest cost first.

    Args:
        evidence: one entry per costly type.
        grafts: sets that may speak for those to be skipped, e.g. the declared rocks and the skippable ones.
        epsilon: largest gain of accuracy that does not matter, as a share.
    """
    graft = chosen_graft(skippable(evidence), grafts)
    made = []
    for item in sorted(evidence, key=lambda item: (-item.cost_share, item.token_id)):
        reason = before_graft(item)
        if ACTIONS[reason] != "skip":
            made.append(Decision(item, reason))
        else:
            made.append(Decision(item, _after_graft(reason, graft, epsilon), graft))
    return made


def _after_graft(reason: Reason, graft: Graft | None, epsilon: float) -> Reason:
    if graft is None:
        return "no graft"
    if graft.gain.high <= epsilon:
        return reason
    return "would gain" if graft.gain.low > 0 else "graft undecided"
