"""The trainings of a comparison: each is brought to its end and evaluated, by whichever process it belongs to.

Every regime and seed has a directory of its own under RUN/compare, a run in itself; a killed comparison goes on in the
training, and at the step, where it stopped. One student is in memory at a time. Which trainings there are is
stages/compare.py's business.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rocktokens.compare.regimes import FrozenSets
from rocktokens.compare.settings import CompareConfig
from rocktokens.errors import ConfigError, RunError
from rocktokens.models.settings import PairConfig
from rocktokens.progress import progress
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.ranks import ranks, wait_for
from rocktokens.run import Run, open_run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import to_mapping
from rocktokens.stage import is_complete
from rocktokens.train.settings import DistillConfig
from rocktokens.values import Json, Row

if TYPE_CHECKING:
    from rocktokens.models.states import StateSource
    from rocktokens.prompts.tasks import Prompt
    from rocktokens.score.scoring import Rollout

log = logging.getLogger(__name__)

# `--again` trains beside the old trainings, which are replaced when the new ones are complete.
ARMS, BESIDE = "compare", ".compare-again"
EVALUATION_BATCH = 256  # rollouts in flight while a student is evaluated
Key = tuple[int, str]
"""(seed, regime)."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything the trainings share, and what each of them is."""

    run: Run
    config: CompareConfig
    pair: PairConfig
    """The run's pair with the checkpoint that every training starts from as its student."""
    prompts: PromptsConfig
    base: DistillConfig
    sets: FrozenSets
    arms: dict[Key, DistillConfig]
    """(seed, regime) → its distillation, in the order of training."""
    folder: str = ARMS
    """Where the trainings live, below the run."""

    def directory(self, seed: int, regime: str) -> Path:
        """Where a training lives."""
        return self.run.path / self.folder / regime / f"seed={seed}"

    def is_read(self, key: Key) -> bool:
        """Whether a training is complete and evaluated."""
        return is_complete(self.directory(*key), "read")


@dataclasses.dataclass(frozen=True)
class Bench:
    """What all trainings of this process need: models, prompts to train on, and what students are evaluated on."""

    models: Any
    prompts: Sequence[Prompt]
    problems: Sequence[Prompt]
    checker: Any
    contexts: Sequence[Rollout]
    teacher: StateSource
    """Where its states on the contexts come from; they are computed once for all students."""


def make_bench(plan: Plan, servers: ServersConfig) -> Bench:
    """Load models and prompts; refused where there are no answers to evaluate students by."""
    from rocktokens.models.states import RememberedStates, source_of
    from rocktokens.prompts.checkers import make_checker
    from rocktokens.prompts.tasks import load_prompts
    from rocktokens.servers.connect import open_pair, require_room

    checker = make_checker(plan.prompts)
    models = open_pair(plan.pair, servers, trains=True)
    asked = dataclasses.replace(plan.prompts, limit=plan.config.problems, seed=plan.prompts.seed + 2)
    problems = []
    if checker is not None:
        problems = [p for p in load_prompts(asked, models.tokenizer, part="causal") if p.answer is not None]
    if checker is None or len(problems) < 2:
        raise ConfigError(
            "regimes are compared on accuracy, and these prompts have no answers to check; name a source with answers, "
            "or --prompts.answer-field and --prompts.checker"
        )
    prompts = load_prompts(plan.prompts, models.tokenizer, part="train")
    wanted = plan.config.train_prompts
    if wanted is not None and wanted > len(prompts):
        raise ConfigError(f"train_prompts = {wanted}, but the source has {len(prompts)} prompts to train on")
    require_room(models, prompts, plan.base.max_new_tokens)
    teacher = RememberedStates(source_of(models.teacher_source()))
    contexts = _contexts(plan, models, problems)
    _require_room_for(contexts, models)
    # Every training loads its own student, and one is in memory at a time.
    models = dataclasses.replace(models, student=None)  # type: ignore[arg-type]
    return Bench(models, prompts[:wanted], problems, checker, contexts, teacher)


def train_and_read(plan: Plan, bench: Bench, keys: Sequence[Key]) -> None:
    """Bring this process's share of the trainings to their ends."""
    own = [key for number, key in enumerate(keys) if ranks().owns(number)]
    total = sum(plan.arms[key].steps + plan.arms[key].keep + 1 for key in own)
    with progress(f"comparing {len(own)} trainings", total, "steps and evaluations") as advance:
        for number, key in enumerate(own, start=1):
            seed, regime = key
            if not plan.is_read(key):
                log.info("— %s with seed %d, training %d of %d", regime, seed, number, len(own))
            arm, config = open_arm(plan, key, len(bench.problems))
            steps = _train(plan, arm, config, bench, advance)
            read = _read(plan, arm, key, bench, advance)
            advance.resumed(config.steps + config.keep + 1 - steps - read)  # complete before, or stopped early


