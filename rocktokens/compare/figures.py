"""Sentences that follow from the numbers of a comparison, and the report's figures of it.

No verdict is decided here. A figure is None where the tables it needs are missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from rocktokens.compare.judgement import seed_estimate
from rocktokens.compare.regimes import SAMPLE_LESS
from rocktokens.compare.settings import CompareConfig
from rocktokens.facts import Facts
from rocktokens.show import (
    DASHES,
    MUTED,
    REST,
    ROCK,
    SERIES,
    SYMBOLS,
    Figure,
    bracket,
    errors,
    estimate,
    interval,
    label,
    layout,
    listed,
    names_axis,
    number,
    percent,
    plural,
    points,
)
from rocktokens.stats import Estimate
from rocktokens.values import Json, Row

# Regime that freezes token types → what it freezes.
FROZEN = {"freeze": "types on the bypass list", "freeze_rocks": "rocks"}
ENOUGH = 0.9  # a control of fewer positions than this share of the frozen ones is not called as many
STAGES = {
    "rollout": "sampling rollouts",
    "select": "choosing positions",
    "teacher": "the teacher",
    "student": "the student",
    "head": "output heads and loss",
    "optimiser": "the optimiser",
    "telemetry": "recording",
    "evaluate": "evaluation",
    "checkpoint": "checkpoints",
    "other": "everything else",
}
STAGE_COLORS = (REST, "@third", "@rare", ROCK, "@fifth", "@sixth", MUTED)
STAGE_PATTERNS = ("", "/", ".", "x", "", "\\", "-")  # colour alone does not tell stages apart


# ---------------------------------------------------------------- sentences


def sentences(summary: Sequence[Row], savings: Sequence[Row], config: CompareConfig) -> list[str]:
    """The conclusion, one verdict per regime other than uniform, and whether savers beat simply sampling less."""
    rows, margin = {row["regime"]: row for row in summary}, config.margin
    own = [f"{name}: {verdict_sentence(row, margin=margin)}" for name, row in rows.items() if name != "uniform"]
    beyond = [
        f"{row['regime']}: beats simply sampling less: {row['answer']}; at equal tokens its accuracy is "
        f"{interval(estimate(row, 'over_control'), points)} points from that of {row['control']}."
        for row in savings
    ]
    return [conclusion(rows, margin=margin), *own, *beyond]


def verdict_sentence(row: Row, *, margin: float) -> str:
    """One regime in a sentence: accuracy, time and ceiling."""
    judged = {
        "costs": "cost accuracy",
        "gains": "raised accuracy",
        "unchanged": f"left accuracy where it was (within ±{points(margin, signed=False)} points)",
        "undecided": "changed accuracy by nothing that could be measured",
    }[row["verdict"]]
    change, seeds = f"{interval(estimate(row, 'delta'), points)} points", plural(row["num_seeds"], "seed")
    changed = f"{judged}: {change}"
    if not row["over_seeds"]:
        changed = f"changed accuracy by {change} over prompts only with {seeds}, which decides nothing"
    left = f"with {percent(_left_out(row))} of positions left out, " if row["ceiling"] > 1.005 else ""
    ceiling = f"; its ceiling is {row['ceiling']:.2f}×" if left else ""

    ratio = estimate(row, "seconds_ratio")
    if ratio is None or not math.isfinite(ratio.low):  # without an interval there is no claim
        flops = f" (floating-point operations: {row['flops_ratio']:.2f}×)" if row["flops_ratio"] is not None else ""
        timed = f"no saving of time can be told from {seeds}{flops}"
    elif ratio.low < 1 < ratio.high:
        saved = Estimate(1 - ratio.value, 1 - ratio.high, 1 - ratio.low, ratio.num_prompts)
        timed = f"saved no measurable part of the time: {points(saved.value)} % {bracket(saved, points)}"
    elif ratio.value <= 1:
        timed = f"saved {percent(1 - ratio.value)} of the time [{points(1 - ratio.high)}, {points(1 - ratio.low)}]"
    else:
        timed = f"took {percent(ratio.value - 1)} more time [{points(ratio.low - 1)}, {points(ratio.high - 1)}]"

    return f"{left}it {changed}, and {timed}{ceiling}."


def _left_out(row: Row) -> float:
    """Share of positions without loss, or not sampled."""
    return max(0.0, 1.0 - 1.0 / row["ceiling"])


def conclusion(rows: Mapping[str, Row], *, margin: float) -> str:
    """Whether the bypass list, and all rocks, can be skipped in this pair; with their control."""
    said, inside = [], f"±{points(margin, signed=False)} points"
    for name, what in ((name, what) for name, what in FROZEN.items() if name in rows):
        row, change = rows[name], f"{interval(estimate(rows[name], 'delta'), points)} points"
        without = f"trained without them, accuracy changed by {change}"
        seeds = plural(row["num_seeds"], "seed")
        if not row["over_seeds"]:
            said.append(
                f"Whether the {what} can be skipped is not decided: trained without them with {seeds}, accuracy "
                f"changed by {change}, an interval over prompts only. It takes three seeds at least."
            )
        else:
            answers = {
                "costs": f"The {what} are cornerstones here: {without}.",
                "gains": f"The {what} are stumbling blocks here: {without}.",
                "unchanged": f"The {what} can be skipped here: {without}, inside {inside}.",
                "undecided": f"Whether the {what} can be skipped is not decided to {inside}: {without}. More seeds or "
                "prompts would tell.",
            }
            said.append(answers[row["verdict"]])
    if not said:
        return "Nothing was frozen in any regime compared here: nothing is said about skipping token types."
    if "freeze" not in rows:
        said.insert(0, "There was nothing on the bypass list to freeze.")
    random = rows.get("random")
    if random is not None:
        frozen = max(_left_out(rows[name]) for name in FROZEN if name in rows)
        which = "as many other positions"
        if _left_out(random) < ENOUGH * frozen:  # a set that is most of the text leaves too few others
            which = f"{percent(_left_out(random))} of positions where the frozen types are {percent(frozen)}"
        said.append(f"The control, {which}, changed it by {interval(estimate(random, 'delta'), points)} points.")
    return " ".join(said)


# ---------------------------------------------------------------- curves of accuracy

ACCURACY = "accuracy on held-out prompts, %"
CURVES = (
    "Curves: mean over seeds at every evaluation; bars are 95 % t intervals over seeds, absent with fewer than three."
)


def finals(facts: Facts) -> dict[str, Row]:
    """Regime → its row of compare_summary without what is unknown; uniform and freeze first."""
    rows = sorted(
        facts.rows("compare_summary"), key=lambda row: (row["regime"] != "uniform", row["regime"] != "freeze")
    )
    return {row["regime"]: {key: value for key, value in row.items() if value is not None} for row in rows}


def _curves(facts: Facts, x: str, unit: str) -> dict[str, Json]:
    """Regime → its curve of accuracy against the column x: means over seeds, with t intervals over them."""
    table, columns = facts.table("compare"), ("regime", "seed", "step", "accuracy", x)
    if table is None or facts.lacks(table, f"accuracy against {x}", *columns):
        return {}
    seen: dict[str, dict[int, list[Row]]] = {}
    for row in table.select(columns).to_pylist():
        if row["accuracy"] is not None:
            seen.setdefault(row["regime"], {}).setdefault(row["step"], []).append(row)
    curves: dict[str, Json] = {}
    for place, regime in enumerate(sorted(seen, key=lambda name: (name != "uniform", name != "freeze", name))):
        color, evaluations = SERIES[place % len(SERIES)], [rows for _, rows in sorted(seen[regime].items())]
        x_E = [float(np.mean([row[x] for row in rows])) for rows in evaluations]
        found = [seed_estimate([row["accuracy"] for row in rows]) for rows in evaluations]
        value, low, high = ([None if math.isnan(own[end]) else 100 * own[end] for own in found] for end in range(3))
        curves[regime] = {
            "type": "scatter",
            "mode": "lines+markers",
            "name": label(regime, 40),
            "x": x_E,
            "y": value,
            "error_y": errors(value, low, high, color),
            "line": {"color": color, "dash": DASHES[place % len(DASHES)], "width": 2},
            "marker": {"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 7, "color": color},
            "text": [
                f"{label(regime, 40)}: {percent(own.value)} after {number(at, 0)} {unit}" for at, own in zip(x_E, found)
            ],
            "hovertemplate": "%{text}<extra></extra>",
        }
    return curves


def accuracy_tokens(facts: Facts) -> Figure | None:
    """Accuracy against tokens sampled and scored, one curve per regime; where one of them samples less."""
    curves, table = _curves(facts, "tokens_total", "tokens"), facts.table("compare")
    if table is None or not set(SAMPLE_LESS) & set(curves):  # else all have spent the same
        return None
    if max(len(curve["x"]) for curve in curves.values()) < 3:
        return None  # two points are no curve: the table says it
    found = {name: estimate(row, "change_same_tokens") for name, row in finals(facts).items() if name != "uniform"}
    said = [f"{name} {interval(change, points)} points" for name, change in found.items() if change is not None]
    columns = ("regime", "seed", "step", "accuracy", "tokens_total")
    return Figure(
        name="accuracy_tokens",
        title="What does a token buy?",
        sentence=f"At equal tokens, against uniform: {listed(said, 6)}.",
        estimator=f"{CURVES} A token counts once when it is sampled and once when the teacher scores it.",
        rows=table.select([name for name in columns if name in table.column_names]),
        data=list(curves.values()),
        layout=layout("tokens sampled, and scored by the teacher", ACCURACY, height=420, xaxis={"rangemode": "tozero"}),
    )


# ---------------------------------------------------------------- where the time went


def time_spent(facts: Facts) -> Figure | None:
    """Seconds by stage: of every regime, or of the one training run where nothing was compared."""
    rows = _seconds_by_regime(facts)
    if not rows:
        return None
    stages = [stage for stage in STAGES if any(row.get(stage, 0) > 0 for row in rows.values())]
    names = list(rows)[::-1]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": STAGES[stage],
            "x": [rows[name].get(stage, 0.0) for name in names],
            "y": list(range(len(names))),
            "marker": {
                "color": STAGE_COLORS[index % len(STAGE_COLORS)],
                "pattern": {
                    "shape": STAGE_PATTERNS[index % len(STAGE_PATTERNS)],
                    **{"fillmode": "overlay", "fgcolor": "@paper", "fgopacity": 0.6},
                },
                "line": {"color": "@paper", "width": 1},
            },
            "text": [
                f"{label(name, 40)}, {STAGES[stage]}: {number(rows[name].get(stage, 0.0), 1)} s, "
                f"{percent(rows[name].get(stage, 0.0) / sum(rows[name].values()))}"
                for name in names
            ],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
        }
        for index, stage in enumerate(stages)
    ]
    shape = layout("seconds, mean over seeds", "", height=150 + 38 * len(names), barmode="stack")
    shape |= {"yaxis": names_axis([label(name, 26) for name in names])}
    shape["legend"]["traceorder"] = "normal"
    head, first = next(iter(rows.items()))
    largest, total = max(first, key=lambda stage: first[stage]), sum(first.values())
    kept = finals(facts).get("freeze", {}).get("kept_share")
    ceiling = (
        f"; freezing kept {percent(kept)} of the positions, which allows at most {number(1 / kept)}×" if kept else ""
    )
    return Figure(
        name="time",
        title="Where the time went",
        sentence=f"Of {number(total, 0)} seconds of {'training' if head == 'training' else f'the {head} regime'}, "
        f"{percent(first[largest] / total, 0)} went to {STAGES[largest]}{ceiling}.",
        estimator="Wall-clock seconds by stage, measured by the trainer; nested stages are counted once. Dropping a "
        "share f of positions cannot speed training up by more than 1/(1 − f).",
        rows=pa.Table.from_pylist([{"regime": name, **row} for name, row in rows.items()]),
        data=data,
        layout=shape,
    )


def _seconds_by_regime(facts: Facts) -> dict[str, dict[str, float]]:
    """Regime → stage → seconds, mean over seeds; of the one training run where nothing was compared."""
    for name in ("compare", "training"):
        rows = facts.rows(name)
        columns = [column for column in (rows[0] if rows else ()) if column.removeprefix("seconds_") in STAGES]
        seeds = len({row.get("seed") for row in rows})
        found: dict[str, dict[str, float]] = {}
        for row in rows:
            own = found.setdefault(row.get("regime", "training"), {})
            for column in columns:
                stage = column.removeprefix("seconds_")
                own[stage] = own.get(stage, 0.0) + (row[column] or 0.0) / seeds
        found = {regime: own for regime, own in found.items() if sum(own.values()) > 0}
        if found:
            return found
    return {}
