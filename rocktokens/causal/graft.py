"""What would the student gain had it learned these tokens perfectly? Grafts: the teacher draws them in its place.

The student samples; when the token it drew is in the set, the teacher draws again. Up to the first such draw nothing
differs from the baseline rollout, so that far it is copied; a rollout without one is copied whole, with a gain of
exactly 0. (Nothing is renormalised, so this holds with top-k and top-p, too.) Past it, the student continues with the
random numbers the baseline rollout had there.

Drawing again has an effect of its own: a set that holds part of a position's probability loses some of it even if the
teacher is the student. The arm `placebo` shows it: the rocks, drawn again from the student itself. The control draws
again as many tokens as the rocks have, at random among the others: every other drawn token with the same small
probability.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rocktokens.causal.bans import named_tokens, texts_of
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
from rocktokens.causal.inference import NEUTRAL, STUMBLING_BLOCK, change
from rocktokens.causal.settings import BaselineConfig, GraftConfig
from rocktokens.errors import ConfigError
from rocktokens.jobs import Place, keeping_workers
from rocktokens.progress import console
from rocktokens.prompts.checkers import Checker
from rocktokens.prompts.tasks import Prompt
from rocktokens.run import Run, digest_of_value, open_run, working_on
from rocktokens.sample.requests import Engine, GraftRequest
from rocktokens.seeds import derive_seed, uniforms
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import to_mapping
from rocktokens.stats import Estimate, Floats, share_estimate
from rocktokens.tables import TABLES
from rocktokens.values import Json, Row

log = logging.getLogger(__name__)

# Shapes: V vocabulary, T positions of a rollout, N rollouts, P prompts.
GRAFTS = TABLES["graft_rollouts"].schema
CLUSTER = "cluster "  # before a cluster's name: its arm

Sets = Mapping[str, Sequence[int]]
"""Name → token types that are grafted together. The first is the set in question: the others are compared with it."""


# ---------------------------------------------------------------- which tokens are drawn again


class GraftArm(NamedTuple):
    """Which drawn tokens are drawn again: a probability for every token type."""

    name: str
    redraw_V: Floats
    own: bool = False
    """The student itself draws again, not the teacher."""


def make_arms(sets: Sets, vocabulary: int, share: float) -> list[GraftArm]:
    """The set in question, its placebo, control, rest, all, and the other sets; `share`: of positions, of the first."""

    def indicator(members: Iterable[int]) -> Floats:
        own_V = np.zeros(vocabulary)
        own_V[sorted(set(members))] = 1.0
        return own_V

    (target, members), *others = sets.items()
    if not members:
        raise ConfigError("there is nothing to graft; run `rocktokens detect` first, or name token types with --rocks")
    on_V = indicator(members)
    # As many draws as the rocks have, spread over everything else; if rocks are the larger part, all of the rest.
    odds = min(1.0, share / max(1.0 - share, 1e-12))
    return [
        GraftArm(target, on_V),
        GraftArm("placebo", on_V, own=True),
        GraftArm("control", (1 - on_V) * odds),
        GraftArm("rest", 1 - on_V),
        GraftArm("all", np.ones(vocabulary)),
        *(GraftArm(name, indicator(own)) for name, own in others),
    ]


def first_redraw(rollout: BaseRollout, redraw_V: Floats, seed: int) -> int | None:
    """The first position whose token the rule draws again; None: the rollout is copied whole."""
    redraw_T = redraw_V[list(rollout.token_ids)]
    # Two numbers a position: the coin, and the one that the teacher's draw takes.
    coin_T = uniforms(seed, 2 * len(redraw_T)).reshape(-1, 2)[:, 0]
    hits = np.flatnonzero(coin_T < redraw_T)
    return int(hits[0]) if len(hits) else None


class Redraw(NamedTuple):
    """One rollout that is resumed where an arm first draws again."""

    arm: int
    rollout: BaseRollout
    at: int
    seed: int


def graft_piece(bench: Bench, redraws: Sequence[Redraw], *, arms: Json, base: BaselineConfig) -> pa.Table:
    """One row per redraw: generated, and checked. `arms`: arguments of `make_arms`, small where its result is not."""
    made, begun = make_arms(**arms), []
    for index, rollout, at, seed in redraws:
        # The draw at `at` is on record and the rule draws it again, so the first token is forced to be the teacher's.
        kept, how = rollout.token_ids[:at], Row(skip=at, graft_seed=seed, rule=index, forced=True)
        request = GraftRequest((*rollout.prompt.prompt_ids, *kept), limit_of(base) - at, rollout.seed, **how)
        begun.append(Begun(rollout, kept, request, {"arm": made[index].name, "resumed_at": at}))
    assert bench.make_grafter is not None
    grafter = bench.make_grafter(np.stack([arm.redraw_V for arm in made]), np.array([arm.own for arm in made]))
    return finish_piece(bench, grafter.generate, begun, GRAFTS)


# ---------------------------------------------------------------- gains


class GraftRow(NamedTuple):
    """One arm's result."""

    arm: str
    num_types: int
    share_positions: float
    """Share of the baseline's positions that the rule draws again."""
    accuracy: Estimate
    gain: Estimate


