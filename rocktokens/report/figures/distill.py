"""Figures of what training did: loss of rocks and the rest, persistence beside its A/A arm, gradients.

Each function reads the run's tables and returns a figure with its sentence, or nothing where the tables are missing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
from scipy import stats as sps

from rocktokens.core.stats import Estimate
from rocktokens.report.figures.figure import MUTED, RARE, REST, ROCK, THIRD, Figure, errors, layout, names_axis, rule
from rocktokens.report.formats import interval, label, number, p_value, percent, plural, significant
from rocktokens.report.run_facts import Facts, estimate

MAX_POINTS = 1500
"""Marks of one group in a chart, those of most gradient first; the rows hold all."""
GROUP_COLORS = {"rocks": ROCK, "rare high-loss": RARE, "random others": REST, "other": MUTED}
GROUP_SYMBOLS = {"rocks": "diamond", "rare high-loss": "triangle-up", "random others": "circle-open", "other": "circle"}


def training_loss(facts: Facts) -> Figure | None:
    """Loss on rocks and on the rest, step by step."""
    rows, estimator = _steps_recorded(facts)
    data, ends = [], {}
    for key, title, color in (("loss_rocks", "rocks", ROCK), ("loss_rest", "the rest", REST)):
        own = [(row["step"], row[key]) for row in rows if row[key] is not None and math.isfinite(row[key])]
        if len(own) < 2:
            continue
        smooth = _smooth(np.array([loss for _, loss in own]))
        tenth = max(1, len(smooth) // 10)
        losses = [loss for _, loss in own]
        ends[title] = (_mean_of_steps(losses[:tenth]), _mean_of_steps(losses[-tenth:]))
        data += _loss_traces(title, color, own, smooth)
    if not data:
        if facts.table("training") is not None:
            facts.notes.append("loss over training was left out: no step recorded the loss of rocks or of the rest")
        return None
    shape = layout("optimiser step", "mean reverse KL, nats", height=340)
    shape["yaxis"]["rangemode"] = "tozero"
    said = [f"on {name} the loss went from {before} to {after} nats" for name, (before, after) in ends.items()]
    return Figure(
        name="training_loss",
        title="Loss over training",
        sentence=f"From the first steps to the last, {' and '.join(said)}.",
        estimator=estimator,
        rows=pa.Table.from_pylist(rows),
        data=data,
        layout=shape,
        notes=(*_saturation(facts), *_accuracy(facts)),
    )


def _mean_of_steps(losses: list[float]) -> str:
    """The mean of some steps' losses with a t interval over the steps; a single step has none."""
    count, value = len(losses), float(np.mean(losses))
    if count < 2:
        return number(value, 3)
    reach = float(sps.t.isf(0.025, count - 1) * np.std(losses, ddof=1) / math.sqrt(count))
    return interval(Estimate(value, value - reach, value + reach, count), number, digits=3)


def _loss_traces(title: str, color: str, own: list[tuple[int, float]], smooth: np.ndarray) -> list[dict[str, Any]]:
    """The recorded values, faint, and their moving mean."""
    step = [at for at, _ in own]
    line = {"type": "scatter", "x": step}
    faint = {"mode": "lines", "showlegend": False, "line": {"color": color, "width": 1}, "opacity": 0.35}
    dash = "solid" if title == "rocks" else "dash"
    return [
        {**line, **faint, "y": [loss for _, loss in own], "hoverinfo": "skip"},
        {
            **line,
            "mode": "lines+markers" if len(own) <= 40 else "lines",
            "name": title,
            "y": smooth.tolist(),
            "line": {"color": color, "width": 2.4, "dash": dash},
            "text": [f"step {at}: {title} {number(value, 3)} nats" for at, value in zip(step, smooth)],
            "hovertemplate": "%{text}<extra></extra>",
        },
    ]


