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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from rocktokens.causal.bans import named_tokens, texts_of
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
    bench_of,
    candidate_types,
    causal_stage,
    finish_piece,
    limit_of,
    make_now,
    no_bar,
    open_bench,
    rollouts_of,
    sample_baseline,
)
from rocktokens.causal.inference import NEUTRAL, STUMBLING_BLOCK, change
from rocktokens.causal.settings import BaselineConfig, GraftConfig
from rocktokens.errors import ConfigError
from rocktokens.jobs import Place, keeping_workers
from rocktokens.models.settings import PairConfig
from rocktokens.progress import console
from rocktokens.prompts.checkers import Checker
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import Prompt
from rocktokens.run import Run, digest_of_value, open_run, working_on
from rocktokens.sample.requests import Continuation, Engine, GraftRequest, Request
from rocktokens.sample.settings import RolloutConfig
from rocktokens.seeds import derive_seed, uniforms
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import to_mapping
from rocktokens.stats import Estimate, Floats, share_estimate
from rocktokens.tables import TABLES
from rocktokens.values import Row

if TYPE_CHECKING:
    from rocktokens.servers.vllm import VllmEngine

log = logging.getLogger(__name__)

# Shapes: V vocabulary, T positions of a rollout, P prompts, K arms.
GRAFTS = TABLES["graft_rollouts"].schema


# ---------------------------------------------------------------- which tokens are drawn again


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
    rocks, skippable = sorted(set(sets.target)), sorted(set(sets.skippable))
    if not rocks:
        raise ConfigError("there is nothing to graft; run `rocktokens detect` first, or name token types with --rocks")

    def indicator(members: Iterable[int]) -> Floats:
        own_V = np.zeros(vocabulary)
        own_V[sorted(set(members))] = 1.0
        return own_V

    on_V, rock_share = indicator(rocks), float(share_V[rocks].sum())
    # As many draws as the rocks have, spread over everything else; if rocks are the larger part, all of the rest.
    odds = min(1.0, rock_share / max(1.0 - rock_share, 1e-12))
    arms = [
        GraftArm(sets.name, on_V, len(rocks), members=tuple(rocks)),
        GraftArm("placebo", on_V, len(rocks), own=True),
        GraftArm("control", (1 - on_V) * odds, vocabulary - len(rocks)),
        GraftArm("rest", 1 - on_V, vocabulary - len(rocks)),
        GraftArm("all", np.ones(vocabulary), vocabulary),
    ]
    if skippable and skippable != rocks:
        arms.append(GraftArm("skippable", indicator(skippable), len(skippable), members=tuple(skippable)))
    for name, members in (sets.clusters or {}).items():
        own_V = indicator(members)
        arms.append(GraftArm(f"cluster {name}", own_V, int(own_V.sum())))
    return arms


def first_redraw(rollout: BaseRollout, arm: GraftArm, seed: int) -> int | None:
    """The first position whose token the rule draws again; None: the rollout is copied whole."""
    if not rollout.token_ids:
        return None
    redraw_T = arm.redraw_V[list(rollout.token_ids)]
    coin_T = uniforms(seed, 2 * len(redraw_T)).reshape(-1, 2)[:, 0]
    hits = np.flatnonzero(coin_T < redraw_T)
    return int(hits[0]) if len(hits) else None


# ---------------------------------------------------------------- drawing them again


def graft_piece(bench: Bench, *, known: Callable[[], Shared], base: BaselineConfig, start: int, stop: int) -> pa.Table:
    """One row per resumption start…stop of the plan: generated, and checked."""
    given, begun = known(), []
    arms = given.tables["arms"]
    for row in given.tables["plan"].slice(start, stop - start).to_pylist():
        rollout, at = given.rollouts[row["rollout"]], row["at"]
        kept, how = rollout.token_ids[:at], {"graft_seed": row["seed"], "rule": row["arm"], "forced": True}
        prefix = (*rollout.prompt.prompt_ids, *kept)
        request = GraftRequest(prefix, limit_of(base) - at, rollout.seed, skip=at, **how)
        columns = {"arm": arms["name"][row["arm"]].as_py(), "resumed_at": at}
        begun.append(Begun(rollout, kept, request, columns))
    assert bench.make_grafter is not None
    grafter = bench.make_grafter(np.array(arms["redraw"].to_pylist()), np.array(arms["own"].to_pylist()))
    return finish_piece(bench, grafter.generate, begun, GRAFTS)


