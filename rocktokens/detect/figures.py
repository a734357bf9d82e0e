"""What detection shows: its table on the terminal, and the figures of the report.

"No rocks" is an answer and is printed as one; without the loss before OPD the word is costly. Each figure is made from
the run's tables, with its sentence, or is left out where they are missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rocktokens.detect.certified import COSTLY, DECLARED, LEARNING, LEVELLED, NOT_YET, SO_FAR, UNCLEAR
from rocktokens.detect.measures import CLUSTERS, TYPES_EXPLAIN_LITTLE
from rocktokens.facts import Facts
from rocktokens.show import (
    MUTED,
    NBSP,
    REST,
    ROCK,
    THIRD,
    Column,
    Figure,
    Table,
    errors,
    estimate,
    interval,
    label,
    layout,
    listed,
    log_axis,
    names_axis,
    number,
    p_value,
    percent,
    plural,
    rule,
    visible,
)
from rocktokens.stats import Estimate
from rocktokens.values import Json, Row

if TYPE_CHECKING:
    from rocktokens.detect.rocks import RockReport

SHARES = (
    ("share_types", "token types"),
    ("share_positions", "positions"),
    ("share_positions_median", "positions, median rollout"),
    ("share_loss", "loss"),
    ("share_grad", "gradient norm"),
)
MAX_POINTS = 3000
MEASURED = "on the half of the prompts that did not choose the rocks"

# The terminal


def render(report: RockReport, command: str | None = None, limit: int = 30) -> Table:
    """The rocks, then the other costly types; below them footprints, spread of the loss and what is still needed."""
    rows = [row for row in report.tables["types"].to_pylist() if row["class"] or row[f"in_{report.config.definition}"]]
    for row in rows:
        named = row["class"] or ""
        row["said"] = f"{named} (not confirmed)" if named and not row["confirmed"] else named
        if row["class"] == NOT_YET and row["quarter_steps"] is not None:
            row["said"] += (
                f": a quarter less in {row['quarter_steps']:,.0f} steps (≥ {row['quarter_steps_low'] or 0:,.0f})"
            )
        row["losses"] = f"{number(row['loss_pre'], 3)} → {number(row['loss_post'], 3)}"
    columns = (
        Column("token", "token"),
        Column("class", "said"),
        Column("count", "count", number, {"digits": 0}),
        Column("loss pre → post", "losses"),
        Column("fall [95 %]", "fall", percent, {"digits": 0}, interval=True),
    )
    lines = []
    for found in report.tables["footprints"].to_pylist():
        shown = {name: interval(estimate(found, f"share_{name}"), percent) for name in ("positions", "loss", "grad")}
        grad = "" if found["share_grad"] is None else f", gradient norm {shown['grad']}"
        lines.append(
            f"{found['name']}: {found['num_types']} types, positions {shown['positions']} "
            f"(median rollout {percent(found['share_positions_median'])}), "
            f"loss {shown['loss']}{grad}, enrichment {interval(estimate(found, 'enrichment'))}"
        )
    lines.append(f"overlap (Jaccard): {', '.join(f'{a}/{b} {value:.2f}' for a, b, value in report.overlaps)}")
    spread, enough = report.concentration, report.enough
    if spread["positions_50"] is not None:  # there is a loss
        shares = " / ".join(percent(spread[f"positions_{share}"]) for share in (50, 80, 95))
        line, (explained, low, high) = (
            f"50 / 80 / 95 % of the loss lie in {shares} of the positions",
            spread["variance_by_type"],
        )
        if explained is not None:
            line += f"; the token type explains {interval(Estimate(explained, low, high, 0), percent)} of its variance"
        if explained is not None and explained < TYPES_EXPLAIN_LITTLE:
            line += ". The cost is a matter of single positions; the table `positions` names them"
        lines.append(line)
    if enough["prompts_needed"] is not None:
        lines.append(
            f"{enough['num_unclear']} costly types are unclear; about {enough['prompts_needed']:,} prompts (there are "
            f"{report.counts['num_prompts']:,}) would settle {enough['num_in_reach']} of them"
            f"{f': {command}' if command else ''}"
        )
    elif enough["num_unclear"]:
        lines.append(
            f"{enough['num_unclear']} costly types are unclear: their falls lie too close to 1 − κ for more prompts"
        )
    if report.retest:
        lines.append(retested(report.retest))
    lines += report.notes
    return Table(columns, rows, title=_title(report), caption=lines, name="types.parquet", limit=limit)


def retested(found: Json) -> str:
    """What became of the rocks of an earlier detection."""
    then, now = found["then"], found["now"]
    lost = [
        f"“{visible(row['token'])}” is {row['now'] or 'no longer costly'}" for row in found["types"] if not row["still"]
    ]
    said = f"{found['num_still']} of {found['num_rocks']} rocks of step {then} are still rocks at step {now}"
    return said + (f"; {listed(lost)}" if lost else "")


def _title(report: RockReport) -> str:
    """One line that says how many rocks, by what; or that there are none."""
    count, signal = len(report.rocks), report.config.signal
    if report.config.definition != "certified":
        return f"{count or 'No'} rocks by `{report.config.definition}` on {signal}"
    if report.thresholds.tau_pre is None:
        return f"{len(report.classes[COSTLY])} costly token types on {signal}; rocks: not tested"
    counts = {name: len(report.classes[name]) for name in (NOT_YET, LEARNING, LEVELLED, UNCLEAR)}
    others = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    rest = f"; of other costly types: {others}" if others else ""
    if not count:
        return f"No rocks are declared on {signal}{rest or '; no token type is costly beyond doubt'}"
    dropped = sum(len(report.classes[name]) for name in DECLARED) - count
    word = "rocks so far" if len(report.classes[SO_FAR]) else "rocks"
    filtered = f" ({dropped} more in contexts that do not recur)" if dropped else ""
    return f"{count} {word} declared on {signal}, {len(report.confirmed)} of them confirmed{filtered}{rest}"


# The report


def footprint_row(facts: Facts, name: str | None = None) -> Row:
    """The footprint of a set; empty where it was not measured."""
    return next((row for row in facts.rows("footprints") if row.get("name") == (name or facts.definition)), {})


def footprint(facts: Facts) -> Figure | None:
    """Shares of types, positions, loss and gradient that the rocks hold, beside their control."""
    row = footprint_row(facts)
    if not row:
        return None
    data: list[Json] = []
    measures = [(key, name) for key, name in SHARES if row.get(key) is not None]
    sets = (("rocks", row, ROCK, "circle"), ("matched control", footprint_row(facts, "control"), MUTED, "diamond-open"))
    for index, (name, own, color, symbol) in enumerate(sets):
        # A control is drawn by occurrence: how many types it touches says nothing.
        found = [None if index and key == "share_types" else estimate(own, key) for key, _ in measures]
        kept = [(place, item) for place, item in enumerate(found) if item is not None]
        if not kept:
            continue
        value, low, high = (
            [None if math.isnan(item[end]) else 100 * item[end] for _, item in kept] for end in range(3)
        )
        height = [len(measures) - 1 - place + (-0.12 if index else 0.12) for place, _ in kept]
        texts = [f"{name}: {measures[place][1]} {interval(item, percent)}" for place, item in kept]
        marks = _marks(name, value, height, texts, color, symbol, 10)
        data.append(marks | {"error_x": errors(value, low, high, color)})
    shape = layout("share, %", "", height=90 + 46 * len(measures))
    shape["xaxis"] |= {"rangemode": "tozero", "ticksuffix": NBSP + "%"}
    shape["yaxis"] = names_axis([name for _, name in reversed(measures)])
    shares = [
        f"{interval(estimate(row, key), percent)} of the {name}"
        for key, name in measures
        if key not in ("share_types", "share_positions_median")
    ]
    control = estimate(footprint_row(facts, "control"), "enrichment")
    beside = f"; the matched control's is {interval(control)}" if control else ""
    number_of = int(row.get("num_types") or 0)
    return Figure(
        name="footprint",
        title="Footprint of the rocks",
        sentence=f"{plural(number_of, 'rock')}, {percent(row.get('share_types'))} of the token types, "
        f"{'holds' if number_of == 1 else 'hold'} {listed(shares)}: an enrichment of "
        f"{interval(estimate(row, 'enrichment'))}{beside}.",
        estimator="Rocks are chosen on one half of the prompts, and every share is measured on the other half; 95 % "
        "intervals from a bootstrap over prompts. Enrichment: share of loss ÷ share of positions.",
        rows=facts.table("footprints"),
        data=data,
        layout=shape,
    )


def _marks(
    name: str,
    x: Sequence[float | None],
    y: Sequence[float | None],
    texts: list[str],
    color: str,
    symbol: str,
    size: int,
) -> Json:
    """One trace of marks with a text for each."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": x,
        "y": y,
        "text": texts,
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": color, "size": size, "symbol": symbol, "opacity": 0.9},
    }


