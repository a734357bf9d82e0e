"""Figures of the comparison of training regimes: accuracy against seconds, and where the time went.

Each function reads the run's tables and returns a figure with its sentence, or nothing where the tables are missing.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from rocktokens.compare.intervals import seed_estimate
from rocktokens.compare.regimes import SAMPLE_LESS
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
)
from rocktokens.values import Json, Row

STAGE_TITLES = {
    "rollout": "sampling rollouts",
    "select": "choosing positions",
    "teacher": "teacher",
    "student": "student",
    "head": "output heads and loss",
    "optimiser": "optimiser",
    "telemetry": "recording",
    "evaluate": "evaluation",
    "checkpoint": "checkpoints",
    "other": "everything else",
}
# The same in a sentence, where the title alone does not do.
STAGE_WORDS = {"teacher": "the teacher’s passes", "student": "the student’s passes", "optimiser": "the optimiser"}
TOKEN_COLUMNS = ("regime", "seed", "step", "accuracy", "tokens_total")
STAGE_COLORS = (REST, "@third", "@rare", ROCK, "@fifth", "@sixth", MUTED)


def curves(facts: Facts) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """Regime → seed → (seconds of training so far, accuracy) at every evaluation."""
    table = facts.table("compare")
    columns = ("regime", "seed", "step", "accuracy", "seconds_total")
    if table is None or facts.lacks(table, "accuracy against seconds", *columns):
        return {}
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for row in sorted(table.select(columns).to_pylist(), key=lambda row: (row["seed"], row["step"])):
        if row["accuracy"] is not None:
            own = found.setdefault(row["regime"], {}).setdefault(row["seed"], [])
            own.append((row["seconds_total"], row["accuracy"]))
    return dict(sorted(found.items(), key=lambda item: (item[0] != "uniform", item[0] != "freeze", item[0])))


def finals(facts: Facts) -> dict[str, Row]:
    """Regime → mean final accuracy and seconds over seeds, and its change against uniform with its spread."""
    found: dict[str, Row] = {}
    by_regime = curves(facts)
    base = {seed: own[-1][1] for seed, own in by_regime.get("uniform", {}).items()}
    recorded = _recorded(facts)
    for regime, seeds in by_regime.items():
        last = {seed: own[-1] for seed, own in seeds.items()}
        change = np.array([accuracy - base[seed] for seed, (_, accuracy) in last.items() if seed in base])
        found[regime] = {
            "accuracy": float(np.mean([accuracy for _, accuracy in last.values()])),
            "seconds": float(np.mean([seconds for seconds, _ in last.values()])),
            "num_seeds": len(last),
            "delta": float(change.mean()) if len(change) else None,
            **recorded.get(regime, {}),
        }
    return found


def _recorded(facts: Facts) -> dict[str, Json]:
    """What the comparison recorded about each regime, with its intervals."""
    rows = facts.rows("compare_summary")
    return {row["regime"]: {key: value for key, value in row.items() if value is not None} for row in rows}


def words(facts: Facts) -> tuple[str, ...]:
    """Sentences that the comparison itself wrote down."""
    return tuple(facts.stage("compare").get("verdicts", ()))


def accuracy_seconds(facts: Facts) -> Figure | None:
    """Accuracy against wall-clock seconds for every regime."""
    by_regime = curves(facts)
    if not by_regime:
        return None
    data = []
    for index, (regime, seeds) in enumerate(by_regime.items()):
        color, dash = SERIES[index % len(SERIES)], DASHES[index % len(DASHES)]
        if all(len(own) == 1 for own in seeds.values()):
            mean = [tuple(np.mean([own[0] for own in seeds.values()], axis=0))]
        else:
            mean = _mean_curve(list(seeds.values()))
        ends = _spread(list(seeds.values()), len(mean))
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": label(regime, 40),
                "x": [seconds for seconds, _ in mean],
                "y": [100 * accuracy for _, accuracy in mean],
                "error_y": errors([100 * a for _, a in mean], *ends, color),
                "line": {"color": color, "dash": dash, "width": 2},
                "marker": {"symbol": SYMBOLS[index % len(SYMBOLS)], "size": 7, "color": color},
                "text": [f"{label(regime, 40)}: {percent(a)} after {number(s, 0)} s" for s, a in mean],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    table = facts.table("compare")
    assert table is not None
    shape = layout("seconds of training", "accuracy on held-out problems, %", height=400)
    shape["xaxis"]["rangemode"] = "tozero"
    return Figure(
        name="accuracy_seconds",
        title="What does training without them cost, and save?",
        sentence=compare_sentence(facts),
        estimator="Every regime starts from the same checkpoint with the same prompts, seeds and schedule. Curves: "
        "mean over seeds at every evaluation; bars span the seeds. Seconds are wall-clock seconds of training. "
        + str(facts.stage("compare").get("estimators") or ""),
        rows=table,
        data=data,
        layout=shape,
        notes=words(facts),
    )


def token_curves(facts: Facts) -> dict[str, list[tuple[float, float, float, float]]]:
    """Regime → (tokens, accuracy, low, high) at every evaluation: means over seeds, t intervals over them."""
    table = facts.table("compare")
    if table is None or any(name not in table.column_names for name in TOKEN_COLUMNS):
        return {}
    seen: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for row in table.select(TOKEN_COLUMNS).to_pylist():
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
    """Accuracy against tokens sampled and scored, one curve per regime; where one of them samples less."""
    by_regime, table = token_curves(facts), facts.table("compare")
    if table is None or not set(SAMPLE_LESS) & set(by_regime):  # else all have spent the same
        return None
    data = []
    for place, (regime, rows) in enumerate(by_regime.items()):
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
        sentence=_tokens_sentence(facts),
        estimator="Means over seeds at every evaluation; bars are 95 % t intervals over seeds, absent with fewer than "
        "three. A token counts once when it is sampled and once when the teacher scores it.",
        rows=table.select(TOKEN_COLUMNS),
        data=data,
        layout=shape,
    )


def _tokens_sentence(facts: Facts) -> str:
    """Each regime's change of accuracy against uniform when both have spent the same tokens."""
    rows = [row for row in facts.rows("compare_summary") if row["regime"] != "uniform"]
    changes = {row["regime"]: estimate(row, "change_same_tokens") for row in rows}
    said = [f"{name} {interval(change, points)} points" for name, change in changes.items() if change is not None]
    if not said:
        return "Accuracy against the tokens that were sampled and scored."
    return f"At equal tokens, against uniform: {listed(said, 6)}."


