"""Would the student still solve the task if it could not say this? Bans, by resuming rollouts instead of repeating.

While a banned token is not drawn, the ban changes nothing; when it is, the draw among the others follows their
renormalised probabilities. So a knock-out rollout is the baseline rollout up to the first use of the set, and from
there on a continuation with the set banned; a rollout that never used it is copied whole, with an effect of exactly 0
(docs/method.md §5). A continuation goes on with the very random numbers its baseline rollout had after that place:
they are independent of everything before it, so the law stays exact, and what the ban does not touch is alike in both.

The placebo goes on AFTER the use, with numbers of its own and nothing banned: exactly the baseline's law, so that its
mean effect is 0 and its spread is the noise. (Drawing the place itself again would not be: rollouts come here because
they drew the set.) It is also what further repeats are compared with, number by number.

This module knows engines, prompts and places; models, files and statistics are elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import pyarrow as pa

from rocktokens.causal.baseline import (
    SHOWN_PROMPTS,
    Bar,
    Baseline,
    BaseRollout,
    Judge,
    Keep,
    answerable,
    chunk_of,
    keep_all,
    make_now,
    no_bar,
    sample_baseline,
)
from rocktokens.causal.census import BannedSet, Census, Effects, Outcomes, Power, make_schedule, power_of, run_looks
from rocktokens.causal.settings import BaselineConfig, KnockoutConfig
from rocktokens.errors import ConfigError
from rocktokens.prompts.checkers import Checker
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.requests import Continuation, Engine, Request
from rocktokens.sample.settings import RolloutConfig
from rocktokens.seeds import derive_seed
from rocktokens.tables import TABLES
from rocktokens.values import Row

KNOCKOUTS = TABLES["knockouts"].schema

log = logging.getLogger(__name__)

Arm = Literal["knockout", "placebo"]


@dataclass(frozen=True)
class Job:
    """One continuation to ask for."""

    column: int
    """Which set, by its place in the list of sets."""
    rollout: int
    at: int
    """Position of the first use: where the knock-out's continuation begins."""
    arm: Arm
    repeat: int


def plan(
    baseline: Baseline,
    sets: Sequence[BannedSet],
    active: Sequence[int],
    *,
    exact_resume: bool,
    repeats: int,
    placebo_problems: int,
) -> tuple[list[Job], np.ndarray]:
    """All continuations that the active sets need on these rollouts, and how many rollouts use each set."""
    jobs: list[Job] = []
    used_V = np.zeros(len(sets), int)
    for column in active:
        uses = baseline.first_uses(sets[column].members)
        used_V[column] = len(uses)
        places = uses if exact_resume else dict.fromkeys(range(len(baseline.rollouts)), 0)
        for rollout, at in places.items():
            jobs += [Job(column, rollout, at, "knockout", repeat) for repeat in range(repeats)]
            compared = max(repeats - 1, int(baseline.rollouts[rollout].problem < placebo_problems))
            jobs += [Job(column, rollout, at, "placebo", repeat) for repeat in range(1, compared + 1)]
    return jobs, used_V


def request_for(
    job: Job, rollout: BaseRollout, members: tuple[int, ...], set_id: str, *, limit: int, seed: int, exact_resume: bool
) -> Request | None:
    """What to ask the engine for; None where the rollout was cut right after the first use and nothing can follow."""
    own = derive_seed(seed, "resume", set_id, rollout.rollout_id, job.repeat)
    prefix = rollout.prompt.prompt_ids
    if not exact_resume:
        stream = rollout.seed if job.repeat == 0 else own
        return Request(prefix, limit, stream, members if job.arm == "knockout" else ())
    if job.arm == "placebo":
        # No set holds an end token, so a rollout whose last token is the first use was cut there, by the length limit
        # or by the model's context: nothing could follow it.
        if job.at + 1 >= min(limit, len(rollout.token_ids)):
            return None
        return Request((*prefix, *rollout.token_ids[: job.at + 1]), limit - job.at - 1, own, skip=1)
    prefix = (*prefix, *rollout.token_ids[: job.at])
    if job.repeat:
        return Request(prefix, limit - job.at, own, members)
    # The baseline's own number chose the banned token, so the first draw takes another; those after it are free.
    return Request(prefix, limit - job.at, rollout.seed, members, skip=job.at, first_seed=own)


