"""What would the student gain had it learned these tokens perfectly? Grafts: the teacher draws them in its place.

The student samples; when the token it drew is in the set, the teacher draws again. Up to the first such draw nothing
differs from the baseline rollout, so that far it is copied; a rollout without one is copied whole, with a gain of
exactly 0. (Nothing is renormalised, so this holds with top-k and top-p, too.) Past it, the student continues with the
random numbers the baseline rollout had there.

Drawing again has an effect of its own: a set that holds part of a position's probability loses some of it even if the
teacher is the student. The arm `placebo` shows it: the rocks, drawn again from the student itself. The control draws
again as many tokens as the rocks have, at random among the others: every other drawn token with the same small
probability.

The bypass list asks more: which of the types that the census proves neutral may be skipped together? They are grafted
as one set; where that gains more than ε, the set is halved until the types that gain are found (`sift`). Types that
replace each other at the same positions stay together: drawing one of two again only moves probability to the other.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from rocktokens.causal.inference import NEUTRAL, change
from rocktokens.causal.settings import BaselineConfig, GraftConfig, KnockoutConfig
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
SKIPPABLE = "skippable"  # arm of the bypass list's candidates; with a number behind it, of a part of them

Sets = Mapping[str, Sequence[int]]
"""Name → token types that are grafted together. The first is the set in question: the others are compared with it."""


# ---------------------------------------------------------------- which tokens are drawn again


class GraftArm(NamedTuple):
    """Which drawn tokens are drawn again: a probability for every token type."""

    name: str
    redraw_V: Floats
    own: bool = False
    """The student itself draws again, not the teacher."""


def make_arms(sets: Sets, vocabulary: int, share: float, alone: bool = False) -> list[GraftArm]:
    """The set in question and, unless it is `alone`, its placebo, control, rest, all, and the other sets.

    `share`: of the baseline's positions, that of the first set.
    """

    def indicator(members: Iterable[int]) -> Floats:
        own_V = np.zeros(vocabulary)
        own_V[sorted(set(members))] = 1.0
        return own_V

    (target, members), *others = sets.items()
    if not members:
        raise ConfigError("there is nothing to graft; run `rocktokens detect` first, or name token types with --rocks")
    on_V = indicator(members)
    if alone:
        return [GraftArm(target, on_V)]
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
    found = Grafts(work, problems, vocabulary, config, base)
    found.add(sets)
    return found.result()


class Grafts:
    """The baseline rollouts of some prompts, and what the arms that were grafted on them gained."""

    def __init__(
        self,
        work: Work,
        problems: Sequence[Prompt],
        vocabulary: int,
        config: GraftConfig,
        base: BaselineConfig,
        known: Mapping[str, Sequence[Row]] | None = None,
    ) -> None:
        self.work, self.vocabulary, self.config, self.base = work, vocabulary, config, base
        self.baseline = sample_baseline(work, problems[: config.problems], base, known=known)
        self.start = Baseline.of(self.baseline)
        tokens = np.array([token for rollout in self.start.rollouts for token in rollout.token_ids], int)
        self.share_V = np.bincount(tokens, minlength=vocabulary) / max(len(tokens), 1)
        self.rows: list[GraftRow] = []
        self.tables = [GRAFTS.empty_table()]

    def add(self, sets: Sets, *, alone: bool = False) -> GraftRow:
        """Resume the rollouts for every arm of these sets and compare; the row of the first set."""
        share = float(self.share_V[sorted(set(next(iter(sets.values()))))].sum())
        how: Json = {"sets": sets, "vocabulary": self.vocabulary, "share": share, "alone": alone}
        arms, start, base, redraws = make_arms(**how), self.start, self.base, []
        for index, arm in enumerate(arms):
            for rollout in start.rollouts:
                seed = derive_seed(base.seed, "graft", arm.name, rollout.rollout_id)
                at = first_redraw(rollout, arm.redraw_V, seed)
                redraws += [] if at is None else [Redraw(index, rollout, at, seed)]
        # All arms' resumptions of a rollout share a batch: what they begin with is prefilled once.
        redraws.sort(key=lambda own: (own.rollout.problem, own.rollout.rollout_id, own.at, own.arm))
        made = self.work.make("grafts", graft_piece, redraws, number=len(self.rows), arms=how, base=base)
        self.tables += made
        after: dict[str, dict[str, bool]] = {arm.name: {} for arm in arms}
        for table in made:
            for name, rollout_id, correct in zip(*(table[key].to_pylist() for key in ("arm", "rollout_id", "correct"))):
                after[name][rollout_id] = correct
        rng = np.random.default_rng(derive_seed(base.seed, "graft", *([arms[0].name] if alone else [])))
        before_P = np.bincount(start.problem_N, weights=start.correct_N) / base.rollouts
        for name, redraw_V, _ in arms:
            after_N = [float(after[name].get(rollout.rollout_id, rollout.correct)) for rollout in start.rollouts]
            after_P = np.bincount(start.problem_N, weights=after_N) / base.rollouts
            gain = change(after_P, before_P, resamples=self.config.resamples, rng=rng)
            drawn = float((self.share_V * redraw_V).sum())
            self.rows.append(GraftRow(name, int(np.count_nonzero(redraw_V)), drawn, share_estimate(after_P), gain))
        return self.rows[-len(arms)]

    def result(self) -> GraftResult:
        """Everything that was grafted."""
        accuracy = float(self.start.correct_N.mean())
        return GraftResult(tuple(self.rows), accuracy, self.baseline, pa.concat_tables(self.tables))


# ---------------------------------------------------------------- which types may be skipped together

POSITIONS = 48  # of a type, at which both models are asked what they would draw there
MUTUAL = 0.1  # least share of either model's draws at a type's positions that makes another its alternative


def draw_piece(bench: Bench, redraws: Sequence[Redraw], *, vocabulary: int) -> pa.Table:
    """What the teacher (arm 0) or the student (arm 1) draws at a place in a rollout, given what stands before it."""
    assert bench.make_grafter is not None
    grafter = bench.make_grafter(np.zeros((2, vocabulary)), np.array([False, True]))
    requests = []
    for arm, rollout, at, seed in redraws:
        prefix = (*rollout.prompt.prompt_ids, *rollout.token_ids[:at])
        requests.append(GraftRequest(prefix, 1, rollout.seed, skip=at, graft_seed=seed, rule=arm, forced=True))
    drawn = [found.token_ids[0] for found in grafter.generate(requests)]
    there = [own.rollout.token_ids[own.at] for own in redraws]
    return pa.table({"arm": [own.arm for own in redraws], "token_id": there, "drawn": drawn})


def alternatives(grafts: Grafts, candidates: Sequence[int], excluded: Collection[int]) -> dict[int, set[int]]:
    """Candidate → the types that replace it, and that it replaces, at the same positions.

    Two types are alternatives if at the positions of either one of the models draws the other in at least a tenth of
    the cases. Types that are found for a candidate are asked in turn, so both directions are measured.
    """
    near: dict[int, set[int]] = {}
    asked = list(candidates)
    for number in range(2):
        redraws = []
        for token in asked:
            for index, at in list(grafts.start.first_uses([token]).items())[:POSITIONS]:
                rollout = grafts.start.rollouts[index]
                seed = derive_seed(grafts.base.seed, "alternatives", token, rollout.rollout_id)
                redraws += [Redraw(arm, rollout, at, seed) for arm in (0, 1)]
        counts: dict[tuple[int, int], Counter[int]] = {}
        for table in grafts.work.make("alternatives", draw_piece, redraws, number=number, vocabulary=grafts.vocabulary):
            for arm, token, drawn in zip(*(table[name].to_pylist() for name in ("arm", "token_id", "drawn"))):
                counts.setdefault((token, arm), Counter())[drawn] += 1
        near |= {token: set() for token in asked}
        for (token, _), drawn in counts.items():
            often = {other for other, count in drawn.items() if count >= MUTUAL * drawn.total()}
            near[token] |= often - {token, *excluded}
        asked = sorted(set().union(*near.values()) - near.keys())
    return {token: {other for other in near[token] if token in near[other]} for token in candidates}


def sift(units: Sequence[frozenset[int]], is_flat: Callable[[frozenset[int]], bool]) -> frozenset[int]:
    """The types that gain nothing together: all, or what is left when those that gain are found by halving.

    Units stay whole. A part is tried together with what is already kept, so that the set that is returned is one that
    was tested as a whole.
    """
    kept: frozenset[int] = frozenset()
    parts = [list(units)]
    while parts:
        some = parts.pop(0)
        tried = kept.union(*some)
        if is_flat(tried):
            kept = tried
        elif len(some) > 1:  # if the first half is kept, it and the second are this set again: `is_flat` remembers
            parts[:0] = [some[: len(some) // 2], some[len(some) // 2 :]]
    return kept


def graft_candidates(
    grafts: Grafts, first: Sequence[int], candidates: Sequence[int], excluded: Collection[int], epsilon: float
) -> dict[str, tuple[list[int], list[int]]]:
    """Graft the candidates of the bypass list as a set, then halves of it: arm → (members, those no candidates).

    `first`: the set that has been grafted already. `candidates`: largest cost first, so that what is kept first is what
    is worth most. `excluded`: end tokens.
    """
    known = {frozenset(first): grafts.rows[0].gain}
    beside = alternatives(grafts, candidates, excluded)
    units: list[set[int]] = []  # candidates that are alternatives, directly or by way of others, stay together
    for token in candidates:
        own = {token, *beside[token]}
        joined = [unit for unit in units if unit & own]
        units = [unit for unit in units if not unit & own]
        units.append(own.union(*joined))
    tested: dict[str, tuple[list[int], list[int]]] = {}

    def is_flat(members: frozenset[int]) -> bool:
        if members not in known:
            name = SKIPPABLE if not tested else f"{SKIPPABLE} {len(tested) + 1}"
            tested[name] = sorted(members), sorted(members - set(candidates))
            known[members] = grafts.add({name: tested[name][0]}, alone=True).gain
        return known[members].high <= epsilon

    sift([frozenset(unit) for unit in units], is_flat)
    return tested


def graft_table(
    rows: Sequence[GraftRow], types: Sequence[Row], sets: Sets, beside: Mapping[str, Sequence[int]] | None = None
) -> pa.Table:
    """grafts.parquet: what each set costs (its shares of loss and gradient), and what learning it would gain.

    `types`: rows of types.parquet, where a run has them. `beside`: arm → its members that are no candidates.
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
        flat["alternatives"] = (beside or {}).get(row.arm)
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
        sets = _sets(run, config, setup, types)
        known: dict[str, list[Row]] = {}  # what the census sampled with the same settings
        if run.done("knockout") and run.manifest["config"].get("baseline") == to_mapping(baseline):
            for row in run.read("baseline").to_pylist():
                known.setdefault(row["prompt_id"], []).append(row)
        with keeping_workers():
            work = setup.work(stage, place)
            grafts = Grafts(work, setup.problems, setup.facts.vocabulary, config, setup.baseline, known)
            grafts.add(sets)
            epsilon = run.manifest["config"].get("knockout", {}).get("epsilon", KnockoutConfig.epsilon)
            first, ends = next(iter(sets.values())), setup.facts.eos_ids
            tested = graft_candidates(grafts, first, to_skip, ends, epsilon) if to_skip else {}
        found = grafts.result()
        sets = {**sets, **{arm: members for arm, (members, _) in tested.items()}}
        table = graft_table(found.rows, types, sets, {arm: own for arm, (_, own) in tested.items()})
        gains = {row.arm: list(row.gain[:3]) for row in found.rows}
        facts = {"accuracy": found.accuracy, "gains": gains, **setup.served}
        stage.publish({"grafts": table, "graft_rollouts": found.grafts}, facts)
    console().print(graft_terminal(table, found.accuracy))
    return run


