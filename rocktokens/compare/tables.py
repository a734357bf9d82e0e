"""From trained and evaluated regimes to compare.parquet, its companions and a results file.

Seconds here are those of training: evaluation happens outside of it, and recording and saving are taken off. This
module reads what the trainings left; the numbers are core/comparison/compare.py's and the words
report/conclusions/compare.py's.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocktokens.accuracy import accuracy_estimate
from rocktokens.compare.conclusions import words
from rocktokens.compare.curves import Arm, Audit, Floats
from rocktokens.compare.intervals import values_by_prompt
from rocktokens.compare.judgement import Reading, read_regime
from rocktokens.compare.regimes import OTHER_LOSS, SAMPLE_LESS
from rocktokens.compare.savings import common_tokens, savings
from rocktokens.compare.settings import CompareConfig
from rocktokens.errors import DataError
from rocktokens.files import require_writable as require_writable
from rocktokens.run import Run
from rocktokens.seeds import derive_seed
from rocktokens.stage import Stage
from rocktokens.tables import COPIED, FLOP_STAGES, STEP_STAGES, TABLES, TRAINING_STAGES
from rocktokens.values import Json, Row

ESTIMATORS = (
    "Accuracy and its change: mean over seeds and problems, both random and crossed, paired by seed and problem; t "
    "interval from a two-way layout with Satterthwaite's degrees of freedom. Area: mean of the piecewise linear "
    "accuracy curve over uniform's steps or seconds; a regime that ends earlier holds its last value and is given no "
    "further steps. Reaching: monotone (isotonic) mean curve, interval from a bootstrap over seeds and problems. "
    "Ratios of time: t interval over seeds on logarithms. Seconds are those of training, without evaluation, recording "
    "and saving. Losses: final student on rollouts common to all regimes, mean over positions; interval from the "
    "same two-way layout over seeds and the rollouts' prompts, with Hall's correction for skewness; differences to "
    "uniform paired by both. Lengths and truncation likewise."
)


def write_comparison(
    stage: Stage, arms: Mapping[tuple[int, str], Run], config: CompareConfig, facts: Json
) -> dict[str, Reading]:
    """Compare all trainings, write the tables, and complete the stage."""
    parts = {key: arm_table(arm, key[1], key[0]) for key, arm in arms.items()}
    outcomes = {key: _problems(arm, key[1], key[0]) for key, arm in arms.items()}
    made = [
        arm_of(key[1], key[0], parts[key], outcomes[key], losses=losses_of(arm), clock=config.clock)
        for key, arm in arms.items()
    ]
    by_regime = grouped(made)
    tokens = common_tokens(by_regime)
    readings = read_all(made, config, tokens=tokens)
    saved = savings(by_regime, level=config.level, tokens=tokens)
    overlaps = overlap_rows([arm for (_, regime), arm in arms.items() if regime == "uniform"])
    verdicts = words(readings, margin=config.margin, savings=saved)
    rows = {
        "compare_summary": [reading.row() for reading in readings.values()],
        "compare_savings": [saving.row() for saving in saved],
        "compare_overlap": overlaps,
    }
    tables = {
        "compare": pa.concat_tables(parts.values()),
    }
    tables["compare_problems"] = pa.concat_tables(outcomes.values(), promote_options="default")
    tables |= {name: pa.Table.from_pylist(own, schema=TABLES[name].schema) for name, own in rows.items()}
    found = {"regimes": rows["compare_summary"], "verdicts": verdicts, "estimators": ESTIMATORS, "equal_tokens": tokens}
    found |= {name: rows[f"compare_{name}"] for name in ("savings", "overlap")}
    found["before"] = _before([part for (_, regime), part in parts.items() if regime == "uniform"])
    stage.publish(tables, {**facts, **found})
    return readings


def _before(uniform: Sequence[pa.Table]) -> Row:
    """Accuracy and held-out losses of the student that every training starts from, means over seeds."""
    starts = [table.slice(0, 1).to_pylist()[0] for table in uniform]
    names = {"accuracy": "accuracy", "loss_rocks": "heldout_loss_rocks", "loss_rest": "heldout_loss_rest"}
    known = {name: [row[column] for row in starts if row[column] is not None] for name, column in names.items()}
    return {name: float(np.mean(values)) if values else None for name, values in known.items()}


def overlap_rows(uniform: Sequence[Run]) -> list[Row]:
    """What selectors would keep of uniform's rollouts, and how far any two agree: means over audits and seeds."""
    found: dict[tuple[str, str], list[float]] = {}
    kept: dict[str, list[float]] = {}
    for arm in uniform:
        table = arm.read("training")
        start = "shadow_kept_"
        shadows = sorted(name.removeprefix(start) for name in table.column_names if name.startswith(start))
        for name in shadows:
            kept.setdefault(name, []).extend(_known(table, f"shadow_kept_{name}"))
        for first, second in itertools.combinations(shadows, 2):
            values = _known(table, f"overlap_{first}_{second}") or _known(table, f"overlap_{second}_{first}")
            found.setdefault((first, second), []).extend(values)
    return [
        {
            "first": first,
            "second": second,
            "overlap": float(np.mean(values)),
            "kept_first": float(np.mean(kept[first])),
            "kept_second": float(np.mean(kept[second])),
        }
        for (first, second), values in found.items()
        if values and kept[first] and kept[second]
    ]