def _steps_recorded(facts: Facts) -> tuple[list[dict[str, Any]], str]:
    """(step, loss of rocks, loss of the rest) as training recorded it, or from the telemetry it left behind."""
    table = facts.table("training")
    names = ("step", "loss_rocks", "loss_rest")
    if table is not None and all(name in table.column_names for name in names):
        rows = [{name: row[name] for name in names} for row in table.to_pylist() if row["step"]]
        if sum(row["loss_rocks"] is not None for row in rows) > 1:
            return rows, (
                "Mean reverse KL of each optimiser step’s own rollouts, split by whether its predicted token is a "
                "rock; the bold line is a moving mean over a twentieth of the run. Texts differ from step to step: for "
                "the paired comparison see persistence."
            )
    kept = _telemetry(facts)
    if len(kept) > 2:
        return kept, (
            "Mean reverse KL of the rollouts of the optimiser steps that kept every occurrence, split by the rock set "
            "that was found afterwards. Texts differ from step to step: for the paired comparison see persistence."
        )
    return _checkpoints(facts), (
        "Mean reverse KL on the same rollouts under every kept checkpoint, split by the rock set; all scored "
        "occurrences. Persistence shows the half of the prompts that had no say in choosing the rocks."
    )


def _checkpoints(facts: Facts) -> list[dict[str, Any]]:
    """Loss of rocks and of the rest on the fixed contexts, at every scored checkpoint."""
    if not facts.rock_ids or len(facts.steps) < 2:
        return []
    ids = ", ".join(map(str, sorted(facts.rock_ids)))
    found = facts.query(
        # Rounded: threads add up in any order, and the same run must give the same bytes.
        f"select step, round(favg(kl) filter (token_id in ({ids})), 9) as loss_rocks, "
        f"round(favg(kl) filter (token_id not in ({ids})), 9) as loss_rest from occurrences where isfinite(kl) "
        "group by step order by step"
    )
    return [] if found is None else found.to_pylist()


def _telemetry(facts: Facts) -> list[dict[str, Any]]:
    """Loss of rocks and of the rest at every training step whose occurrences were kept."""
    folder = facts.run.path / "telemetry"
    if not facts.rock_ids or not folder.is_dir():
        return []
    import pyarrow.dataset as ds

    rows = []
    for path in folder.glob("step=*"):
        try:
            table = ds.dataset(path, format="parquet").to_table(columns=["token_id", "kl"])
        except (pa.ArrowInvalid, OSError, ValueError) as error:
            facts.notes.append(f"telemetry of {path.name} was left out: {str(error).splitlines()[0]}")
            continue
        kl_N = table["kl"].to_numpy()
        known_N = np.isfinite(kl_N)
        rock_N = np.isin(table["token_id"].to_numpy(), list(facts.rock_ids))
        means = [float(kl_N[known_N & part].mean()) if (known_N & part).any() else None for part in (rock_N, ~rock_N)]
        step = int(path.name.removeprefix("step="))
        rows.append({"step": step, "loss_rocks": means[0], "loss_rest": means[1]})
    return sorted(rows, key=lambda row: row["step"])


def _saturation(facts: Facts) -> list[str]:
    found = facts.stage("distill").get("saturated")
    if found is None:
        return []
    if found:
        return ["The run was saturated by the slope test."]
    test = facts.stage("distill").get("saturation")
    said = "The slope test does not show saturation"
    if not isinstance(test, dict) or test.get("fall") is None:
        return [f"{said}."]
    fall = Estimate(test["fall"], test["low"], test["high"], test["num_steps"])
    return [f"{said}: over the last {test['num_steps']} steps the loss fell by {interval(fall, percent)} of its level."]


def _accuracy(facts: Facts) -> list[str]:
    ends = [facts.stage("distill").get(f"accuracy_{when}") for when in ("before", "after")]
    said = [interval(estimate(end, "accuracy"), percent) for end in ends if isinstance(end, dict)]
    return [f"Accuracy on held-out problems went from {said[0]} to {said[1]}."] if len(said) == 2 else []