def funnel(facts: Facts) -> Figure | None:
    """Frequency against mean loss, rocks marked."""
    table = facts.table("types")
    if table is None or facts.lacks(table, "the funnel", "count", "loss_post", "token_id"):
        return None
    types = [row for row in facts.types if row["count"] and (row["loss_post"] or 0) > 0]
    if not types:
        return None
    others = [row for row in types if row["token_id"] not in facts.rock_ids][:MAX_POINTS]
    rocks = [row for row in types if row["token_id"] in facts.rock_ids]
    data = [
        _marks(
            name,
            [row["count"] for row in own],
            [row["loss_post"] for row in own],
            [
                f"{label(row['token'], 40)}  id {row['token_id']}<br>{plural(row['count'], 'occurrence')}, "
                f"{label(str(row.get('cluster', '')), 40)}<br>mean loss {number(row.get('loss_pre'), 3)} → "
                f"{number(row['loss_post'], 3)} nats<br>burden {number(row.get('r'), 1)}, context consistency "
                f"{percent(row.get('ccr'))}"
                for row in own
            ],
            color,
            symbol,
            size,
        )
        for own, name, color, symbol, size in (
            (others, "other token types", REST, "circle-open", 6),
            (rocks, "rocks", ROCK, "diamond", 10),
        )
        if own
    ]
    shape = layout("occurrences", f"mean {label(facts.signal)} after OPD, nats", height=400)
    log_axis(shape["xaxis"], min(row["count"] for row in types), max(row["count"] for row in types))
    log_axis(shape["yaxis"], min(row["loss_post"] for row in types), max(row["loss_post"] for row in types))
    mean = sum(row.get("r") or 0 for row in types) / max(sum(row["count"] for row in types), 1)
    if mean > 0:
        shape["shapes"] = [rule(mean, along="y")]
        corner = {"x": 1, "xref": "paper", "xanchor": "right", "yanchor": "bottom", "showarrow": False}
        note = {"text": "mean of all", "font": {"size": 11, "color": MUTED}, "y": math.log10(mean)}
        shape["annotations"] = [corner | note]
    above = sum(row["loss_post"] >= mean for row in rocks)
    costly = max(types, key=lambda row: row["loss_post"])
    return Figure(
        name="funnel",
        title="Frequent, costly, or both",
        sentence=f"{above} of {plural(len(rocks), 'rock')} cost more than the mean token ({number(mean, 3)} nats); "
        f"the costliest type, “{visible(costly['token'])}”, costs {number(costly['loss_post'], 2)} nats at "
        f"{plural(costly['count'], 'occurrence')}.",
        estimator=f"One mark a token type, {MEASURED}; mean over its occurrences of {facts.signal} under the last "
        "checkpoint. Both axes are logarithmic.",
        rows=table,
        data=data,
        layout=shape,
    )


