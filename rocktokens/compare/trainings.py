"""One training of a comparison is one job: train a regime with a seed, then evaluate the students that were kept.

Every training has a directory under RUN/compare, a run in itself, so that a killed one resumes at the step where it
stopped. A job gets everything from its `Training`, so that it can run in any process; which trainings there are is
stage.py's.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rocktokens import jobs
from rocktokens.compare.settings import CompareConfig
from rocktokens.errors import ConfigError
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run, open_run, write_text
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import to_mapping
from rocktokens.train.settings import DistillConfig
from rocktokens.values import Json, Row

if TYPE_CHECKING:
    from rocktokens.models.pair import Pair
    from rocktokens.models.states import StateSource
    from rocktokens.prompts.tasks import Prompt
    from rocktokens.sample.requests import Rollout

EVALUATION_BATCH = 256  # rollouts in flight while a student is evaluated
START = "start"  # folder of the evaluations before training, which all regimes of a seed share

CURVE_ROLLOUTS = 1  # per held-out prompt at the evaluations before the last


@dataclass(frozen=True)
class Common:
    """What all trainings of a comparison share."""

    folder: Path
    """Where the trainings lie: RUN/compare."""
    pair: PairConfig
    """The run's pair with the checkpoint that every training starts from as its student."""
    prompts: PromptsConfig
    compare: CompareConfig
    servers: ServersConfig
    rocks: tuple[int, ...]
    max_new_tokens: int
    contexts: Path
    """Table of the rollouts on which every student's loss is measured."""


@dataclass(frozen=True)
class Training:
    """One regime with one seed."""

    regime: str
    seed: int
    distill: DistillConfig
    common: Common

    @property
    def directory(self) -> Path:
        """Where it lies."""
        return self.common.folder / self.regime / f"seed={self.seed}"

    def job(self) -> jobs.Job:
        """Train and evaluate; the part is written last."""
        size = self.distill.steps + self.distill.keep
        return jobs.Job(f"{self.regime}, seed {self.seed}", self.directory / "evaluated.json", {"training": self}, size)

    def open(self) -> Run:
        """Its run, made if it is not there; RunError where it was made with other settings."""
        asked, common = self.common.compare, self.common
        names = ("problems", "rollouts", "contexts", "start")
        reading: Json = {name: getattr(asked, name) for name in names} | {"rocks": list(common.rocks)}
        return Run.create(self.directory, {"distill": to_mapping(self.distill), "reading": reading})


# ---------------------------------------------------------------- the jobs


def sample_contexts(part: Path, common: Common, seed: int) -> None:
    """Sample the common rollouts from the start, for a run that has no rollouts of its own."""
    from rocktokens.models.pair import load_model
    from rocktokens.run import write_parquet
    from rocktokens.sample.rollouts import make_sampler, sample_rollouts

    bench = _bench(replace(common, contexts=Path()))
    models = replace(bench.models, student=load_model(common.pair.student, common.pair))
    settings = RolloutConfig(num_rollouts=1, max_new_tokens=common.max_new_tokens, seed=seed)
    prompts = list(bench.problems)[: common.compare.contexts]
    write_parquet(sample_rollouts(make_sampler(models, settings), prompts, settings, models.tokenizer, None), part)


def evaluate_start(part: Path, training: Training) -> None:
    """Evaluate the student that every training of a seed starts from."""
    common, _ = training.common, _bench(training.common)  # what is refused leaves no directory
    run = training.open()
    dtype = "float32" if common.pair.dtype == "auto" else common.pair.dtype  # as kept students are saved
    pair = replace(common.pair, dtype=dtype)
    _evaluate(training, run, 0, pair.student, pair, CURVE_ROLLOUTS)
    write_text(part, json.dumps({"steps": [0]}))


def train_and_evaluate(part: Path, training: Training) -> None:
    """Bring one training to its end and evaluate it."""
    run, common = training.open(), training.common
    if not run.done("train"):
        _train(training, run)
    for step in run.checkpoints():
        if run.done(f"read/step={step}"):
            continue
        if step == 0:
            start = open_run(common.folder / START / f"seed={training.seed}")
            for table in ("problems/step=0", "losses/step=0"):
                run.write(table, start.read(table))
            run.finish("read/step=0", start.facts("read/step=0"))
        else:
            final = step == training.distill.steps
            rollouts = common.compare.rollouts if final else CURVE_ROLLOUTS
            _evaluate(training, run, step, str(run.checkpoint(step)), common.pair, rollouts)
            jobs.advance(1)
    write_text(part, json.dumps({"steps": run.checkpoints()}))
    if not common.compare.keep_students:
        shutil.rmtree(run.path / "checkpoints", ignore_errors=True)


def _train(training: Training, run: Run) -> None:
    from rocktokens.models.pair import load_model
    from rocktokens.train.distill import distill

    common, bench = training.common, _bench(training.common)
    # Trained weights are float32 whatever the pair's dtype: small updates vanish in 16 bits.
    student = load_model(common.pair.student, replace(common.pair, dtype="float32"))
    found = distill(
        training.distill,
        replace(bench.models, student=student),
        bench.prompts,
        run,
        rocks=common.rocks,
        show=False,
        on_step=lambda row: jobs.advance(1),
    )
    run.finish("train", {"steps": found.facts["steps"]})
    shutil.rmtree(run.path / "checkpoints" / ".resume", ignore_errors=True)