def _known(table: pa.Table, name: str) -> list[float]:
    values = table[name].to_pylist() if name in table.column_names else []
    return [value for value in values if value is not None]


def arm_table(arm: Run, regime: str, seed: int) -> pa.Table:
    """One row per optimiser step of a training, and one for the start; accuracy and held-out losses where evaluated."""
    rows = {row["step"]: row for row in arm.read("training").to_pylist() if row["step"] > 0}
    made, seconds_total, processor_total, flops_total, spent_total = [], 0.0, 0.0, 0.0, 0
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
        spent_total += (row.get("tokens") or 0) + (row.get("scored") or 0)
        found["tokens_total"] = spent_total
        found |= {name: row.get(name) for name in COPIED}
        made.append({**found, **stages, "seconds_other": max(seconds - sum(stages.values()), 0.0), **flops})
    return pa.Table.from_pylist(made, schema=TABLES["compare"].schema)


EVALUATED = ("heldout_loss_rocks", "heldout_loss_rest", "heldout_length", "heldout_truncated")


def _reading(arm: Run, step: int) -> dict[str, float | None]:
    names = ("accuracy", "accuracy_low", "accuracy_high")
    if not arm.done(f"read/step={step}"):
        return dict.fromkeys((*names, *EVALUATED))
    correct_P = arm.read(f"problems/step={step}")["correct"].to_numpy()
    interval = accuracy_estimate(correct_P, rng=np.random.default_rng(derive_seed("interval", step)), resamples=500)
    found = arm.facts(f"read/step={step}")
    return dict(zip(names, interval[:3])) | {name: found.get(name) for name in EVALUATED}


def _problems(arm: Run, regime: str, seed: int) -> pa.Table:
    parts = []
    for step in arm.facts("read")["steps"]:
        table = arm.read(f"problems/step={step}")
        named = {"regime": [regime] * len(table), "seed": [seed] * len(table), "step": [step] * len(table)}
        parts.append(pa.table({**named, **{name: table[name] for name in table.column_names}}))
    return pa.concat_tables(parts, promote_options="default")  # older evaluations have fewer columns


def losses_of(arm: Run) -> dict[str, Floats]:
    """The last evaluation's losses by prompt, for intervals; nothing where a training did not record them."""
    name, found = f"losses/step={arm.facts('read')['steps'][-1]}", dict[str, Floats]()
    if not arm.has(name):
        return found
    table = arm.read(name)
    for field, own in (("loss_rocks_C", "rock"), ("loss_rest_C", "rest")):
        positions_C = table[f"{own}_positions"].to_numpy()
        if positions_C.sum():
            found[field] = values_by_prompt(table[f"{own}_loss"].to_numpy(), positions_C)
    return found


