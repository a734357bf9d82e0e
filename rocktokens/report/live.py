"""What a run in training shows: loss of rocks and rest, accuracy, kept share, and the newest rollouts.

Read from what the trainer writes while it runs (training.parquet, telemetry/), so watching costs it nothing. The
regimes of a comparison are runs of their own and are shown next to each other.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
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
    facts = Facts(run)
    curves = {"distillation": _curve(path / "training.parquet")}
    for arm in sorted(path.glob("compare/*/seed=*/training.parquet")):
        curves[f"{arm.parent.parent.name}, {arm.parent.name}"] = _curve(arm)
    return {
        "name": facts.name,
        "title": verdict(facts).title,
        "complete": [stage for stage in run.manifest["stages"] if "/" not in stage],
        "steps": run.manifest["config"].get("distill", {}).get("steps"),
        "curves": {name: curve for name, curve in curves.items() if curve},
        "rollouts": _newest(facts, decode),
        "rocks": "rocks" if facts.rocks else "none were declared" if facts.types else "none yet, rocks are not tested",
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


def _newest(facts: Facts, decode: Decode | None) -> list[Json]:
    """Rollouts of the newest recorded training step with every token's cost."""
    folders = sorted(facts.run.path.glob("telemetry/step=*"), key=lambda item: int(item.name.removeprefix("step=")))
    found: dict[str, Row] = {}
    try:
        table = ds.dataset(folders[-1], format="parquet").to_table() if folders else None
    except (OSError, pa.ArrowInvalid, ValueError):
        return []  # being written; the next refresh has it
    order = [("rollout_id", "ascending"), ("position", "ascending")]
    for row in [] if table is None else table.sort_by(order).to_pylist():
        if row["rollout_id"] not in found and len(found) == NEWEST:
            break
        own = found.setdefault(row["rollout_id"], {"id": row["rollout_id"], "tokens": []})
        if len(own["tokens"]) < MAX_TOKENS:
            text = visible(token_text(facts, row["token_id"], decode), flow=True)
            own["tokens"].append([text, _number(row["kl"]), row["token_id"] in facts.rock_ids])
    return list(found.values())
