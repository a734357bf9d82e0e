"""The rollouts that knock-outs and grafts start from: sampled once, checked, and searched for first uses.

Asks an engine for continuations and a judge for their answers; knows no model, and not what will be done at the places
found here. Everything that takes time goes through `keep`, which may have the result from an earlier, killed attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from rocktokens.errors import DataError
from rocktokens.prompts.checkers import Checker, check_all
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.requests import Continuation, Engine, Request
from rocktokens.sample.rollouts import rollout_row
from rocktokens.seeds import derive_seed
from rocktokens.stats import Floats

Keep = Callable[[str, Callable[[], pa.Table]], pa.Table]
"""keep(name, make): the table of that name, made now if it was not kept before."""


@runtime_checkable
class SharedKeep(Protocol):
    """A `Keep` that several processes share: it is told of all tables at once, so that each can make its own."""

    def __call__(self, name: str, make: Callable[[], pa.Table]) -> pa.Table:
        """The table of that name."""
        ...

    def keep_all(self, makers: Mapping[str, Callable[[], pa.Table]]) -> list[pa.Table]:
        """The tables of these names, in order."""
        ...


# Resumptions that are asked for and written to disk together: what a kill may cost, and what processes share out.
CHUNK, SHARED_CHUNK = 2048, 512


def chunk_of(keep: Keep) -> int:
    """How many go together: fewer where several processes may share them, however many they are."""
    return SHARED_CHUNK if isinstance(keep, SharedKeep) else CHUNK


def keep_all(keep: Keep, makers: Mapping[str, Callable[[], pa.Table]]) -> list[pa.Table]:
    """The tables of these names, in order, kept before or made now."""
    if isinstance(keep, SharedKeep):
        return keep.keep_all(makers)
    return [keep(name, make) for name, make in makers.items()]


Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""bar(description, total): a block that is told of work done."""


def make_now(name: str, make: Callable[[], pa.Table]) -> pa.Table:
    """A `Keep` that keeps nothing."""
    return make()


