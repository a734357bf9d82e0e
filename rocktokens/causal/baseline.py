"""What knock-outs and grafts share: prompts, the baseline rollouts they start from, and how work is shared out.

The baseline is sampled once, checked, and searched for the first use of every token type. Work comes in pieces of some
hundred rollouts that do not depend on the number of workers. They are made here with an engine at hand or, in a stage,
as jobs with a part on disk each, so that a kill loses no finished piece.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
SHOWN_PROMPTS = 12  # token ids of resumed rollouts are kept for the first prompts alone: enough to read some
COLUMNS = ("subset", "prompt_field", "answer_field")  # of files and datasets


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
    seed: int


class Baseline:
    """Rollouts of some prompts in a row, and where each token type is first used in each."""

    def __init__(self, rollouts: Sequence[BaseRollout]) -> None:
        self.rollouts = list(rollouts)
        self.problem_N = np.array([rollout.problem for rollout in rollouts], int)
        self.correct_N = np.array([rollout.correct for rollout in rollouts], float)
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

    @classmethod
    def of(cls, table: pa.Table, first_problem: int = 0) -> Baseline:
        """From a rollouts table, prompt by prompt; the first prompt has this number."""
        found, number = [], dict[str, int]()
        for row in table.to_pylist():
            prompt = Prompt(row["prompt_id"], tuple(row["prompt_ids"]), "", row["answer"])
            problem = number.setdefault(prompt.prompt_id, first_problem + len(number))
            tokens = tuple(row["token_ids"])
            found.append(BaseRollout(prompt, problem, row["rollout_id"], tokens, row["correct"], row["seed"]))
        return cls(found)

    def first_uses(self, members: Collection[int]) -> dict[int, int]:
        """Rollouts (by index) that use any member, with the position of the first use."""
        found: dict[int, int] = {}
        for token in members:
            begin, end = np.searchsorted(self._token_U, [token, token + 1])
            for rollout, position in zip(self._rollout_U[begin:end].tolist(), self._position_U[begin:end].tolist()):
                found[rollout] = min(position, found.get(rollout, position))
        return dict(sorted(found.items()))


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
    """Further columns of its row."""


def finish_piece(
    bench: Bench, generate: Callable[..., Sequence[Continuation]], begun: Sequence[Begun], schema: pa.Schema
) -> pa.Table:
    """One row per rollout: continued, and checked."""
    drawn = iter(generate([own.request for own in begun if own.request is not None], progress=advance))
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


def limit_of(base: BaselineConfig) -> int:
    """Longest response."""
    return base.max_new_tokens or RolloutConfig.max_new_tokens


@dataclass(frozen=True)
class Work:
    """Makes tables in pieces: here, with a bench, or as jobs."""

    exact_resume: bool
    bench: Bench | None = None
    folder: Path = Path()
    """Where jobs write their parts."""
    opens: Json = dataclasses.field(default_factory=dict)
    """Arguments of `open_bench` in a worker."""
    place: Place | None = None

    def make(
        self,
        what: str,
        piece: Callable[..., pa.Table],
        items: Sequence[Any],
        *,
        number: int,
        rollouts: int = 1,
        **given: Any,
    ) -> list[pa.Table]:
        """The tables of all pieces, in order.

        Args:
            what: the word before the progress bar, and the beginning of the parts' names.
            piece: a top-level function, called as `piece(bench, some of the items, **given)`.
            items: what the pieces are cut from.
            number: sets parts of one name apart.
            rollouts: how many one item stands for.
            given: further arguments.
        """
        size = max(1, CHUNK // rollouts)
        # Neighbours stay together: resumptions of one rollout share its prefix.
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        if self.bench is not None:
            return [piece(self.bench, chunk, **given) for chunk in chunks]
        # The number of items is in the name: with other rollouts known beforehand, a part holds other ones.
        names = [f"{what}-{number}-{len(items)}-{place:06d}" for place in range(len(chunks))]
        how = {"opens": self.opens, "piece": piece, "given": given}
        jobs = [
            Job(name, self.folder / f"{name}.parquet", {**how, "items": chunk}, rollouts * len(chunk))
            for name, chunk in zip(names, chunks)
        ]
        run(jobs, do_piece, self.place, what=what, unit="rollouts")
        return [read_parquet(job.part, None, "remove it and repeat the command") for job in jobs]


def do_piece(part: Path, *, opens: Json, piece: Callable[..., pa.Table], items: Sequence[Any], given: Json) -> None:
    """A job: make one piece and write it whole."""
    write_parquet(piece(keep(opens, lambda: open_bench(**opens)), items, **given), part)


def open_bench(
    pair: PairConfig, prompts: PromptsConfig, rollouts: RolloutConfig, servers: ServersConfig, grafts: bool
) -> Bench:
    """A worker's engines, in this process or on servers, and its checker; `grafts` need both models."""
    from rocktokens.causal.grafters import GraftSampler, ServedGrafter
    from rocktokens.models.pair import load_pair
    from rocktokens.sample.rollouts import make_sampler
    from rocktokens.servers.connect import open_sampling

    engine: Any
    make_grafter: Any = None
    if grafts and not servers.student:
        models = load_pair(pair)
        engine, tokenizer = make_sampler(models, rollouts), models.tokenizer
        make_grafter = partial(GraftSampler, engine, make_sampler(models, rollouts, of_teacher=True))
    else:
        sampling = open_sampling(pair, servers, rollouts, check=False)
        engine, tokenizer = sampling.engine, sampling.facts.tokenizer
        if grafts:
            teacher: Any = open_sampling(pair, servers, rollouts, of_teacher=True, check=False).engine
            make_grafter = partial(ServedGrafter, engine, teacher)
    checker = make_checker(prompts)
    assert checker is not None
    decode: Any = partial(tokenizer.decode, skip_special_tokens=True)
    return Bench(engine, decode, checker, make_grafter)


