"""The stage `compare`: train the regimes from one start, read them on the same problems, say what follows.

Every regime and seed is an arm with a directory of its own under RUN/compare; a killed comparison goes on in the arm
and at the step where it stopped. Arms of one seed are trained one after the other, so that a slow hour of the machine
meets all regimes alike, and one student is in memory at a time. This module orders the work and writes the files; the
regimes are core/comparison/regimes.py's, the readings core/comparison/compare.py's.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rocktokens.config import CompareConfig, DistillConfig, PairConfig, PromptsConfig, RolloutConfig, ServersConfig
from rocktokens.config.base import from_manifest, to_mapping
from rocktokens.config.permissions import refuse_code
from rocktokens.core.comparison.regimes import FrozenSets, check_arms, common_base, regime_config
from rocktokens.core.selection.adaptive import least_updates
from rocktokens.errors import ConfigError, RunError
from rocktokens.progress import progress
from rocktokens.report.terminal.compare import show
from rocktokens.runs.files import digest_of_value, failing
from rocktokens.runs.lock import working_on
from rocktokens.runs.ranks import ranks, wait_for
from rocktokens.runs.store import Run, open_run
from rocktokens.stages.bypass import write_comparison_back
from rocktokens.stages.compare_sets import frozen_ids, frozen_sets, regimes_to_train
from rocktokens.stages.compare_tables import write_comparison
from rocktokens.stages.stage import Stage, inputs_of, is_complete, pair_of, prompts_of
from rocktokens.stages.workers import apart_from_torchrun

log = logging.getLogger(__name__)

# `--again` trains beside the old arms, which are replaced when the new ones are complete.
ARMS, BESIDE, REPLACED = "compare", ".compare-again", ".compare-replaced"
READING_BATCH = 256  # rollouts in flight while a student is read


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything the arms share, and what each of them is."""

    run: Run
    config: CompareConfig
    pair: PairConfig
    """The run's pair with the pre-OPD checkpoint as its student."""
    prompts: PromptsConfig
    base: DistillConfig
    sets: FrozenSets
    cut: int | None
    arms: dict[tuple[int, str], DistillConfig]
    """(seed, regime) → its distillation, in the order of training."""
    folder: str = "compare"
    """Where the arms live, below the run."""

    def directory(self, seed: int, regime: str) -> Path:
        """Where an arm lives."""
        return self.run.path / self.folder / regime / f"seed={seed}"


