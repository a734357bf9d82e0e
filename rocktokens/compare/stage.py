"""The stage `compare`: train the regimes from one start, evaluate them on the same prompts, say what follows.

The driver lists one job per regime and seed (trainings.py), reads what they leave, compares it (judgement.py) and
writes the tables. Jobs of one seed follow each other, so that a slow hour of the machine affects all regimes alike.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from rocktokens.bypass import write_comparison_back
from rocktokens.compare.figures import sentences
from rocktokens.compare.judgement import Trained, savings, summary_row, values_by_prompt
from rocktokens.compare.regimes import OTHER_LOSS, common_base, frozen_sets, regime_config, regimes_to_train
from rocktokens.compare.settings import CompareConfig
from rocktokens.compare.trainings import START, Common, Training, evaluate_start, train_and_evaluate
from rocktokens.errors import ConfigError, RunError
from rocktokens.jobs import Place, keeping_workers
from rocktokens.jobs import run as run_jobs
from rocktokens.progress import console
from rocktokens.run import Run, digest_of_value, open_run, working_on
from rocktokens.select.interface import least_updates
from rocktokens.servers.settings import ServersConfig
from rocktokens.settings import from_manifest, refuse_code
from rocktokens.show import Column, Table, number, percent, plural, points
from rocktokens.stage import Stage, inputs_of, pair_of, prompts_of
from rocktokens.tables import COPIED, FLOP_STAGES, STEP_STAGES, TABLES, TRAINING_STAGES
from rocktokens.train.settings import DistillConfig
from rocktokens.values import Json, Row

log = logging.getLogger(__name__)

# `--again` trains in a folder of its own; the old trainings stay until the new ones are whole.
COMPARED, AGAIN, REPLACED = "compare", ".compare-again", ".compare-replaced"
ESTIMATORS = (
    "Accuracy and its change: mean over seeds and prompts, both random and crossed, paired by seed and prompt; t "
    "interval from a two-way layout with Satterthwaite's degrees of freedom. Reaching: monotone (isotonic) mean curve, "
    "interval from a bootstrap over seeds and prompts. Ratios of time: t interval over seeds on logarithms. Seconds "
    "are those of training, without evaluation, recording and saving. Losses: final student on rollouts common to all "
    "regimes, mean over positions; interval from the same two-way layout over seeds and the rollouts' prompts, with "
    "Hall's correction for skewness; differences to uniform paired by both. Lengths and truncation likewise."
)


def compare(
    path: Path,
    config: CompareConfig,
    *,
    servers: ServersConfig | None = None,
    again: bool = False,
    place: Place = Place(),  # noqa: B008 - frozen
) -> Run:
    """Train and evaluate the regimes; writes compare.parquet and its companions, prints the tables and the verdicts."""
    with working_on(path):
        run = open_run(path)
        sets = frozen_sets(run, config)
        inputs = inputs_of(run, files=("rollouts.parquet",), stages=("distill",))
        inputs["the rocks"], inputs["the bypass list"] = (digest_of_value(list(s)) for s in (sets.rocks, sets.bypass))
        stage = Stage(run, "compare", {"compare": config}, inputs)
        if not stage.due(again):
            return run
        is_there = any((run.path / name).exists() for name in (COMPARED, AGAIN))
        folder = run.path / (AGAIN if again and is_there else COMPARED)
        trainings = plan_trainings(run, config, folder, servers or ServersConfig())
        if {training.regime for training in trainings} == {"uniform"}:
            if run.done("compare") and stage.changed_settings():
                raise ConfigError(
                    f"of the regimes {', '.join(config.regimes)} only uniform is left to train: there is nothing to "
                    "compare, and the comparison that is there stays. Name another regime, or token ids with --rocks"
                )
            run.reopen("compare")  # an older comparison was of rocks that are no longer declared
            log.warning("only uniform is left to train: there is nothing to compare, and the stage is left out")
            return run
        _train_all(trainings, place)
        if folder.name == AGAIN:
            shutil.rmtree(run.path / REPLACED, ignore_errors=True)
            if (run.path / COMPARED).exists():
                (run.path / COMPARED).rename(run.path / REPLACED)
            folder.rename(run.path / COMPARED)
            shutil.rmtree(run.path / REPLACED, ignore_errors=True)
        made = {(t.seed, t.regime): open_run(run.path / COMPARED / t.regime / f"seed={t.seed}") for t in trainings}
        base = trainings[0].distill
        frozen = {t.regime: list(t.distill.selector.rocks) for t in trainings if t.distill.selector.rocks}
        facts: Json = {"normalise": base.normalise, "steps": base.steps, "start": config.start or 0}
        facts |= {"frozen_by": frozen, "frozen": frozen.get("freeze") or frozen.get("freeze_rocks") or []}
        if not facts["frozen"]:
            which = "no rock is declared" if not sets.rocks else "no declared rock is on the bypass list"
            facts["nothing_to_freeze"] = f"nothing was frozen: {which}"
        write_comparison(stage, made, config, facts)
        write_comparison_back(run)
        _show(run.facts("compare"))
        return run


def _train_all(trainings: Sequence[Training], place: Place) -> None:
    """Do every job that is not done; trainings on disk that were made with other settings are refused first."""
    base, folder = trainings[0].distill, trainings[0].common.folder
    starts = [replace(t, regime=START) for t in trainings if t.regime == "uniform"]
    try:
        for training in (*starts, *trainings):
            if training.directory.exists():
                training.open()
    except RunError as error:
        if folder.name != AGAIN:
            raise RunError(f"{error} Or pass --again to train every regime anew.") from error
        shutil.rmtree(folder)  # a stopped `--again` with other settings
    with keeping_workers():
        run_jobs([t.job() for t in starts], evaluate_start, place, what="evaluating the start", unit="seeds")
        every = [training.job(base.steps + base.keep) for training in trainings]
        what = f"comparing {plural(len(trainings), 'training')}"
        run_jobs(every, train_and_evaluate, place, what=what, unit="steps and evaluations")


def plan_trainings(run: Run, config: CompareConfig, folder: Path, servers: ServersConfig) -> list[Training]:
    """One training per regime and seed, uniform first.

    Refused before anything is trained if one cannot be made or differs from the others in more than its regime.
    """
    for needed, why in (("distill", "regimes repeat it"), ("sample", "losses are measured on its rollouts")):
        if not run.done(needed):
            raise RunError(f"{run.path}: run `rocktokens {needed} {run.path}` first; {why}")
    trained = from_manifest(DistillConfig, run.manifest["config"].get("distill") or {}, "distill")
    for name in (trained.selector.name, *trained.shadows):
        refuse_code(str(run.path), "selector", name)
    own = run.facts("distill")  # the first part of a training that was continued
    own = {"steps": own["steps_before"][0]} if "steps_before" in own else own
    base = common_base(trained, config, steps=config.steps or own["steps"])
    sets = frozen_sets(run, config)
    regimes = regimes_to_train(run, config, sets)
    if "adaptive" in regimes and base.steps <= least_updates():
        watched = f"adaptive watches {least_updates()} steps before it freezes anything"
        log.warning("%s: in %d it trains as uniform; compare more steps", watched, base.steps)
    trained_rows, rate = run.read("training").to_pylist(), base.learning_rate
    rates = [row["learning_rate"] for row in trained_rows if row["step"] <= (config.start or 0)]
    rates = [known for known in rates if known is not None]
    if rates and rates[-1] < max(rates) and rates[-1] < rate / 2:  # below its peak: decayed, not warming up
        log.warning(
            "the distillation had come down to a learning rate of %.1e at step %d; the regimes begin there with a new "
            "optimiser and a peak of %.1e, which may cost all of them accuracy at first. --learning-rate sets a lower",
            *(rates[-1], config.start, rate),
        )
    pair = replace(pair_of(run), student=_start(run, trained, config.start))
    contexts = run.path / "rollouts.parquet"
    common = Common(folder, pair, prompts_of(run), config, servers, sets.rocks, base.max_new_tokens, contexts)
    return [
        Training(name, seed, regime_config(name, base, config, seed=seed, sets=sets), common)
        for seed in range(config.seeds)
        for name in regimes
    ]


def _start(run: Run, trained: DistillConfig, step: int | None) -> str:
    """The checkpoint that is asked for, else the model that OPD started from; with adapters, the model under them."""
    if trained.has_adapters:
        if step is not None:
            raise ConfigError(
                f"start = {step} names a checkpoint of adapters, and regimes are trained from a whole model; leave "
                "--start out, or distil the whole student"
            )
        off_policy = run.path / "checkpoints" / "off_policy"
        return str(off_policy) if off_policy.is_dir() else pair_of(run).student
    if (step or 0) not in run.checkpoints():
        kept = ", ".join(map(str, run.checkpoints())) or "none"
        raise ConfigError(f"start = {step or 0}, but {run.path} keeps the checkpoints {kept}; name one of these")
    return str(run.checkpoint(step or 0))


# ---------------------------------------------------------------- from what trainings left to tables


def write_comparison(stage: Stage, made: Mapping[tuple[int, str], Run], config: CompareConfig, facts: Json) -> None:
    """Compare all trainings ((seed, regime) → its run), write the tables, and complete the stage."""
    steps, outcomes, by_regime = list[pa.Table](), list[pa.Table](), dict[str, list[Trained]]()
    for (seed, regime), run in made.items():
        rows, own = _step_rows(run, regime, seed), _outcomes(run, regime, seed)
        by_regime.setdefault(regime, []).append(_trained(run, rows, own))
        steps.append(pa.Table.from_pylist(rows, schema=TABLES["compare"].schema))
        outcomes.append(own)
    tokens = min(
        float(trained.x["tokens"][-1]) for own in by_regime.values() for trained in own
    )  # all have spent these
    summary = [summary_row(own, by_regime["uniform"], config, tokens=tokens) for own in by_regime.values()]
    saved = savings(by_regime, tokens=tokens)
    tables = {"compare": pa.concat_tables(steps), "compare_problems": pa.concat_tables(outcomes)}
    for name, rows in (("compare_summary", summary), ("compare_savings", saved)):
        tables[name] = pa.Table.from_pylist(rows, schema=TABLES[name].schema)
    found: Json = {"regimes": summary, "savings": saved, "equal_tokens": tokens}
    found |= {"estimators": ESTIMATORS, "verdicts": sentences(summary, saved, config)}
    stage.publish(tables, {**facts, **found})


def _step_rows(run: Run, regime: str, seed: int) -> list[Row]:
    """One row per optimiser step of a training, and one for the start; accuracy and held-out losses where evaluated."""
    rows = {row["step"]: row for row in run.read("training").to_pylist() if row["step"] > 0}
    made: list[Row] = []
    totals = {"seconds_total": 0.0, "flops_total": 0.0, "tokens_total": 0}
    for step in [0, *sorted(rows)]:
        row = rows.get(step, {})
        # Evaluation, recording and saving are not training.
        aside = sum(row.get(f"seconds_{stage}") or 0.0 for stage in STEP_STAGES if stage not in TRAINING_STAGES)
        seconds = max((row.get("seconds") or 0.0) - aside, 0.0)
        stages = {f"seconds_{stage}": row.get(f"seconds_{stage}") or 0.0 for stage in TRAINING_STAGES}
        stages["seconds_other"] = max(seconds - sum(stages.values()), 0.0)
        flops = {f"flops_{stage}": row.get(f"flops_{stage}") or 0.0 for stage in FLOP_STAGES}
        totals["seconds_total"] += seconds
        totals["flops_total"] += sum(flops.values())
        totals["tokens_total"] += (row.get("tokens") or 0) + (row.get("scored") or 0)
        copied = {name: row.get(name) for name in COPIED}
        made.append(
            {"regime": regime, "seed": seed, "step": step, "seconds": seconds, **totals, **copied, **stages, **flops}
        )
        if run.done(f"read/step={step}"):
            accuracy = float(run.read(f"problems/step={step}")["correct"].to_numpy().mean())
            made[-1] |= {"accuracy": accuracy, **run.facts(f"read/step={step}")}
    return made


def _outcomes(run: Run, regime: str, seed: int) -> pa.Table:
    """Outcomes of every held-out prompt at every evaluation."""
    parts = []
    for step in sorted(int(name.partition("=")[2]) for name in run.manifest["stages"] if name.startswith("read/")):
        table = run.read(f"problems/step={step}")
        named = {"regime": [regime] * len(table), "seed": [seed] * len(table), "step": [step] * len(table)}
        parts.append(pa.table({**named, **{name: table[name] for name in table.column_names}}))
    return pa.concat_tables(parts)


def _trained(run: Run, rows: Sequence[Row], outcomes: pa.Table) -> Trained:
    """A training's tables as the arrays that comparisons are made of."""
    regime = rows[0]["regime"]
    read = [row for row in rows if row.get("accuracy") is not None]
    trained = [row for row in rows if row["tokens"]]
    tokens = float(sum(row["tokens"] for row in trained))
    axes = {"steps": "step", "seconds": "seconds_total", "flops": "flops_total", "tokens": "tokens_total"}
    step_N, last = outcomes["step"].to_numpy(), read[-1]["step"]
    correct_N, length_N, cut_N = (outcomes[name].to_numpy() for name in ("correct", "length", "truncated"))
    loss_C, losses = {}, run.read(f"losses/step={last}")
    for name, own in (("rocks", "rock"), ("rest", "rest")):
        positions_C = losses[f"{own}_positions"].to_numpy()
        if positions_C.sum():
            loss_C[name] = values_by_prompt(losses[f"{own}_loss"].to_numpy(), positions_C)

    def mean(name: str) -> float | None:
        """Over the tokens of the steps in which it was recorded."""
        known = [row for row in trained if row[name] is not None]
        total = sum(row["tokens"] for row in known)
        return float(sum(row[name] * row["tokens"] for row in known) / total) if known else None

    audit = {"bite_tokens": mean("changed_share"), "bite_loss": mean("changed_loss_share")}
    if regime in OTHER_LOSS:  # another loss changes every token
        audit = {"bite_tokens": 1.0, "bite_loss": 1.0}
    return Trained(
        regime=regime,
        seed=rows[0]["seed"],
        x={axis: np.array([row[column] for row in read], float) for axis, column in axes.items()},
        correct_EP=np.stack([correct_N[step_N == row["step"]] for row in read]),
        kept_share=sum(row["kept_share"] * row["tokens"] for row in trained) / max(tokens, 1.0),
        tokens=tokens,
        loss_C=loss_C,
        length_P=length_N[step_N == last],
        truncated_P=cut_N[step_N == last],
        audit=audit | {"end_dropped": mean("end_dropped_share")},
    )


