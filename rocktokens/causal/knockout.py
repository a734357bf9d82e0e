"""Would the student still solve the task if it could not say this? Bans, by resuming rollouts instead of repeating.

While a banned token is not drawn, the ban changes nothing; when it is, the draw among the others follows their
renormalised probabilities. So a knock-out rollout is the baseline rollout up to the first use of the set, and from
there on a continuation with the set banned; a rollout that never used it is copied whole, with an effect of exactly 0
(docs/method.md §5). A continuation takes the very random numbers its baseline rollout had after that place: they are
independent of everything before it, so the law stays exact, and what the ban does not touch is alike in both.

The placebo continues AFTER the use, with numbers of its own and nothing banned: exactly the baseline's law, so that its
mean effect is 0 and its spread is the noise. (Drawing the place itself again would not be: rollouts come here because
they drew the set.) Further repeats are compared with it, number by number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocktokens.causal.bans import make_sets, named_tokens, texts_of
from rocktokens.causal.baseline import (
    Bar,
    Baseline,
    BaseRollout,
    Begun,
    Bench,
    Keep,
    Setup,
    Shared,
    Work,
    answerable,
    candidate_types,
    causal_stage,
    finish_piece,
    limit_of,
    make_now,
    no_bar,
    rollouts_of,
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
from rocktokens.values import Row

log = logging.getLogger(__name__)

KNOCKOUTS = TABLES["knockouts"].schema
PIECE_POSITIONS = 2_000_000  # scored positions in memory at a time


# ---------------------------------------------------------------- what is resumed, and how


@dataclass(frozen=True)
class Resumption:
    """One continuation to ask for."""

    column: int
    """Which set, by its place in the list of sets."""
    rollout: int
    at: int
    """Position of the first use: where the knock-out's continuation begins."""
    arm: Literal["knockout", "placebo"]
    repeat: int


def plan(
    baseline: Baseline,
    sets: Sequence[BannedSet],
    active: Sequence[int],
    *,
    exact_resume: bool,
    repeats: int,
    placebo_problems: int,
) -> tuple[list[Resumption], np.ndarray]:
    """All continuations that the active sets need on these rollouts, and how many rollouts use each set."""
    found: list[Resumption] = []
    used_V = np.zeros(len(sets), int)
    for column in active:
        uses = baseline.first_uses(sets[column].members)
        used_V[column] = len(uses)
        places = uses if exact_resume else dict.fromkeys(range(len(baseline.rollouts)), 0)
        for rollout, at in places.items():
            found += [Resumption(column, rollout, at, "knockout", repeat) for repeat in range(repeats)]
            compared = max(repeats - 1, int(baseline.rollouts[rollout].problem < placebo_problems))
            found += [Resumption(column, rollout, at, "placebo", repeat) for repeat in range(1, compared + 1)]
    # Those of one rollout side by side: what they begin with is then prefilled once.
    return sorted(found, key=lambda own: (own.rollout, own.at, own.column, own.arm, own.repeat)), used_V


def resumed(
    own: Resumption, rollout: BaseRollout, banned: BannedSet, *, limit: int, seed: int, exact_resume: bool
) -> tuple[tuple[int, ...], Request | None]:
    """The tokens that are copied, and what to ask the engine for behind them; None where nothing can follow."""
    fresh = derive_seed(seed, "resume", banned.set_id, rollout.rollout_id, own.repeat)
    prompt = rollout.prompt.prompt_ids
    if not exact_resume:
        stream = rollout.seed if own.repeat == 0 else fresh
        return (), Request(prompt, limit, stream, banned.members if own.arm == "knockout" else ())
    if own.arm == "placebo":
        # No set holds an end token, so a rollout whose last token is the first use was cut there, by the length limit
        # or by the model's context: nothing could follow it.
        if own.at + 1 >= min(limit, len(rollout.token_ids)):
            return rollout.token_ids, None
        kept = rollout.token_ids[: own.at + 1]
        return kept, Request((*prompt, *kept), limit - own.at - 1, fresh, skip=1)
    kept = rollout.token_ids[: own.at]
    if own.repeat:
        return kept, Request((*prompt, *kept), limit - own.at, fresh, banned.members)
    # The baseline's own number chose the banned token, so the first draw takes another; those after it are free.
    request = Request((*prompt, *kept), limit - own.at, rollout.seed, banned.members, skip=own.at, first_seed=fresh)
    return kept, request