@contextmanager
def no_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A `Bar` that shows nothing."""
    yield lambda count: None


class Judge:
    """Decodes responses and has their answers checked; a response that was seen before is not checked again."""

    def __init__(self, decode: Callable[[list[int]], str], checker: Checker) -> None:
        self.decode, self.checker = decode, checker
        self._seen: dict[tuple[str, tuple[int, ...]], bool] = {}

    def __call__(self, prompt: Prompt, token_ids: tuple[int, ...]) -> bool:
        key = (prompt.prompt_id, token_ids)
        if key not in self._seen:
            self._seen[key] = bool(self.checker(self.text(token_ids), prompt.answer or ""))
        return self._seen[key]

    def learn(self, jobs: Sequence[tuple[Prompt, tuple[int, ...]]]) -> None:
        """Have many responses checked at once, before they are asked for one by one."""
        new = {(prompt.prompt_id, ids): (prompt, ids) for prompt, ids in jobs}
        new = {key: job for key, job in new.items() if key not in self._seen}
        pairs = [(self.text(ids), prompt.answer or "") for prompt, ids in new.values()]
        self._seen |= dict(zip(new, check_all(self.checker, pairs)))

    def text(self, token_ids: tuple[int, ...]) -> str:
        """A response as people read it."""
        return self.decode(list(token_ids))

    def forget(self) -> None:
        """Free the memory: the prompts to come are others."""
        self._seen.clear()


# Token ids of knocked-out and grafted rollouts are kept for the first prompts alone: enough to read some.
SHOWN_PROMPTS = 12


@dataclass(frozen=True)
class BaseRollout:
    """One sampled response with its outcome."""

    prompt: Prompt
    problem: int
    """Number of the prompt in the census, from 0."""
    rollout_id: str
    token_ids: tuple[int, ...]
    correct: bool
    truncated: bool
    seed: int


class Baseline:
    """Rollouts of some prompts in a row, and where each token type is first used in each."""

    def __init__(self, rollouts: Sequence[BaseRollout]) -> None:
        self.rollouts = list(rollouts)
        lengths = [len(rollout.token_ids) for rollout in rollouts]
        token_N = np.fromiter((t for rollout in rollouts for t in rollout.token_ids), np.int64, sum(lengths))
        rollout_N = np.repeat(np.arange(len(rollouts)), lengths)
        position_N = np.arange(len(token_N)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        # Sorted by type, then rollout, then position: the first row of each (type, rollout) is the first use.
        order = np.lexsort((position_N, rollout_N, token_N))
        token_N, rollout_N, position_N = token_N[order], rollout_N[order], position_N[order]
        first_N = np.ones(len(token_N), bool)
        first_N[1:] = (np.diff(token_N) != 0) | (np.diff(rollout_N) != 0)
        self._token_U, self._rollout_U, self._position_U = token_N[first_N], rollout_N[first_N], position_N[first_N]

    def first_uses(self, members: Collection[int]) -> dict[int, int]:
        """Rollouts (by index) that use any member, with the position of the first use."""
        found: dict[int, int] = {}
        for token in members:
            begin, end = np.searchsorted(self._token_U, [token, token + 1])
            for rollout, position in zip(self._rollout_U[begin:end].tolist(), self._position_U[begin:end].tolist()):
                found[rollout] = min(position, found.get(rollout, position))
        return dict(sorted(found.items()))

    def correct_N(self) -> Floats:
        """Outcome of every rollout."""
        return np.array([rollout.correct for rollout in self.rollouts], float)


def answerable(prompts: Sequence[Prompt], checker: Checker | None) -> list[Prompt]:
    """The prompts whose answers can be checked; refuses where there are none: accuracy has no meaning then."""
    if checker is None:
        raise DataError("checker is none: without answers to check, accuracy and the effect of a ban have no meaning")
    with_answer = [prompt for prompt in prompts if prompt.answer is not None]
    if len(with_answer) < 2:
        raise DataError(
            f"{len(with_answer)} of {len(prompts)} prompts have an answer to check; the causal tests need at least 2"
        )
    return with_answer


def sample_baseline(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    first_problem: int,
    rollouts: int,
    max_new_tokens: int,
    seed: int,
    judge: Judge,
    keep: Keep = make_now,
    bar: Bar = no_bar,
    chunk: int = CHUNK,
    known: Mapping[str, Sequence[dict]] | None = None,
) -> tuple[Baseline, pa.Table]:
    """Sample prompts `first_problem`… of a census; also the rollouts as rows of runs/schema.ROLLOUTS.

    `known`: rows by prompt_id that another stage has sampled with the same settings.
    """
    missing = [prompt for prompt in prompts if prompt.prompt_id not in (known or {})]
    rows = {prompt_id: list(own) for prompt_id, own in (known or {}).items()}
    per_part = max(1, chunk // rollouts)
    with bar("baseline", len(missing) * rollouts) as advance:

        def make(part: Sequence[Prompt]) -> pa.Table:
            jobs = [(prompt, number) for prompt in part for number in range(rollouts)]
            seeds = [derive_seed(seed, "baseline", prompt.prompt_id, number) for prompt, number in jobs]
            asked = [Request(job[0].prompt_ids, max_new_tokens, own) for job, own in zip(jobs, seeds)]
            answers = engine.generate(asked)
            advance(len(jobs))
            judge.learn([(job[0], answer.token_ids) for job, answer in zip(jobs, answers)])
            return pa.Table.from_pylist([_row(*job, own, a, judge) for job, own, a in zip(jobs, seeds, answers)])

        makers = {
            f"baseline-{first_problem:07d}-{len(missing)}-{start:07d}": partial(make, missing[start : start + per_part])
            for start in range(0, len(missing), per_part)
        }
        for table in keep_all(keep, makers):
            for row in table.to_pylist():
                rows.setdefault(row["prompt_id"], []).append(row)
    ordered = [rows[prompt.prompt_id] for prompt in prompts]
    found = [
        _rollout(prompt, first_problem + index, row)
        for index, (prompt, own) in enumerate(zip(prompts, ordered))
        for row in own
    ]
    return Baseline(found), pa.Table.from_pylist([row for own in ordered for row in own])


def _row(prompt: Prompt, number: int, seed: int, answer: Continuation, judge: Judge) -> dict:
    text, correct = judge.text(answer.token_ids), judge(prompt, answer.token_ids)
    return rollout_row(prompt, number, seed, answer, text=text, correct=correct)


def _rollout(prompt: Prompt, problem: int, row: dict) -> BaseRollout:
    tokens = tuple(row["token_ids"])
    return BaseRollout(prompt, problem, row["rollout_id"], tokens, row["correct"], row["truncated"], row["seed"])