def check_arms_on_disk(plan: Plan, keys: Sequence[Key], num_problems: int) -> None:
    """Refuse trainings on disk that were made with other settings, before anything is trained."""
    for number, key in enumerate(keys):
        if ranks().owns(number) and plan.directory(*key).exists():
            open_arm(plan, key, num_problems)


def open_arm(plan: Plan, key: Key, num_problems: int) -> tuple[Run, DistillConfig]:
    """A training's directory, made if it is not there, and its settings."""
    asked, config = plan.config, plan.arms[key]
    reading: Json = {
        "problems": num_problems,
        "rollouts": asked.rollouts,
        "curve_rollouts": asked.curve_rollouts,
    }
    reading |= {"contexts": asked.contexts, "rocks": list(plan.sets.rocks)}
    later = {"train_prompts": asked.train_prompts, "start": asked.start}  # settings that older trainings do not name
    reading |= {name: value for name, value in later.items() if value is not None}
    sections, directory = {"distill": to_mapping(config), "reading": reading}, plan.directory(*key)
    try:
        return Run.create(directory, sections), config
    except RunError as error:
        if plan.folder == BESIDE:  # a stopped `--again` with other settings
            shutil.rmtree(directory, ignore_errors=True)
            return Run.create(directory, sections), config
        raise RunError(f"{error} Or pass --again to train every regime anew.") from error


def _contexts(plan: Plan, models: Any, problems: Sequence[Prompt]) -> Sequence[Rollout]:
    """Rollouts on which every student's loss is measured: the run's own held-out ones, else the start's, kept."""
    from rocktokens.sample.rollouts import make_sampler, rollouts_of, sample_rollouts

    run, count = plan.run, plan.config.contexts
    if run.done("sample"):
        return rollouts_of(run.read("rollouts"))[:count]
    name = f"{plan.folder}/contexts"
    if not ranks().is_first:
        wait_for(lambda: run.has(name), "the contexts of the comparison")
    if not run.has(name):
        settings = RolloutConfig(num_rollouts=1, max_new_tokens=plan.base.max_new_tokens, seed=plan.base.seed)
        engine = make_sampler(models, settings)
        table = sample_rollouts(engine, list(problems)[:count], settings, models.tokenizer, None)
        run.write(name, table)
    return rollouts_of(run.read(name))[:count]


def _require_room_for(contexts: Sequence[Rollout], models: Any) -> None:
    """Refuse a served teacher that does not take the contexts: students' losses are measured after the training."""
    from rocktokens.models.states import Sequences
    from rocktokens.servers.states import ServedStates

    source = None if models.remote is None else models.remote.states
    if isinstance(source, ServedStates):
        ids = tuple((*rollout.prompt_ids, *rollout.token_ids) for rollout in contexts)
        starts = tuple(len(rollout.prompt_ids) for rollout in contexts)
        source.check(Sequences(ids, starts, tuple(rollout.rollout_id for rollout in contexts)))


def _train(plan: Plan, arm: Run, config: DistillConfig, bench: Bench, advance: Callable[[int], None]) -> int:
    """Train to the end; returns the steps that were told to `advance`, at most those planned."""
    from rocktokens.models.pair import load_model
    from rocktokens.train.distill import distill

    if arm.done("train"):
        return 0
    told = 0

    def on_step(row: Row) -> None:
        nonlocal told
        now = min(row["step"], config.steps)
        advance(now - told)
        told = now

    # Trained weights are float32 whatever the pair's dtype: small updates vanish in 16 bits.
    student = load_model(plan.pair.student, dataclasses.replace(plan.pair, dtype="float32"))
    found = distill(
        config,
        dataclasses.replace(bench.models, student=student),
        bench.prompts,
        arm,
        rocks=plan.sets.rocks,
        show=False,
        on_step=on_step,
    )
    last = arm.checkpoint(found.facts["steps"])
    if not last.is_dir():  # stopped between two evaluation points
        draft = last.with_name(f".{last.name}.draft")
        found.student.save_pretrained(draft)
        draft.rename(last)
    arm.finish("train", {"steps": found.facts["steps"], "stopped": found.facts["stopped"]})
    shutil.rmtree(arm.path / "checkpoints" / ".resume", ignore_errors=True)
    del found, student
    gc.collect()
    return told


