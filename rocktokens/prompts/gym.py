"""Prompts and answer checking from reasoning-gym: `--prompts.source reasoning-gym:chain_sum`.

The package generates endless prompts with verifiable answers from seeds. It is an optional dependency
(`pip install rocktokens[tasks]`), imported only when a source names it. Only the tasks of `TASKS` are offered: they
give the same prompts for a seed in every process (some others follow the order of Python's sets), have one right
answer, and that answer is compared here. No scorer of the package is called: some of them evaluate what a model
wrote as Python, and some give full marks to wrong answers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal

import msgspec
import yaml

from rocktokens.errors import ConfigError
from rocktokens.seeds import derive_seed
from rocktokens.settings import require

PREFIX = "reasoning-gym:"
BLOCK = 1000  # prompts generated from one seed before the next seed is taken
MOST_REPEATS = 2000  # a task that repeats itself this many times in a row has no more to give
OURS = ("seed", "size")  # the task's own settings that prompts.seed and prompts.limit replace


# ---------------------------------------------------------------- reading answers
#
# The last of: an <answer> element; a \boxed formula; what follows `####`, "answer is" or "answer:"; and where the
# rollout has none of these, its last number, fraction or line. The first kind that occurs is taken.

TAG = re.compile(r"<answer>(?:(?!<answer>).)*?</answer>", re.IGNORECASE | re.DOTALL)
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
WORDED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
STATED = re.compile(r"(?:####|(?:final\s+)?answer[\s*]*(?:is\b\s*:?|:))[\s*$`]*(\S.*)", re.IGNORECASE)
# A minus sign that follows a number, a name or a bracket subtracts.
NUMBER = re.compile(r"(?:(?<![\w)\]}])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+)")
FRACTION = re.compile(r"(-?\b\d{1,30}\b) ?(?:/|\} ?\{) ?(\d{1,30}\b)")
DASHES = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-"})
GROUPED = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\,)(?=\d{3}(?!\d))")  # thousands in LaTeX: 1{,}234 and 1\,234
# What follows a result after these is a reason, not the result.
ASIDE = re.compile(
    r"[.;]\s|(?<=\d)\s+\(|[,\s]\s*(?:because|since|as|where|which|when|if|given|for|so)\b", re.IGNORECASE
)
DECORATION = " \t:*$`.!\"'"


def _marked(text: str) -> str | None:
    """The last <answer> element, else the last box, else the line of the last stated answer."""
    elements = TAG.findall(text)
    if elements:
        return str(elements[-1][len("<answer>") : -len("</answer>")])
    boxes = BOXED.findall(text)
    if boxes:
        words = WORDED.fullmatch(boxes[-1].strip())
        return words.group(1) if words else str(boxes[-1])
    stated = [found.group(1) for found in STATED.finditer(text)]
    return stated[-1] if stated else None


def read_number(text: str) -> Decimal | None:
    """The number that a rollout gives as its answer; of an equation, what it comes to."""
    text = GROUPED.sub(",", text.translate(DASHES))
    marked = _marked(text)
    if marked is None or (not NUMBER.search(marked) and "<answer>" not in text.lower()):
        numbers = NUMBER.findall(text)[-1:]
    else:
        first = NUMBER.search(marked)
        aside = ASIDE.search(marked, first.end()) if first else None
        result = marked[: aside.start()] if aside else marked
        numbers = NUMBER.findall(result.rpartition("=")[2]) or NUMBER.findall(result)
    return Decimal(numbers[0].replace(",", "")) if numbers else None


def read_fraction(text: str) -> tuple[int, int] | None:
    """Numerator and denominator of the fraction that a rollout gives as its answer."""
    found = FRACTION.findall(_marked(text) or text)
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def read_text(text: str) -> str | None:
    """The line that a rollout gives as its answer, without case, spaces and what markdown puts round it."""
    marked = _marked(text)
    lines = [line for line in (text if marked is None else marked).splitlines() if line.strip("` \t")]
    line = "" if not lines else lines[-1 if marked is None else 0]
    return "".join(line.split()).strip(DECORATION).casefold() or None


NUMBERS = (
    "aiw basic_arithmetic chain_sum count_bits count_primes decimal_chain_sum gcd gsm_symbolic largest_island lcm "
    "leg_counting letter_counting number_sequence products rectangle_count simple_equations simple_geometry"
)
TEXTS = (
    "caesar_cipher color_cube_rotation family_relationships letter_jumble number_filtering spell_backward syllogism "
    "word_sequence_reversal word_sorting zebra_puzzles"
)
TASKS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(NUMBERS.split(), read_number),
    **dict.fromkeys(TEXTS.split(), read_text),
    "fraction_simplification": read_fraction,
}


# ---------------------------------------------------------------- prompts


def is_gym_source(source: str) -> bool:
    """Whether a prompt source names a reasoning-gym task."""
    return source.startswith(PREFIX)


def gym_rows(source: str, options: Sequence[str], seed: int) -> Iterator[tuple[str, str, str]]:
    """Distinct prompts of a task as (name, question, answer); ends when the task has no more to give.

    `options` are the task's own settings as KEY=VALUE. Another seed gives other prompts, in another order.
    """
    name, seen, repeats, block = _task_name(source), set[str](), 0, 0
    try:
        import reasoning_gym
    except ImportError:
        raise ConfigError(f"{source} needs the package reasoning-gym: `pip install rocktokens[tasks]`") from None
    settings = _read_options(name, options)
    while True:
        first = derive_seed("reasoning-gym", name, seed, block) % 2**31
        for number in range(BLOCK):
            try:
                if number == 0:
                    task = reasoning_gym.create_dataset(name, seed=first, size=BLOCK, **settings)
                entry = task[number]
            except Exception as error:  # the package's own checks are assertions, some of them without a word
                said = f": {str(error).strip().splitlines()[0]}" if str(error).strip() else ""
                raise ConfigError(f"{source} cannot make prompts with {' '.join(options)}{said}") from error
            repeats = repeats + 1 if entry["question"] in seen else 0
            if repeats >= MOST_REPEATS:
                return
            if not repeats:
                seen.add(entry["question"])
                yield f"{name}/{first}-{number}", str(entry["question"]), str(entry["answer"])
        block += 1


def gym_checker(source: str) -> Callable[[str, str], bool]:
    """A checker for a task: a rollout is right if what it states as its answer is the reference answer."""
    read = TASKS[_task_name(source)]
    # The reference is read as an <answer>, so that both sides are written alike.
    return lambda text, answer: (found := read(text)) is not None and found == read(f"<answer>{answer}</answer>")


def _task_name(source: str) -> str:
    name = source.removeprefix(PREFIX)
    require(name in TASKS, f"rocktokens does not offer {source!r}; the tasks that work are {', '.join(sorted(TASKS))}")
    return name


def _read_options(name: str, options: Sequence[str]) -> dict[str, object]:
    """A task's settings by name, checked against the types of its settings class: the package checks no types."""
    from reasoning_gym.factory import DATASETS

    settings, found = DATASETS[name][1], dict[str, object]()
    known = [own.name for own in dataclasses.fields(settings) if own.name not in OURS]
    for option in options:
        key, equals, written = option.partition("=")
        takes = f"{PREFIX}{name} takes options as KEY=VALUE, where KEY is one of {', '.join(known)}"
        require(bool(equals) and key in known, f"{takes}; got {option!r}")
        try:
            found[key] = yaml.safe_load(written)
        except yaml.YAMLError:
            raise ConfigError(f"prompts.options: {option!r} is not YAML; signs need quotes, as in ['+', '*']") from None
    try:
        checked = msgspec.convert(found, settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"prompts.options of {PREFIX}{name}: {error}") from None
    return {key: getattr(checked, key) for key in found}