def open_graft_bench(
    pair: PairConfig, prompts: PromptsConfig, rollouts: RolloutConfig, servers: ServersConfig
) -> Bench:
    """A worker's bench with both models, in this process or on servers."""
    from rocktokens.causal.graft_sampler import GraftSampler
    from rocktokens.models.pair import load_pair
    from rocktokens.sample.rollouts import make_sampler
    from rocktokens.servers.connect import open_sampling

    kind: Any = ServedGrafter if servers.student else GraftSampler
    if servers.student:
        bench = open_bench(pair, prompts, rollouts, servers)
        teacher: Any = open_sampling(pair, servers, rollouts, of_teacher=True, check=False).engine
    else:
        models = load_pair(pair)
        bench = bench_of(make_sampler(models, rollouts), models.tokenizer, prompts)
        teacher = make_sampler(models, rollouts, of_teacher=True)
    return replace(bench, make_grafter=partial(kind, bench.engine, teacher))


class ServedGrafter:
    """Grafts on servers: the student's servers write, and where a rule says so one token comes from the teacher's.

    A stretch is asked of the student's servers, its first token that the rule draws again is looked for, the teacher's
    servers draw that one token, and the student continues behind it. The coins are those of the local grafter; a draw's
    law does not depend on how the stretches are cut. `rules`: (K, V) redraw probabilities; `own`: (K,), rules under
    which the student itself draws again.
    """

    def __init__(self, student: VllmEngine, teacher: VllmEngine, rules: Floats, own: Floats) -> None:
        self.student, self.teacher, self.rules, self.own = student, teacher, rules, own
        self.redraws = 0

    def generate(
        self, requests: Sequence[GraftRequest], *, progress: Callable[[int], None] | None = None
    ) -> list[Continuation]:
        """One continuation a request, in order; refused where one of the models' servers has no room for it."""
        for request in requests:
            self.student.check(request)
            # The teacher is asked up to where the student ends.
            self.teacher.check(replace(request, max_new_tokens=self._room(request)))
        return self.student.pool.map(self._complete, requests, progress=progress)

    def _room(self, request: GraftRequest) -> int:
        own = self.student.context
        return request.max_new_tokens if own is None else min(request.max_new_tokens, own - len(request.prefix))

    async def _complete(self, request: GraftRequest) -> Continuation:
        from rocktokens.causal.graft_sampler import graft_numbers

        room = self._room(request)
        coin_T = graft_numbers(request.graft_seed, request.skip, room)[:, 0]
        done: list[int] = []
        again = request.forced

        async def ask(engine: VllmEngine, length: int, who: str) -> tuple[int, ...]:
            # Every stretch has a seed of its own.
            seed = derive_seed(request.graft_seed, who, request.seed, request.skip + len(done))
            return (await engine.complete(Request((*request.prefix, *done), length, seed))).token_ids

        while True:
            if again:
                self.redraws += 1
                done += await ask(self.student if self.own[request.rule] else self.teacher, 1, "redraw")
                again = False
            else:
                drawn = await ask(self.student, room - len(done), "student")
                rule_T = self.rules[request.rule][list(drawn)]
                hits = (coin_T[len(done) : len(done) + len(drawn)] < rule_T).nonzero()[0]
                done += drawn[: hits[0]] if len(hits) else drawn
                again = len(hits) > 0
            if not again and (len(done) >= room or done[-1] in self.student.eos_ids):
                return Continuation(tuple(done), truncated=done[-1] not in self.student.eos_ids)


# ---------------------------------------------------------------- gains


class GraftRow(NamedTuple):
    """One arm's result."""

    arm: str
    num_types: int
    share_positions: float
    """Share of the baseline's positions that the rule draws again."""
    accuracy: Estimate
    gain: Estimate
    num_resumed: int
    num_rollouts: int
    num_tokens: int
    members: tuple[int, ...] = ()
    """Token types of the set, where it was named by its members: the rocks, or those that would be skipped."""


