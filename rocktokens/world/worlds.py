"""What each built-in world is: its grammar, its prompts, how an answer is checked, and the planted truth.

A world is data. This module knows where a pair's files lie but never opens them, and imports nothing heavy. How the
texts that the pairs were trained on are written is benchmarks/world_corpus.py's.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from rocktokens.errors import ConfigError
from rocktokens.world.grammar import ARITHMETIC, CORNERSTONE, DIGITS, MARKET, SPECIALS, Grammar

PAIRS = Path(__file__).parent / "pairs"
Split = Literal["train", "detection", "causal"]
SPLIT_TENTHS: dict[Split, range] = {"train": range(8), "detection": range(8, 9), "causal": range(9, 10)}
MAX_NUMBER = 20  # operands are 1..20: every result has at most two digits
SYMBOLIC_SHARE = 0.25


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
    return fill_in(grammar.symbolic if draft.symbolic else grammar.worded, fill)


def fill_in(template: tuple[str, ...], fill: dict[str, list[str]]) -> list[str]:
    """A template's pieces with its slots filled."""
    return [piece for slot in template for piece in fill.get(slot, (slot,))]


def stated_result(grammar: Grammar, text: str) -> str | None:
    """The number that the conclusion states, or None: the first formula after the conclusion's own words."""
    words = "".join(grammar.conclusion[: grammar.conclusion.index("{open}")]).rpartition("}")[2].lstrip(", ")
    openers, closers = (
        "|".join(re.escape(mark.strip()) for mark in marks) for marks in (grammar.openers, grammar.closers)
    )
    found = re.search(rf"{re.escape(words)}\s*(?:{openers})\s*([0-9]+)\s*(?:{closers})", text)
    return found.group(1) if found else None


@dataclass(frozen=True)
class Problem:
    """One problem with its reference answer."""

    id: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class TokenSet:
    """Token types, as text and as ids, in the same order."""

    tokens: tuple[str, ...]
    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Truth:
    """What was planted, by construction of the corpus and never by running a detector."""

    rocks: TokenSet
    """The teacher chooses among these by a table that the student cannot learn within a run; they stand between the
    same words wherever they occur."""
    costly: TokenSet
    """Chosen by the table as well: as unlearnable as the markers, and rocks like them, but each stands before another
    number, in contexts that do not recur. Empty where delimiters are chosen freely."""
    pillars: TokenSet  # without one of these the working cannot be written down
    neutrals: TokenSet  # every author chooses among these freely, and after the result has been stated
    stumbling_blocks: TokenSet  # a habit both authors have, after which the result is often wrong
    rocks_matter_at_inference: bool
    """Whether the working after a rock depends on which one it was. The teacher is then worth following only where
    markers of its own kind stand, so that freezing them costs accuracy. False: rocks are neutral as well."""
    rocks_level_off: bool
    """Whether part of what chooses the markers is learned first (which pair belongs to which step) and the rest never:
    their loss falls, and then stays. False: none of it is learned."""

    @property
    def unlearnable(self) -> TokenSet:
        """Every type that the table chooses: what a student without the table cannot learn within a run."""
        return TokenSet(self.rocks.tokens + self.costly.tokens, self.rocks.ids + self.costly.ids)


@dataclass(frozen=True, kw_only=True)
class World:
    """A task with planted truth, and the pair trained on it."""

    name: str
    grammar: Grammar
    seed: int
    hidden_openers: bool = True
    """Whether delimiters, too, follow the style table; otherwise everybody chooses them freely."""
    careless: bool = False
    """Whether the teacher calculates badly after a marker that is not of the step's own pair."""

    @property
    def path(self) -> Path:
        """The shipped pair and its manifest."""
        return PAIRS / self.name

    @property
    def student_path(self) -> Path:
        """The student, loadable by AutoModelForCausalLM and AutoTokenizer."""
        return self.path / "student"

    @property
    def teacher_path(self) -> Path:
        """The teacher, likewise."""
        return self.path / "teacher"

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Pieces to ids: special tokens first, the others in a seeded order, so that ids carry no meaning.

        All grammars' pieces: a world has token types it never uses, as real models do.
        """
        words = sorted((ARITHMETIC.pieces() | MARKET.pieces()) - set(SPECIALS))
        random.Random(self.seed).shuffle(words)
        return {piece: number for number, piece in enumerate((*SPECIALS, *words))}

    def problems(self, split: Split, n: int, seed: int = 0) -> list[Problem]:
        """n different problems of a split; the same seed gives the same problems, and a longer list continues it."""
        if split not in SPLIT_TENTHS:
            raise ConfigError(f"{self.name} has no split {split!r}. There are: {', '.join(SPLIT_TENTHS)}.")
        drafts = draw_drafts(self.grammar, split, random.Random(f"{self.name}/{split}/{seed}"))
        answers: dict[str, str] = {}
        while len(answers) < n:
            draft = next(drafts)
            answers.setdefault("".join(write_prompt(self.grammar, draft)), str(draft.result))
        name = f"{self.name}/{split}/{seed}"
        return [Problem(f"{name}/{place}", prompt, answer) for place, (prompt, answer) in enumerate(answers.items())]

    def check(self, text: str, answer: str) -> bool:
        """Whether a response's conclusion states the answer."""
        return stated_result(self.grammar, text) == answer.strip()

    def token_set(self, tokens: tuple[str, ...]) -> TokenSet:
        """These pieces with their ids."""
        return TokenSet(tokens, tuple(self.vocabulary[token] for token in tokens))

    def truth(self) -> Truth:
        """What was planted."""
        grammar = self.grammar
        return Truth(
            rocks=self.token_set(grammar.markers),
            costly=self.token_set(grammar.openers if self.hidden_openers else ()),
            pillars=self.token_set((grammar.result_sign, "+", "-", *DIGITS)),
            neutrals=self.token_set(grammar.closings),
            stumbling_blocks=self.token_set(grammar.stumble[:1]),
            rocks_matter_at_inference=self.careless,
            rocks_level_off=grammar.paired,
        )


WORLDS: dict[str, World] = {
    "arithmetic": World(name="arithmetic", grammar=ARITHMETIC, seed=11),
    "market": World(name="market", grammar=MARKET, seed=12, hidden_openers=False),
    "cornerstone": World(name="cornerstone", grammar=CORNERSTONE, seed=13, hidden_openers=False, careless=True),
}
