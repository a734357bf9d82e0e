"""What would the student gain had it learned these tokens perfectly? Grafts: the teacher draws them in its place.

The student samples; when the token it drew is in the set, the teacher draws again. Up to the first such draw nothing
differs from the baseline rollout, so that far it is copied; a rollout without one is copied whole, with a gain of
exactly 0. (Nothing is renormalised, so this holds with top-k and top-p, too.) Past it, the student goes on with the
random numbers the baseline rollout had there.

Drawing again has an effect of its own: a set that holds part of a position's probability loses some of it even if the
teacher is the student. The arm `placebo` shows it: the rocks, drawn again from the student itself. The control draws
again as many tokens as the rocks have, at random among the others: every other drawn token with the same small
probability. This module knows engines, prompts and rules; models and files are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

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
from rocktokens.causal.graft_report import GraftRow
from rocktokens.causal.inference import change
from rocktokens.causal.knockout import shuffled
from rocktokens.causal.settings import BaselineConfig, GraftConfig
from rocktokens.errors import ConfigError
from rocktokens.prompts.checkers import Checker
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.requests import Continuation, Engine, GraftRequest
from rocktokens.sample.settings import RolloutConfig
from rocktokens.seeds import derive_seed, uniforms
from rocktokens.stats import Floats, share_estimate
from rocktokens.tables import TABLES

# Shapes: V vocabulary, T positions of a rollout, P prompts.
GRAFTS = TABLES["graft_rollouts"].schema


class Grafter(Protocol):
    """Anything that continues prefixes with some tokens drawn again from a teacher."""

    def generate(
        self, requests: Sequence[GraftRequest], *, progress: Callable[[int], None] | None = None
    ) -> list[Continuation]:
        """One continuation a request, in order."""
        ...


@dataclass(frozen=True)
class GraftArm:
    """Which drawn tokens the teacher draws again: a probability for every token type."""

    name: str
    redraw_V: Floats
    num_types: int
    own: bool = False
    """The student itself draws again."""
    members: tuple[int, ...] = ()
    """The set itself, where it is what the arm is about."""


@dataclass(frozen=True)
class GraftResult:
    """Gains of every arm, and what they rest on."""

    rows: tuple[GraftRow, ...]
    accuracy: float
    """Of the baseline: the arm `none`."""
    baseline: pa.Table
    grafts: pa.Table
    """One row per resumption; a rollout without a row for an arm was copied."""


@dataclass(frozen=True)
class GraftSets:
    """The sets of token types that are grafted."""

    target: tuple[int, ...]
    """The set in question: the declared rocks or, where there are none, the candidates of the census."""
    name: str = "rocks"
    """What the target is."""
    skippable: tuple[int, ...] = ()
    """Types that detection and census would let training skip; their graft decides whether it may."""
    clusters: Mapping[str, Iterable[int]] | None = None


def make_arms(sets: GraftSets, vocabulary: int, share_V: Floats) -> list[GraftArm]:
    """The target, placebo, control, rest, all, what would be skipped, and one arm per cluster.

    `share_V`: each type's share of the positions.
    """
    rocks = sorted(set(sets.target))
    if not rocks:
        raise ConfigError("there is nothing to graft; run `rocktokens detect` first, or name token types with --rocks")
    wrong = [token for token in (*rocks, *sets.skippable) if not 0 <= token < vocabulary]
    if wrong:
        raise ConfigError(f"token id {wrong[0]} is not in the vocabulary of {vocabulary}")
    on_V = np.zeros(vocabulary)
    on_V[rocks] = 1.0
    rock_share = float(share_V[rocks].sum())
    # As many draws as the rocks have, spread over everything else; if rocks are the larger part, all of the rest.
    odds = min(1.0, rock_share / max(1.0 - rock_share, 1e-12))
    arms = [
        GraftArm(sets.name, on_V, len(rocks), members=tuple(rocks)),
        GraftArm("placebo", on_V, len(rocks), own=True),
        GraftArm("control", (1 - on_V) * odds, vocabulary - len(rocks)),
        GraftArm("rest", 1 - on_V, vocabulary - len(rocks)),
        GraftArm("all", np.ones(vocabulary), vocabulary),
    ]
    skippable = sorted(set(sets.skippable))
    if skippable and skippable != rocks:
        arms.append(GraftArm("skippable", _indicator(skippable, vocabulary), len(skippable), members=tuple(skippable)))
    for name, members in (sets.clusters or {}).items():
        own_V = _indicator(members, vocabulary)
        arms.append(GraftArm(f"cluster {name}", own_V, int(own_V.sum())))
    return arms


def _indicator(members: Iterable[int], vocabulary: int) -> Floats:
    own_V = np.zeros(vocabulary)
    own_V[sorted(set(members))] = 1.0
    return own_V


def first_redraw(rollout: BaseRollout, arm: GraftArm, seed: int) -> int | None:
    """The first position whose token the rule draws again; None: the rollout is copied whole."""
    if not rollout.token_ids:
        return None
    redraw_T = arm.redraw_V[list(rollout.token_ids)]
    coin_T = uniforms(seed, 2 * len(redraw_T)).reshape(-1, 2)[:, 0]
    hits = np.flatnonzero(coin_T < redraw_T)
    return int(hits[0]) if len(hits) else None


def graft(
    engine: Engine,
    make_grafter: Callable[[Floats, Floats], Grafter],
    prompts: Sequence[Prompt],
    rocks: Iterable[int] | GraftSets,
    *,
    vocabulary: int,
    decode: Callable[[list[int]], str],
    checker: Checker | None,
    clusters: Mapping[str, Iterable[int]] | None = None,
    config: GraftConfig | None = None,
    baseline: BaselineConfig | None = None,
    known: Mapping[str, Sequence[dict]] | None = None,
    keep: Keep = make_now,
    bar: Bar = no_bar,
) -> GraftResult:
    """Accuracy gained when the teacher draws the rocks, as many other tokens, all others, everything, each cluster.

    Args:
        engine: samples from the student.
        make_grafter: `make_grafter(rules, own)` gives the engine for rules of redrawing, one row per arm, and for
            each whether the student itself draws again.
        prompts: with answers.
        rocks: the set in question, or all sets by name.
        vocabulary: number of token types.
        decode: token ids to text.
        checker: `checker(text, answer)` says whether a rollout is right.
        clusters: further sets, each grafted by itself.
        config: how many prompts, and the coverage of intervals.
        baseline: the rollouts that grafts start from.
        known: baseline rollouts by prompt_id that another stage has sampled with the same settings.
        keep: keeps finished parts.
        bar: shows progress.
    """
    config, base = config or GraftConfig(), baseline or BaselineConfig()
    problems = shuffled(answerable(prompts, checker), base.seed)[: min(config.problems, base.problems)]
    assert checker is not None
    judge, limit = Judge(decode, checker), base.max_new_tokens or RolloutConfig.max_new_tokens
    start, rows = sample_baseline(
        engine,
        problems,
        first_problem=0,
        rollouts=base.rollouts,
        max_new_tokens=limit,
        seed=base.seed,
        judge=judge,
        keep=keep,
        bar=bar,
        chunk=chunk_of(keep),
        known=known,
    )
    sets = rocks if isinstance(rocks, GraftSets) else GraftSets(tuple(rocks), clusters=clusters)
    arms = make_arms(sets, vocabulary, _shares(start, vocabulary))
    grafter = make_grafter(np.stack([arm.redraw_V for arm in arms]), np.array([arm.own for arm in arms]))
    table = _run(grafter, arms, start, judge, limit=limit, seed=base.seed, keep=keep, bar=bar)
    rng = np.random.default_rng(derive_seed(base.seed, "graft"))
    found = tuple(_result(arm, start, table, base.rollouts, _shares(start, vocabulary), config, rng) for arm in arms)
    return GraftResult(found, float(start.correct_N().mean()), rows, table)


def _shares(baseline: Baseline, vocabulary: int) -> Floats:
    """Each token type's share of the baseline's positions."""
    count_V = np.zeros(vocabulary)
    for rollout in baseline.rollouts:
        np.add.at(count_V, np.asarray(rollout.token_ids, int), 1)
    return count_V / max(count_V.sum(), 1)


def _run(
    grafter: Grafter,
    arms: Sequence[GraftArm],
    baseline: Baseline,
    judge: Judge,
    *,
    limit: int,
    seed: int,
    keep: Keep,
    bar: Bar,
) -> pa.Table:
    """All arms' resumptions, sharing batches, in chunks that are each kept."""
    jobs: list[tuple[int, BaseRollout, int, int]] = []
    for index, arm in enumerate(arms):
        for rollout in baseline.rollouts:
            own = derive_seed(seed, "graft", arm.name, rollout.rollout_id)
            at = first_redraw(rollout, arm, own)
            if at is not None:
                jobs.append((index, rollout, at, own))
    jobs.sort(key=lambda job: (job[1].problem, job[1].rollout_id, job[2], job[0]))

    def make(some: list[tuple[int, BaseRollout, int, int]], advance: Callable[[int], None]) -> pa.Table:
        asked = [
            GraftRequest(
                (*rollout.prompt.prompt_ids, *rollout.token_ids[:at]),
                limit - at,
                rollout.seed,
                skip=at,
                graft_seed=own,
                rule=index,
                forced=True,
            )
            for index, rollout, at, own in some
        ]
        made = []
        answers = grafter.generate(asked)
        responses = [(*job[1].token_ids[: job[2]], *answer.token_ids) for job, answer in zip(some, answers)]
        judge.learn([(job[1].prompt, response) for job, response in zip(some, responses)])
        for (index, rollout, at, _), answer, response in zip(some, answers, responses):
            right = judge(rollout.prompt, response)
            names = (rollout.prompt.prompt_id, rollout.rollout_id, arms[index].name)
            kept = response if rollout.problem < SHOWN_PROMPTS else None
            made.append(dict(zip(GRAFTS.names, (*names, at, right, len(answer.token_ids), kept))))
        advance(len(some))
        return pa.Table.from_pylist(made, schema=GRAFTS)

    with bar("grafts", len(jobs)) as advance:
        makers = {
            f"grafts-{start:08d}": partial(make, jobs[start : start + chunk_of(keep)], advance)
            for start in range(0, len(jobs), chunk_of(keep))
        }
        return pa.concat_tables([GRAFTS.empty_table(), *keep_all(keep, makers)])


def _result(
    arm: GraftArm,
    baseline: Baseline,
    table: pa.Table,
    rollouts: int,
    share_V: Floats,
    config: GraftConfig,
    rng: np.random.Generator,
) -> GraftRow:
    mine = [row for row in table.to_pylist() if row["arm"] == arm.name]
    after = {row["rollout_id"]: row["correct"] for row in mine}
    before_N = baseline.correct_N()
    after_N = np.array([after.get(rollout.rollout_id, rollout.correct) for rollout in baseline.rollouts], float)
    problem_N = np.array([rollout.problem for rollout in baseline.rollouts], int)
    before_P, after_P = (np.bincount(problem_N, weights=values) / rollouts for values in (before_N, after_N))
    return GraftRow(
        arm=arm.name,
        num_types=arm.num_types,
        share_positions=float((share_V * arm.redraw_V).sum()),
        accuracy=share_estimate(after_P, level=config.level),
        gain=change(after_P, before_P, level=config.level, resamples=config.resamples, rng=rng),
        num_resumed=len(mine),
        num_rollouts=len(after_N),
        num_tokens=int(sum(row["num_tokens"] for row in mine)),
        members=arm.members,
    )
