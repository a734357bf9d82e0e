"""The figure of what hangs on the thresholds: the rock set with each of them moved by one step."""

from __future__ import annotations

from rocktokens.facts import Facts
from rocktokens.show import ROCK, Figure, label, layout, names_axis, number, percent

# Thresholds as a reader knows them, with the letter that docs/method.md gives them.
from rocktokens.values import Row

THRESHOLDS = {
    "tau": "loss threshold τ",
    "gamma": "similarity threshold γ",
    "eta": "consistency η",
    "window": "context width w",
    "k": "number of rocks K",
    "kappa": "stagnation κ",
    "q": "false-discovery rate q",
}


def sensitivity(facts: Facts) -> Figure | None:
    """The rock set with each threshold moved by one step."""
    table = facts.table("sensitivity")
    if table is None or facts.lacks(table, "sensitivity", "parameter", "step", "jaccard", "definition"):
        return None
    rows = [r for r in table.to_pylist() if r["definition"] == facts.definition and r["parameter"] != "base"]
    if not rows:
        return None
    rows.sort(key=lambda row: (row["jaccard"], row["parameter"], row["step"]), reverse=True)
    moved = [THRESHOLDS.get(row["parameter"], row["parameter"]) for row in rows]
    names = [f"{label(name, 40)} {'↑' if row['step'] > 0 else '↓'}" for name, row in zip(moved, rows)]
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": label(facts.definition),
            "x": [row["jaccard"] for row in rows],
            "y": list(range(len(rows))),
            "marker": {"color": ROCK, "size": 10, "symbol": "diamond"},
            "text": [_sensitivity_hover(name, row) for name, row in zip(names, rows)],
            "hovertemplate": "%{text}<extra></extra>",
        }
    ]
    shape = layout("overlap with the set as chosen (Jaccard)", "", height=100 + 28 * len(rows), showlegend=False)
    shape["xaxis"]["range"] = [0, 1.04]
    shape["yaxis"] = names_axis(names)
    worst = rows[-1]
    ends = [row.get("enrichment") for row in rows if row.get("enrichment") is not None]
    spread = f"; enrichment stays within {number(min(ends))} and {number(max(ends))}" if ends else ""
    return Figure(
        name="sensitivity",
        title="How far does it hang on the thresholds?",
        sentence=f"Moving any one threshold by a step leaves an overlap of {number(worst['jaccard'])} or more with the "
        f"rock set as chosen (least at {moved[-1]} {'↑' if worst['step'] > 0 else '↓'}){spread}.",
        estimator="τ: quantile of the loss ± 0.05; γ: half or twice the share of similar pairs; η ± 0.05; w ± 1; K: "
        "the neighbouring value of the sweep. Sets are chosen again on the selection half; footprints are measured on "
        "the other half.",
        rows=table,
        data=data,
        layout=shape,
    )


def _sensitivity_hover(name: str, row: Row) -> str:
    found = f"{name} (at {number(row.get('value'), 3)}): Jaccard {number(row['jaccard'])}"
    if row.get("share_positions") is not None:
        found += f"<br>positions {percent(row['share_positions'])}, loss {percent(row.get('share_loss'))}"
    return found + (f", enrichment {number(row['enrichment'])}" if row.get("enrichment") is not None else "")
