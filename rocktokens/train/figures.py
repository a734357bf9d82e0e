"""Figures of what training did: loss of rocks and of the rest, step by step.

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
    REST,
    ROCK,
    Figure,
    estimate,
    interval,
    layout,
    log_axis,
    number,
    percent,
)
from rocktokens.stats import Estimate
from rocktokens.values import Json

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