def _mean_curve(seeds: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    length = min(map(len, seeds))
    return [tuple(np.mean([own[place] for own in seeds], axis=0).tolist()) for place in range(length)]  # type: ignore[misc]


def _spread(seeds: list[list[tuple[float, float]]], length: int) -> tuple[list[float], list[float]]:
    low = [100 * min(own[min(place, len(own) - 1)][1] for own in seeds) for place in range(length)]
    high = [100 * max(own[min(place, len(own) - 1)][1] for own in seeds) for place in range(length)]
    return low, high


def compare_sentence(facts: Facts) -> str:
    """Each regime's change of accuracy against uniform, and its share of uniform's seconds."""
    found = finals(facts)
    base = found.get("uniform")
    if not base:
        return "No uniform regime was trained, so nothing can be set against it."
    said = []
    first_ones = ("freeze", "random", "prefix")
    for regime in sorted(found, key=lambda name: (name not in first_ones, list(found).index(name))):
        row = found[regime]
        change = estimate(row, "delta")
        if regime != "uniform" and change is not None:
            said.append(f"{regime} {interval(change, points)} points in {_share_of_time(row, base)}×")
    start = f"Uniform training ended at {percent(base['accuracy'])} in {number(base['seconds'], 0)} s"
    return f"{start}; against it, with their share of its time: {listed(said, 4)}." if said else f"{start}."


def _share_of_time(row: Row, base: Json) -> str:
    ratio = estimate(row, "seconds_ratio")
    return interval(ratio) if ratio else number(row["seconds"] / base["seconds"])


def time_spent(facts: Facts) -> Figure | None:
    """Seconds by stage: of every regime, or of the one training run."""
    rows = _seconds_by_regime(facts)
    if not rows:
        return None
    stages = [stage for stage in STAGE_TITLES if any(row.get(stage, 0) > 0 for row in rows.values())]
    names = list(rows)[::-1]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": STAGE_TITLES[stage],
            "x": [rows[name].get(stage, 0.0) for name in names],
            "y": list(range(len(names))),
            "marker": {
                "color": STAGE_COLORS[index % len(STAGE_COLORS)],
                "pattern": {
                    "shape": ("", "/", ".", "x", "", "\\", "-")[index % 7],
                    "fillmode": "overlay",
                    "fgcolor": "@paper",
                    "fgopacity": 0.6,
                },
                "line": {"color": "@paper", "width": 1},
            },
            "text": [
                f"{label(name, 40)}, {STAGE_TITLES[stage]}: {number(rows[name].get(stage, 0.0), 1)} s, "
                f"{percent(rows[name].get(stage, 0.0) / sum(rows[name].values()))}"
                for name in names
            ],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
        }
        for index, stage in enumerate(stages)
    ]
    shape = layout("seconds, mean over seeds", "", height=150 + 38 * len(names), barmode="stack")
    shape["yaxis"] = names_axis([label(name, 26) for name in names])
    shape["legend"] = {**shape["legend"], "traceorder": "normal"}
    largest = {name: max(row, key=lambda stage: row[stage]) for name, row in rows.items()}
    head = next(iter(rows))
    share = rows[head][largest[head]] / sum(rows[head].values())
    return Figure(
        name="time",
        title="Where the time went",
        sentence=f"Of {number(sum(rows[head].values()), 0)} seconds of {_training(head)}, {percent(share, 0)} went to "
        f"{STAGE_WORDS.get(largest[head], STAGE_TITLES[largest[head]])}" + _ceiling(facts) + ".",
        estimator="Wall-clock seconds by stage on the first rank, measured by the trainer; nested stages are counted "
        "once. Dropping a share f of positions cannot speed training up by more than 1/(1 − f).",
        rows=pa.Table.from_pylist([{"regime": name, **row} for name, row in rows.items()]),
        data=data,
        layout=shape,
    )


def _training(name: str) -> str:
    return "training" if name == "training" else f"the {name} regime"


def _seconds_by_regime(facts: Facts) -> dict[str, dict[str, float]]:
    """Regime → stage → seconds, mean over seeds; of the one training run where nothing was compared."""
    for name in ("compare", "training"):
        rows = facts.rows(name)
        columns = [column for column in (rows[0] if rows else ()) if column.removeprefix("seconds_") in STAGE_TITLES]
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


def _ceiling(facts: Facts) -> str:
    share = _recorded(facts).get("freeze", {}).get("kept_share")
    if not share:
        return ""
    return f"; freezing kept {percent(share)} of the positions, which allows at most {number(1 / share)}×"
