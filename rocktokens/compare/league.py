"""Figures of the tournament: accuracy against tokens for every regime, and the league when all have spent the same.

Each function reads the run's tables and returns a figure with its sentence, or nothing where the tables are missing.
"""

from __future__ import annotations

import numpy as np

from rocktokens.compare.intervals import seed_estimate
from rocktokens.facts import Facts
from rocktokens.show import (
    DASHES,
    MUTED,
    REST,
    ROCK,
    SERIES,
    SYMBOLS,
    Figure,
    errors,
    estimate,
    interval,
    label,
    layout,
    listed,
    names_axis,
    number,
    percent,
    points,
    rule,
)

# Fewer regimes need no league: the comparison with uniform says all.
from rocktokens.values import Row

LEAGUE_FROM = 5
COLUMNS = ("regime", "seed", "step", "accuracy", "tokens_total")


def token_curves(facts: Facts) -> dict[str, list[tuple[float, float, float, float]]]:
    """Regime → (tokens, accuracy, low, high) at every evaluation: means over seeds, t intervals over them."""
    table = facts.table("compare")
    if table is None or any(name not in table.column_names for name in COLUMNS):
        return {}
    seen: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for row in table.select(COLUMNS).to_pylist():
        if row["accuracy"] is not None and row["tokens_total"] is not None:
            seen.setdefault(row["regime"], {}).setdefault(row["step"], []).append(
                (row["tokens_total"], row["accuracy"])
            )
    found = {}
    for regime, steps in seen.items():
        seeds = max(map(len, steps.values()))
        rows = []
        for _, pairs in sorted(steps.items()):
            if len(pairs) < seeds and len(steps) > 2:
                continue  # seeds that ended at another step are not a mean over seeds
            mean = seed_estimate([accuracy for _, accuracy in pairs])
            rows.append((float(np.mean([tokens for tokens, _ in pairs])), mean.value, mean.low, mean.high))
        found[regime] = rows
    return dict(sorted(found.items(), key=lambda item: (item[0] != "uniform", item[0])))


def accuracy_tokens(facts: Facts) -> Figure | None:
    """Accuracy against tokens sampled and scored, for every regime."""
    curves, table = token_curves(facts), facts.table("compare")
    if len(curves) < LEAGUE_FROM or table is None or not any(rows[-1][0] > 0 for rows in curves.values()):
        return None
    data = []
    for place, (regime, rows) in enumerate(curves.items()):
        color = SERIES[place % len(SERIES)]
        low, high = ([None if np.isnan(row[end]) else 100 * row[end] for row in rows] for end in (2, 3))
        accuracy = [100 * row[1] for row in rows]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label(regime, 40),
                "x": [row[0] for row in rows],
                "y": accuracy,
                "error_y": errors(accuracy, low, high, color),
                "line": {"color": color, "dash": DASHES[place % len(DASHES)], "width": 2},
                "marker": {"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 7, "color": color},
                "text": [f"{label(regime, 40)}: {percent(row[1])} after {number(row[0], 0)} tokens" for row in rows],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    shape = layout("tokens sampled, and scored by the teacher", "accuracy on held-out prompts, %", height=420)
    shape["xaxis"]["rangemode"] = "tozero"
    return Figure(
        name="accuracy_tokens",
        title="What does a token buy?",
        sentence=league_sentence(facts) or "Accuracy against the tokens that were sampled and scored.",
        estimator="Means over seeds at every evaluation; bars are 95 % t intervals over seeds, absent with fewer than "
        "three. A token counts once when it is sampled and once when the teacher scores it.",
        rows=table.select(COLUMNS),
        data=data,
        layout=shape,
    )


def league_sentence(facts: Facts) -> str:
    """Who leads at equal tokens, and with whom the lead is shared."""
    rows = facts.rows("compare_league")
    if not rows:
        return ""
    first = [row["regime"] for row in rows if row["rank"] == 1]
    uniform = next((row for row in rows if row["regime"] == "uniform"), None)
    said = f"At equal tokens {rows[0]['regime']} leads with {percent(rows[0]['accuracy'])}"
    if len(first) > 1:
        said += f", and {listed(first[1:], 6)} cannot be told from it"
    return f"{said}; uniform has {percent(uniform['accuracy'])}." if uniform else f"{said}."


def league(facts: Facts) -> Figure | None:
    """Every regime's change of accuracy against uniform at equal tokens."""
    rows, table = facts.rows("compare_league"), facts.table("compare_league")
    if len(rows) < LEAGUE_FROM or table is None:
        return None
    rows = rows[::-1]
    changes = [estimate(row, "change") for row in rows]
    shown: list[Row] = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [100 * row["change"] for row in rows],
            "y": list(range(len(rows))),
            "error_x": errors(
                [100 * row["change"] for row in rows],
                [100 * row["change_low"] for row in rows],
                [100 * row["change_high"] for row in rows],
                MUTED,
            ),
            "marker": {"color": [ROCK if row["rank"] == 1 else REST for row in rows], "size": 9},
            "text": [
                f"{label(row['regime'], 40)}, rank {row['rank']}: {percent(row['accuracy'])}"
                + (f", {interval(change, points)} points against uniform" if change else "")
                for row, change in zip(rows, changes)
            ],
            "hovertemplate": "%{text}<extra></extra>",
        }
    ]
    shape = layout("change of accuracy against uniform at equal tokens, points", "", height=150 + 24 * len(rows))
    shape["yaxis"] = names_axis([f"{row['rank']}. {label(row['regime'], 26)}" for row in rows])
    shape["shapes"] = [rule(0.0)]
    return Figure(
        name="league",
        title="The league at equal tokens",
        sentence=league_sentence(facts),
        estimator="Change of accuracy against uniform when both have spent the same tokens, mean over seeds and "
        "prompts, paired by both; t intervals of a two-way layout. Regimes whose interval overlaps that of the first "
        "of a rank share the rank. Bite is the share of tokens, and of the loss, whose weight a regime changed.",
        rows=table,
        data=shown,
        layout=shape,
        notes=tuple(_bite_notes(rows)),
    )


def _bite_notes(rows: list[Row]) -> list[str]:
    """What must be known before a regime is called tested."""
    small = [row["regime"] for row in rows if row["bite_tokens"] is not None and 0 < row["bite_tokens"] < 0.05]
    ends = [row["regime"] for row in rows if row["end_dropped"]]
    said = []
    if small:
        said.append(f"Changed less than 5 % of the tokens, and so were hardly tested: {listed(small, 8)}.")
    if ends:
        said.append(f"Left end tokens without loss: {listed(ends, 8)}.")
    return said
