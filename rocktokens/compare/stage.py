"""The stage `compare`: train the regimes from one start, evaluate them on the same prompts, say what follows.

This module says which trainings there are, in which order, and when a regime has enough of them, and writes the files.
The trainings themselves are compare_arms.py's, the regimes core/comparison/regimes.py's, the comparison
core/comparison/compare.py's. Trainings of one seed come one after the other, so that a slow hour of the machine meets
all regimes alike; several processes share them out.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from pathlib import Path

from rocktokens.bypass.stage import write_comparison_back
from rocktokens.compare.regimes import SHADOWS, FrozenSets, check_arms, common_base, regime_config
from rocktokens.compare.sets import frozen_ids, frozen_sets, regimes_to_train
from rocktokens.compare.settings import CompareConfig
from rocktokens.compare.tables import write_comparison
from rocktokens.compare.terminal import show
from rocktokens.compare.trainings import (
    ARMS,
    BESIDE,
    Bench,
    Plan,
    check_arms_on_disk,
    make_bench,
    train_and_read,
)
from rocktokens.errors import ConfigError, RunError
from rocktokens.files import digest_of_value, failing
from rocktokens.lock import working_on
from rocktokens.models.settings import PairConfig
from rocktokens.permissions import refuse_code
from rocktokens.ranks import ranks, wait_for
from rocktokens.run import Run, open_run
from rocktokens.select.adaptive import least_updates
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import from_manifest
from rocktokens.stage import Stage, inputs_of, pair_of, prompts_of
from rocktokens.train.settings import DistillConfig
from rocktokens.values import Json
from rocktokens.workers import apart_from_torchrun

log = logging.getLogger(__name__)

REPLACED = ".compare-replaced"


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
        if run.done("compare") and stage.changed_settings():
            raise ConfigError(
                f"of the regimes {', '.join(plan.config.regimes)} only uniform is left to train: there is nothing to "
                "compare, and the comparison that is there stays. Name another regime, or token ids with --rocks"
            )
        if ranks().is_first:
            run.reopen("compare")
        log.warning("only uniform is left to train: there is nothing to compare, and the stage is left out")
        return
    _train_all(plan, make_bench(plan, servers))
    if not ranks().is_first:
        return
    if plan.folder != ARMS:
        _replace_arms(run, plan.folder)
        plan = dataclasses.replace(plan, folder=ARMS)
    arms = {key: open_run(plan.directory(*key)) for key in plan.arms}
    facts: Json = {"normalise": plan.base.normalise, "steps": plan.base.steps}
    facts |= {"schedule": plan.base.schedule}
    facts["start"] = plan.config.start or 0
    facts |= {"rocks": list(plan.sets.rocks), "bypass": list(plan.sets.bypass)}
    facts["frozen_by"] = {name: list(ids) for name, ids in frozen_ids(plan.arms).items()}
    facts["frozen"] = facts["frozen_by"].get("freeze") or facts["frozen_by"].get("freeze_rocks") or []
    if not facts["frozen"]:
        which = "no rock is declared" if not plan.sets.rocks else "no declared rock is on the bypass list"
        facts["nothing_to_freeze"] = f"nothing was frozen: {which}"
    readings = write_comparison(stage, arms, plan.config, facts)
    if servers.teacher:
        plan.parts().clear()
    shutil.rmtree(run.path / REPLACED, ignore_errors=True)
    write_comparison_back(run)
    show(readings, plan.config, run.facts("compare"))


def _train_all(plan: Plan, bench: Bench) -> None:
    """Train what is asked for; the first process waits for the others' trainings."""
    keys = list(plan.arms)
    check_arms_on_disk(plan, keys, len(bench.problems))
    train_and_read(plan, bench, keys)
    if ranks().is_first:
        wait_for(lambda: all(plan.is_read(key) for key in keys), "others' trainings")


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
    """The trainings of a comparison, one per regime and seed.

    Refused before anything is trained if one cannot be made or differs from the others in more than its regime.
    """
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
    if config.start:
        _warn_of_a_higher_rate(run, base.learning_rate, config.start)
    arms: dict[tuple[int, str], DistillConfig] = {}
    for seed in range(config.first_seed, config.first_seed + config.seeds):
        configs: dict[str, DistillConfig] = {}
        for name in regimes:
            configs[name] = regime_config(name, base, config, seed=seed, sets=sets)
        check_arms(configs)
        configs["uniform"] = dataclasses.replace(configs["uniform"], shadows=_shadows(sets))
        arms |= {(seed, name): configs[name] for name in regimes}
    pair = pair_of(run)
    pair = dataclasses.replace(pair, student=_start(run, pair, trained, config.start))
    folder = BESIDE if beside and (run.path / ARMS).exists() else ARMS
    return Plan(run, config, pair, prompts_of(run), base, sets, arms, folder)


def _shadows(sets: FrozenSets) -> tuple[str, ...]:
    """The selectors that run in uniform's shadow."""
    return tuple(name for name in SHADOWS if name != "freeze_rocks" or sets.rocks)


def _start(run: Run, pair: PairConfig, trained: DistillConfig, step: int | None) -> str:
    """The checkpoint that is asked for, else the model that OPD started from; with adapters, the model under them."""
    if trained.lora_rank is not None:
        if step is not None:
            raise ConfigError(
                f"start = {step} names a checkpoint of adapters, and regimes are trained from a whole model; leave "
                "--start out, or distil without --lora-rank"
            )
        off_policy = run.path / "checkpoints" / "off_policy"
        return str(off_policy) if off_policy.is_dir() else pair.student
    if 0 not in run.checkpoints():
        raise RunError(f"{run.path} does not keep the checkpoint that OPD started from; distil it again to compare")
    if step is not None and step not in run.checkpoints():
        kept = ", ".join(map(str, run.checkpoints()))
        raise ConfigError(f"start = {step}, but {run.path} keeps the checkpoints {kept}; name one of these")
    return str(run.checkpoint(step or 0))


def _warn_of_a_higher_rate(run: Run, rate: float, step: int) -> None:
    """Where the rate had decayed and regimes take it up anew, even uniform may lose what it had gained."""
    rows = run.read("training").to_pylist()
    rates = [row["learning_rate"] for row in rows if row["step"] <= step and row.get("learning_rate") is not None]
    if rates and rates[-1] < max(rates) and rates[-1] < rate / 2:  # below its peak: decayed, not warming up
        log.warning(
            "the distillation had come down to a learning rate of %.1e at step %d; the regimes begin there with a new "
            "optimiser and a peak of %.1e, which may cost all of them accuracy at first (compare with "
            "the accuracy before training). --learning-rate sets a lower one",
            rates[-1],
            step,
            rate,
        )
