"""Figures of what training did: loss of rocks and the rest, and persistence with its A/A comparison.

Each function reads the run's tables and returns a figure with its sentence, or nothing where the tables are missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from scipy import stats as sps

from rocktokens.facts import Facts
from rocktokens.show import (
    MUTED,
    REST,
    ROCK,
    THIRD,
    Figure,
    errors,
    estimate,
    interval,
    label,
    layout,
    log_axis,
    names_axis,
    number,
    p_value,
    percent,
    plural,
    rule,
)
from rocktokens.stats import Estimate
from rocktokens.values import Json, Row

MAX_POINTS = 2_000
"""Steps drawn of a training; the rows hold all of them."""
# A loss that spans more than this factor is drawn on a logarithmic axis: what happens to the small one shows too.
LOG_FROM = 20


def training_loss(facts: Facts) -> Figure | None:
    """Loss on rocks and on the rest, step by step."""
    rows, estimator = _steps_recorded(facts)
    data, said = [], []
    for key, title, color, dash in (("loss_rocks", "rocks", ROCK, "solid"), ("loss_rest", "the rest", REST, "dash")):
        own = [(row["step"], row[key]) for row in rows if row[key] is not None and math.isfinite(row[key])]
        if len(own) < 2:
            continue
        step_S, loss_S = zip(*own)
        kernel = np.ones(max(1, len(own) // 20))
        smooth_S = np.convolve(loss_S, kernel, "same") / np.convolve(np.ones(len(own)), kernel, "same")
        tenth, thin = max(1, len(own) // 10), slice(None, None, max(1, math.ceil(len(own) / MAX_POINTS)))
        before, after = _mean_of_steps(loss_S[:tenth]), _mean_of_steps(loss_S[-tenth:])
        said.append(f"on {title} the loss went from {before} to {after} nats")
        # The recorded values, faint, and their moving mean.
        line: Json = {"type": "scatter", "x": list(step_S[thin]), "mode": "lines"}
        faint = {"showlegend": False, "line": {"color": color, "width": 1}, "opacity": 0.35, "hoverinfo": "skip"}
        data.append({**line, **faint, "y": list(loss_S[thin])})
        bold = {
            "mode": "lines+markers" if len(own) <= 40 else "lines",
            "name": title,
            "y": smooth_S[thin].tolist(),
            "line": {"color": color, "width": 2.4, "dash": dash},
            "text": [f"step {at}: {title} {number(mean, 3)} nats" for at, mean in zip(step_S[thin], smooth_S[thin])],
            "hovertemplate": "%{text}<extra></extra>",
        }
        data.append({**line, **bold})
    if not data:
        if facts.table("training") is not None:
            facts.notes.append("loss over training was left out: no step recorded the loss of rocks or of the rest")
        return None
    shape = layout("optimiser step", "mean reverse KL, nats", height=340)
    shape["yaxis"]["rangemode"] = "tozero"
    drawn = [value for trace in data for value in trace["y"] if value > 0]
    if drawn and max(drawn) > LOG_FROM * min(drawn):
        log_axis(shape["yaxis"], min(drawn), max(drawn))
    return Figure(
        name="training_loss",
        title="Loss over training",
        sentence=f"From the first steps to the last, {' and '.join(said)}.",
        estimator=estimator,
        rows=pa.Table.from_pylist(rows),
        data=data,
        layout=shape,
        notes=tuple(_notes(facts)),
    )


def _mean_of_steps(losses: Sequence[float]) -> str:
    """The mean of some steps' losses with a t interval over the steps; a single step has none."""
    count, value = len(losses), float(np.mean(losses))
    if count < 2:
        return number(value, 3)
    reach = float(sps.t.isf(0.025, count - 1) * np.std(losses, ddof=1) / math.sqrt(count))
    return interval(Estimate(value, value - reach, value + reach, count), number, digits=3)


def _steps_recorded(facts: Facts) -> tuple[list[Json], str]:
    """(step, loss of rocks, loss of the rest): as training recorded it, of its telemetry, or of its checkpoints."""
    table, names = facts.table("training"), ("step", "loss_rocks", "loss_rest")
    if table is not None and all(name in table.column_names for name in names):
        rows = [row for row in table.select(names).to_pylist() if row["step"]]
        if sum(row["loss_rocks"] is not None for row in rows) > 1:
            return rows, (
                "Mean reverse KL of each optimiser step’s own rollouts, split by whether its predicted token is a "
                "rock; the bold line is a moving mean over a twentieth of the run. Texts differ from step to step: for "
                "the paired comparison see persistence."
            )
    kept = _by_step(facts, "telemetry") if (facts.run.path / "telemetry").is_dir() else []
    if len(kept) > 2:
        return kept, (
            "Mean reverse KL of the rollouts of the optimiser steps that kept every occurrence, split by the rock set "
            "that was found afterwards. Texts differ from step to step: for the paired comparison see persistence."
        )
    return _by_step(facts, "occurrences") if len(facts.steps) > 1 else [], (
        "Mean reverse KL on the same rollouts under every kept checkpoint, split by the rock set; all scored "
        "occurrences. Persistence shows the held-out half of the prompts."
    )