def _smooth(values: np.ndarray) -> np.ndarray:
    width = max(1, len(values) // 20)
    kernel = np.ones(width)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def persistence_rows(facts: Facts) -> list[dict[str, Any]]:
    """Rows of the persistence table, if they say what changed where."""
    table = facts.table("persistence")
    if table is None or facts.lacks(table, "persistence", "group", "arm", "step", "before", "after", "change"):
        return []
    return table.to_pylist()


def persistence(facts: Facts) -> Figure | None:
    """Change of the loss on fixed contexts by group, beside both A/A arms."""
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
    shape["yaxis"] = names_axis(list(reversed(groups)))
    shape["shapes"] = [rule(0, color="@ink", dash="solid")]
    return Figure(
        name="persistence",
        title="Do they learn?",
        sentence=persistence_sentence(rows, last),
        estimator="Fixed contexts: the same rollouts scored under every checkpoint, so pre and post are paired. Groups "
        "are chosen on one half of the prompts and followed on the other. The A/A arms compare one checkpoint with "
        "itself on different texts: what they show is noise and regression to the mean. 95 % bootstrap over prompts.",
        rows=table,
        data=data,
        layout=shape,
    )


def _persistence_hover(row: dict[str, Any], title: str) -> str:
    before, after, change = (estimate(row, name) for name in ("before", "after", "change"))
    return (
        f"<b>{label(row['group'], 40)}</b>, {title}<br>{interval(before, digits=3)} → {interval(after, digits=3)} nats"
        f"<br>change {interval(change, digits=3)}<br>{plural(row.get('num_types') or 0, 'type')}, "
        f"{percent(row.get('share_fallen'), 0)} of them fell, Wilcoxon {p_value(row.get('p_value'))}"
    )


def persistence_sentence(rows: list[dict[str, Any]], last: int | None) -> str:
    """Pre to post of every group, and what the A/A arm changes by itself."""
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


def _grouped(facts: Facts, table: pa.Table) -> list[dict[str, Any]]:
    """Geometry rows, grouped by the rock set that holds now: detection may have run again since."""
    rows = table.to_pylist()
    if not _regrouped(facts, rows):
        return rows
    facts.notes.append("geometry was computed for another rock set; its figures are grouped by the one that holds now")
    moved = {True: "rocks", False: "other"}
    return [
        {**row, "group": moved[row["token_id"] in facts.rock_ids]}
        if row["group"] == "rocks" or row["token_id"] in facts.rock_ids
        else row
        for row in rows
    ]


def _regrouped(facts: Facts, rows: list[dict[str, Any]]) -> bool:
    then = {row["token_id"] for row in rows if row["group"] == "rocks"}
    return bool(facts.rock_ids) and then != facts.rock_ids & {row["token_id"] for row in rows}


def _optimiser(facts: Facts) -> tuple[str, ...]:
    """The optimiser hypothesis: do rocks get less of the update than of the gradient?"""
    table = facts.table("updates")
    if (
        table is None
        or not facts.rock_ids
        or facts.lacks(table, "the optimiser's share", "token_id", "grad_share", "update_share")
    ):
        return ()
    own = [row for row in table.to_pylist() if row["token_id"] in facts.rock_ids]
    grad, update = (sum(row[name] or 0.0 for row in own) for name in ("grad_share", "update_share"))
    tied = " (tied embeddings: the input side counts too)" if any(row.get("tied") for row in own) else ""
    return (
        f"On the output head the optimiser gave the rocks {percent(update)} of its update for {percent(grad)} of the "
        f"gradient{tied}.",
    )


def gradients(facts: Facts) -> Figure | None:
    """Share of the gradient against share of positions; colour and shape by group."""
    table = facts.table("geometry")
    if table is None or facts.lacks(table, "gradient shares", "token_id", "group", "grad_share", "position_share"):
        return None
    rows = [row for row in _grouped(facts, table) if row["grad_share"] and row["position_share"]]
    data = []
    for group in ("other", "random others", "rare high-loss", "rocks"):
        own = [row for row in rows if row["group"] == group]
        if own:
            data.append(_gradient_trace(facts, group, own, "position_share", "grad_share", 100.0))
    if not data:
        return None
    shape = layout("share of positions, %", "share of gradient norm, %", height=400)
    shape["xaxis"]["type"] = shape["yaxis"]["type"] = "log"
    shape["xaxis"]["dtick"] = shape["yaxis"]["dtick"] = 1
    low = 100 * min(min(row["grad_share"], row["position_share"]) for row in rows)
    high = 100 * max(max(row["grad_share"], row["position_share"]) for row in rows)
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
        "÷ Σ‖g‖ of all, beside its share of positions, under the last checkpoint.",
        rows=table,
        data=data,
        layout=shape,
        notes=_optimiser(facts),
    )


