"""What a run in training shows: loss of rocks and rest, accuracy, kept share, and the newest rollouts.

Read from what the trainer writes while it runs (training.parquet, telemetry/), so watching costs it nothing. The
regimes of a comparison are runs of their own and are shown beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from rocktokens.facts import Facts
from rocktokens.report.page import resource, served_style
from rocktokens.report.verdict import verdict
from rocktokens.run import open_run
from rocktokens.show import visible
from rocktokens.values import Json, Row

MAX_POINTS = 600
NEWEST = 4
"""Rollouts of the newest recorded step that are shown."""
MAX_TOKENS = 400
SERIES = ("loss", "loss_rocks", "loss_rest", "kept_share")
Decode = Callable[[Sequence[int]], str]


def live_data(path: Path, decode: Decode | None = None) -> Json:
    """Everything that the live page draws, as plain values."""
    run = open_run(path)
    facts = Facts(run)
    rocks, how = _rocks(facts)
    curves = {"distillation": _curve(path / "training.parquet")}
    for arm in sorted(path.glob("compare/*/seed=*/training.parquet")):
        curves[f"{arm.parent.parent.name}, {arm.parent.name}"] = _curve(arm)
    stages = [stage for stage in run.manifest["stages"] if "/" not in stage]
    return {
        "name": facts.name,
        "title": verdict(facts).title,
        "complete": stages,
        "steps": run.manifest["config"].get("distill", {}).get("steps"),
        "curves": {name: curve for name, curve in curves.items() if curve},
        "rollouts": _newest(path, facts, rocks, decode),
        "rocks": how,
        "report": (path / "report.html").is_file(),
    }


def _curve(path: Path) -> dict[str, list[Any]] | None:
    """Columns of a training record, thinned; None where there is none yet or it is being replaced."""
    try:
        table = pq.read_table(path) if path.is_file() else None
    except (OSError, pa.ArrowInvalid):
        return None
    if table is None or "step" not in table.column_names:
        return None
    rows = [row for row in table.to_pylist() if row["step"] is not None]
    thin = [row for row in rows if row["step"] > 0]
    thin = thin[:: max(1, math.ceil(len(thin) / MAX_POINTS))]
    found: dict[str, list[Any]] = {"step": [row["step"] for row in thin]}
    for name in SERIES:
        values = [_number(row.get(name)) for row in thin]
        if any(value is not None for value in values):
            found[name] = values
    checked = [row for row in rows if row.get("accuracy") is not None]
    keys = ("step", "accuracy", "accuracy_low", "accuracy_high")
    found["evaluations"] = [[_number(row.get(key)) for key in keys] for row in checked]
    found["seconds"] = [sum(row.get("seconds") or 0.0 for row in rows)]
    return found


def _number(value: Any) -> float | None:
    return float(f"{value:.5g}") if isinstance(value, int | float) and math.isfinite(value) else None


def _rocks(facts: Facts) -> tuple[set[int], str]:
    """The rocks, or while nothing was detected the types that cost most in what was recorded so far."""
    if facts.rock_ids:
        return facts.rock_ids, "rocks"
    if facts.types:
        return set(), "no rocks were declared"
    sums: dict[int, list[float]] = {}
    for table in _telemetry(facts.run.path, last=5):
        kl = np.nan_to_num(table["kl"].to_numpy())
        for token_id, value in zip(table["token_id"].to_pylist(), kl):
            own = sums.setdefault(token_id, [0.0, 0.0])
            own[0], own[1] = own[0] + float(value), own[1] + 1
    total = sum(own[0] for own in sums.values())
    mean = total / max(sum(own[1] for own in sums.values()), 1)
    costly = [token_id for token_id, own in sums.items() if own[0] > 0.02 * total and own[0] / own[1] > 2 * mean]
    return set(costly), "costly so far: more than 2 % of the loss at more than twice the mean; not yet tested"


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


def _newest(path: Path, facts: Facts, rocks: set[int], decode: Decode | None) -> list[Json]:
    """Rollouts of the newest recorded step with every token's cost."""
    for table in reversed(_telemetry(path, last=2)):
        found: dict[str, Row] = {}
        for row in table.sort_by([("rollout_id", "ascending"), ("position", "ascending")]).to_pylist():
            if row["rollout_id"] not in found and len(found) == NEWEST:
                continue
            own = found.setdefault(row["rollout_id"], {"id": row["rollout_id"], "tokens": []})
            if len(own["tokens"]) < MAX_TOKENS:
                token_id = row["token_id"]
                named = token_id in facts.texts or decode is None
                text = facts.token(token_id) if named else decode([token_id])  # type: ignore[misc]
                own["tokens"].append([visible(text, flow=True), _number(row["kl"]), token_id in rocks])
        if found:
            return list(found.values())
    return []


def live_page(name: str) -> tuple[str, str]:
    """(the page, its one script); the page asks this server for new numbers every few seconds."""
    script = resource("live.js")
    body = resource("live.html").replace("{{name}}", escape(visible(name)))
    html = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>Live: {escape(visible(name))}</title><style>{served_style()}</style></head><body>{body}"
        f"<script>{script}</script></body></html>"
    )
    return html, script