def compare(path: Path, config: CompareConfig, *, servers: ServersConfig | None = None, again: bool = False) -> Run:
    """Train and read the regimes; writes compare.parquet and its companions, prints the table and the verdicts.

    Several processes share the trainings, each of which is one process's; the first one writes the tables.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        apart_from_torchrun(compare, path, config, servers=servers, again=again)
        return open_run(path)
    with working_on(path):
        run = open_run(path)
        if set(config.regimes) == {"uniform"}:
            raise ConfigError("regimes must name at least one beside uniform: there would be nothing to compare")
        stage = _stage(run, config)
        if stage.due(again):
            _compare(stage, make_plan(run, config, beside=again), servers or ServersConfig())
        return run


def _stage(run: Run, config: CompareConfig) -> Stage:
    """No guards: what is trained protects itself (`_arm_run`), and tables are made from it at no cost."""
    inputs = inputs_of(run, files=("rollouts.parquet",), stages=("distill",))
    sets = frozen_sets(run, config)
    inputs |= {"the rocks": digest_of_value(list(sets.rocks)), "the bypass list": digest_of_value(list(sets.bypass))}
    return Stage(run, "compare", {"compare": config}, inputs)


def _compare(stage: Stage, plan: Plan, servers: ServersConfig) -> None:
    run = stage.run
    if len(plan.arms) == plan.config.seeds:  # no rocks are declared any more: an older comparison was of others
        if ranks().is_first:
            run.reopen("compare")
        log.warning("only uniform is left to train: there is nothing to compare, and the stage is left out")
        return
    if not _train_and_read(plan, servers) or not ranks().is_first:
        return
    wait_for(lambda: all(is_complete(plan.directory(*key), "read") for key in plan.arms), "others' trainings")
    if plan.folder != ARMS:
        _replace_arms(run, plan.folder)
        plan = dataclasses.replace(plan, folder=ARMS)
    arms = {key: open_run(plan.directory(*key)) for key in plan.arms}
    facts: dict[str, Any] = {"normalise": plan.base.normalise, "cut": plan.cut, "steps": plan.base.steps}
    facts |= {"rocks": list(plan.sets.rocks), "bypass": list(plan.sets.bypass)}
    facts["frozen_by"] = {name: list(ids) for name, ids in frozen_ids(plan.arms).items()}
    facts["frozen"] = facts["frozen_by"].get("freeze") or facts["frozen_by"].get("freeze_rocks") or []
    if not facts["frozen"]:
        facts["nothing_to_freeze"] = "there was nothing to freeze: no rock is declared and the bypass list is empty"
    readings = write_comparison(stage, arms, plan.config, facts)
    shutil.rmtree(run.path / REPLACED, ignore_errors=True)
    write_comparison_back(run)
    show(readings, run.facts("compare")["verdicts"], plan.config, facts)


def _replace_arms(run: Run, folder: str) -> None:
    """Put trainings that were made beside the old ones in their place; the old ones go when the tables are written."""
    old = run.path / ARMS
    with failing(old):
        if old.exists():
            shutil.rmtree(run.path / REPLACED, ignore_errors=True)
            old.replace(run.path / REPLACED)
        (run.path / folder).replace(old)


# ---------------------------------------------------------------- what will be trained


def make_plan(run: Run, config: CompareConfig, *, beside: bool = False) -> Plan:
    """The arms of a comparison, refused before anything is trained if one cannot be had or differs in anything else."""
    if not run.done("distill"):
        raise RunError(f"{run.path} is not distilled; run `rocktokens distill {run.path}` first: regimes repeat it")
    known = dict(run.manifest["config"].get("distill") or {})
    own = known.pop("selector", None)  # every regime has its own; an older version's fields may mean something else
    trained = from_manifest(DistillConfig, known, "distill")
    for name in (*([own.get("name", "uniform")] if isinstance(own, dict) else []), *trained.shadows):
        refuse_code(str(run.path), "selector", str(name))
    base = common_base(trained, config, steps=config.steps or run.facts("distill")["steps"])
    sets = frozen_sets(run, config)
    regimes = regimes_to_train(run, config, sets)
    if "adaptive" in regimes and base.steps <= least_updates():
        log.warning(
            "adaptive watches %d steps before it freezes anything: in %d it trains as uniform; compare more steps",
            least_updates(),
            base.steps,
        )
    cut = _choose_cut(run, base, sets.rocks, config) if {"cut", "merit"} & set(regimes) else None
    arms: dict[tuple[int, str], DistillConfig] = {}
    for seed in range(config.seeds):
        configs: dict[str, DistillConfig] = {}
        for name in regimes:
            configs[name] = regime_config(name, base, config, seed=seed, sets=sets, cut=cut)
        check_arms(configs)
        arms |= {(seed, name): configs[name] for name in regimes}
    pair = pair_of(run)
    pair = dataclasses.replace(pair, student=_start(run, pair, trained))
    folder = BESIDE if beside and (run.path / ARMS).exists() else ARMS
    return Plan(run, config, pair, prompts_of(run), base, sets, cut, arms, folder)


def _start(run: Run, pair: PairConfig, trained: DistillConfig) -> str:
    """The model that OPD started from; with adapters, the whole model under them."""
    if trained.lora_rank is not None:
        off_policy = run.path / "checkpoints" / "off_policy"
        return str(off_policy) if off_policy.is_dir() else pair.student
    if 0 not in run.checkpoints():
        raise RunError(f"{run.path} does not keep the checkpoint that OPD started from; distil it again to compare")
    return str(run.checkpoint(0))


def _choose_cut(run: Run, base: DistillConfig, rocks: Sequence[int], config: CompareConfig) -> int:
    """The shortest prefix that covers the non-rock loss at every scored checkpoint."""
    from rocktokens.core.selection.sample_less import prefix_cut

    if not run.steps():
        raise RunError(f"{run.path} has no scored occurrences to choose a cut from; run `rocktokens score` first")
    cuts = {}
    for step in run.steps():
        table = run.query(f"select position, token_id, kl from occurrences where step = {step}")
        rest_N = ~np.isin(table["token_id"].to_numpy(), rocks)
        cuts[step] = prefix_cut(
            table["position"].to_numpy(),
            table["kl"].to_numpy(),
            rest_N,
            limit=base.max_new_tokens,
            coverage=config.coverage,
        )
    longest = max(cuts, key=lambda step: cuts[step].length)
    log.info(
        "rollouts are cut at %d of %d tokens: %.1f %% of the non-rock loss and %.1f %% of the positions of checkpoint "
        "%d lie before it, and no checkpoint needs more",
        cuts[longest].length,
        base.max_new_tokens,
        100 * cuts[longest].covered,
        100 * cuts[longest].positions,
        longest,
    )
    return cuts[longest].length


# ---------------------------------------------------------------- arms


def _train_and_read(plan: Plan, servers: ServersConfig) -> bool:
    """Bring this process's arms to their ends; False where there are no answers to check."""
    from rocktokens.engines.connect import open_pair
    from rocktokens.lm.checkers import make_checker
    from rocktokens.lm.tasks import load_prompts

    checker = make_checker(plan.prompts)
    models, _ = open_pair(plan.pair, servers, trains=True)
    problems = []
    if checker is not None:
        asked = dataclasses.replace(plan.prompts, limit=plan.config.problems, seed=plan.prompts.seed + 2)
        problems = [p for p in load_prompts(asked, models.tokenizer, part="causal") if p.answer is not None]
    if checker is None or len(problems) < 2:
        log.warning("no answers to check: regimes cannot be compared on accuracy, and the stage is left out")
        return False
    own = {key: config for number, (key, config) in enumerate(plan.arms.items()) if ranks().owns(number)}
    arms = {key: _arm_run(plan, *key, config, len(problems)) for key, config in own.items()}
    contexts = _contexts(plan, models, problems)
    prompts = load_prompts(plan.prompts, models.tokenizer, part="train")
    total = sum(config.steps + config.keep + 1 for config in own.values())
    with progress(f"comparing {len(own)} trainings", total, "steps and readings") as advance:
        for number, ((seed, regime), config) in enumerate(own.items(), start=1):
            arm = arms[seed, regime]
            share = config.steps + config.keep + 1
            if not arm.done("read"):
                log.info("— %s with seed %d, training %d of %d", regime, seed, number, len(own))
            steps = _train(plan, arm, config, models, prompts, advance)
            read = _read(plan, arm, (seed, regime), models, problems, checker, contexts, advance)
            advance.resumed(share - steps - read)  # complete before, or stopped early
    return True