def arm_of(
    regime: str,
    seed: int,
    table: pa.Table,
    problems: pa.Table,
    *,
    clock: str = "wall",
    losses: Mapping[str, Floats] | None = None,
) -> Arm:
    """A training's tables as the arrays that comparisons are made of.

    `losses`: its last held-out losses by prompt (`losses_of`), where they are on record.
    """
    total = "seconds_total" if clock == "wall" else "seconds_processor_total"
    everything = table.to_pylist()
    read = [row for row in everything if row["accuracy"] is not None]
    trained = [row for row in everything if row["tokens"]]
    tokens = float(sum(row["tokens"] for row in trained))
    if read[-1][total] <= 0:
        raise DataError(
            f"regime {regime} has no {clock} seconds on record; compare by the other clock, or train --again"
        )
    step_N, correct_N = problems["step"].to_numpy(), problems["correct"].to_numpy()
    spent_E = np.array([row["tokens_total"] for row in read], float)
    return Arm(
        regime=regime,
        seed=seed,
        step_E=np.array([row["step"] for row in read], float),
        seconds_E=np.array([row[total] for row in read], float),
        flops_E=np.array([row["flops_total"] for row in read], float),
        correct_EP=np.stack([correct_N[step_N == row["step"]] for row in read]),
        spent_E=spent_E,
        kept_share=sum(row["kept_share"] * row["tokens"] for row in trained) / max(tokens, 1.0),
        tokens=tokens,
        samples_less=regime in SAMPLE_LESS,
        loss_rocks=read[-1]["heldout_loss_rocks"],
        loss_rest=read[-1]["heldout_loss_rest"],
        **_lengths(problems, read[-1]["step"]),
        **(losses or {}),
        stages={s: sum(row[f"seconds_{s}"] for row in everything) for s in (*TRAINING_STAGES, "other")},
        audit=_audit(regime, trained, read[-1]),
    )


def _lengths(problems: pa.Table, step: int) -> dict[str, Floats]:
    """Lengths and truncation by prompt at one evaluation; nothing where they are not on record."""
    rows = problems.filter(pc.equal(problems["step"], step))
    known = [name for name in ("length", "truncated") if name in rows.column_names and not rows[name].null_count]
    return {f"{name}_P": rows[name].to_numpy() for name in known}


def _audit(regime: str, trained: Sequence[Row], last: Row) -> Audit:
    """Means over the steps in which each was recorded; another loss changes every token."""

    def mean(name: str) -> float | None:
        known = [row for row in trained if row[name] is not None]
        total = sum(row["tokens"] for row in known)
        return float(sum(row[name] * row["tokens"] for row in known) / total) if known else None

    if regime in OTHER_LOSS:
        shares: tuple[float | None, float | None] = (1.0, 1.0)
    else:
        shares = (mean("changed_share"), mean("changed_loss_share"))
    return Audit(*shares, mean("end_dropped_share"), last["heldout_length"], last["heldout_truncated"])


def grouped(arms: Sequence[Arm]) -> dict[str, list[Arm]]:
    """Trainings by regime."""
    found: dict[str, list[Arm]] = {}
    for arm in arms:
        found.setdefault(arm.regime, []).append(arm)
    return found


def read_all(
    arms: Sequence[Arm],
    config: CompareConfig,
    *,
    tokens: float | None = None,
) -> dict[str, Reading]:
    """Every regime against uniform, uniform itself first."""
    by_regime = grouped(arms)
    return {
        regime: read_regime(
            own,
            by_regime["uniform"],
            margin=config.margin,
            level=config.level,
            resamples=config.resamples,
            rng=np.random.default_rng(derive_seed("compare", regime)),
            tokens=tokens,
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