def _read(plan: Plan, arm: Run, key: Key, bench: Bench, advance: Callable[[int], None]) -> int:
    """Accuracy and losses of the kept students, one in memory at a time; returns the number of evaluations told."""
    from rocktokens.models.pair import load_model

    if arm.done("read"):
        return 0
    seed, regime = key
    steps, read = arm.checkpoints(), 0
    finals = (steps[-1], plan.arms[key].steps)  # where regimes are compared, with all rollouts
    for step in steps:
        if arm.done(f"read/step={step}"):
            continue
        if step == 0 and regime != "uniform":  # every training of a seed starts from the same student
            start = plan.directory(seed, "uniform")
            # Another process may be at it; every process works in the order of the plan, so none waits for ever.
            wait_for(partial(is_complete, start, "read/step=0"), "the evaluation of the untrained student")
            uniform = open_run(start)
            arm.write("problems/step=0", uniform.read("problems/step=0"))
            if uniform.has("losses/step=0"):
                arm.write("losses/step=0", uniform.read("losses/step=0"))
            arm.finish("read/step=0", uniform.facts("read/step=0"))
        else:
            student = load_model(str(arm.checkpoint(step)), plan.pair)
            own = dataclasses.replace(bench, models=dataclasses.replace(bench.models, student=student))
            rollouts = plan.config.rollouts if step in finals else plan.config.curve_rollouts
            outcomes, lengths = _outcomes(plan, own, seed, rollouts)
            arm.write(f"problems/step={step}", outcomes)
            losses = _losses(own, plan.sets.rocks)
            arm.write(f"losses/step={step}", losses)
            arm.finish(f"read/step={step}", _mean_losses(losses) | lengths)
            del own, student
            gc.collect()
        if read <= plan.arms[key].keep:
            advance(1)
            read += 1
    arm.finish("read", {"steps": steps})
    if not plan.config.keep_students:
        shutil.rmtree(arm.path / "checkpoints", ignore_errors=True)
    return read


def _outcomes(plan: Plan, bench: Bench, seed: int, num_rollouts: int) -> tuple[pa.Table, dict[str, float]]:
    """Share of right rollouts of every prompt, with one seed for all regimes of a seed; lengths and truncation."""
    from rocktokens.sample.accuracy import Evaluator, sample_with
    from rocktokens.sample.rollouts import make_sampler

    models, problems, limit = bench.models, bench.problems, plan.base.max_new_tokens
    engine = make_sampler(models, RolloutConfig(max_new_tokens=limit, batch_size=EVALUATION_BATCH))
    sample, lengths, truncated = sample_with(engine), list[int](), list[bool]()

    def watched(prompts: Sequence[Sequence[int]], seeds: Sequence[int], most: int) -> list[list[int]]:
        found = sample(prompts, seeds, most)
        lengths.extend(map(len, found))
        truncated.extend(len(ids) >= most and ids[-1] not in models.eos_ids for ids in found)
        return found

    draws = {"max_new_tokens": limit, "num_rollouts": num_rollouts, "seed": plan.base.seed + seed}
    evaluator = Evaluator(problems, bench.checker, models.tokenizer, **draws, batch_size=EVALUATION_BATCH)
    correct_P = evaluator.correct(watched)
    by_prompt = (len(problems), num_rollouts)  # rollouts of one prompt are sampled one after the other
    outcomes = pa.table(
        {
            "prompt_id": [problem.prompt_id for problem in problems],
            "correct": correct_P,
            "rollouts": np.full(len(problems), num_rollouts, np.int32),
            "length": np.reshape(lengths, by_prompt).mean(1).astype(float),
            "truncated": np.reshape(truncated, by_prompt).mean(1).astype(float),
        }
    )
    return outcomes, {"heldout_length": float(np.mean(lengths)), "heldout_truncated": float(np.mean(truncated))}


def _losses(bench: Bench, rocks: Sequence[int]) -> pa.Table:
    """Summed divergence at rocks and at the rest, by prompt, over contexts that are the same for every student."""
    from rocktokens.score.scoring import score

    parts: list[pa.Table] = []
    models = bench.models
    score(
        bench.contexts,
        {0: models.student},
        bench.teacher,
        eos_ids=models.eos_ids,
        vocabulary=models.vocabulary,
        write=lambda _, table: parts.append(table.select(["prompt_id", "token_id", "kl"])),
    )
    table = pa.concat_tables(parts)
    kl_N = table["kl"].to_numpy().astype(float)
    prompts_C, place_N = np.unique(table["prompt_id"].to_numpy(zero_copy_only=False).astype(str), return_inverse=True)
    rock_N, valid_N = np.isin(table["token_id"].to_numpy(), rocks), np.isfinite(kl_N)
    found: Row = {"prompt_id": list(prompts_C)}
    for name, mask_N in (("rock", rock_N & valid_N), ("rest", ~rock_N & valid_N)):
        found[f"{name}_positions"] = np.bincount(place_N[mask_N], minlength=len(prompts_C))
        found[f"{name}_loss"] = np.bincount(place_N[mask_N], kl_N[mask_N], len(prompts_C))
    return pa.table(found)


def _mean_losses(losses: pa.Table) -> Row:
    """Mean divergence at rocks and at the rest; None where there are no such positions."""
    found: Row = {}
    for name, own in (("heldout_loss_rocks", "rock"), ("heldout_loss_rest", "rest")):
        positions = int(np.sum(losses[f"{own}_positions"].to_numpy()))
        found[name] = float(np.sum(losses[f"{own}_loss"].to_numpy())) / positions if positions else None
    return found