def _evaluate(training: Training, run: Run, step: int, student: str, pair: PairConfig, num_rollouts: int) -> None:
    """Outcomes on held-out prompts, with one seed for all regimes of a seed, and losses on the common rollouts."""
    from rocktokens.models.pair import load_model
    from rocktokens.sample.accuracy import Evaluator, sample_with
    from rocktokens.sample.rollouts import make_sampler
    from rocktokens.score.scoring import score

    common, bench = training.common, _bench(training.common)
    models = replace(bench.models, student=load_model(student, pair))
    limit, prompts = common.max_new_tokens, bench.problems
    sample = sample_with(make_sampler(models, RolloutConfig(max_new_tokens=limit, batch_size=EVALUATION_BATCH)))
    lengths, truncated = list[int](), list[bool]()

    def watched(asked: Sequence[Sequence[int]], seeds: Sequence[int], most: int) -> list[list[int]]:
        found = sample(asked, seeds, most)
        lengths.extend(map(len, found))
        truncated.extend(len(ids) >= most and ids[-1] not in models.eos_ids for ids in found)
        return found

    draws: Row = {"max_new_tokens": limit, "num_rollouts": num_rollouts, "seed": training.distill.seed}
    correct_P = Evaluator(prompts, bench.checker, models.tokenizer, **draws, batch_size=EVALUATION_BATCH).correct(
        watched
    )
    by_prompt = (len(prompts), num_rollouts)  # rollouts of one prompt are sampled one after the other
    outcomes = {
        "prompt_id": [prompt.prompt_id for prompt in prompts],
        "correct": correct_P,
        "rollouts": np.full(len(prompts), num_rollouts, np.int32),
        "length": np.reshape(lengths, by_prompt).mean(1).astype(float),
        "truncated": np.reshape(truncated, by_prompt).mean(1).astype(float),
    }
    run.write(f"problems/step={step}", pa.table(outcomes))
    facts: Row = {"heldout_length": float(np.mean(lengths)), "heldout_truncated": float(np.mean(truncated))}

    parts: list[pa.Table] = []
    score(
        bench.contexts,
        {0: models.student},
        bench.teacher,
        eos_ids=models.eos_ids,
        vocabulary=models.vocabulary,
        write=lambda _, table: parts.append(table.select(["prompt_id", "token_id", "kl"])),
    )
    scored = pa.concat_tables(parts)
    kl_N = scored["kl"].to_numpy().astype(float)
    prompts_C, place_N = np.unique(scored["prompt_id"].to_numpy(zero_copy_only=False).astype(str), return_inverse=True)
    rock_N, valid_N = np.isin(scored["token_id"].to_numpy(), common.rocks), np.isfinite(kl_N)
    losses: Row = {"prompt_id": list(prompts_C)}
    for name, mask_N in (("rock", rock_N & valid_N), ("rest", ~rock_N & valid_N)):
        positions_C = np.bincount(place_N[mask_N], minlength=len(prompts_C))
        loss_C = np.bincount(place_N[mask_N], kl_N[mask_N], len(prompts_C))
        losses |= {f"{name}_positions": positions_C, f"{name}_loss": loss_C}
        mean = float(np.sum(loss_C)) / int(positions_C.sum()) if positions_C.any() else None
        facts["heldout_loss_rocks" if name == "rock" else "heldout_loss_rest"] = mean
    run.write(f"losses/step={step}", pa.table(losses))
    run.finish(f"read/step={step}", facts)
    gc.collect()  # one student in memory at a time


# ---------------------------------------------------------------- what stays loaded between jobs


@dataclass(frozen=True)
class _Bench:
    models: Pair
    """The pair without a student: every training and evaluation loads its own."""
    prompts: Sequence[Prompt]
    problems: Sequence[Prompt]
    checker: Any
    contexts: Sequence[Rollout]
    teacher: StateSource
    """Its states on the contexts are computed once for all students."""


@lru_cache(maxsize=1)
def _bench(common: Common) -> _Bench:
    """Load the teacher and the prompts; refused where there are no answers to evaluate students by."""
    from rocktokens.models.states import RememberedStates, Sequences, source_of
    from rocktokens.prompts.checkers import make_checker
    from rocktokens.prompts.tasks import load_prompts
    from rocktokens.run import read_parquet
    from rocktokens.sample.rollouts import RolloutRows
    from rocktokens.servers.connect import open_pair, require_room
    from rocktokens.servers.states import ServedStates

    asked, checker = common.compare, make_checker(common.prompts)
    models = open_pair(common.pair, common.servers, trains=True)
    held_out = replace(common.prompts, limit=asked.problems, seed=common.prompts.seed + 2)
    problems = [p for p in load_prompts(held_out, models.tokenizer, part="causal") if p.answer is not None]
    if checker is None or len(problems) < 2:
        raise ConfigError(
            "regimes are compared on accuracy, and these prompts have no answers to check; name a source with answers, "
            "or --prompts.answer-field and --prompts.checker"
        )
    prompts = load_prompts(common.prompts, models.tokenizer, part="train")
    require_room(models, prompts, common.max_new_tokens)
    contexts: Sequence[Rollout] = ()
    if common.contexts != Path():
        contexts = RolloutRows(read_parquet(common.contexts, None, "run `rocktokens sample` again"))[: asked.contexts]
    source = source_of(models.teacher_source())
    if isinstance(source, ServedStates):  # refused now, not after the first training
        ids = tuple((*rollout.prompt_ids, *rollout.token_ids) for rollout in contexts)
        starts = tuple(len(rollout.prompt_ids) for rollout in contexts)
        source.check(Sequences(ids, starts, tuple(rollout.rollout_id for rollout in contexts)))
    models = replace(models, student=None)  # type: ignore[arg-type]
    return _Bench(models, prompts, problems, checker, contexts, RememberedStates(source))


def forget() -> None:
    """Free what jobs in this process have loaded."""
    _bench.cache_clear()