def clusters(facts: Facts) -> Figure | None:
    """What kinds of tokens the rocks are."""
    table = facts.table("clusters")
    if table is None or facts.lacks(table, "the clusters", "cluster", "share_positions", "share_loss"):
        return None
    rows = sorted(table.to_pylist(), key=lambda row: row["share_loss"])
    names = [label(CLUSTERS.get(row["cluster"], str(row["cluster"])), 40) for row in rows]
    data = []
    for key, name, color, pattern in (("share_positions", "positions", REST, "/"), ("share_loss", "loss", ROCK, "")):
        texts = [
            f"{kind}: {percent(row[key])} of the {name}, {plural(row.get('num_types') or 0, 'type')}, "
            f"enrichment {number(row.get('enrichment'))}"
            for kind, row in zip(names, rows)
        ]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "x": [100 * row[key] for row in rows],
                "y": list(range(len(rows))),
                "text": texts,
                "textposition": "none",
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"color": color, "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": "@paper"}},
            }
        )
    shape = layout("share of all, %", "", height=110 + 54 * len(rows), barmode="group")
    shape["yaxis"] = names_axis(names)
    top = rows[-1]
    return Figure(
        name="clusters",
        title="What kinds of tokens are they?",
        sentence=f"The costliest kind is {CLUSTERS.get(top['cluster'], top['cluster'])}: "
        f"{plural(top.get('num_types') or 0, 'rock')} with {percent(top['share_loss'])} of the loss on "
        f"{percent(top['share_positions'])} of the positions (enrichment {number(top.get('enrichment'))}).",
        estimator=f"Rocks grouped by their text alone; shares of all positions and of all loss, {MEASURED}.",
        rows=table,
        data=data,
        layout=shape,
    )


