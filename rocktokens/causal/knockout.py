"""Would the student still solve the task if it could not say this? Bans, by resuming rollouts instead of repeating.

While a banned token is not drawn, the ban changes nothing; when it is, the draw among the others follows their
renormalised probabilities. So a knock-out rollout is the baseline rollout up to the first use of the set, and from
there on a continuation with the set banned; a rollout that never used it is copied whole, with an effect of exactly 0
(docs/method.md §5). A continuation takes the very random numbers its baseline rollout had after that place: they are
independent of everything before it, so the law stays exact, and what the ban does not touch is alike in both.

The placebo continues AFTER the use, with numbers of its own and nothing banned: exactly the baseline's law, so that its
mean effect is 0 and its spread is the noise. (Drawing the place itself again would not be: rollouts come here because
they drew the set.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from rocktokens.causal.bans import make_sets, named_tokens, texts_of, window_sets
from rocktokens.causal.baseline import (
    Baseline,
    BaseRollout,
    Begun,
    Bench,
    Setup,
    Work,
    answerable,
    candidate_types,
    causal_stage,
    finish_piece,
    limit_of,
    sample_baseline,
)
from rocktokens.causal.census import (
    BannedSet,
    Census,
    Effects,
    Outcomes,
    census_facts,
    census_table,
    make_schedule,
    power_of,
    run_looks,
)
from rocktokens.causal.settings import BaselineConfig, KnockoutConfig
from rocktokens.errors import ConfigError
from rocktokens.jobs import Place, keeping_workers
from rocktokens.progress import console
from rocktokens.prompts.checkers import Checker
from rocktokens.prompts.tasks import Prompt
from rocktokens.run import Run, open_run, working_on
from rocktokens.sample.requests import Engine, Request
from rocktokens.seeds import derive_seed
from rocktokens.servers.settings import ServersConfig
from rocktokens.tables import TABLES
from rocktokens.values import Json

log = logging.getLogger(__name__)

KNOCKOUTS = TABLES["knockouts"].schema


# ---------------------------------------------------------------- what is resumed, and how


class Resumption(NamedTuple):
    """One continuation to ask for."""

    column: int
    """Which set, by its place in the list of sets."""
    rollout: BaseRollout
    at: int
    """Position of the first use: where the knock-out's continuation begins."""
    is_placebo: bool


def plan(
    baseline: Baseline, sets: Sequence[BannedSet], active: Sequence[int], *, exact_resume: bool, placebo_problems: int
) -> tuple[list[Resumption], np.ndarray]:
    """All continuations that the active sets need on these rollouts, and how many rollouts use each set."""
    found: list[tuple[int, int, int, bool]] = []
    used_V = np.zeros(len(sets), int)
    for column in active:
        uses = baseline.first_uses(sets[column].members)
        used_V[column] = len(uses)
        for index, at in (uses if exact_resume else dict.fromkeys(range(len(baseline.rollouts)), 0)).items():
            found.append((index, at, column, False))
            if baseline.rollouts[index].problem < placebo_problems:
                found.append((index, at, column, True))
    # Those of one rollout side by side: what they begin with is then prefilled once.
    return [Resumption(column, baseline.rollouts[i], at, placebo) for i, at, column, placebo in sorted(found)], used_V


def resumed(own: Resumption, banned: BannedSet, *, limit: int, seed: int, exact_resume: bool) -> Begun:
    """The tokens that are copied, and what to ask the engine for behind them; None where nothing can follow."""
    rollout, at, prompt = own.rollout, own.at, own.rollout.prompt.prompt_ids
    fresh = derive_seed(seed, "resume", banned.set_id, rollout.rollout_id, int(own.is_placebo))
    kept: tuple[int, ...] = ()
    request: Request | None
    if not exact_resume:
        stream, members = (fresh, ()) if own.is_placebo else (rollout.seed, banned.members)
        request = Request(prompt, limit, stream, members)
    elif not own.is_placebo:
        kept = rollout.token_ids[:at]
        # The baseline's own number chose the banned token, so the first draw takes another; those after it are free.
        request = Request((*prompt, *kept), limit - at, rollout.seed, banned.members, skip=at, first_seed=fresh)
    elif at + 1 < min(limit, len(rollout.token_ids)):
        kept = rollout.token_ids[: at + 1]
        request = Request((*prompt, *kept), limit - at - 1, fresh, skip=1)
    else:
        # No set holds an end token, so a rollout whose last token is the first use was cut there, by the length limit
        # or by the model's context: nothing could follow it.
        kept, request = rollout.token_ids, None
    arm = "placebo" if own.is_placebo else "control" if banned.role == "control" else "knockout"
    return Begun(rollout, kept, request, {"arm": arm, "set_id": banned.set_id, "resumed_at": at})


