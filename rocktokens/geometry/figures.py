"""Figures of the gradients: which types hold the gradient, and whether they pull the same way.

Each function reads the run's tables and returns a figure with its sentence, or nothing where the tables are missing.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from rocktokens.facts import Facts
from rocktokens.show import (
    MUTED,
    RARE,
    REST,
    ROCK,
    Figure,
    label,
    layout,
    log_axis,
    number,
    p_value,
    percent,
    rule,
    significant,
)
from rocktokens.values import Json, Row

MAX_POINTS = 1500
"""Marks of one group in a chart, those of most gradient first; the rows hold all."""
GROUP_COLORS = {"rocks": ROCK, "rare high-loss": RARE, "random others": REST, "other": MUTED}
GROUP_SYMBOLS = {"rocks": "diamond", "rare high-loss": "triangle-up", "random others": "circle-open", "other": "circle"}


def _grouped(facts: Facts, table: pa.Table) -> tuple[list[Row], bool]:
    """Geometry rows grouped by the rock set that holds now, and whether detection has found another one since."""
    rows, rocks = table.to_pylist(), facts.rock_ids
    then = {row["token_id"] for row in rows if row["group"] == "rocks"}
    if not rocks or then == rocks & {row["token_id"] for row in rows}:
        return rows, False
    facts.notes.append("geometry was computed for another rock set; its figures are grouped by the one that holds now")
    for row in rows:
        if row["token_id"] in then | rocks:
            row["group"] = "rocks" if row["token_id"] in rocks else "other"
    return rows, True


def gradients(facts: Facts) -> Figure | None:
    """Share of the gradient against share of positions; colour and shape by group."""
    table = facts.table("geometry")
    if table is None or facts.lacks(table, "gradient shares", "token_id", "group", "grad_share", "position_share"):
        return None
    rows = [row for row in _grouped(facts, table)[0] if row["grad_share"] and row["position_share"]]
    data = []
    for group in ("other", "random others", "rare high-loss", "rocks"):
        own = [row for row in rows if row["group"] == group]
        if own:
            data.append(_gradient_trace(facts, group, own, "position_share", "grad_share", 100.0))
    if not data:
        return None
    shape = layout("share of positions, %", "share of gradient norm, %", height=400)
    low = 100 * min(min(row["grad_share"], row["position_share"]) for row in rows)
    high = 100 * max(max(row["grad_share"], row["position_share"]) for row in rows)
    for axis in ("xaxis", "yaxis"):
        log_axis(shape[axis], low, high, suffix="\u00a0%")
    line = {"type": "line", "x0": low, "y0": low, "x1": high, "y1": high, "layer": "below"}
    shape["shapes"] = [{**line, "line": {"color": MUTED, "dash": "dot", "width": 1.2}}]
    own = [row for row in rows if row["group"] == "rocks"]
    grad, positions = sum(row["grad_share"] for row in own), sum(row["position_share"] for row in own)
    ratio = f"{number(grad / positions)} times their share of positions" if positions else "no share of positions"
    return Figure(
        name="gradients",
        title="Who holds the gradient?",
        sentence=f"Rocks hold {percent(grad)} of the gradient norm on {percent(positions)} of the positions, {ratio}; "
        "above the dotted line a type pulls more than its share.",
        estimator="Exact gradient of reverse KL in the student's logits, summed norms over occurrences: Σ‖g‖ of a type "
        "÷ Σ‖g‖ of all, against its share of positions, under the last checkpoint.",
        rows=table,
        data=data,
        layout=shape,
    )


def alignment(facts: Facts) -> Figure | None:
    """Cosine of each type's mean gradient with that of all other types, by group."""
    table = facts.table("geometry")
    if table is None or facts.lacks(table, "gradient alignment", "token_id", "cos_others", "group", "mean_grad_norm"):
        return None
    rows, moved = _grouped(facts, table)
    rows = [row for row in rows if row["cos_others"] is not None]
    groups = [group for group in ("rocks", "rare high-loss", "random others") if any(r["group"] == group for r in rows)]
    if not groups:
        return None
    data, medians = [], []
    for group in groups:
        own = [row for row in rows if row["group"] == group]
        data.append(_gradient_trace(facts, group, own, "cos_others", "mean_grad_norm", 1.0))
        medians.append(f"{number(float(np.median([row['cos_others'] for row in own])))} for {group}")
    tested = ""
    for row in [] if moved else facts.stage("geometry").get("comparisons", []):
        if row.get("metric") == "cos_others" and {row.get("first"), row.get("second")} == {"rocks", "random others"}:
            tested = f" (rocks against random others: {p_value(row.get('p_value'))})"
    shape = layout("cosine with the sum of all other types' mean gradients", "norm of the mean gradient", height=360)
    shape["xaxis"]["range"] = [-1.04, 1.04]
    shape["shapes"] = [rule(0)]
    return Figure(
        name="alignment",
        title="Do they pull the same way?",
        sentence=f"The median cosine with all other types' gradient is {', '.join(medians)}{tested}.",
        estimator="ḡ of a type is the mean of its occurrences' gradients in logit space; the cosine leaves the type's "
        "own share out of the sum. Groups are compared by Mann–Whitney."
        + (" Gradients are sketched: cosines err by up to 0.02." if facts.stage("geometry").get("sketched") else ""),
        rows=table,
        data=data,
        layout=shape,
    )


def _gradient_trace(facts: Facts, group: str, rows: list[Row], x: str, y: str, scale: float) -> Json:
    rows = sorted(rows, key=lambda row: (-(row.get("grad_share") or 0.0), row["token_id"]))[:MAX_POINTS]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": label(group, 40),
        "x": [scale * row[x] for row in rows],
        "y": [scale * row[y] for row in rows],
        "marker": {"color": GROUP_COLORS[group], "symbol": GROUP_SYMBOLS[group], "size": 9 if group == "rocks" else 6},
        "text": [
            f"{label(facts.token(row['token_id']), 40)}, {group}<br>{percent(row.get('position_share'), 2)} of "
            f"positions, {percent(row.get('grad_share'), 2)} of gradient norm<br>cosine with the others "
            f"{number(row.get('cos_others'))}, ‖ḡ‖ {significant(row.get('mean_grad_norm'))}"
            for row in rows
        ],
        "hovertemplate": "%{text}<extra></extra>",
    }