# ---------------------------------------------------------------- what is printed


COLUMNS = (  # the report and --json hold what else was measured
    Column("regime", "regime"),
    Column("accuracy", "accuracy", percent),
    Column("change [95 %]", "delta", points, interval=True),
    Column("FLOPs ×", "flops_ratio", number),
    Column("verdict", "verdict"),
)


def _show(facts: Json) -> None:
    """Print the table and the verdicts."""
    uniform = facts["regimes"][0]
    rows = [uniform | dict.fromkeys(("delta", "verdict")), *facts["regimes"][1:]]  # uniform against itself is empty
    start = f"the checkpoint at step {facts['start']}" if facts.get("start") else "one start"
    trained = f"{facts['steps']} steps, {plural(uniform['num_seeds'], 'seed')}, {uniform['num_problems']} prompts"
    over = "seeds and prompts" if uniform["over_seeds"] else "prompts only (an interval over seeds needs three of them)"
    caption = f"loss divided by {facts['normalise']} tokens; changes in points against uniform, intervals over {over}"
    out = console()
    out.print(Table(COLUMNS, rows, title=f"Regimes from {start}: {trained}", caption=[caption]))
    for sentence in facts["verdicts"]:
        out.print(sentence, markup=False)  # “[not reached, …]” is an interval, not a style
