"""From trained and evaluated regimes to compare.parquet, its companions and a results file.

Seconds here are those of training: evaluation happens outside of it, and recording and saving are taken off. This
module reads what the arms left; the numbers are core/comparison/compare.py's and the words
report/conclusions/compare.py's.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rocktokens.config import CompareConfig
from rocktokens.core.accuracy import accuracy_estimate
from rocktokens.core.comparison.compare import Arm, Reading, read_regime
from rocktokens.core.comparison.regimes import SAMPLE_LESS
from rocktokens.core.seeds import derive_seed
from rocktokens.errors import DataError
from rocktokens.report.conclusions.compare import words
from rocktokens.runs.files import require_writable as require_writable
from rocktokens.runs.schema import COPIED, FLOP_STAGES, STEP_STAGES, TABLES, TRAINING_STAGES
from rocktokens.runs.store import Run
from rocktokens.stages.stage import Stage

ESTIMATORS = (
    "Accuracy and its change: mean over seeds and problems, both random and crossed, paired by seed and problem; t "
    "interval from a two-way layout with Satterthwaite's degrees of freedom. Area: mean of the piecewise linear "
    "accuracy curve over uniform's steps or seconds; a regime that ends earlier holds its last value and is given no "
    "further steps. Reaching: monotone (isotonic) mean curve, interval from a bootstrap over seeds and problems. "
    "Ratios of time: t interval over seeds on logarithms. Seconds are those of training, without evaluation, recording "
    "and saving. Losses: final student on rollouts common to all regimes, t interval over seeds."
)


def write_comparison(
    stage: Stage, arms: Mapping[tuple[int, str], Run], config: CompareConfig, facts: dict[str, Any]
) -> dict[str, Reading]:
    """Read all arms, write the tables, and complete the stage."""
    parts, outcomes, made = [], [], []
    for (seed, regime), arm in arms.items():
        table, problems = arm_table(arm, regime, seed), _problems(arm, regime, seed)
        parts.append(table)
        outcomes.append(problems)
        made.append(arm_of(regime, seed, table, problems, clock=config.clock))
    readings = read_all(made, config)
    verdicts = words(readings, margin=config.margin)
    rows = [reading.row() for reading in readings.values()]
    tables = {"compare": pa.concat_tables(parts), "compare_problems": pa.concat_tables(outcomes)}
    tables["compare_summary"] = pa.Table.from_pylist(rows, schema=TABLES["compare_summary"].schema)
    stage.publish(tables, {**facts, "regimes": rows, "verdicts": verdicts, "estimators": ESTIMATORS})
    return readings


def arm_table(arm: Run, regime: str, seed: int) -> pa.Table:
    """One row per optimiser step of an arm, and one for the start; accuracy and held-out losses where it was read."""
    rows = {row["step"]: row for row in arm.read("training").to_pylist() if row["step"] > 0}
    made, seconds_total, processor_total, flops_total = [], 0.0, 0.0, 0.0
    for step in [0, *sorted(rows)]:
        row = rows.get(step, {})
        aside = sum(row.get(f"seconds_{stage}") or 0.0 for stage in STEP_STAGES if stage not in TRAINING_STAGES)
        seconds = max((row.get("seconds") or 0.0) - aside, 0.0)
        stages = {f"seconds_{stage}": row.get(f"seconds_{stage}") or 0.0 for stage in TRAINING_STAGES}
        flops = {f"flops_{stage}": row.get(f"flops_{stage}") or 0.0 for stage in FLOP_STAGES}
        processor = row.get("seconds_processor") or 0.0
        seconds_total += seconds
        processor_total += processor
        flops_total += sum(flops.values())
        found = {"regime": regime, "seed": seed, "step": step, **_reading(arm, step)}
        found |= {"seconds": seconds, "seconds_total": seconds_total, "seconds_processor": processor}
        found |= {"seconds_processor_total": processor_total, "flops_total": flops_total}
        found |= {name: row.get(name) for name in COPIED}
        made.append({**found, **stages, "seconds_other": max(seconds - sum(stages.values()), 0.0), **flops})
    return pa.Table.from_pylist(made, schema=TABLES["compare"].schema)


def _reading(arm: Run, step: int) -> dict[str, float | None]:
    names = ("accuracy", "accuracy_low", "accuracy_high", "heldout_loss_rocks", "heldout_loss_rest")
    if not arm.done(f"read/step={step}"):
        return dict.fromkeys(names)
    correct_P = arm.read(f"problems/step={step}")["correct"].to_numpy()
    interval = accuracy_estimate(correct_P, rng=np.random.default_rng(derive_seed("interval", step)), resamples=500)
    losses = arm.facts(f"read/step={step}")
    return dict(zip(names, (*interval[:3], losses["heldout_loss_rocks"], losses["heldout_loss_rest"])))


def _problems(arm: Run, regime: str, seed: int) -> pa.Table:
    parts = []
    for step in arm.facts("read")["steps"]:
        table = arm.read(f"problems/step={step}")
        named = {"regime": [regime] * len(table), "seed": [seed] * len(table), "step": [step] * len(table)}
        parts.append(pa.table({**named, **{name: table[name] for name in table.column_names}}))
    return pa.concat_tables(parts)


def arm_of(regime: str, seed: int, table: pa.Table, problems: pa.Table, *, clock: str = "wall") -> Arm:
    """An arm's tables as the arrays that readings are made of."""
    total = "seconds_total" if clock == "wall" else "seconds_processor_total"
    rows = table.to_pylist()
    read = [row for row in rows if row["accuracy"] is not None]
    trained = [row for row in rows if row["tokens"]]
    tokens = float(sum(row["tokens"] for row in trained))
    if read[-1][total] <= 0:
        raise DataError(f"regime {regime} has no {clock} seconds on record; read by the other clock, or train --again")
    step_N, correct_N = problems["step"].to_numpy(), problems["correct"].to_numpy()
    return Arm(
        regime=regime,
        seed=seed,
        step_E=np.array([row["step"] for row in read], float),
        seconds_E=np.array([row[total] for row in read], float),
        flops_E=np.array([row["flops_total"] for row in read], float),
        correct_EP=np.stack([correct_N[step_N == row["step"]] for row in read]),
        kept_share=sum(row["kept_share"] * row["tokens"] for row in trained) / max(tokens, 1.0),
        tokens=tokens,
        samples_less=regime in SAMPLE_LESS,
        loss_rocks=read[-1]["heldout_loss_rocks"],
        loss_rest=read[-1]["heldout_loss_rest"],
        stages={s: sum(row[f"seconds_{s}"] for row in rows) for s in (*TRAINING_STAGES, "other")},
    )


def read_all(arms: list[Arm], config: CompareConfig) -> dict[str, Reading]:
    """Every regime against uniform, uniform itself first."""
    by_regime: dict[str, list[Arm]] = {}
    for arm in arms:
        by_regime.setdefault(arm.regime, []).append(arm)
    return {
        regime: read_regime(
            own,
            by_regime["uniform"],
            margin=config.margin,
            level=config.level,
            resamples=config.resamples,
            rng=np.random.default_rng(derive_seed("compare", regime)),
        )
        for regime, own in by_regime.items()
    }


def save_results(run: Run, path: Path) -> None:
    """The comparison with its circumstances as one JSON file: command, versions, hardware, commit, date."""
    import psutil

    facts = run.facts("compare")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    environment = {
        "command": shlex.join(["rocktokens", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() or None,
        "cpu": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg()[0],
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "versions": run.manifest["versions"],
    }
    sections = ("prompts", "distill", "detect", "compare")
    settings = {name: run.manifest["config"][name] for name in sections if name in run.manifest["config"]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment, "settings": settings, "results": facts}, indent=2) + "\n")