def response_of(job: Job, rollout: BaseRollout, answer: Continuation, exact_resume: bool) -> tuple[int, ...]:
    """The whole response: what was copied, and what was generated."""
    if not exact_resume:
        return answer.token_ids
    return (*rollout.token_ids[: job.at + (job.arm == "placebo")], *answer.token_ids)


class Arms:
    """Carries out jobs in chunks that are each kept, so that a finished resumption is never done again."""

    def __init__(
        self, engine: Engine, sets: Sequence[BannedSet], judge: Judge, *, limit: int, seed: int, keep: Keep, bar: Bar
    ) -> None:
        self.engine, self.sets, self.judge = engine, sets, judge
        self.limit, self.seed, self.keep, self.bar = limit, seed, keep, bar
        self.exact = engine.exact_resume

    def run(self, name: str, jobs: Sequence[Job], baseline: Baseline) -> pa.Table:
        """One row per job: prompt_id, rollout_id, arm, set_id, repeat, resumed_at, correct, num_tokens."""
        # All sets' resumptions go to the engine together, those of one rollout side by side: what they begin with is
        # then prefilled once, and the engine puts alike lengths into one batch.
        jobs = sorted(jobs, key=lambda job: (job.rollout, job.at, job.column, job.arm, job.repeat))
        size = chunk_of(self.keep)
        with self.bar(name, len(jobs)) as advance:
            makers = {
                f"{name}-{start:08d}": partial(self._do, jobs[start : start + size], baseline, advance)
                for start in range(0, len(jobs), size)
            }
            tables = keep_all(self.keep, makers)
        return pa.concat_tables(tables) if tables else _empty()

    def _do(self, jobs: list[Job], baseline: Baseline, advance: Callable[[int], None]) -> pa.Table:
        rollouts = [baseline.rollouts[job.rollout] for job in jobs]
        asked = [
            request_for(
                job,
                rollout,
                self.sets[job.column].members,
                self.sets[job.column].set_id,
                limit=self.limit,
                seed=self.seed,
                exact_resume=self.exact,
            )
            for job, rollout in zip(jobs, rollouts)
        ]
        requests = [request for request in asked if request is not None]
        drawn = iter(self.engine.generate(requests, progress=advance))
        advance(len(asked) - len(requests))  # copied whole
        answers = [next(drawn) if request is not None else None for request in asked]
        responses = [
            rollout.token_ids if answer is None else response_of(job, rollout, answer, self.exact)
            for job, rollout, answer in zip(jobs, rollouts, answers)
        ]
        made = zip(rollouts, responses, answers)
        self.judge.learn([(rollout.prompt, ids) for rollout, ids, answer in made if answer is not None])
        rows = []
        for job, rollout, answer, response in zip(jobs, rollouts, answers, responses):
            banned = self.sets[job.column]
            correct = rollout.correct if answer is None else self.judge(rollout.prompt, response)
            rows.append(
                {
                    "prompt_id": rollout.prompt.prompt_id,
                    "rollout_id": rollout.rollout_id,
                    "arm": "control" if job.arm == "knockout" and banned.role == "control" else job.arm,
                    "set_id": banned.set_id,
                    "repeat": job.repeat,
                    "resumed_at": job.at,
                    "correct": correct,
                    "num_tokens": 0 if answer is None else len(answer.token_ids),
                    "token_ids": response if rollout.problem < SHOWN_PROMPTS else None,
                }
            )
        return pa.Table.from_pylist(rows, schema=KNOCKOUTS)


def _empty() -> pa.Table:
    return KNOCKOUTS.empty_table()