def resume_piece(
    bench: Bench, *, known: Callable[[], Shared], sets: Sequence[BannedSet], base: BaselineConfig, start: int, stop: int
) -> pa.Table:
    """One row per resumption start…stop of a look's plan: generated, and checked."""
    given, exact, begun = known(), bench.engine.exact_resume, []
    for row in given.tables["plan"].slice(start, stop - start).to_pylist():
        own, rollout, banned = Resumption(**row), given.rollouts[row["rollout"]], sets[row["column"]]
        kept, request = resumed(own, rollout, banned, limit=limit_of(base), seed=base.seed, exact_resume=exact)
        arm = "control" if own.arm == "knockout" and banned.role == "control" else own.arm
        columns = {"arm": arm, "set_id": banned.set_id, "repeat": own.repeat, "resumed_at": own.at}
        begun.append(Begun(rollout, kept, request, columns))
    return finish_piece(bench, bench.engine.generate, begun, KNOCKOUTS)


# ---------------------------------------------------------------- the census


@dataclass(frozen=True)
class KnockoutResult:
    """A census and everything it rests on."""

    census: Census
    baseline: pa.Table
    """Rollouts."""
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
        eos_ids: tokens that end a rollout; a set that bans one of them is refused.
        vocabulary: number of token types; a set of all of them is refused.
        config: looks, error rates and what counts as an effect.
        baseline: the rollouts that knock-outs start from.
        keep: keeps finished parts.
        bar: shows progress.

    Returns:
        The census, the baseline rollouts, and one row per resumed rollout.
    """
    config, base = config or KnockoutConfig(), baseline or BaselineConfig()
    check_sets(sets, eos_ids, vocabulary)
    problems = answerable(prompts, checker, base.seed)[: base.problems]
    assert checker is not None
    return _take_census(Work(Bench(engine, decode, checker), keep, bar), problems, sets, config, base)


def _take_census(
    work: Work, problems: Sequence[Prompt], sets: Sequence[BannedSet], config: KnockoutConfig, base: BaselineConfig
) -> KnockoutResult:
    """Look by look: sample the look's prompts, resume for the sets still open, decide."""
    if base.greedy:
        config = replace(config, repeats=1, placebo_share=0.0)  # greedy rollouts have no noise to show or to average
    if not work.exact_resume:
        log.info(
            "top-k or top-p is set: banning a token then lets others into the cut, so a rollout cannot be resumed "
            "where it first used it; every knock-out is generated in full"
        )
    placebo_problems = int(np.ceil(config.placebo_share * len(problems)))
    place = {banned.set_id: column for column, banned in enumerate(sets)}
    baselines: list[pa.Table] = []
    tables: list[pa.Table] = []

    def measure(look: int, begin: int, end: int, active: Sequence[int]) -> Outcomes:
        rows = sample_baseline(work, problems[begin:end], base, first_problem=begin)
        baseline = Baseline(rollouts_of(rows, begin))
        wanted, used_V = plan(
            baseline,
            sets,
            active,
            exact_resume=work.exact_resume,
            repeats=config.repeats,
            placebo_problems=placebo_problems,
        )
        correct_N = baseline.correct_N()
        if look == 0:  # before anything is banned: which effects the planned number of prompts can show
            log.info("baseline: %.1f %% right in the first %d rollouts", 100 * correct_N.mean(), len(correct_N))
            power = power_of(correct_N, used_V[list(active)], config, base, len(problems))
            for name, (share, effect) in power.items():
                said = "power: the %s candidate is in %.1f %% of rollouts; %d prompts show effects from %.2f points at "
                said += "%.0f %% power, or smaller where pairs agree"
                log.info(said, name, 100 * share, len(problems), 100 * effect, 100 * config.power)
        columns = ("column", "rollout", "at", "arm", "repeat")
        plan_table = pa.table({name: [getattr(own, name) for own in wanted] for name in columns})
        shared = {"rollouts": rows, "plan": plan_table}
        name, given = f"look-{look + 1}", {"sets": tuple(sets), "base": base}
        parts = work.carry_out(name, shared, resume_piece, first_problem=begin, given=given)
        table = pa.concat_tables([KNOCKOUTS.empty_table(), *parts])
        baselines.append(rows)
        tables.extend([_baseline_rows(rows), table])
        rollout_J = np.array([own.rollout for own in wanted], int)
        problem_N = np.array([rollout.problem for rollout in baseline.rollouts], int)
        return Outcomes(
            problem_N=problem_N,
            correct_N=correct_N,
            num_tokens=sum(len(rollout.token_ids) for rollout in baseline.rollouts),
            used_V=used_V,
            problem_J=problem_N[rollout_J],
            before_J=correct_N[rollout_J],
            column_J=np.array([place[name] for name in table["set_id"].to_pylist()], int),
            is_knockout_J=np.array([arm != "placebo" for arm in table["arm"].to_pylist()], bool),
            repeat_J=table["repeat"].to_numpy().astype(int),
            after_J=np.array(table["correct"].to_pylist(), float),
            num_tokens_J=table["num_tokens"].to_numpy().astype(int),
            placebo_problems=placebo_problems,
        )

    schedule = make_schedule(len(problems), config.rounds if config.until == "decided" else 1)
    effects = Effects(sets, len(problems), base.rollouts, config.repeats)
    census = run_looks(effects, schedule, measure, config, seed=derive_seed(base.seed, "census"))
    census = replace(census, exact_resume=work.exact_resume)
    return KnockoutResult(census, pa.concat_tables(baselines), pa.concat_tables(tables))


