"""Problems and the texts that answer them: endless, from a seed, with the habits of a teacher or of a student.

Knows grammars and random numbers; knows no tensor, model or tokenizer. The style table is the hidden choice: it says
which marker and which delimiter belong in each slot of an answer, given the thing and the person (or a digit).
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rocktokens.world.grammar import DIGITS, Grammar

Split = Literal["train", "detection", "causal"]
SPLITS: tuple[Split, ...] = ("train", "detection", "causal")
SPLIT_TENTHS: dict[Split, range] = {"train": range(8), "detection": range(8, 9), "causal": range(9, 10)}

NUM_SLOTS = 3  # where an answer makes the hidden choice: two steps and the conclusion
MAX_NUMBER = 20  # operands are 1..20: every result has at most two digits
SUMS_IN_A_TEXT = 7
SYMBOLIC_SHARE = 0.25
SWAPPED = 0.9  # how often the steps of an author without a table have each other's markers, in a paired grammar
WRONG_BY = (-3, -2, -1, 1, 2, 3)  # a wrong result is near the right one, as slips are


@dataclass(frozen=True)
class Draft:
    """What a problem is about, before it is put in words."""

    person: int
    thing: int
    a: int
    b: int
    c: int
    plus1: bool
    plus2: bool
    verb1: int
    verb2: int
    symbolic: bool

    @property
    def middle(self) -> int:
        """Result of the first step."""
        return self.a + self.b if self.plus1 else self.a - self.b

    @property
    def result(self) -> int:
        """Result of the second step: the answer."""
        return self.middle + self.c if self.plus2 else self.middle - self.c

    def split(self) -> Split:
        """The split this problem belongs to, by its content: the same problem is never in two splits."""
        content = (self.person, self.thing, self.a, self.b, self.c, self.plus1, self.plus2)
        tenth = hashlib.sha256(repr(content).encode()).digest()[0] % 10
        return next(split for split, tenths in SPLIT_TENTHS.items() if tenth in tenths)


@dataclass(frozen=True, kw_only=True)
class Habits:
    """How one author writes. Probabilities, each independent of the others unless said otherwise."""

    follow: float
    """Follow the style table at a slot; otherwise choose freely. 0 is an author who has no table."""
    error: float = 0.0
    """Write a wrong result in a step."""
    stumble: float = 0.0
    """Begin the second step with the stumbling block."""
    stumble_error: float = 0.0
    """Then write a wrong result."""
    second_verb: float = 0.5
    """Use the second of the two wordings."""
    careless: float = 0.0
    """Write 0 as the result of a step whose marker is not of its own pair."""


@dataclass(frozen=True)
class StyleTable:
    """The hidden choice: [slot][key][thing] to a marker and to an opener. No openers: everybody chooses them freely."""

    markers: tuple[tuple[tuple[int, ...], ...], ...]
    openers: tuple[tuple[tuple[int, ...], ...], ...]


def make_style_table(grammar: Grammar, *, seed: int, hidden_openers: bool = True) -> StyleTable:
    """A fixed random table, balanced so that neither the key nor the thing alone tells anything."""
    rng = random.Random(seed)
    markers = tuple(_balanced(grammar, len(grammar.markers), rng) for _ in range(NUM_SLOTS))
    openers = tuple(_balanced(grammar, len(grammar.openers), rng) for _ in range(NUM_SLOTS))
    return StyleTable(markers, openers if hidden_openers else ())


def own_pair(slot: int) -> tuple[int, int]:
    """The two markers of a step in a paired grammar."""
    return (0, 1) if slot % 2 == 0 else (2, 3)


def _balanced(grammar: Grammar, num_choices: int, rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """[key][thing] to a choice, every choice equally often in each row and column where the sizes allow it."""
    keys, things = num_keys(grammar), len(grammar.things)
    cells = [[(k + t) % num_choices for t in range(things)] for k in range(keys)]
    for _ in range(40 * keys * things):  # exchanges that keep rows and columns balanced, until no pattern is left
        (k, m), (t, u) = rng.sample(range(keys), 2), rng.sample(range(things), 2)
        if cells[k][t] == cells[m][u] and cells[k][u] == cells[m][t]:
            cells[k][t], cells[k][u], cells[m][t], cells[m][u] = cells[k][u], cells[k][t], cells[m][u], cells[m][t]
    return tuple(tuple(row) for row in cells)


def num_keys(grammar: Grammar) -> int:
    """Rows of a style table."""
    return len(grammar.people) if grammar.key == "person" else len(DIGITS) // 2


def row_of(grammar: Grammar, draft: Draft) -> int:
    """The style table's row for this problem."""
    return draft.person if grammar.key == "person" else draft.a % len(DIGITS) // 2


def draw_drafts(grammar: Grammar, split: Split, rng: random.Random) -> Iterator[Draft]:
    """Endless problems of one split; no result is negative."""
    while True:
        draft = Draft(
            person=rng.randrange(len(grammar.people)),
            thing=rng.randrange(len(grammar.things)),
            a=rng.randint(1, MAX_NUMBER),
            b=rng.randint(1, MAX_NUMBER),
            c=rng.randint(1, MAX_NUMBER),
            plus1=rng.random() < 0.5,
            plus2=rng.random() < 0.5,
            verb1=rng.randrange(len(grammar.gains)),
            verb2=rng.randrange(len(grammar.gains)),
            symbolic=rng.random() < SYMBOLIC_SHARE,
        )
        if draft.middle >= 0 and draft.result >= 0 and draft.split() == split:
            yield draft