def resume_piece(
    bench: Bench, wanted: Sequence[Resumption], *, sets: Sequence[BannedSet], base: BaselineConfig
) -> pa.Table:
    """One row per resumption: generated, and checked."""
    how: Json = {"limit": limit_of(base), "seed": base.seed, "exact_resume": bench.engine.exact_resume}
    begun = [resumed(own, sets[own.column], **how) for own in wanted]
    return finish_piece(bench, bench.engine.generate, begun, KNOCKOUTS)


# ---------------------------------------------------------------- the census


@dataclass(frozen=True)
class KnockoutResult:
    """A census and everything it rests on."""

    census: Census
    baseline: pa.Table
    """Rollouts."""
    knockouts: pa.Table
    """One row per resumption. A rollout without a row for a set was copied."""


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
) -> KnockoutResult:
    """Ban every set in turn and say what the ban does to accuracy, with an interval.

    Args:
        engine: samples from the student.
        prompts: those without an answer are left out; shuffled with a seed, so that a look is a fair sample of them.
        sets: what is banned, each set by itself.
        decode: token ids to text.
        checker: `checker(text, answer)` says whether a rollout is right.
        eos_ids: tokens that end a rollout; a set that bans one of them is refused.
        vocabulary: number of token types; a set of all of them is refused.
        config: looks, error rates and what counts as an effect.
        baseline: the rollouts that knock-outs start from.

    Returns:
        The census, the baseline rollouts, and one row per resumed rollout.
    """
    config, base = config or KnockoutConfig(), baseline or BaselineConfig()
    check_sets(sets, eos_ids, vocabulary)
    problems = answerable(prompts, checker, base.seed)[: base.problems]
    assert checker is not None
    return _take_census(Work(engine.exact_resume, Bench(engine, decode, checker)), problems, sets, config, base)


def _take_census(
    work: Work, problems: Sequence[Prompt], sets: Sequence[BannedSet], config: KnockoutConfig, base: BaselineConfig
) -> KnockoutResult:
    """Look by look: sample the look's prompts, resume for the sets still open, decide."""
    if base.greedy:
        config = replace(config, placebo_share=0.0)  # greedy rollouts have no noise to show
    if not work.exact_resume:
        log.info(
            "top-k or top-p is set: banning a token then lets others into the cut, so a rollout cannot be resumed "
            "where it first used it; every knock-out is generated in full"
        )
    # Problems are shuffled, so the first of them are a fair sample.
    placebo_problems = int(np.ceil(config.placebo_share * len(problems)))
    baselines: list[pa.Table] = []
    tables: list[pa.Table] = []

    def measure(look: int, begin: int, end: int, active: Sequence[int]) -> Outcomes:
        rows = sample_baseline(work, problems[begin:end], base, first_problem=begin)
        baseline = Baseline.of(rows, begin)
        wanted, used_V = plan(baseline, sets, active, exact_resume=work.exact_resume, placebo_problems=placebo_problems)
        if look == 0:  # before anything is banned: which effects the planned number of prompts can show
            correct_N = baseline.correct_N
            log.info("baseline: %.1f %% right in the first %d rollouts", 100 * correct_N.mean(), len(correct_N))
            power = power_of(correct_N, used_V[list(active)], config, base.rollouts, len(problems))
            for name, (share, effect) in power.items():
                said = "power: the %s candidate is in %.1f %% of rollouts; %d prompts show effects from %.2f points at "
                said += "%.0f %% power, or smaller where pairs agree"
                log.info(said, name, 100 * share, len(problems), 100 * effect, 100 * config.power)
        parts = work.make("look", resume_piece, wanted, number=look + 1, sets=tuple(sets), base=base)
        table = pa.concat_tables([KNOCKOUTS.empty_table(), *parts])
        baselines.append(rows)
        tables.append(table)
        return Outcomes(
            problem_N=baseline.problem_N,
            correct_N=baseline.correct_N,
            used_V=used_V,
            problem_J=np.array([own.rollout.problem for own in wanted], int),
            before_J=np.array([own.rollout.correct for own in wanted], float),
            column_J=np.array([own.column for own in wanted], int),
            is_knockout_J=np.array([not own.is_placebo for own in wanted], bool),
            after_J=np.array(table["correct"].to_pylist(), float),
            placebo_problems=placebo_problems,
        )

    schedule = make_schedule(len(problems), config.rounds if config.until == "decided" else 1)
    effects = Effects(sets, len(problems), base.rollouts)
    census = run_looks(effects, schedule, measure, config, seed=derive_seed(base.seed, "census"))
    return KnockoutResult(census, pa.concat_tables(baselines), pa.concat_tables(tables))