def _baseline_rows(rollouts: pa.Table) -> pa.Table:
    """Baseline rollouts as rows of the knock-out table."""
    count = len(rollouts)
    columns: Row = {name: rollouts[name] for name in ("prompt_id", "rollout_id", "correct")}
    columns |= {"arm": ["baseline"] * count, "set_id": [""] * count, "repeat": [0] * count}
    columns |= {"num_tokens": pc.list_value_length(rollouts["token_ids"])}
    columns |= {name: [None] * count for name in ("resumed_at", "token_ids")}
    return TABLES["knockouts"].conform(pa.table(columns))


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
    with working_on(path):
        run = open_run(path)
        stage = causal_stage(run, "knockout", {"knockout": config, "baseline": baseline}, baseline)
        if not stage.due(again):
            return run
        setup = Setup.of(run, baseline, servers or ServersConfig())
        sets = _sets(run, config, setup)
        check_sets(sets, setup.facts.eos_ids, setup.facts.vocabulary)
        with keeping_workers(loaded=True):
            found = _take_census(setup.work(stage, place), setup.problems, sets, config, setup.baseline)
        for note in found.census.notes:
            log.warning("%s", note)
        tables = {"baseline": found.baseline, "knockouts": found.knockouts, "census": census_table(found.census)}
        stage.publish(tables, {**census_facts(found.census), **setup.served})
    from rocktokens.causal.figures import census_terminal

    console().print(census_terminal(found.census))
    return run


def _sets(run: Run, config: KnockoutConfig, setup: Setup) -> list[BannedSet]:
    """What is banned: candidates named or from types.parquet, with windows, families, controls."""
    texts = texts_of(setup.facts.tokenizer)
    types = run.types().to_pylist() if run.has("types") else []
    detected = run.facts("detect") if run.done("detect") else {}
    if config.candidates:
        candidates = named_tokens(config.candidates, texts, setup.facts.tokenizer)
    else:
        if not types:
            raise ConfigError(
                "the run has no types.parquet to take candidates from; run `rocktokens detect` first, or name them "
                "with --candidates"
            )
        declared = detected.get("rocks", [])
        candidates = candidate_types(types, list(map(int, declared)), config.top)
        if set(candidates) & set(setup.facts.eos_ids):
            log.info("the end token is among the candidates and is not banned: no rollout could end")
        candidates = [token for token in candidates if token not in setup.facts.eos_ids]
    thresholds = detected.get("thresholds", {})
    return make_sets(
        candidates,
        config,
        texts,
        eos_ids=setup.facts.eos_ids,
        rocks=detected.get("rocks", []),
        count={row["token_id"]: row.get("count_all") or row["count"] or 0 for row in types},
        occurrences=_pieces(run) if "window" in config.kinds and run.steps() else None,
        tau=thresholds.get("tau_post"),
        width=thresholds.get("window", 4),
    )


def _pieces(run: Run) -> Iterator[dict[str, np.ndarray]]:
    """Token, loss and rollout of every position at the last scored checkpoint, in order, some whole rollouts at a time.

    However the rollouts lie in their files: where they lie in order, only the files of a piece are read for it.
    """
    step = run.steps()[-1]
    rollouts = run.query(
        f"select rollout_id, count(*) as positions from occurrences where step = {step} group by all order by all"
    )
    piece_R = np.cumsum(rollouts["positions"].to_numpy()) // PIECE_POSITIONS
    starts = np.flatnonzero(np.diff(piece_R, prepend=-1))
    for start, stop in zip(starts, np.append(starts[1:], len(piece_R))):
        first, last = (rollouts["rollout_id"][int(place)].as_py() for place in (start, stop - 1))
        table = run.query(
            "select dense_rank() over (order by rollout_id) as rollout, token_id as token, kl as loss from occurrences "
            f"where step = {step} and rollout_id between ? and ? order by rollout_id, position",
            (first, last),
        )
        yield {name: table[name].to_numpy() for name in ("rollout", "token", "loss")}