@dataclass(frozen=True)
class GraftResult:
    """Gains of every arm, and what they rest on."""

    rows: tuple[GraftRow, ...]
    accuracy: float
    """Of the baseline."""
    baseline: pa.Table
    grafts: pa.Table
    """One row per resumption; a rollout without a row for an arm was copied."""


def graft(
    engine: Engine,
    make_grafter: Callable[[Floats, Floats], Any],
    prompts: Sequence[Prompt],
    rocks: Iterable[int],
    *,
    vocabulary: int,
    decode: Callable[[list[int]], str],
    checker: Checker | None,
    clusters: Mapping[str, Iterable[int]] | None = None,
    config: GraftConfig | None = None,
    baseline: BaselineConfig | None = None,
) -> GraftResult:
    """Accuracy gained when the teacher draws the rocks, as many other tokens, all others, everything, each cluster.

    Args:
        engine: samples from the student.
        make_grafter: `make_grafter(rules, own)` gives the engine for rules of redrawing, one row per arm, and for
            each whether the student itself draws again.
        prompts: with answers.
        rocks: the set in question.
        vocabulary: number of token types.
        decode: token ids to text.
        checker: `checker(text, answer)` says whether a rollout is right.
        clusters: further sets, each grafted by itself.
        config: how many prompts, and the resamples of intervals.
        baseline: the rollouts that grafts start from.
    """
    config, base = config or GraftConfig(), baseline or BaselineConfig()
    problems = answerable(prompts, checker, base.seed)[: base.problems]
    assert checker is not None
    work = Work(engine.exact_resume, Bench(engine, decode, checker, make_grafter))
    sets = {"rocks": list(rocks), **{f"{CLUSTER}{name}": list(own) for name, own in (clusters or {}).items()}}
    return _graft_all(work, problems, sets, vocabulary, config, base)


def _graft_all(
    work: Work,
    problems: Sequence[Prompt],
    sets: Sets,
    vocabulary: int,
    config: GraftConfig,
    base: BaselineConfig,
    known: Mapping[str, Sequence[Row]] | None = None,
) -> GraftResult:
    """Sample the baseline, resume for every arm, compare."""
    rows = sample_baseline(work, problems[: config.problems], base, known=known)
    start = Baseline.of(rows)
    tokens = [token for rollout in start.rollouts for token in rollout.token_ids]
    share_V = np.bincount(np.array(tokens, int), minlength=vocabulary) / max(len(tokens), 1)
    target = sorted(set(next(iter(sets.values()))))
    how: Json = {"sets": sets, "vocabulary": vocabulary, "share": float(share_V[target].sum())}
    arms = make_arms(**how)
    redraws = []
    for index, arm in enumerate(arms):
        for rollout in start.rollouts:
            seed = derive_seed(base.seed, "graft", arm.name, rollout.rollout_id)
            at = first_redraw(rollout, arm.redraw_V, seed)
            redraws += [] if at is None else [Redraw(index, rollout, at, seed)]
    # All arms' resumptions of a rollout share a batch: what they begin with is prefilled once.
    redraws.sort(key=lambda own: (own.rollout.problem, own.rollout.rollout_id, own.at, own.arm))
    parts = work.make("grafts", graft_piece, redraws, number=0, arms=how, base=base)
    table = pa.concat_tables([GRAFTS.empty_table(), *parts])

    after: dict[str, dict[str, bool]] = {arm.name: {} for arm in arms}
    for name, rollout_id, correct in zip(*(table[column].to_pylist() for column in ("arm", "rollout_id", "correct"))):
        after[name][rollout_id] = correct
    rng = np.random.default_rng(derive_seed(base.seed, "graft"))
    before_P = np.bincount(start.problem_N, weights=start.correct_N) / base.rollouts
    found = []
    for name, redraw_V, _ in arms:
        after_N = [float(after[name].get(rollout.rollout_id, rollout.correct)) for rollout in start.rollouts]
        after_P = np.bincount(start.problem_N, weights=after_N) / base.rollouts
        gain = change(after_P, before_P, resamples=config.resamples, rng=rng)
        drawn = float((share_V * redraw_V).sum())
        found.append(GraftRow(name, int(np.count_nonzero(redraw_V)), drawn, share_estimate(after_P), gain))
    return GraftResult(tuple(found), float(start.correct_N.mean()), rows, table)


