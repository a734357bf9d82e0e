"""A census as a table and as the facts of a manifest. It arranges numbers and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rocktokens.causal.census import Census, SetResult
from rocktokens.causal.inference import NEVER_USED

LEVELS = (0.05, 0.10, 0.20)
NUMBERS = (
    *("num_used", "used_share", "num_problems", "num_changed", "delta", "low", "high"),
    *("outer_low", "outer_high", "inner_low", "inner_high", "accuracy_with"),
    *("p", "p_bonferroni", "p_bh", "p_neutral", "sd", "detectable"),
    *("placebo_delta", "placebo_floor", "round", "alpha_share", "more_problems", "num_resumed", "num_tokens"),
)


def census_table(census: Census) -> pa.Table:
    """census.parquet: one row per set; what is not known is null."""
    results = census.results
    columns: dict[str, pa.Array] = {
        "set_id": pa.array([r.banned.set_id for r in results]),
        "role": pa.array([r.banned.role for r in results]),
        "kind": pa.array([r.banned.kind for r in results]),
        "token_id": pa.array([r.banned.token_id for r in results], pa.int32()),
        "token": pa.array([r.banned.token for r in results]),
        "members": pa.array([list(r.banned.members) for r in results], pa.list_(pa.int32())),
        "control_of": pa.array([r.banned.control_of for r in results], pa.string()),
        "verdict": pa.array([r.verdict for r in results]),
    }
    for name in NUMBERS:
        label = {"low": "delta_low", "high": "delta_high"}.get(name, name)
        columns[label] = _numbers([getattr(r, name) for r in results])
    columns["accuracy_without"] = _numbers([min(max(r.accuracy_with + r.delta, 0.0), 1.0) for r in results])
    for level in LEVELS:
        columns[f"bh_{round(100 * level):02d}"] = pa.array([bool(r.p_bh <= level) for r in results])
    return pa.table(columns)


def _numbers(values: Sequence[float]) -> pa.Array:
    array = np.asarray(values)
    return pa.array(array, mask=~np.isfinite(array)) if array.dtype.kind == "f" else pa.array(array)


def census_facts(census: Census) -> dict:
    """The few numbers a manifest keeps."""
    used = [r for r in census.results if r.verdict != NEVER_USED]
    floors = [r.placebo_floor for r in used if np.isfinite(r.placebo_floor)]
    resumed = sum(r.num_tokens for r in census.results)
    return {
        "verdicts": census.counts(),
        "control_verdicts": census.counts("control"),
        "accuracy": census.accuracy.value,
        "accuracy_low": census.accuracy.low,
        "accuracy_high": census.accuracy.high,
        "num_problems": census.accuracy.num_prompts,
        "num_rollouts": census.baseline_rollouts,
        "rounds": census.num_rounds,
        "epsilon": census.epsilon,
        "alpha": census.alpha,
        "power": census.power,
        "smallest_detectable_effect": _plain(median_detectable(last_look(census))),
        "noise_floor": max(floors, default=None),
        "placebo_strong": list(census.placebo_strong),
        "baseline_tokens": census.baseline_tokens,
        "resumed_tokens": resumed,
        "exact_resume": census.exact_resume,
        "more_problems": max((r.more_problems for r in census.results), default=0),
        "notes": list(census.notes),
    }


def _plain(value: float) -> float | None:
    return value if np.isfinite(value) else None


def last_look(census: Census) -> list[SetResult]:
    """The sets that were tested on every problem; all others were decided before."""
    return [r for r in census.results if r.num_problems == census.accuracy.num_prompts and r.verdict != NEVER_USED]


def median_detectable(results: Sequence[SetResult]) -> float:
    """Median of the smallest effects that these sets could show; NaN where there are none."""
    return float(np.median([r.detectable for r in results])) if results else float("nan")