@dataclass(frozen=True)
class KnockoutResult:
    """A census and everything it rests on."""

    census: Census
    baseline: pa.Table
    """Rows of runs/schema.ROLLOUTS."""
    knockouts: pa.Table
    """One row per resumption, and one a baseline rollout. A rollout without a row for a set was copied."""


def check_sets(sets: Sequence[BannedSet], eos_ids: Sequence[int], vocabulary: int | None = None) -> None:
    """Refuse bans under which no response can end, or none can be written."""
    if not sets:
        raise ConfigError("there is nothing to ban; name candidates, or run `rocktokens detect` first")
    for banned in sets:
        if set(banned.members) & set(eos_ids):
            raise ConfigError(
                f"{banned.token!r} (#{banned.token_id}) ends responses; without it every rollout runs into the "
                "length limit, which says nothing about the token. Leave it out."
            )
        if vocabulary is not None and len(set(banned.members)) >= vocabulary:
            raise ConfigError(f"set {banned.set_id} bans every token type; nothing could be sampled")


def knockout_census(
    engine: Engine,
    prompts: Sequence[Prompt],
    sets: Sequence[BannedSet],
    *,
    decode: Callable[[list[int]], str],
    checker: Checker | None,
    eos_ids: Sequence[int] = (),
    vocabulary: int | None = None,
    config: KnockoutConfig | None = None,
    baseline: BaselineConfig | None = None,
    keep: Keep = make_now,
    bar: Bar = no_bar,
) -> KnockoutResult:
    """Ban every set in turn and say what the ban does to accuracy, with an interval.

    Args:
        engine: samples from the student.
        prompts: those without an answer are left out; shuffled with a seed, so that a look is a fair sample of them.
        sets: what is banned, each set by itself.
        decode: token ids to text.
        checker: `checker(text, answer)` says whether a rollout is right.
        eos_ids: tokens that end a rollout; a set that bans all of them is refused.
        vocabulary: number of token types; a set beyond it is refused.
        config: looks, error rates and what counts as an effect.
        baseline: the rollouts that knock-outs start from.
        keep: keeps finished parts.
        bar: shows progress.

    Returns:
        The census, the baseline rollouts, and one row per resumed rollout.
    """
    config, base = config or KnockoutConfig(), baseline or BaselineConfig()
    check_sets(sets, eos_ids, vocabulary)
    problems = shuffled(answerable(prompts, checker), base.seed)[: base.problems]
    assert checker is not None
    if base.greedy:
        config = replace(config, repeats=1, placebo_share=0.0)  # greedy rollouts have no noise to show or to average
    if not engine.exact_resume:
        log.info(
            "top-k or top-p is set: banning a token then lets others into the cut, so a rollout cannot be resumed "
            "where it first used it; every knock-out is generated in full"
        )
    schedule = make_schedule(len(problems), config.rounds if config.until == "decided" else 1)
    work = _Work(engine, problems, sets, Judge(decode, checker), config, base, keep, bar)
    effects = Effects(sets, len(problems), base.rollouts, config.repeats)
    census = run_looks(effects, schedule, work.measure, config, seed=derive_seed(base.seed, "census"))
    census = replace(census, exact_resume=engine.exact_resume)
    return KnockoutResult(census, pa.concat_tables(work.baselines), pa.concat_tables(work.tables))