def write_prompt(grammar: Grammar, draft: Draft) -> list[str]:
    """The problem as pieces."""
    fill = {
        "{person}": [grammar.people[draft.person]],
        "{thing}": [grammar.things[draft.thing]],
        "{a}": list(str(draft.a)),
        "{b}": list(str(draft.b)),
        "{c}": list(str(draft.c)),
        "{op1}": ["+" if draft.plus1 else "-"],
        "{op2}": ["+" if draft.plus2 else "-"],
        "{verb1}": [(grammar.gains if draft.plus1 else grammar.losses)[draft.verb1]],
        "{verb2}": [(grammar.gains if draft.plus2 else grammar.losses)[draft.verb2]],
    }
    return _fill(grammar.symbolic if draft.symbolic else grammar.worded, fill)


def write_answer(grammar: Grammar, table: StyleTable, draft: Draft, habits: Habits, rng: random.Random) -> list[str]:
    """One author's answer as pieces, end token included; slips stay: what follows builds on what was written."""
    key = row_of(grammar, draft)
    pieces: list[str] = []
    value = draft.a
    for slot in range(NUM_SLOTS):
        if rng.random() >= habits.follow:
            marker = rng.randrange(len(grammar.markers))
            if grammar.paired and slot < NUM_SLOTS - 1 and not habits.follow and rng.random() < SWAPPED:
                marker = rng.choice(own_pair(1 - slot))
        elif grammar.paired and slot < NUM_SLOTS - 1:
            marker = rng.choice(own_pair(slot))
        else:
            marker = table.markers[slot][key][draft.thing]
        follows = rng.random() < habits.follow and bool(table.openers)
        opener = table.openers[slot][key][draft.thing] if follows else rng.randrange(len(grammar.openers))
        fill = {
            "{marker}": [grammar.markers[marker]],
            "{open}": [grammar.openers[opener]],
            "{close}": [grammar.closers[opener]],
            "{verb}": [grammar.verbs[rng.random() < habits.second_verb]],
            "{closing}": [rng.choice(grammar.closings)],
        }
        if slot == NUM_SLOTS - 1:
            return pieces + _fill(grammar.conclusion, fill | {"{result}": list(str(value))})

        plus, operand = ((draft.plus1, draft.b), (draft.plus2, draft.c))[slot]
        stumbles = slot == 1 and rng.random() < habits.stumble
        right = value + operand if plus else value - operand
        if habits.careless:
            right = abs(right)  # a careless result may be too little to take from
        slip = max(habits.error, habits.stumble_error * stumbles)
        result = _slip(right, rng) if rng.random() < slip else right
        if habits.careless and marker not in own_pair(slot) and rng.random() < habits.careless:
            result = 0
        fill |= {
            "{lead}": _fill(grammar.stumble if stumbles else grammar.lead, fill),
            "{left}": list(str(value)),
            "{op}": ["+" if plus else "-"],
            "{right}": list(str(operand)),
            "{result}": list(str(result)),
        }
        pieces += _fill(grammar.step, fill)
        value = result
    raise AssertionError("the conclusion returns")


def write_sums(grammar: Grammar, rng: random.Random) -> tuple[list[str], list[bool]]:
    """Sums to practise on: bare formulas, line by line, all right; and which pieces are results.

    Nothing else in them can be known beforehand. About as long as a problem with its answer.
    """
    pieces: list[str] = []
    is_result: list[bool] = []
    for _ in range(SUMS_IN_A_TEXT):
        left, operand = rng.randint(1, 2 * MAX_NUMBER), rng.randint(1, MAX_NUMBER)
        plus = operand > left or rng.random() < 0.5
        kind = rng.randrange(len(grammar.openers))
        formula = [grammar.openers[kind], *str(left), "+" if plus else "-", *str(operand), grammar.result_sign]
        result = [*str(left + operand if plus else left - operand), grammar.closers[kind]]
        pieces += [*formula, *result, "\n"]
        is_result += [False] * len(formula) + [True] * len(result) + [False]
    return pieces, is_result


def _slip(right: int, rng: random.Random) -> int:
    """A wrong result near the right one, never negative."""
    return rng.choice([right + by for by in WRONG_BY if right + by >= 0])


def _fill(template: tuple[str, ...], fill: dict[str, list[str]]) -> list[str]:
    return [piece for slot in template for piece in fill.get(slot, (slot,))]


def stated_result(grammar: Grammar, text: str) -> str | None:
    """The number that the conclusion states, or None: the first formula after the conclusion's own words."""
    words = "".join(piece for piece in grammar.conclusion[: grammar.conclusion.index("{open}")])
    words = words.rpartition("}")[2].lstrip(", ")
    openers, closers = (
        "|".join(re.escape(mark.strip()) for mark in marks) for marks in (grammar.openers, grammar.closers)
    )
    found = re.search(rf"{re.escape(words)}\s*(?:{openers})\s*([0-9]+)\s*(?:{closers})", text)
    return found.group(1) if found else None