# ---------------------------------------------------------------- the stage


def knockout(
    path: Path,
    config: KnockoutConfig,
    baseline: BaselineConfig,
    *,
    servers: ServersConfig | None = None,
    place: Place | None = None,
    again: bool = False,
) -> Run:
    """Ban every candidate in turn; writes baseline, knockouts and census.parquet, and prints the census."""
    from rocktokens.causal.figures import census_terminal

    with working_on(path):
        run = open_run(path)
        stage = causal_stage(run, "knockout", {"knockout": config, "baseline": baseline}, baseline)
        if not stage.due(again):
            return run
        setup = Setup.of(run, baseline, servers or ServersConfig())
        sets = _sets(run, config, setup)
        check_sets(sets, setup.facts.eos_ids, setup.facts.vocabulary)
        with keeping_workers():
            found = _take_census(setup.work(stage, place), setup.problems, sets, config, setup.baseline)
        for note in found.census.notes:
            log.warning("%s", note)
        tables = {"baseline": found.baseline, "knockouts": found.knockouts, "census": census_table(found.census)}
        stage.publish(tables, {**census_facts(found.census), **setup.served})
    console().print(census_terminal(found.census))
    return run


def _sets(run: Run, config: KnockoutConfig, setup: Setup) -> list[BannedSet]:
    """What is banned: candidates named or from types.parquet, with windows, families, controls."""
    texts = texts_of(setup.facts.tokenizer)
    types = run.types().to_pylist() if run.has("types") else []
    detected = run.facts("detect") if run.done("detect") else {}
    rocks, thresholds = list(map(int, detected.get("rocks", []))), detected.get("thresholds", {})
    if config.candidates:
        candidates = named_tokens(config.candidates, texts, setup.facts.tokenizer)
    elif types:
        candidates = candidate_types(types, rocks, config.top)
        if set(candidates) & set(setup.facts.eos_ids):
            log.info("the end token is among the candidates and is not banned: no rollout could end")
        candidates = [token for token in candidates if token not in setup.facts.eos_ids]
    else:
        raise ConfigError(
            "the run has no types.parquet to take candidates from; run `rocktokens detect` first, or name them "
            "with --candidates"
        )
    windows = None
    if run.steps() and thresholds.get("tau_post") is not None:
        limits = {"tau": thresholds["tau_post"], "width": thresholds.get("window", 4)}
        windows = partial(window_sets, run, candidates=candidates, **limits)
    count = {row["token_id"]: row.get("count_all") or row["count"] or 0 for row in types}
    return make_sets(candidates, config, texts, eos_ids=setup.facts.eos_ids, rocks=rocks, count=count, windows=windows)