def _arm_run(plan: Plan, seed: int, regime: str, config: DistillConfig, num_problems: int) -> Run:
    asked = plan.config
    reading: dict[str, Any] = {
        "problems": num_problems,
        "rollouts": asked.rollouts,
        "curve_rollouts": asked.curve_rollouts,
    }
    reading |= {"contexts": asked.contexts, "rocks": list(plan.sets.rocks)}
    sections, directory = {"distill": to_mapping(config), "reading": reading}, plan.directory(seed, regime)
    try:
        return Run.create(directory, sections)
    except RunError as error:
        if plan.folder == BESIDE:  # a stopped `--again` with other settings
            shutil.rmtree(directory, ignore_errors=True)
            return Run.create(directory, sections)
        raise RunError(f"{error} Or pass --again to train every regime anew.") from error


def _contexts(plan: Plan, models: Any, problems: Sequence[Any]) -> list[Any]:
    """Rollouts on which every student's loss is measured: the run's own held-out ones, else the start's, kept."""
    from rocktokens.lm.sampling.rollouts import make_sampler, rollouts_of, sample_rollouts

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


def _train(
    plan: Plan, arm: Run, config: DistillConfig, models: Any, prompts: Sequence[Any], advance: Callable[[int], None]
) -> int:
    """Train an arm to its end; returns the steps that were told to `advance`."""
    from rocktokens.lm.pair import load_model
    from rocktokens.lm.training.distill import distill

    if arm.done("train"):
        return 0
    told = 0

    def on_step(row: dict[str, Any]) -> None:
        nonlocal told
        advance(row["step"] - told)
        told = row["step"]

    student = load_model(plan.pair.student, plan.pair)
    found = distill(
        config,
        dataclasses.replace(models, student=student),
        prompts,
        arm,
        rocks=plan.sets.rocks,
        show=False,
        on_step=on_step,
    )
    last = arm.checkpoint(found.facts["steps"])
    if not last.is_dir():  # stopped between two reading points
        draft = last.with_name(f".{last.name}.draft")
        found.student.save_pretrained(draft)
        draft.rename(last)
    arm.finish("train", {"steps": found.facts["steps"], "stopped": found.facts["stopped"]})
    shutil.rmtree(arm.path / "checkpoints" / ".resume", ignore_errors=True)
    del found, student
    gc.collect()
    return told


