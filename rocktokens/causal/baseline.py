"""What knock-outs and grafts share: prompts, the baseline rollouts they start from, and how work is shared out.

The baseline is sampled once, checked, and searched for the first use of every token type. Work comes in pieces: the
driver names them and a process with an engine makes each one (`Bench`). `Work` makes them in this process with an
engine at hand; `JobWork` as jobs, each with a part on disk, so that a kill loses no finished piece. Pieces do not
depend on the number of workers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from rocktokens.causal.settings import BaselineConfig
from rocktokens.errors import ConfigError, DataError
from rocktokens.jobs import Job, Place, advance, keep, run
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.checkers import Checker, check_all, make_checker
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import Prompt, is_endless, load_prompts
from rocktokens.run import Run, read_parquet, write_parquet
from rocktokens.sample.requests import Continuation, Engine, Request
from rocktokens.sample.settings import RolloutConfig
from rocktokens.seeds import derive_seed
from rocktokens.servers.settings import ServersConfig
from rocktokens.stage import Stage, inputs_of, pair_of, prompts_of, student_source
from rocktokens.stats import Floats
from rocktokens.tables import ROLLOUTS
from rocktokens.values import Json, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rocktokens.models.pair import PairFacts

log = logging.getLogger(__name__)

CHUNK = 512  # rollouts of one piece of work: what a kill may cost, and what workers share out
# Token ids of knocked-out and grafted rollouts are kept for the first prompts alone: enough to read some.
SHOWN_PROMPTS = 12
COLUMNS = ("subset", "prompt_field", "answer_field")  # of files and datasets

Keep = Callable[[str, Callable[[], pa.Table]], pa.Table]
"""keep(name, make): the table of that name, made now if it was not kept before."""
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""bar(description, total): a block that is told of work done."""


def make_now(name: str, make: Callable[[], pa.Table]) -> pa.Table:
    """A `Keep` that keeps nothing."""
    return make()


