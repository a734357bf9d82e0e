"""One training of a comparison is one job: train a regime with a seed, then evaluate the students that were kept.

Every training has a directory under RUN/compare, a run in itself, so that a killed one resumes at the step where it
stopped. A job gets everything from its `Training`, so that it can run in any process.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        return self.common.folder / self.regime / f"seed={self.seed}"

    def job(self, size: int = 1) -> jobs.Job:
        """Its job; the part is written last."""
        return jobs.Job(f"{self.regime}, seed {self.seed}", self.directory / "evaluated.json", {"training": self}, size)

    def open(self) -> Run:
        """Its run, made if it is not there; RunError where it was made with other settings."""
        names = ("problems", "rollouts", "contexts", "start")
        reading: Json = {name: getattr(self.common.compare, name) for name in names}
        reading["rocks"] = list(self.common.rocks)
        return Run.create(self.directory, {"distill": to_mapping(self.distill), "reading": reading})


# ---------------------------------------------------------------- the jobs


def evaluate_start(part: Path, training: Training) -> None:
    """Evaluate the student that every training of a seed starts from."""
    _bench(training.common)  # what is refused leaves no directory
    pair = training.common.pair
    if pair.dtype == "auto":
        pair = replace(pair, dtype="float32")  # as kept students are saved
    _evaluate(training, training.open(), 0, pair.student, pair)
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
            _evaluate(training, run, step, str(run.checkpoint(step)), common.pair)
            jobs.advance(1)
    write_text(part, json.dumps({"steps": run.checkpoints()}))
    shutil.rmtree(run.path / "checkpoints", ignore_errors=True)  # evaluated students are not needed any more


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


def _evaluate(training: Training, run: Run, step: int, student: str, pair: PairConfig) -> None:
    """Outcomes on held-out prompts, with one seed for all regimes of a seed, and losses on the common rollouts."""
    from rocktokens.models.pair import load_model
    from rocktokens.sample.rollouts import Evaluator, make_sampler, sample_with
    from rocktokens.score.scoring import score

    common, bench = training.common, _bench(training.common)
    models = replace(bench.models, student=load_model(student, pair))
    limit, prompts = common.max_new_tokens, bench.problems
    num_rollouts = common.compare.rollouts if step == training.distill.steps else CURVE_ROLLOUTS
    sample = sample_with(make_sampler(models, RolloutConfig(max_new_tokens=limit, batch_size=EVALUATION_BATCH)))
    lengths, truncated = list[int](), list[bool]()

    def watched(asked: Sequence[Sequence[int]], seeds: Sequence[int], most: int) -> list[list[int]]:
        found = sample(asked, seeds, most)
        lengths.extend(map(len, found))
        truncated.extend(len(ids) >= most and ids[-1] not in models.eos_ids for ids in found)
        return found

    how: Row = {"max_new_tokens": limit, "num_rollouts": num_rollouts, "seed": training.distill.seed}
    evaluator = Evaluator(prompts, bench.checker, models.tokenizer, **how, batch_size=EVALUATION_BATCH)
    by_prompt = (len(prompts), num_rollouts)  # rollouts of one prompt are sampled one after the other
    outcomes = {
        "prompt_id": [prompt.prompt_id for prompt in prompts],
        "correct": evaluator.correct(watched),
        "rollouts": np.full(len(prompts), num_rollouts, np.int32),
        "length": np.reshape(lengths, by_prompt).mean(1),
        "truncated": np.reshape(truncated, by_prompt).mean(1),
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
    for name, title, mask_N in (("rock", "rocks", rock_N & valid_N), ("rest", "rest", ~rock_N & valid_N)):
        positions_C = np.bincount(place_N[mask_N], minlength=len(prompts_C))
        loss_C = np.bincount(place_N[mask_N], kl_N[mask_N], len(prompts_C))
        losses |= {f"{name}_positions": positions_C, f"{name}_loss": loss_C}
        facts[f"heldout_loss_{title}"] = float(loss_C.sum()) / int(positions_C.sum()) if positions_C.any() else None
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


def _bench(common: Common) -> _Bench:
    """What all jobs of a worker share."""
    found: _Bench = jobs.keep(common, lambda: _load(common))
    return found


def _load(common: Common) -> _Bench:
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
    contexts = RolloutRows(read_parquet(common.contexts, None, "run `rocktokens sample` again"))[: asked.contexts]
    source = source_of(models.teacher_source())
    if isinstance(source, ServedStates):  # refused now, not after the first training
        ids = tuple((*rollout.prompt_ids, *rollout.token_ids) for rollout in contexts)
        starts = tuple(len(rollout.prompt_ids) for rollout in contexts)
        source.check(Sequences(ids, starts, tuple(rollout.rollout_id for rollout in contexts)))
    models = replace(models, student=None)  # type: ignore[arg-type]
    return _Bench(models, prompts, problems, checker, contexts, RememberedStates(source))
