"""Prompts and answer checking from reasoning-gym: `--prompts.source reasoning-gym:gsm_symbolic`, any of its tasks.

The package generates endless verifiable problems from seeds and scores answers itself. It is an optional dependency
(`pip install rocktokens[tasks]`) and is imported only when a source names it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rocktokens.errors import ConfigError, DataError
from rocktokens.prompts.gym_answers import readings
from rocktokens.prompts.gym_guard import may_be_scored
from rocktokens.prompts.gym_options import read_options, shown
from rocktokens.prompts.gym_process import CannotMake, make_problem
from rocktokens.seeds import derive_seed

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

PREFIX = "reasoning-gym:"
BLOCK = 1000  # problems generated from one seed before the next seed is taken
# A task that gives this many repeated problems in a row has no more to give.
MOST_REPEATS = 2000
FULL_SCORE = 1.0
MIXTURE = "composite"

# Where tasks that accept many answers keep one of them, and what stands for the answer where they keep none.
EXAMPLES = ("possible_answer", "example_correct_answer", "example_answer")
NO_EXAMPLE = "any solution"


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
    _dataset(name, options)  # refuses what the task refuses
    seen: set[str] = set()
    repeats, block = 0, 0
    while repeats < MOST_REPEATS:
        first = derive_seed("reasoning-gym", name, seed, block) % 2**31
        for number in range(BLOCK):
            entry = _problem(name, options, first, number)
            question = str(entry["question"])
            if question in seen:
                repeats += 1
                if repeats >= MOST_REPEATS:
                    return
                continue
            seen.add(question)
            repeats = 0
            yield f"{name}/{first}-{number}", question, GymAnswer(_reference(entry), entry)
        block += 1


def gym_checker(source: str, options: Sequence[str]) -> Callable[[str, str], bool]:
    """The task's own scorer as a checker: a rollout is right if what it states as its answer scores full marks."""
    name = _task_name(source)
    task = _dataset(name, options)

    def check(text: str, answer: str) -> bool:
        entry = answer.entry if isinstance(answer, GymAnswer) else {"answer": answer, "metadata": {}}
        reference = None if entry["answer"] is None else str(entry["answer"])
        return any(_scores_full(name, task, reading, entry) for reading in readings(text, reference))

    return check


def _reference(entry: Mapping[str, object]) -> str:
    """The right answer as it is shown; of a task that accepts many and names none, an example where it keeps one."""
    if entry["answer"] is not None:
        return str(entry["answer"])
    known = entry.get("metadata")
    for key in EXAMPLES:
        example = known.get(key) if isinstance(known, Mapping) else None
        if example:
            return example if isinstance(example, str) else json.dumps(example)
    return NO_EXAMPLE


def _scores_full(name: str, task: ProceduralDataset, stated: str | None, entry: Mapping[str, object]) -> bool:
    if not may_be_scored(name, stated, entry):
        return False
    try:
        return float(task.score_answer(stated, entry)) >= FULL_SCORE
    except Exception:  # scorers are other people's: one that stumbles over a text has not found the answer in it
        return False


def _task_name(source: str) -> str:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ConfigError(
            f"{source} needs the package reasoning-gym; install it with `pip install rocktokens[tasks]`"
        ) from None
    name = source.removeprefix(PREFIX)
    if name == MIXTURE:
        raise ConfigError(f"{source} mixes other tasks, which options cannot describe; name one of those tasks instead")
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else f"it has {len(DATASETS)} tasks, e.g. gsm_symbolic"
        raise ConfigError(f"reasoning-gym has no task {name!r}; {hint}")
    return name


def _dataset(name: str, options: Sequence[str]) -> ProceduralDataset:
    """The task with its settings, for its scorer: problems are made in a process of their own."""
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(name, seed=0, size=BLOCK, **_settings(name, options))
    except ConfigError:
        raise
    except Exception as error:  # the package's own checks are assertions, some without a word
        raise ConfigError(f"{PREFIX}{name} refuses {shown(options)}{_said(str(error))}") from None


def _settings(name: str, options: Sequence[str]) -> dict[str, object]:
    from reasoning_gym.factory import DATASETS

    return read_options(name, DATASETS[name][1], options)


def _problem(name: str, options: Sequence[str], seed: int, number: int) -> Mapping[str, object]:
    """One problem of a block; what settings make impossible shows only here."""
    try:
        return make_problem(name, _settings(name, options), seed=seed, size=BLOCK, number=number)
    except CannotMake as error:
        raise ConfigError(f"{PREFIX}{name} cannot make problems with {shown(options)}{_said(str(error))}") from error


def _said(text: str) -> str:
    text = text.strip()
    return f": {text.splitlines()[0]}" if text else ""


def too_few(source: str, found: int, wanted: int) -> DataError:
    """The error for a task whose problem space is smaller than what was asked for."""
    return DataError(
        f"{source} gave {found} distinct problems where {wanted} were asked for; lower prompts.limit or choose "
        "settings with more variety through prompts.options"
    )