def shuffled(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """The prompts, shuffled with a seed."""
    order = np.random.default_rng(derive_seed(seed, "problems")).permutation(len(prompts))
    return [prompts[index] for index in order]


class _Work:
    """What a look does: sample its prompts, resume for the sets still open, hand the outcomes over."""

    def __init__(
        self,
        engine: Engine,
        problems: list[Prompt],
        sets: Sequence[BannedSet],
        judge: Judge,
        config: KnockoutConfig,
        base: BaselineConfig,
        keep: Keep,
        bar: Bar,
    ) -> None:
        self.engine, self.problems, self.sets, self.judge = engine, problems, sets, judge
        self.config, self.base, self.keep, self.bar = config, base, keep, bar
        self.limit = base.max_new_tokens or RolloutConfig.max_new_tokens
        self.placebo_problems = int(np.ceil(config.placebo_share * len(problems)))
        self.arms = Arms(engine, sets, judge, limit=self.limit, seed=base.seed, keep=keep, bar=bar)
        self.baselines: list[pa.Table] = []
        self.tables: list[pa.Table] = []

    def measure(self, look: int, begin: int, end: int, active: Sequence[int]) -> Outcomes:
        """Outcomes of prompts begin…end for the active sets."""
        self.judge.forget()
        baseline, rows = sample_baseline(
            self.engine,
            self.problems[begin:end],
            first_problem=begin,
            rollouts=self.base.rollouts,
            max_new_tokens=self.limit,
            seed=self.base.seed,
            judge=self.judge,
            keep=self.keep,
            bar=self.bar,
            chunk=chunk_of(self.keep),
        )
        jobs, used_V = plan(
            baseline,
            self.sets,
            active,
            exact_resume=self.engine.exact_resume,
            repeats=self.config.repeats,
            placebo_problems=self.placebo_problems,
        )
        if look == 0:
            used_A = used_V[list(active)]
            _say_power(power_of(baseline.correct_N(), used_A, self.config, self.base, len(self.problems)), self)
        table = self.arms.run(f"look {look + 1}", jobs, baseline)
        self.baselines.append(rows)
        self.tables += [_baseline_rows(rows), table]
        return self._outcomes(baseline, table, used_V)

    def _outcomes(self, baseline: Baseline, table: pa.Table, used_V: np.ndarray) -> Outcomes:
        by_id = {rollout.rollout_id: index for index, rollout in enumerate(baseline.rollouts)}
        column = {banned.set_id: index for index, banned in enumerate(self.sets)}
        rollout_J = np.array([by_id[name] for name in table["rollout_id"].to_pylist()], int)
        problem_N = np.array([rollout.problem for rollout in baseline.rollouts], int)
        correct_N = baseline.correct_N()
        return Outcomes(
            problem_N=problem_N,
            correct_N=correct_N,
            num_tokens=sum(len(rollout.token_ids) for rollout in baseline.rollouts),
            used_V=used_V,
            problem_J=problem_N[rollout_J],
            before_J=correct_N[rollout_J],
            column_J=np.array([column[name] for name in table["set_id"].to_pylist()], int),
            is_knockout_J=np.array([arm != "placebo" for arm in table["arm"].to_pylist()], bool),
            repeat_J=table["repeat"].to_numpy().astype(int),
            after_J=np.array(table["correct"].to_pylist(), float),
            num_tokens_J=table["num_tokens"].to_numpy().astype(int),
            placebo_problems=self.placebo_problems,
        )


def _say_power(found: Power, work: _Work) -> None:
    log.info("baseline: %.1f %% right in the first %d rollouts", 100 * found.accuracy, found.num_rollouts)
    if found.accuracy in (0.0, 1.0):
        log.warning("the baseline is always right or always wrong so far; there is no room for an effect")
    for name, share, effect in zip(("median", "most used"), found.used_shares, found.detectable):
        log.info(
            "power: the %s candidate is in %.1f %% of rollouts; %d prompts show effects from %.2f points at %.0f %% "
            "power, or smaller where pairs agree",
            name,
            100 * share,
            len(work.problems),
            100 * effect,
            100 * work.config.power,
        )


def _baseline_rows(rollouts: pa.Table) -> pa.Table:
    """Baseline rollouts as rows of the knock-out table."""
    lengths = [len(tokens) for tokens in rollouts["token_ids"].to_pylist()]
    count = len(rollouts)
    columns: Row = {
        "prompt_id": rollouts["prompt_id"],
        "rollout_id": rollouts["rollout_id"],
        "arm": ["baseline"] * count,
        "set_id": [""] * count,
        "repeat": [0] * count,
        "resumed_at": [None] * count,
        "correct": rollouts["correct"],
        "num_tokens": lengths,
        "token_ids": [None] * count,
    }
    return TABLES["knockouts"].conform(pa.table(columns))