def graft_table(rows: Sequence[GraftRow], types: Sequence[Row], sets: Sets) -> pa.Table:
    """grafts.parquet: what each set costs (its shares of loss and gradient), and what learning it would gain.

    `types`: rows of types.parquet, where a run has them.
    """
    total = sum(item["r"] or 0.0 for item in types)
    everything = {item["token_id"] for item in types}
    members = {name: set(own) for name, own in sets.items()}
    members |= {"rest": everything - next(iter(members.values())), "all": everything}
    made = []
    for row in rows:
        own = [item for item in types if item["token_id"] in members.get(row.arm, ())]
        flat: Row = {"arm": row.arm, "num_types": row.num_types, "share_positions": row.share_positions}
        for name, known in (("accuracy", row.accuracy), ("gain", row.gain)):
            flat |= {name: known.value, f"{name}_low": known.low, f"{name}_high": known.high}
        flat["loss_share"] = sum(item["r"] or 0.0 for item in own) / total if own and total else None
        flat["grad_share"] = sum(item["grad_share"] or 0.0 for item in own) if own else None
        named = row.arm in sets and not row.arm.startswith(CLUSTER)  # a cluster may have most of the vocabulary
        flat |= {"num_problems": row.gain.num_prompts, "members": sorted(members[row.arm]) if named else None}
        made.append(flat)
    return pa.Table.from_pylist(made, schema=TABLES["grafts"].schema)


# ---------------------------------------------------------------- the stage


def run_graft(
    path: Path,
    config: GraftConfig,
    baseline: BaselineConfig,
    *,
    servers: ServersConfig | None = None,
    place: Place | None = None,
    again: bool = False,
) -> Run:
    """Let the teacher draw the rocks, and other sets; writes grafts.parquet, one row per arm, and prints it."""
    from rocktokens.causal.figures import graft_terminal
    from rocktokens.servers.connect import generating

    servers = servers or ServersConfig()
    with working_on(path):
        run = open_run(path)
        stage = causal_stage(run, "graft", {"graft": config, "graft_baseline": baseline}, baseline)
        to_skip = () if config.rocks else skippable(run)
        stage.inputs["what the census would let be skipped"] = digest_of_value(list(to_skip))
        if not stage.due(again):
            return run
        if servers.student and not generating(servers):
            raise ConfigError(
                "grafts on servers need a teacher's server that generates among --servers.teacher; or leave "
                "--servers.student out, and both models are loaded here"
            )
        if servers.teacher and not servers.student:
            log.info(
                "graft draws from both models at every position and loads both here: the teacher's servers are not "
                "asked. Where the teacher does not fit, name the student's servers too (--servers.student)"
            )
        setup = Setup.of(run, baseline, servers, grafts=True)
        types = run.types().to_pylist() if run.has("types") else []
        sets = _sets(run, config, setup, types, to_skip)
        known: dict[str, list[Row]] = {}  # what the census sampled with the same settings
        if run.done("knockout") and run.manifest["config"].get("baseline") == to_mapping(baseline):
            for row in run.read("baseline").to_pylist():
                known.setdefault(row["prompt_id"], []).append(row)
        with keeping_workers():
            work = setup.work(stage, place)
            found = _graft_all(work, setup.problems, sets, setup.facts.vocabulary, config, setup.baseline, known)
        table = graft_table(found.rows, types, sets)
        gains = {row.arm: list(row.gain[:3]) for row in found.rows}
        facts = {"accuracy": found.accuracy, "gains": gains, **setup.served}
        stage.publish({"grafts": table, "graft_rollouts": found.grafts}, facts)
    console().print(graft_terminal(table, found.accuracy))
    return run


def _sets(run: Run, config: GraftConfig, setup: Setup, types: Sequence[Row], to_skip: Sequence[int]) -> Sets:
    """The declared rocks, or the candidates where there are none; what the census would let be skipped; clusters."""
    sets: dict[str, list[int]] = {}
    if config.rocks:
        sets["rocks"] = named_tokens(config.rocks, texts_of(setup.facts.tokenizer), setup.facts.tokenizer)
    elif rocks := sorted(run.rocks()["token_id"].to_pylist()):
        sets["rocks"] = rocks
        if to_skip and list(to_skip) != rocks:
            sets["skippable"] = list(to_skip)
    else:
        top = candidate_types(types, (), config.top)
        sets["candidates"] = [token for token in top if token not in setup.facts.eos_ids]
        log.info("no rocks are declared: the %d token types of largest burden are grafted in their place", len(top))
    for row in sorted(types, key=lambda row: row["cluster"]) if config.clusters else ():
        if row["cluster"] != "unknown":
            sets.setdefault(f"{CLUSTER}{row['cluster']}", []).append(row["token_id"])
    return sets


def skippable(run: Run) -> tuple[int, ...]:
    """Confirmed rocks that the census would let training skip: the set that has to be grafted together."""
    if not (run.has("census") and run.has("types")):
        return ()
    found = run.query(
        "select distinct token_id from types join census using (token_id) where class = 'rock' and in_certified "
        "and confirmed and kind = 'token' and verdict in (?, ?) order by token_id",
        (NEUTRAL, STUMBLING_BLOCK),
    )
    return tuple(found["token_id"].to_pylist())
