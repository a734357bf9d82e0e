"""Prompts and answer checking from reasoning-gym: `--prompts.source reasoning-gym:gsm_symbolic`, any of its tasks.

The package generates endless verifiable problems from seeds and scores answers itself. It is an optional dependency
(`pip install rocktokens[tasks]`) and is imported only when a source names it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rocktokens.core.seeds import derive_seed
from rocktokens.errors import ConfigError, DataError

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

PREFIX = "reasoning-gym:"
BLOCK = 1000  # problems generated from one seed before the next seed is taken
# A task that gives this many repeated problems in a row has no more to give.
MOST_REPEATS = 2000
FULL_SCORE = 1.0
OUR_SETTINGS = ("seed", "size")

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
STATED = re.compile(r"(?:####|(?:final\s+)?answer\s*(?:is|:))\s*(.+)", re.IGNORECASE)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class GymAnswer(str):
    """A reference answer that remembers the problem it belongs to, which some tasks need to score a rollout."""

    entry: Mapping[str, object]

    def __new__(cls, text: str, entry: Mapping[str, object]) -> GymAnswer:
        made = super().__new__(cls, text)
        made.entry = entry
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return GymAnswer, (str(self), dict(self.entry))


def is_gym_source(source: str) -> bool:
    """Whether a prompt source names a reasoning-gym task."""
    return source.startswith(PREFIX)


def gym_rows(source: str, options: Sequence[str], seed: int) -> Iterator[tuple[str, str, GymAnswer]]:
    """Endless distinct problems of a task as (name, question, answer); ends where the task has no more to give.

    Args:
        source: `reasoning-gym:NAME`.
        options: The task's own settings as KEY=VALUE.
        seed: Another seed gives other problems, in another order.
    """
    name = _task_name(source)
    seen: set[str] = set()
    repeats, block = 0, 0
    while repeats < MOST_REPEATS:
        first = derive_seed("reasoning-gym", name, seed, block) % 2**31
        for number, entry in enumerate(_dataset(name, options, first)):
            question = str(entry["question"])
            if question in seen:
                repeats += 1
                if repeats >= MOST_REPEATS:
                    return
                continue
            seen.add(question)
            repeats = 0
            yield f"{name}/{first}-{number}", question, GymAnswer(str(entry["answer"]), entry)
        block += 1


def gym_checker(source: str, options: Sequence[str]) -> Callable[[str, str], bool]:
    """The task's own scorer as a checker: a rollout is right if what it states as its answer scores full marks."""
    task = _dataset(_task_name(source), options, 0)

    def check(text: str, answer: str) -> bool:
        entry = answer.entry if isinstance(answer, GymAnswer) else {"answer": answer, "metadata": {}}
        return float(task.score_answer(stated_answer(text, answer), entry)) >= FULL_SCORE

    return check


def stated_answer(text: str, reference: str) -> str | None:
    """What a rollout gives as its final answer.

    The last of: an <answer> element; a \\boxed formula; what follows `####`, "answer is" or "answer:"; the last number
    where the reference is a number; the last line that is not empty. The first kind that occurs is taken.
    """
    for pattern in (TAGGED, BOXED):
        found = pattern.findall(text)
        if found:
            return str(found[-1]).strip()
    numeric = NUMBER.fullmatch(reference.strip()) is not None
    stated = STATED.findall(text)
    if numeric:
        numbers = NUMBER.findall(stated[-1]) if stated else []
        numbers = numbers[:1] or NUMBER.findall(text)[-1:]
        return numbers[0].replace(",", "") if numbers else None
    if stated:
        return str(stated[-1]).strip().strip("*").strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _task_name(source: str) -> str:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(
            f"{source} needs the package reasoning-gym; install it with `pip install rocktokens[tasks]`"
        ) from None
    name = source.removeprefix(PREFIX)
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else f"it has {len(DATASETS)} tasks, e.g. gsm_symbolic"
        raise ConfigError(f"reasoning-gym has no task {name!r}; {hint}")
    return name


def _dataset(name: str, options: Sequence[str], seed: int) -> ProceduralDataset:
    import reasoning_gym

    settings = _settings(name, options)
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=BLOCK, **settings)
    except TypeError as error:
        raise ConfigError(f"reasoning-gym:{name} does not take these settings: {error}") from None
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"reasoning-gym:{name} refuses its settings: {error}") from None


def _settings(name: str, options: Sequence[str]) -> dict[str, object]:
    import yaml

    found: dict[str, object] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"prompts.options are KEY=VALUE, got {option!r}")
        if key in OUR_SETTINGS:
            raise ConfigError(f"prompts.options cannot set {key}; use prompts.seed and prompts.limit")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"prompts.options: {option!r} is not KEY=VALUE with a readable value") from None
    return found


def too_few(source: str, found: int, wanted: int) -> DataError:
    """The error for a task whose problem space is smaller than what was asked for."""
    return DataError(
        f"{source} gave {found} distinct problems where {wanted} were asked for; lower prompts.limit or choose "
        "settings with more variety through prompts.options"
    )