@contextmanager
def no_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A `Bar` that shows nothing."""
    yield lambda count: None


# ---------------------------------------------------------------- rollouts


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


def rollouts_of(table: pa.Table, first_problem: int = 0) -> list[BaseRollout]:
    """Rows of a rollouts table, prompt by prompt; the first prompt has this number."""
    number: dict[str, int] = {}
    found = []
    for row in table.to_pylist():
        prompt = Prompt(row["prompt_id"], tuple(row["prompt_ids"]), "", row["answer"])
        problem = number.setdefault(prompt.prompt_id, first_problem + len(number))
        tokens = tuple(row["token_ids"])
        found.append(
            BaseRollout(prompt, problem, row["rollout_id"], tokens, row["correct"], row["truncated"], row["seed"])
        )
    return found


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


def answerable(prompts: Sequence[Prompt], checker: Checker | None, seed: int) -> list[Prompt]:
    """The prompts whose answers can be checked, shuffled; refused where accuracy would have no meaning."""
    if checker is None:
        raise DataError("checker is none: without answers to check, accuracy and the effect of a ban have no meaning")
    found = [prompt for prompt in prompts if prompt.answer is not None]
    if len(found) < 2:
        raise DataError(
            f"{len(found)} of {len(prompts)} prompts have an answer to check; the causal tests need at least 2"
        )
    # A look is then a fair sample of them.
    return [found[index] for index in np.random.default_rng(derive_seed(seed, "problems")).permutation(len(found))]


# ---------------------------------------------------------------- work


@dataclass(frozen=True)
class Bench:
    """What a process needs to make pieces: an engine that writes and a checker that judges."""

    engine: Engine
    decode: Callable[[list[int]], str]
    checker: Checker
    progress: Callable[[int], None] | None = None
    make_grafter: Callable[[Floats, Floats], Any] | None = None

    def judge(self, responses: Sequence[tuple[Prompt, tuple[int, ...]]]) -> list[bool]:
        """Whether each response is right; equal responses to a prompt are checked once."""
        keys = [(prompt.prompt_id, ids) for prompt, ids in responses]
        new = {key: (self.decode(list(ids)), prompt.answer or "") for key, (prompt, ids) in zip(keys, responses)}
        known = dict(zip(new, check_all(self.checker, list(new.values()))))
        return [known[key] for key in keys]


class Begun(NamedTuple):
    """A baseline rollout that is written anew from somewhere on."""

    rollout: BaseRollout
    kept: tuple[int, ...]
    """The tokens that stay."""
    request: Request | None
    """For what follows them; None where nothing can follow."""
    columns: Row
    """What the row says besides."""


def finish_piece(
    bench: Bench, generate: Callable[..., Sequence[Continuation]], begun: Sequence[Begun], schema: pa.Schema
) -> pa.Table:
    """One row per rollout: continued, and checked."""
    drawn = iter(generate([own.request for own in begun if own.request is not None], progress=bench.progress))
    answers = [next(drawn).token_ids if own.request is not None else () for own in begun]
    responses = [(*own.kept, *answer) for own, answer in zip(begun, answers)]
    right = bench.judge([(own.rollout.prompt, response) for own, response in zip(begun, responses)])
    rows = [
        {
            "prompt_id": own.rollout.prompt.prompt_id,
            "rollout_id": own.rollout.rollout_id,
            "correct": correct,
            "num_tokens": len(answer),
            "token_ids": response if own.rollout.problem < SHOWN_PROMPTS else None,
            **own.columns,
        }
        for own, answer, response, correct in zip(begun, answers, responses, right)
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def sample_piece(bench: Bench, *, prompts: Sequence[Prompt], base: BaselineConfig) -> pa.Table:
    """Rollouts of some prompts, checked."""
    from rocktokens.sample.rollouts import rollout_row

    asked = [(prompt, number) for prompt in prompts for number in range(base.rollouts)]
    seeds = [derive_seed(base.seed, "baseline", prompt.prompt_id, number) for prompt, number in asked]
    requests = [Request(prompt.prompt_ids, limit_of(base), seed) for (prompt, _), seed in zip(asked, seeds)]
    answers = bench.engine.generate(requests, progress=bench.progress)
    right = bench.judge([(prompt, answer.token_ids) for (prompt, _), answer in zip(asked, answers)])
    rows = [
        rollout_row(prompt, number, seed, answer, text=bench.decode(list(answer.token_ids)), correct=correct)
        for (prompt, number), seed, answer, correct in zip(asked, seeds, answers, right)
    ]
    return pa.Table.from_pylist(rows, schema=ROLLOUTS)


def limit_of(base: BaselineConfig) -> int:
    """Longest response."""
    return base.max_new_tokens or RolloutConfig.max_new_tokens


class Shared:
    """Tables that all pieces of a step read, and the number of their first prompt."""

    def __init__(self, tables: Mapping[str, pa.Table], first_problem: int) -> None:
        self.tables, self.first_problem = tables, first_problem

    @cached_property
    def rollouts(self) -> list[BaseRollout]:
        """Of the table `rollouts`."""
        return rollouts_of(self.tables["rollouts"], self.first_problem)


@lru_cache(maxsize=2)
def read_shared(folder: Path, first_problem: int) -> Shared:
    """What the driver has written for all pieces of a step."""
    tables = {path.stem: read_parquet(path, None, "repeat the command") for path in folder.glob("*.parquet")}
    return Shared(tables, first_problem)


class Work:
    """Makes pieces in this process, one after the other; `keep` may know them from an earlier, killed attempt."""

    def __init__(self, bench: Bench, keep: Keep = make_now, bar: Bar = no_bar) -> None:
        self.bench, self.keep, self.bar = bench, keep, bar
        self.exact_resume = bench.engine.exact_resume

    def share(self, name: str, tables: Mapping[str, pa.Table], first_problem: int) -> Callable[[], Shared]:
        """Make tables known to all pieces: a piece calls what is returned."""
        known = Shared(tables, first_problem)
        return lambda: known

    def make(self, what: str, pieces: Mapping[str, tuple[int, Json]], piece: Callable[..., pa.Table]) -> list[pa.Table]:
        """The tables of all pieces, in order.

        Args:
            what: the words before the progress bar.
            pieces: name → how many rollouts, and arguments.
            piece: a top-level function, called as `piece(bench, **arguments)`.
        """
        with self.bar(what, sum(size for size, _ in pieces.values())) as moved:
            bench = dataclasses.replace(self.bench, progress=moved)
            return [self.keep(name, partial(piece, bench, **given)) for name, (_, given) in pieces.items()]

    def carry_out(
        self,
        name: str,
        tables: Mapping[str, pa.Table],
        piece: Callable[..., pa.Table],
        *,
        given: Json,
        first_problem: int = 0,
    ) -> list[pa.Table]:
        """A plan in pieces: each is called as `piece(bench, known=, start=, stop=, **given)`, with rows of the plan."""
        known, number = self.share(name, tables, first_problem), len(tables["plan"])
        pieces = {}
        for start in range(0, number, CHUNK):
            stop = min(start + CHUNK, number)
            pieces[f"{name}-{start:08d}"] = (stop - start, {"known": known, "start": start, "stop": stop, **given})
        return self.make(name.replace("-", " "), pieces, piece)


class JobWork(Work):
    """Makes pieces as jobs, each with its part in a folder."""

    def __init__(self, folder: Path, given: Json, place: Place | None, exact_resume: bool) -> None:
        self.folder, self.given, self.place, self.exact_resume = folder, given, place, exact_resume

    def share(self, name: str, tables: Mapping[str, pa.Table], first_problem: int) -> Callable[[], Shared]:
        """Written to the folder; workers read them once."""
        for own, table in tables.items():
            write_parquet(table, self.folder / name / f"{own}.parquet")
        return partial(read_shared, self.folder / name, first_problem)

    def make(self, what: str, pieces: Mapping[str, tuple[int, Json]], piece: Callable[..., pa.Table]) -> list[pa.Table]:
        """The same, shared out among workers."""
        jobs = [
            Job(name, self.folder / f"{name}.parquet", {**self.given, "piece": piece, "given": given}, size)
            for name, (size, given) in pieces.items()
        ]
        run(jobs, do_piece, self.place, what=what, unit="rollouts")
        return [read_parquet(job.part, None, "remove it and repeat the command") for job in jobs]


def do_piece(
    part: Path, *, opener: Callable[..., Bench], bench: Json, piece: Callable[..., pa.Table], given: Json
) -> None:
    """A job: make one piece and write it whole."""
    write_parquet(piece(keep((opener.__name__, bench), lambda: opener(**bench)), **given), part)


def open_bench(pair: PairConfig, prompts: PromptsConfig, rollouts: RolloutConfig, servers: ServersConfig) -> Bench:
    """Load the student, or connect to its servers, and the checker."""
    from rocktokens.servers.connect import open_sampling

    sampling = open_sampling(pair, servers, rollouts, check=False)
    return bench_of(sampling.engine, sampling.facts.tokenizer, prompts)


def bench_of(engine: Engine, tokenizer: PreTrainedTokenizerBase, prompts: PromptsConfig) -> Bench:
    """A worker's bench: it tells the progress bar of its job."""
    checker = make_checker(prompts)
    assert checker is not None
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return Bench(engine, decode, checker, advance)  # type: ignore[arg-type]


