"""Problems and the texts that answer them: endless, from a seed, with the habits of a teacher or of a student.

Knows grammars and random numbers; knows no tensor, model or tokenizer. The style table is the hidden choice: it says
which marker and which delimiter belong in each slot of an answer, given the thing and the person (or a digit).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from rocktokens.world import World, get_world, world_names
from rocktokens.world.grammar import DIGITS, EOS, PAD, SPECIALS, UNK, Grammar
from rocktokens.world.worlds import MAX_NUMBER, Draft, fill_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_LENGTH = 128  # longest prompt + response is under 90 tokens

NUM_SLOTS = 3  # where an answer makes the hidden choice: two steps and the conclusion
LEADS = 2  # where leads are a hidden choice: one of these is the stumbling block
SUMS_IN_A_TEXT = 7
SWAPPED = 0.9  # how often the steps of an author without a table have each other's markers, in a paired grammar
WRONG_BY = (-3, -2, -1, 1, 2, 3)  # a wrong result is near the right one, as slips are


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
    leads: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """0 is the stumbling block. Empty: how often a step begins with it is a habit."""


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
            return pieces + fill_in(grammar.conclusion, fill | {"{result}": list(str(value))})

        plus, operand = ((draft.plus1, draft.b), (draft.plus2, draft.c))[slot]
        stumbles = slot == 1 and rng.random() < habits.stumble
        if table.leads:
            choice = table.leads[slot][key][draft.thing] if rng.random() < habits.follow else rng.randrange(LEADS)
            stumbles = choice == 0
        right = value + operand if plus else value - operand
        if habits.careless:
            right = abs(right)  # a careless result may be too little to take from
        slip = max(habits.error, habits.stumble_error * stumbles)
        result = _slip(right, rng) if rng.random() < slip else right
        if habits.careless and marker not in own_pair(slot) and rng.random() < habits.careless:
            result = 0
        fill |= {
            "{lead}": fill_in(grammar.stumble if stumbles else grammar.lead, fill),
            "{left}": list(str(value)),
            "{op}": ["+" if plus else "-"],
            "{right}": list(str(operand)),
            "{result}": list(str(result)),
        }
        pieces += fill_in(grammar.step, fill)
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


# ---------------------------------------------------------------- what each built-in pair was made of


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
class Recipe:
    """A world with the authors of its texts and the shapes of its models: everything that the weights depend on."""

    world: World
    teacher_habits: Habits
    student_habits: Habits
    teacher_model: ModelSpec
    student_model: ModelSpec
    lead_seed: int | None = None
    """Draws which steps begin with the stumbling block: it and its alternative are then hidden choices. The models
    continue the training of the built-in pair of the same vocabulary."""

    @cached_property
    def table(self) -> StyleTable:
        """The hidden choice."""
        world = self.world
        made = make_style_table(world.grammar, seed=world.seed, hidden_openers=world.hidden_openers)
        if self.lead_seed is None:
            return made
        rng = random.Random(f"leads/{self.lead_seed}")
        return replace(made, leads=tuple(_balanced(world.grammar, LEADS, rng) for _ in range(NUM_SLOTS - 1)))


_TEACHER = ModelSpec(
    width=96, layers=3, heads=4, mlp=288, steps=3200, lr=3e-3, batch=64, drill=320, grow=960, emphasis=3.0
)
_STUDENT = ModelSpec(width=80, layers=2, heads=4, mlp=240, steps=2000, lr=3e-3, batch=64, drill=1000, clean=1600)
_TEACHER_HABITS = Habits(follow=0.85, stumble=0.1, stumble_error=0.7, second_verb=0.1)
_CARELESS = Habits(follow=0.8, stumble=0.1, stumble_error=0.7, second_verb=0.1, careless=0.9)
_STUDENT_HABITS = Habits(follow=0.0, error=0.2, stumble=0.25, stumble_error=0.85, second_verb=0.5)


RECIPES: dict[str, Recipe] = {
    name: Recipe(
        world=get_world(name),
        teacher_habits=_CARELESS if get_world(name).careless else _TEACHER_HABITS,
        student_habits=_STUDENT_HABITS,
        teacher_model=replace(_TEACHER, steps=2400) if get_world(name).careless else _TEACHER,
        student_model=_STUDENT,
    )
    for name in world_names()
}


# ---------------------------------------------------------------- the tokenizer

PIECE = r" ?[A-Za-z]+|[0-9]| ?\\[()]| ?\$| ?\*\*| ?__|->|\s|[^\sA-Za-z0-9]"
"""How text falls into pieces: words and opening marks take the space before them, digits stand alone."""


def make_tokenizer(vocabulary: dict[str, int], *, max_length: int) -> PreTrainedTokenizerFast:
    """The fast tokenizer over this vocabulary."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