def _read(
    plan: Plan,
    arm: Run,
    key: tuple[int, str],
    models: Any,
    problems: Sequence[Any],
    checker: Any,
    contexts: Sequence[Any],
    advance: Callable[[int], None],
) -> int:
    """Accuracy and losses of an arm's kept students, one in memory at a time; returns the number of readings."""
    from rocktokens.lm.pair import load_model

    if arm.done("read"):
        return 0
    seed, regime = key
    steps, read = arm.checkpoints(), 0
    for step in steps:
        if arm.done(f"read/step={step}"):
            continue
        if step == 0 and regime != "uniform":  # every arm of a seed starts from the same student
            start = plan.directory(seed, "uniform")
            # Another process may be at it; every process works in the order of the plan, so none waits for ever.
            wait_for(partial(is_complete, start, "read/step=0"), "the evaluation of the untrained student")
            uniform = open_run(start)
            arm.write("problems/step=0", uniform.read("problems/step=0"))
            arm.finish("read/step=0", uniform.facts("read/step=0"))
        else:
            student = load_model(str(arm.checkpoint(step)), plan.pair)
            own = dataclasses.replace(models, student=student)
            rollouts = plan.config.rollouts if step == steps[-1] else plan.config.curve_rollouts
            arm.write(f"problems/step={step}", _outcomes(plan, own, problems, checker, seed, rollouts))
            arm.finish(f"read/step={step}", _losses(own, contexts, plan.sets.rocks))
            del own, student
            gc.collect()
        advance(1)
        read += 1
    arm.finish("read", {"steps": steps})
    if not plan.config.keep_students:
        shutil.rmtree(arm.path / "checkpoints", ignore_errors=True)
    return read


def _outcomes(plan: Plan, models: Any, problems: Sequence[Any], checker: Any, seed: int, num_rollouts: int) -> pa.Table:
    """Share of right rollouts of every prompt; the same seeds for every regime of a seed."""
    from rocktokens.lm.sampling.accuracy import Evaluator, sample_with
    from rocktokens.lm.sampling.rollouts import make_sampler

    limit = plan.base.max_new_tokens
    draws = {"max_new_tokens": limit, "num_rollouts": num_rollouts, "seed": plan.base.seed + seed}
    evaluator = Evaluator(problems, checker, models.tokenizer, **draws, batch_size=READING_BATCH)
    engine = make_sampler(models, RolloutConfig(max_new_tokens=limit, batch_size=READING_BATCH))
    return pa.table(
        {
            "prompt_id": [problem.prompt_id for problem in problems],
            "correct": evaluator.correct(sample_with(engine)),
            "rollouts": np.full(len(problems), num_rollouts, np.int32),
        }
    )


def _losses(models: Any, contexts: Sequence[Any], rocks: Sequence[int]) -> dict[str, Any]:
    """Mean divergence on rocks and on the rest, over contexts that are the same for every student."""
    from rocktokens.lm.scoring import score

    parts: list[pa.Table] = []
    score(
        contexts,
        {0: models.student},
        models.teacher_source(),
        eos_ids=models.eos_ids,
        vocabulary=models.vocabulary,
        write=lambda _, table: parts.append(table.select(["token_id", "kl"])),
    )
    table = pa.concat_tables(parts)
    kl_N = table["kl"].to_numpy().astype(float)
    rock_N, valid_N = np.isin(table["token_id"].to_numpy(), rocks), np.isfinite(kl_N)
    found = {}
    for name, mask_N in (("heldout_loss_rocks", rock_N & valid_N), ("heldout_loss_rest", ~rock_N & valid_N)):
        found[name] = float(kl_N[mask_N].mean()) if mask_N.any() else None
    return found