def sensitivity(facts: Facts) -> Figure | None:
    """The declared set with κ and q moved by one step."""
    table = facts.table("sensitivity")
    if table is None or facts.lacks(table, "sensitivity", "parameter", "step", "jaccard"):
        return None
    rows = [row for row in table.to_pylist() if row["parameter"] != "base"]
    if not rows:
        return None
    rows.sort(key=lambda row: (row["jaccard"], row["parameter"], row["step"]), reverse=True)
    words = {"kappa": "stagnation κ", "q": "false-discovery rate q"}
    names = [
        f"{words.get(row['parameter']) or label(row['parameter'], 40)} {'↑' if row['step'] > 0 else '↓'}"
        for row in rows
    ]
    texts = [
        f"{name} (at {number(row.get('value'), 3)}): Jaccard {number(row['jaccard'])}<br>positions "
        f"{percent(row.get('share_positions'))}, loss {percent(row.get('share_loss'))}"
        for name, row in zip(names, rows)
    ]
    shape = layout("overlap with the declared set (Jaccard)", "", height=100 + 28 * len(rows), showlegend=False)
    shape["xaxis"]["range"] = [0, 1.04]
    shape["yaxis"] = names_axis(names)
    ends = [row.get("enrichment") for row in rows if row.get("enrichment") is not None]
    spread = f"; enrichment stays within {number(min(ends))} and {number(max(ends))}" if ends else ""
    overlap, places = [row["jaccard"] for row in rows], list(range(len(rows)))
    return Figure(
        name="sensitivity",
        title="How far does it hang on the thresholds?",
        sentence=f"Moving κ or q by a step leaves an overlap of {number(overlap[-1])} or more with the declared "
        f"set (least at {names[-1]}){spread}.",
        estimator="κ ± 0.1; q halved and doubled. Sets are chosen again on the selection half; footprints are measured "
        "on the other half.",
        rows=table,
        data=[_marks("declared rocks", overlap, places, texts, ROCK, "diamond", 10)],
        layout=shape,
    )


def persistence(facts: Facts) -> Figure | None:
    """Change of the loss on fixed contexts by group, with both A/A comparisons."""
    table = facts.table("persistence")
    if table is None or facts.lacks(table, "persistence", "group", "arm", "step", "before", "after", "change"):
        return None
    rows = table.to_pylist()
    if not rows:
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
        sentence=_persistence_sentence(rows, last),
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


def _persistence_sentence(rows: list[Row], last: int | None) -> str:
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
