"""What a run in training shows: loss of rocks and rest, accuracy, kept share, and the newest rollouts.

Read from what the trainer writes while it runs (training.parquet, telemetry/), so watching costs it nothing. The
regimes of a comparison are runs of their own and are shown next to each other.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from rocktokens.facts import Facts
from rocktokens.report.conclusions import verdict
from rocktokens.report.page import REPORT
from rocktokens.report.viewer import Decode, rounded, token_text
from rocktokens.run import open_run
from rocktokens.show import visible
from rocktokens.values import Json, Row

MAX_POINTS = 600
NEWEST, MAX_TOKENS = 4, 400
"""Rollouts of the newest recorded step that are shown, and tokens of each."""
SERIES = ("loss", "loss_rocks", "loss_rest", "kept_share")


def live_data(path: Path, decode: Decode | None = None) -> Json:
    """Everything that the live page draws, as plain values."""
    run = open_run(path)
    facts, telemetry = Facts(run), _telemetry(path, last=5)
    rocks, how = _rocks(facts, telemetry)
    curves = {"distillation": _curve(path / "training.parquet")}
    for arm in sorted(path.glob("compare/*/seed=*/training.parquet")):
        curves[f"{arm.parent.parent.name}, {arm.parent.name}"] = _curve(arm)
    return {
        "name": facts.name,
        "title": verdict(facts).title,
        "complete": [stage for stage in run.manifest["stages"] if "/" not in stage],
        "steps": run.manifest["config"].get("distill", {}).get("steps"),
        "curves": {name: curve for name, curve in curves.items() if curve},
        "rollouts": _newest(facts, telemetry, rocks, decode),
        "rocks": how,
        "report": (path / REPORT).is_file(),
    }


def _curve(path: Path) -> dict[str, list[Any]] | None:
    """Columns of a training record, thinned; None where there is none yet or it is being replaced."""
    try:
        rows = pq.read_table(path).to_pylist() if path.is_file() else []
    except (OSError, pa.ArrowInvalid):
        return None
    rows = [row for row in rows if row.get("step") is not None]
    if not rows:
        return None
    thin = [row for row in rows if row["step"] > 0]
    thin = thin[:: max(1, math.ceil(len(thin) / MAX_POINTS))]
    series = {name: [_number(row.get(name)) for row in thin] for name in SERIES}
    keys = ("step", "accuracy", "accuracy_low", "accuracy_high")
    return {
        "step": [row["step"] for row in thin],
        **{name: values for name, values in series.items() if any(value is not None for value in values)},
        "evaluations": [[_number(row.get(key)) for key in keys] for row in rows if row.get("accuracy") is not None],
    }


def _number(value: Any) -> float | None:
    return rounded(value, 5) if isinstance(value, int | float) else None


def _rocks(facts: Facts, telemetry: list[pa.Table]) -> tuple[set[int], str]:
    """The rocks, or while nothing was detected the types that cost most in what was recorded so far."""
    if facts.rock_ids:
        return facts.rock_ids, "rocks"
    if facts.types:
        return set(), "no rocks were declared"
    how = "costly so far: more than 2 % of the loss at more than twice the mean; not yet tested"
    if not telemetry:
        return set(), how
    kept = pa.concat_tables([table.select(["token_id", "kl"]) for table in telemetry])
    kept = kept.filter(pc.is_finite(kept["kl"]))
    total, mean = pc.sum(kept["kl"]).as_py() or 0.0, pc.mean(kept["kl"]).as_py() or 0.0
    rows = kept.group_by("token_id").aggregate([("kl", "sum"), ("kl", "mean")]).to_pylist()
    costly = [row for row in rows if row["kl_sum"] > 0.02 * total and row["kl_mean"] > 2 * mean]
    return {row["token_id"] for row in costly}, how


def _telemetry(path: Path, last: int) -> list[pa.Table]:
    """Occurrences of the newest recorded training steps, oldest first."""
    folders = sorted(path.glob("telemetry/step=*"), key=lambda item: int(item.name.removeprefix("step=")))
    tables = []
    for folder in folders[-last:]:
        try:
            tables.append(ds.dataset(folder, format="parquet").to_table())
        except (OSError, pa.ArrowInvalid, ValueError):
            continue  # being written; the next refresh has it
    return tables


def _newest(facts: Facts, telemetry: list[pa.Table], rocks: set[int], decode: Decode | None) -> list[Json]:
    """Rollouts of the newest recorded step with every token's cost."""
    found: dict[str, Row] = {}
    if telemetry:
        ordered = telemetry[-1].sort_by([("rollout_id", "ascending"), ("position", "ascending")])
        for row in ordered.to_pylist():
            if row["rollout_id"] not in found and len(found) == NEWEST:
                break
            own = found.setdefault(row["rollout_id"], {"id": row["rollout_id"], "tokens": []})
            if len(own["tokens"]) < MAX_TOKENS:
                text = visible(token_text(facts, row["token_id"], decode), flow=True)
                own["tokens"].append([text, _number(row["kl"]), row["token_id"] in rocks])
    return list(found.values())