def _by_step(facts: Facts, table: str) -> list[Json]:
    """Loss of rocks and of the rest at every step of a table of occurrences."""
    if not facts.rock_ids:
        return []
    ids = ", ".join(map(str, sorted(facts.rock_ids)))
    return facts.ask(
        # Rounded: threads add up in any order, and the same run must give the same bytes.
        f"select step, round(favg(kl) filter (token_id in ({ids})), 9) as loss_rocks, "
        f"round(favg(kl) filter (token_id not in ({ids})), 9) as loss_rest from {table} where isfinite(kl) "
        "group by step order by step"
    )


def _notes(facts: Facts) -> list[str]:
    """Whether the loss had stopped falling, and what training did to accuracy."""
    made, notes = facts.stage("distill"), []
    if made.get("saturated"):
        notes.append("The run was saturated by the slope test.")
    elif made.get("saturated") is not None:
        said, test = "The slope test does not show saturation", made.get("saturation")
        if isinstance(test, dict) and test.get("fall") is not None:
            fall = Estimate(test["fall"], test["low"], test["high"], test["num_steps"])
            said += f": over the last {test['num_steps']} steps the loss fell by {interval(fall, percent)} of its level"
        notes.append(f"{said}.")
    ends = [made.get(f"accuracy_{when}") for when in ("before", "after")]
    shown = [interval(estimate(end, "accuracy"), percent) for end in ends if isinstance(end, dict)]
    if len(shown) == 2:
        notes.append(f"Accuracy on held-out prompts went from {shown[0]} to {shown[1]}.")
    return notes


def persistence_rows(facts: Facts) -> list[Row]:
    """Rows of the persistence table, if they say what changed where."""
    table = facts.table("persistence")
    if table is None or facts.lacks(table, "persistence", "group", "arm", "step", "before", "after", "change"):
        return []
    return table.to_pylist()


def persistence(facts: Facts) -> Figure | None:
    """Change of the loss on fixed contexts by group, with both A/A comparisons."""
    table, rows = facts.table("persistence"), persistence_rows(facts)
    if table is None or not rows:
        return None
    last = max((row["step"] for row in rows if row.get("step") is not None), default=None)
    arms = {
        "checkpoint": (f"pre → post (step {last})", ROCK, "diamond"),
        "aa_selected": ("A/A: texts chosen on → others", MUTED, "circle-open"),
        "aa_fresh": ("A/A: two parts of fresh texts", THIRD, "square-open"),
    }
    groups = list(dict.fromkeys(row["group"] for row in rows))
    data = []
    for offset, (arm, (title, color, symbol)) in zip((0.2, 0.0, -0.2), arms.items()):
        own = [row for row in rows if row["arm"] == arm and (arm != "checkpoint" or row.get("step") == last)]
        if not own:
            continue
        ends = [[row.get(f"change_{end}") for row in own] for end in ("low", "high")]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": title,
                "x": [row["change"] for row in own],
                "y": [len(groups) - 1 - groups.index(row["group"]) + offset for row in own],
                "error_x": errors([row["change"] for row in own], ends[0], ends[1], color),
                "marker": {"color": color, "size": 10, "symbol": symbol},
                "text": [_persistence_hover(row, title) for row in own],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    shape = layout("change of mean loss, nats", "", height=150 + 70 * len(groups))
    shape["yaxis"] = names_axis([label(group, 40) for group in reversed(groups)])
    shape["shapes"] = [rule(0, color="@ink", dash="solid")]
    return Figure(
        name="persistence",
        title="Do they learn?",
        sentence=persistence_sentence(rows, last),
        estimator="Fixed contexts: the same rollouts scored under every checkpoint, so pre and post are paired. Groups "
        "are chosen on one half of the prompts and followed on the other. The A/A rows compare one checkpoint with "
        "itself on different texts: what they show is noise and regression to the mean. 95 % bootstrap over prompts.",
        rows=table,
        data=data,
        layout=shape,
    )


def _persistence_hover(row: Row, title: str) -> str:
    before, after, change = (estimate(row, name) for name in ("before", "after", "change"))
    return (
        f"{label(row['group'], 40)}, {title}<br>{interval(before, digits=3)} → {interval(after, digits=3)} nats"
        f"<br>change {interval(change, digits=3)}<br>{plural(row.get('num_types') or 0, 'type')}, "
        f"{percent(row.get('share_fallen'), 0)} of them fell, Wilcoxon {p_value(row.get('p_value'))}"
    )


def persistence_sentence(rows: list[Row], last: int | None) -> str:
    """Pre to post of every group, and what the A/A comparison changes by itself."""
    said = []
    for row in rows:
        if row["arm"] == "checkpoint" and row.get("step") == last:
            said.append(
                f"{row['group']} went from {number(row['before'], 3)} to {number(row['after'], 3)} nats "
                f"({interval(estimate(row, 'change'), digits=3)})"
            )
    noise = [row for row in rows if row["arm"] == "aa_selected" and row["group"] == "rocks"]
    tail = (
        f"; with no training at all, other texts alone change the rocks' loss by "
        f"{interval(estimate(noise[0], 'change'), digits=3)}"
        if noise
        else ""
    )
    return (f"On the same texts, {', '.join(said)}{tail}." if said else "No group was measured twice.").replace(
        "On the same texts, rocks", "On the same texts, the rocks"
    )