def _sets(run: Run, config: GraftConfig, setup: Setup, types: Sequence[Row]) -> Sets:
    """The declared rocks, or the candidates of the census where there are none; clusters."""
    sets: dict[str, list[int]] = {}
    if config.rocks:
        sets["rocks"] = named_tokens(config.rocks, texts_of(setup.facts.tokenizer), setup.facts.tokenizer)
    elif rocks := sorted(run.rocks()["token_id"].to_pylist()):
        sets["rocks"] = rocks
    else:
        top = candidate_types(types, (), config.top)
        sets["candidates"] = [token for token in top if token not in setup.facts.eos_ids]
        log.info("no rocks are declared: the %d token types of largest burden are grafted in their place", len(top))
    for row in sorted(types, key=lambda row: row["cluster"]) if config.clusters else ():
        if row["cluster"] != "unknown":
            sets.setdefault(f"{CLUSTER}{row['cluster']}", []).append(row["token_id"])
    return sets


def skippable(run: Run) -> tuple[int, ...]:
    """Candidates of the bypass list, largest cost first: declared rocks, confirmed, proven neutral by the census."""
    if not (run.has("census") and run.has("types")):
        return ()
    census = run.read("census").to_pylist()
    neutral = {row["token_id"] for row in census if row["kind"] == "token" and row["verdict"] == NEUTRAL}
    types = [row for row in run.types().to_pylist() if row["token_id"] in neutral]
    found = [row for row in types if row.get("in_certified") and row.get("confirmed")]
    return tuple(row["token_id"] for row in sorted(found, key=lambda row: (-(row["r"] or 0.0), row["token_id"])))