@dataclass(frozen=True)
class GraftResult:
    """Gains of every arm, and what they rest on."""

    rows: tuple[GraftRow, ...]
    accuracy: float
    """Of the baseline: the arm `none`."""
    baseline: pa.Table
    grafts: pa.Table
    """One row per resumption; a rollout without a row for an arm was copied."""


def graft(
    engine: Engine,
    make_grafter: Callable[[Floats, Floats], Any],
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
    problems = answerable(prompts, checker, base.seed)[: base.problems]
    assert checker is not None
    work = Work(Bench(engine, decode, checker, make_grafter=make_grafter), keep, bar)
    sets = rocks if isinstance(rocks, GraftSets) else GraftSets(tuple(rocks), clusters=clusters)
    return _graft_all(work, problems, sets, vocabulary, config, base, known)


def _graft_all(
    work: Work,
    problems: Sequence[Prompt],
    sets: GraftSets,
    vocabulary: int,
    config: GraftConfig,
    base: BaselineConfig,
    known: Mapping[str, Sequence[Row]] | None,
) -> GraftResult:
    """Sample the baseline, resume for every arm, compare."""
    rows = sample_baseline(work, problems[: config.problems], base, known=known)
    start = Baseline(rollouts_of(rows))
    count_V = np.zeros(vocabulary)
    for rollout in start.rollouts:
        np.add.at(count_V, np.asarray(rollout.token_ids, int), 1)
    share_V = count_V / max(count_V.sum(), 1)
    arms = make_arms(sets, vocabulary, share_V)
    planned: list[tuple[int, int, int, int]] = []
    for index, arm in enumerate(arms):
        for number, rollout in enumerate(start.rollouts):
            seed = derive_seed(base.seed, "graft", arm.name, rollout.rollout_id)
            at = first_redraw(rollout, arm, seed)
            if at is not None:
                planned.append((index, number, at, seed))
    # All arms' resumptions share batches.
    planned.sort(key=lambda own: (start.rollouts[own[1]].problem, start.rollouts[own[1]].rollout_id, own[2], own[0]))
    columns = zip(*planned) if planned else ((), (), (), ())
    plan_table = pa.table({name: list(own) for name, own in zip(("arm", "rollout", "at", "seed"), columns)})
    rules = {"name": [arm.name for arm in arms], "own": [arm.own for arm in arms]}
    arms_table = pa.table({**rules, "redraw": [arm.redraw_V for arm in arms]})
    shared = {"rollouts": rows, "plan": plan_table, "arms": arms_table}
    table = pa.concat_tables(
        [GRAFTS.empty_table(), *work.carry_out("grafts", shared, graft_piece, given={"base": base})]
    )
    rng = np.random.default_rng(derive_seed(base.seed, "graft"))
    found = tuple(_result(arm, start, table, base.rollouts, share_V, config, rng) for arm in arms)
    return GraftResult(found, float(start.correct_N().mean()), rows, table)


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
        accuracy=share_estimate(after_P),
        gain=change(after_P, before_P, resamples=config.resamples, rng=rng),
        num_resumed=len(mine),
        num_rollouts=len(after_N),
        num_tokens=int(sum(row["num_tokens"] for row in mine)),
        members=arm.members,
    )