def alignment(facts: Facts) -> Figure | None:
    """Cosine of each type's mean gradient with that of all other types, by group."""
    table = facts.table("geometry")
    if table is None or facts.lacks(table, "gradient alignment", "token_id", "cos_others", "group", "mean_grad_norm"):
        return None
    rows = [row for row in _grouped(facts, table) if row["cos_others"] is not None]
    groups = [group for group in ("rocks", "rare high-loss", "random others") if any(r["group"] == group for r in rows)]
    if not groups:
        return None
    data = []
    for group in groups:
        own = [row for row in rows if row["group"] == group]
        data.append(_gradient_trace(facts, group, own, "cos_others", "mean_grad_norm", 1.0))
    shape = layout("cosine with the sum of all other types' mean gradients", "norm of the mean gradient", height=360)
    shape["xaxis"]["range"] = [-1.04, 1.04]
    shape["shapes"] = [rule(0)]
    return Figure(
        name="alignment",
        title="Do they pull the same way?",
        sentence=_alignment_sentence(facts, rows, groups),
        estimator="ḡ of a type is the mean of its occurrences' gradients in logit space; the cosine leaves the type's "
        "own share out of the sum. Groups are compared by Mann–Whitney."
        + (" Gradients are sketched: cosines err by up to 0.02." if facts.stage("geometry").get("sketched") else ""),
        rows=table,
        data=data,
        layout=shape,
    )


def _alignment_sentence(facts: Facts, rows: list[dict[str, Any]], groups: list[str]) -> str:
    medians = [
        f"{number(float(np.median([r['cos_others'] for r in rows if r['group'] == group])))} for {group}"
        for group in groups
    ]
    said = f"The median cosine with all other types' gradient is {', '.join(medians)}"
    tested = [] if _regrouped(facts, facts.rows("geometry")) else facts.stage("geometry").get("comparisons", [])
    for row in tested:
        if row.get("metric") == "cos_others" and {row.get("first"), row.get("second")} == {"rocks", "random others"}:
            return said + f" (rocks against random others: {p_value(row.get('p_value'))})."
    return said + "."


def _gradient_trace(
    facts: Facts, group: str, rows: list[dict[str, Any]], x: str, y: str, scale: float
) -> dict[str, Any]:
    rows = sorted(rows, key=lambda row: (-(row.get("grad_share") or 0.0), row["token_id"]))[:MAX_POINTS]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": group,
        "x": [scale * row[x] for row in rows],
        "y": [scale * row[y] for row in rows],
        "marker": {"color": GROUP_COLORS[group], "symbol": GROUP_SYMBOLS[group], "size": 9 if group == "rocks" else 6},
        "text": [
            f"<b>{label(facts.token(row['token_id']), 40)}</b>, {group}<br>{percent(row.get('position_share'), 2)} of "
            f"positions, {percent(row.get('grad_share'), 2)} of gradient norm<br>cosine with the others "
            f"{number(row.get('cos_others'))}, ‖ḡ‖ {significant(row.get('mean_grad_norm'))}"
            for row in rows
        ],
        "hovertemplate": "%{text}<extra></extra>",
    }
