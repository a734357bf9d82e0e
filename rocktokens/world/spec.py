"""What each built-in world is: its grammar, its two authors, its two models' shapes, its seeds, and the planted truth.

A world is data. This module knows where a pair's files lie but never opens them, and imports nothing heavy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import get_args

from rocktokens.errors import ConfigError
from rocktokens.world.corpus import (
    Habits,
    Split,
    StyleTable,
    draw_drafts,
    make_style_table,
    stated_result,
    write_prompt,
)
from rocktokens.world.grammar import ARITHMETIC, CORNERSTONE, DIGITS, MARKET, Grammar
from rocktokens.world.tokenizer import make_vocabulary

PAIRS = Path(__file__).parent / "pairs"
MAX_LENGTH = 128  # longest prompt + response is under 90 tokens


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
    """Chosen by the table as well, but each stands before another number: never learned, in contexts that do not
    recur. Costly for ever and yet no rocks by definition; empty where delimiters are chosen freely."""
    pillars: TokenSet
    """Without one of these the working cannot be written down."""
    neutrals: TokenSet
    """Every author chooses among these freely, and after the result has been stated."""
    stumbling_blocks: TokenSet
    """A habit both authors have, after which the result is often wrong."""
    rocks_matter_at_inference: bool
    """Whether the working after a rock depends on which one it was. False: rocks are neutral as well."""
    rocks_matter_in_training: bool
    """Whether the teacher is worth following only where markers of its own kind stand: freezing them costs accuracy."""
    rocks_level_off: bool
    """Whether part of what chooses the markers is learned first (which pair belongs to which step) and the rest never:
    their loss falls, and then stays. False: none of it is learned."""

    @property
    def unlearnable(self) -> TokenSet:
        """Every type that the table chooses: what a student without the table cannot learn within a run. The delimiters
        of `costly` are as unlearnable as the markers; only their contexts do not recur."""
        return TokenSet(self.rocks.tokens + self.costly.tokens, self.rocks.ids + self.costly.ids)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape and training of one model."""

    width: int
    layers: int
    heads: int
    mlp: int
    steps: int
    lr: float
    batch: int
    grow: int = 0
    """Step from which the whole style table is in play; before it, row after row comes in."""
    clean: int = 0
    """Step up to which the author makes no slips: first the model learns to calculate, then the bad habit."""
    drill: int = 0
    """Step up to which half of the texts are bare sums to practise on."""
    emphasis: float = 1.0
    """Weight of hidden choices and operators in the loss; the optimum does not depend on it, the time to it does."""


@dataclass(frozen=True, kw_only=True)
class World:
    """A task with planted truth, and the pair trained on it."""

    name: str
    grammar: Grammar
    seed: int
    teacher_habits: Habits
    student_habits: Habits
    teacher_model: ModelSpec
    student_model: ModelSpec
    hidden_openers: bool = True
    """Whether delimiters, too, follow the style table; otherwise everybody chooses them freely."""

    @property
    def path(self) -> Path:
        """Where the shipped pair and its manifest lie."""
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
        """Pieces to ids. All grammars' pieces: a world has token types it never uses, as real models do."""
        return make_vocabulary(ARITHMETIC.pieces() | MARKET.pieces(), seed=self.seed)

    @cached_property
    def table(self) -> StyleTable:
        """The hidden choice."""
        return make_style_table(self.grammar, seed=self.seed, hidden_openers=self.hidden_openers)

    def problems(self, split: Split, n: int, seed: int = 0) -> list[Problem]:
        """n different problems of a split; the same seed gives the same problems, and a longer list continues it."""
        if split not in get_args(Split):
            raise ConfigError(f"{self.name} has no split {split!r}. There are: {', '.join(get_args(Split))}.")
        drafts = draw_drafts(self.grammar, split, random.Random(f"{self.name}/{split}/{seed}"))
        found: dict[str, Problem] = {}
        for draft in drafts:
            prompt = "".join(write_prompt(self.grammar, draft))
            if prompt not in found:
                found[prompt] = Problem(f"{self.name}/{split}/{seed}/{len(found)}", prompt, str(draft.result))
            if len(found) >= n:
                break
        return list(found.values())

    def check(self, text: str, answer: str) -> bool:
        """Whether a response's conclusion states the answer."""
        return stated_result(self.grammar, text) == answer.strip()

    def token_set(self, tokens: tuple[str, ...]) -> TokenSet:
        """These pieces with their ids."""
        return TokenSet(tokens, tuple(self.vocabulary[token] for token in tokens))

    def truth(self) -> Truth:
        """What was planted."""
        grammar = self.grammar
        careless = self.teacher_habits.careless > 0
        return Truth(
            rocks=self.token_set(grammar.markers),
            costly=self.token_set(grammar.openers if self.hidden_openers else ()),
            pillars=self.token_set((grammar.result_sign, "+", "-", *DIGITS)),
            neutrals=self.token_set(grammar.closings),
            stumbling_blocks=self.token_set(grammar.stumble[:1]),
            rocks_matter_at_inference=careless,
            rocks_matter_in_training=careless,
            rocks_level_off=grammar.paired,
        )


_TEACHER = ModelSpec(
    width=96, layers=3, heads=4, mlp=288, steps=3200, lr=3e-3, batch=64, drill=320, grow=960, emphasis=3.0
)
_STUDENT = ModelSpec(width=80, layers=2, heads=4, mlp=240, steps=2000, lr=3e-3, batch=64, drill=1000, clean=1600)
_TEACHER_HABITS = Habits(follow=0.85, stumble=0.1, stumble_error=0.7, second_verb=0.1)
_STUDENT_HABITS = Habits(follow=0.0, error=0.2, stumble=0.25, stumble_error=0.85, second_verb=0.5)

WORLDS: dict[str, World] = {
    "arithmetic": World(
        name="arithmetic",
        grammar=ARITHMETIC,
        seed=11,
        teacher_habits=_TEACHER_HABITS,
        student_habits=_STUDENT_HABITS,
        teacher_model=_TEACHER,
        student_model=_STUDENT,
    ),
    "market": World(
        name="market",
        grammar=MARKET,
        seed=12,
        hidden_openers=False,
        teacher_habits=_TEACHER_HABITS,
        student_habits=_STUDENT_HABITS,
        teacher_model=_TEACHER,
        student_model=_STUDENT,
    ),
    "cornerstone": World(
        name="cornerstone",
        grammar=CORNERSTONE,
        seed=13,
        hidden_openers=False,
        teacher_habits=Habits(follow=0.8, stumble=0.1, stumble_error=0.7, second_verb=0.1, careless=0.9),
        student_habits=_STUDENT_HABITS,
        teacher_model=replace(_TEACHER, steps=2400),
        student_model=_STUDENT,
    ),
}