def graft_table(
    rows: Sequence[GraftRow],
    types: Sequence[Mapping[str, Any]],
    rocks: Iterable[int],
    clusters: Mapping[str, Iterable[int]],
) -> pa.Table:
    """grafts.parquet: what each set costs (its shares of loss and gradient), and what learning it would gain.

    `types`: rows of types.parquet, where a run has them.
    """
    total = sum(item["r"] or 0.0 for item in types)
    everything = {item["token_id"] for item in types}
    members: dict[str, set[int]] = {"rest": everything - set(rocks), "all": everything}
    members |= {row.arm: set(row.members) for row in rows if row.members}
    members |= {f"cluster {name}": set(own) for name, own in clusters.items()}
    made = []
    for row in rows:
        own = [item for item in types if item["token_id"] in members.get(row.arm, set())]
        flat = {name: value for name, value in row._asdict().items() if name not in ("accuracy", "gain", "members")}
        for name, known in (("accuracy", row.accuracy), ("gain", row.gain)):
            flat |= {name: known.value, f"{name}_low": known.low, f"{name}_high": known.high}
        flat["loss_share"] = sum(item["r"] or 0.0 for item in own) / total if own and total else None
        flat["grad_share"] = sum(item["grad_share"] or 0.0 for item in own) if own else None
        made.append({**flat, "num_problems": row.gain.num_prompts, "members": list(row.members) or None})
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
    servers = servers or ServersConfig()
    with working_on(path):
        run = open_run(path)
        stage = causal_stage(run, "graft", {"graft": config, "graft_baseline": baseline}, baseline)
        to_skip = () if config.rocks else skippable(run)
        stage.inputs["what the census would let be skipped"] = digest_of_value(list(to_skip))
        if not stage.due(again):
            return run
        _check_servers(servers)
        setup = Setup.of(run, baseline, servers, grafts=True)
        clusters: dict[str, list[int]] = {}
        types = run.types().to_pylist() if run.has("types") else []
        for row in types if config.clusters else ():
            if row["cluster"] != "unknown":
                clusters.setdefault(row["cluster"], []).append(row["token_id"])
        sets = replace(_target(run, config, setup, to_skip), clusters=dict(sorted(clusters.items())))
        known: dict[str, list[Row]] = {}  # what the census sampled with the same settings
        if run.done("knockout") and run.manifest["config"].get("baseline") == to_mapping(baseline):
            for row in run.read("baseline").to_pylist():
                known.setdefault(row["prompt_id"], []).append(row)
        with keeping_workers(loaded=True):
            work = setup.work(stage, place, open_graft_bench)
            found = _graft_all(work, setup.problems, sets, setup.facts.vocabulary, config, setup.baseline, known)
        table = graft_table(found.rows, types, sets.target, sets.clusters or {})
        gains = {row.arm: list(row.gain[:3]) for row in found.rows}
        facts = {"accuracy": found.accuracy, "gains": gains, **setup.served}
        stage.publish({"grafts": table, "graft_rollouts": found.grafts}, facts)
    from rocktokens.causal.figures import graft_terminal

    console().print(graft_terminal(table, found.accuracy))
    return run


def _check_servers(servers: ServersConfig) -> None:
    """Both models are on servers, or both are loaded here."""
    from rocktokens.servers.connect import generating

    if servers.student and not generating(servers):
        raise ConfigError(
            "grafts on servers need a teacher's server that generates among --servers.teacher; or leave "
            "--servers.student out, and both models are loaded here"
        )
    if servers.teacher and not servers.student:
        log.info(
            "graft draws from both models at every position and loads both here: the teacher's servers are not asked. "
            "Where the teacher does not fit, name the student's servers too (--servers.student)"
        )


def _target(run: Run, config: GraftConfig, setup: Setup, to_skip: tuple[int, ...]) -> GraftSets:
    """The declared rocks, or the candidates where there are none; and what the tests so far would let be skipped."""
    if config.rocks:
        return GraftSets(tuple(named_tokens(config.rocks, texts_of(setup.facts.tokenizer), setup.facts.tokenizer)))
    rocks = tuple(int(token) for token in run.rocks()["token_id"].to_pylist())
    if rocks:
        return GraftSets(rocks, skippable=to_skip)
    ends = set(setup.facts.eos_ids)
    candidates = [token for token in candidate_types(run.types().to_pylist(), (), config.top) if token not in ends]
    log.info("no rocks are declared: the %d token types of largest burden are grafted in their place", len(candidates))
    return GraftSets(tuple(candidates), name="candidates")


def skippable(run: Run) -> tuple[int, ...]:
    """Confirmed rocks that the census would let training skip: the set that has to be grafted together."""
    if not (run.has("census") and run.has("types")) or "class" not in run.types().column_names:
        return ()
    rocks = {
        row["token_id"]
        for row in run.types().to_pylist()
        if row["class"] == "rock" and row["in_certified"] and row["confirmed"]
    }
    tested = [row for row in run.read("census").to_pylist() if row["kind"] == "token"]
    needless = {row["token_id"] for row in tested if row["verdict"] in (NEUTRAL, STUMBLING_BLOCK)}
    return tuple(sorted(rocks & needless))