def sample_baseline(
    work: Work,
    prompts: Sequence[Prompt],
    base: BaselineConfig,
    *,
    first_problem: int = 0,
    known: Mapping[str, Sequence[Row]] | None = None,
) -> pa.Table:
    """Rollouts of these prompts in order; `known`: rows by prompt_id that another stage has sampled alike."""
    missing = [prompt for prompt in prompts if prompt.prompt_id not in (known or {})]
    rows = {prompt_id: list(own) for prompt_id, own in (known or {}).items()}
    step = max(1, CHUNK // base.rollouts)
    groups = {start: missing[start : start + step] for start in range(0, len(missing), step)}
    pieces = {
        f"baseline-{first_problem:07d}-{len(missing)}-{start:07d}": (
            len(group) * base.rollouts,
            {"prompts": group, "base": base},
        )
        for start, group in groups.items()
    }
    for table in work.make("baseline", pieces, sample_piece):
        for row in table.to_pylist():
            rows.setdefault(row["prompt_id"], []).append(row)
    return pa.Table.from_pylist([row for prompt in prompts for row in rows[prompt.prompt_id]], schema=ROLLOUTS)


# ---------------------------------------------------------------- the run


def causal_stage(run: Run, name: str, settings: dict[str, object], baseline: BaselineConfig) -> Stage:
    """The stage with all that a causal test reads: models, prompts, and the detection with its tables."""
    pair, prompts = pair_of(run), prompts_of(run)
    if baseline.checkpoint == "teacher":
        raise ConfigError("knock-outs and grafts are of the student; checkpoint must be last, student or a step")
    models = {"student": student_source(run, pair, baseline.checkpoint), "teacher": pair.teacher}
    prompts = dataclasses.replace(prompts, source=baseline.source or prompts.source)
    files = ("types.parquet", "rollouts.parquet")
    inputs = inputs_of(run, files=files, stages=("detect",), models=models, prompts=prompts)
    return Stage(run, name, settings, inputs, guards=("settings",))


@dataclass(frozen=True)
class Setup:
    """What the driver of a causal stage knows: the pair without its weights, and the prompts."""

    facts: PairFacts
    pair: PairConfig
    """The student is the checkpoint that is meant."""
    baseline: BaselineConfig
    rollouts: RolloutConfig
    problems: list[Prompt]
    prompts: PromptsConfig
    """Whose checker reads the responses."""
    servers: ServersConfig
    served: Json
    """For the manifest: what was served."""

    @classmethod
    def of(cls, run: Run, baseline: BaselineConfig, servers: ServersConfig, *, grafts: bool = False) -> Setup:
        """Everything but what is banned or grafted. Servers, where they are named, are asked what they serve."""
        from rocktokens.models.pair import pair_facts
        from rocktokens.sample.rollouts import check_lengths
        from rocktokens.servers.connect import open_sampling

        own = prompts_of(run)
        asked = asked_prompts(own, baseline)
        checked = _checked_as(own, asked)
        pair = dataclasses.replace(pair_of(run), student=student_source(run, pair_of(run), baseline.checkpoint))
        known = run.manifest["config"]
        limit = baseline.max_new_tokens or known.get("rollouts", known.get("distill", {})).get("max_new_tokens")
        baseline = dataclasses.replace(baseline, max_new_tokens=limit or RolloutConfig.max_new_tokens)
        rollouts = RolloutConfig(
            max_new_tokens=limit_of(baseline),
            temperature=baseline.temperature,
            greedy=baseline.greedy,
            top_k=baseline.top_k,
            top_p=baseline.top_p,
            batch_size=baseline.batch_size,
        )
        facts = pair_facts(pair)
        found = own_problems(run, asked, baseline, facts.tokenizer)
        problems = answerable(found, make_checker(checked), baseline.seed)[: baseline.problems]
        served: Json = {}
        if servers.student:
            sampling = open_sampling(pair, servers, rollouts)
            sampling.require_room(problems, rollouts.max_new_tokens)
            served["served"] = sampling.served
        else:
            check_lengths(problems, facts.context)
        if servers.student and grafts:
            served["teacher_served"] = open_sampling(pair, servers, rollouts, of_teacher=True).served
        return cls(facts, pair, baseline, rollouts, problems, checked, servers, served)

    def work(self, stage: Stage, place: Place | None, opener: Callable[..., Bench] = open_bench) -> JobWork:
        """Work in jobs, whose parts lie in the stage's folder; `opener` opens a worker's bench."""
        bench = {"pair": self.pair, "prompts": self.prompts, "rollouts": self.rollouts, "servers": self.servers}
        exact = self.baseline.greedy or (self.baseline.top_k is None and self.baseline.top_p is None)
        return JobWork(stage.parts, {"opener": opener, "bench": bench}, place, exact)


def asked_prompts(own: PromptsConfig, baseline: BaselineConfig) -> PromptsConfig:
    """Where the prompts of a causal test come from: the run's own, or what the user names instead."""
    from rocktokens.world import world_names

    source = baseline.source or own.source
    built_in = is_endless(source)
    if built_in and baseline.split not in (None, "causal"):
        raise ConfigError(f"causal tests on {source} take its prompts for causal tests; leave --baseline.split out")
    if source != own.source and {source, own.source} <= set(world_names()):
        raise ConfigError(f"this student was trained on {own.source}; prompts of {source} are out of vocabulary")
    theirs: Json = {}  # settings of the run's own source that another does not have
    if source != own.source:
        theirs = {"split": PromptsConfig.split, "options": ()}
        theirs |= {name: getattr(PromptsConfig, name) for name in COLUMNS} if built_in else {}
    asked = dataclasses.replace(own, source=source, limit=baseline.problems if built_in else None, **theirs)
    return dataclasses.replace(asked, split=baseline.split or asked.split)


def _checked_as(own: PromptsConfig, asked: PromptsConfig) -> PromptsConfig:
    """The prompts whose checker reads the responses; a world's student answers in its language, on any file."""
    from rocktokens.prompts.gym import is_gym_source
    from rocktokens.world import world_names

    return own if own.source in world_names() and not is_gym_source(asked.source) else asked


def own_problems(
    run: Run, asked: PromptsConfig, baseline: BaselineConfig, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Prompts that neither training nor detection saw, unless the user says otherwise."""
    source, built_in = asked.source, is_endless(asked.source)
    own = baseline.source is None and baseline.split is None
    if own and not built_in and baseline.reuse_prompts:
        return load_prompts(asked, tokenizer)
    found = load_prompts(asked, tokenizer, part="causal" if own or built_in else None)
    used = set(run.read("rollouts", ["prompt_id"])["prompt_id"].to_pylist()) if run.has("rollouts") and own else set()
    fresh = [prompt for prompt in found if prompt.prompt_id not in used]
    if len(fresh) < 2:
        raise DataError(
            f"detection used all but {len(fresh)} of the prompts of {source} that are set aside for causal tests; name "
            "other prompts with --baseline.source FILE, or pass --baseline.reuse-prompts"
        )
    if len(fresh) < baseline.problems:
        log.info("%d prompts for the causal tests, fewer than the %d asked for", len(fresh), baseline.problems)
    return fresh


def candidate_types(types: Sequence[Row], declared: Sequence[int], top: int) -> list[int]:
    """The top token types by burden, and every declared rock: what is tested does not depend on what was declared."""
    by_burden = sorted(types, key=lambda row: (-(row.get("r") or 0.0), row["token_id"]))
    chosen = [int(row["token_id"]) for row in by_burden[:top]]
    return chosen + [token for token in dict.fromkeys(declared) if token not in set(chosen)]