def sample_baseline(
    work: Work,
    prompts: Sequence[Prompt],
    base: BaselineConfig,
    *,
    first_problem: int = 0,
    known: Mapping[str, Sequence[Row]] | None = None,
) -> pa.Table:
    """Rollouts of these prompts in order; `known`: rows by prompt_id that another stage has sampled alike."""
    rows = {prompt_id: list(own) for prompt_id, own in (known or {}).items()}
    missing = [prompt for prompt in prompts if prompt.prompt_id not in rows]
    how: Json = {"number": first_problem, "rollouts": base.rollouts, "base": base}
    for table in work.make("baseline", sample_piece, missing, **how):
        for row in table.to_pylist():
            rows.setdefault(row["prompt_id"], []).append(row)
    return pa.Table.from_pylist([row for prompt in prompts for row in rows[prompt.prompt_id]], schema=ROLLOUTS)


def sample_piece(bench: Bench, prompts: Sequence[Prompt], *, base: BaselineConfig) -> pa.Table:
    """Rollouts of some prompts, checked."""
    from rocktokens.sample.rollouts import rollout_row

    asked = [(prompt, number) for prompt in prompts for number in range(base.rollouts)]
    seeds = [derive_seed(base.seed, "baseline", prompt.prompt_id, number) for prompt, number in asked]
    requests = [Request(prompt.prompt_ids, limit_of(base), seed) for (prompt, _), seed in zip(asked, seeds)]
    answers = bench.engine.generate(requests, progress=advance)
    right = bench.judge([(prompt, answer.token_ids) for (prompt, _), answer in zip(asked, answers)])
    rows = [
        rollout_row(prompt, number, seed, answer, text=bench.decode(list(answer.token_ids)), correct=correct)
        for (prompt, number), seed, answer, correct in zip(asked, seeds, answers, right)
    ]
    return pa.Table.from_pylist(rows, schema=ROLLOUTS)


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
    baseline: BaselineConfig
    """With its length limit."""
    problems: list[Prompt]
    opens: Json
    """Arguments of `open_bench`."""
    served: Json
    """For the manifest: what was served."""

    @classmethod
    def of(cls, run: Run, baseline: BaselineConfig, servers: ServersConfig, *, grafts: bool = False) -> Setup:
        """Everything but what is banned or grafted. Servers, where they are named, are asked what they serve."""
        from rocktokens.models.pair import pair_facts
        from rocktokens.prompts.gym import is_gym_source
        from rocktokens.sample.rollouts import check_lengths
        from rocktokens.servers.connect import open_sampling
        from rocktokens.world import world_names

        own = prompts_of(run)
        asked = asked_prompts(own, baseline)
        # A world's student answers in its language, whatever file the prompts come from.
        checked = own if own.source in world_names() and not is_gym_source(asked.source) else asked
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
            if grafts:
                served["teacher_served"] = open_sampling(pair, servers, rollouts, of_teacher=True).served
        else:
            check_lengths(problems, facts.context)
        opens = {"pair": pair, "prompts": checked, "rollouts": rollouts, "servers": servers, "grafts": grafts}
        return cls(facts, baseline, problems, opens, served)

    def work(self, stage: Stage, place: Place | None) -> Work:
        """Work in jobs, whose parts lie in the stage's folder."""
        exact = self.baseline.greedy or (self.baseline.top_k is None and self.baseline.top_p is None)
        return Work(exact, folder=stage.parts, opens=self.opens, place=place)


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
