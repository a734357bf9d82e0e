"""Figures of what detection found: footprint, funnel, sweep, density, clusters.

Each function reads the run's tables and returns a figure with its sentence, or nothing where the tables are missing.
"""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa

from rocktokens.facts import Facts
from rocktokens.show import (
    MUTED,
    NBSP,
    REST,
    ROCK,
    SYMBOLS,
    THIRD,
    Figure,
    errors,
    estimate,
    interval,
    label,
    layout,
    listed,
    log_axis,
    names_axis,
    number,
    percent,
    plural,
    rule,
    visible,
)
from rocktokens.values import Row

CLUSTERS = {
    "math": "math and LaTeX delimiters",
    "markdown": "markdown and whitespace",
    "discourse": "discourse markers",
    "digits": "digits",
    "punctuation": "other punctuation",
    "content": "content words",
    "unknown": "no tokenizer at hand",
}
SHARES = (
    ("share_types", "token types"),
    ("share_positions", "positions"),
    ("share_positions_median", "positions, median rollout"),
    ("share_loss", "loss"),
    ("share_grad", "gradient norm"),
)
NAMES = {"control": "matched control", "control_loss": "control matched on loss"}
MAX_POINTS = 3000


def footprint_row(facts: Facts, name: str | None = None) -> dict[str, object]:
    """The footprint of a set; without a table of footprints, its values from the types alone."""
    name = name or facts.definition
    for row in facts.rows("footprints"):
        if row.get("name") == name:
            return row
    if f"in_{name}" not in (facts.types[0] if facts.types else {}):
        return {}
    own = [row for row in facts.types if row[f"in_{name}"]]

    def share(column: str) -> float | None:
        total = sum(row.get(column) or 0.0 for row in facts.types)
        return sum(row.get(column) or 0.0 for row in own) / total if total else None

    positions, loss = share("count"), share("r")
    return {
        "name": name,
        "num_types": len(own),
        "share_types": len(own) / len(facts.types),
        "share_positions": positions,
        "share_loss": loss,
        "share_grad": share("grad_share"),
        "enrichment": loss / positions if loss is not None and positions else None,
    }


def footprint(facts: Facts) -> Figure | None:
    """Shares of types, positions, loss and gradient that the rocks hold, beside their control."""
    row = footprint_row(facts)
    if not row:
        return None
    data, table = [], facts.table("footprints")
    sets = [(facts.definition, "rocks", ROCK, "circle"), ("control", NAMES["control"], MUTED, "diamond-open")]
    measures = [(key, title) for key, title in SHARES if row.get(key) is not None]
    for index, (name, title, color, symbol) in enumerate(sets):
        own = row if name == facts.definition else footprint_row(facts, name)
        # A control is drawn by occurrence: how many types it touches says nothing.
        found = [None if index and key == "share_types" else estimate(own, key) for key, _ in measures]
        kept = [(place, item) for place, item in enumerate(found) if item is not None]
        if not kept:
            continue
        value = [100 * item.value for _, item in kept]
        low, high = [100 * item.low for _, item in kept], [100 * item.high for _, item in kept]
        ends = [[None if math.isnan(end) else end for end in side] for side in (low, high)]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": title,
                "x": value,
                "y": [len(measures) - 1 - place + (0.12 if index else -0.12) * -1 for place, _ in kept],
                "error_x": errors(value, ends[0], ends[1], color),
                "marker": {"color": color, "size": 10, "symbol": symbol},
                "text": [f"{title}: {measures[place][1]} {interval(item, percent)}" for place, item in kept],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    shape = layout("share, %", "", height=90 + 46 * len(measures))
    shape["xaxis"] |= {"rangemode": "tozero", "ticksuffix": NBSP + "%"}
    shape["yaxis"] = names_axis([title for _, title in reversed(measures)])
    return Figure(
        name="footprint",
        title="Footprint of the rocks",
        sentence=_footprint_sentence(facts, row),
        estimator="Rocks are chosen on one half of the prompts, and every share is measured on the other half; 95 % "
        "intervals from a bootstrap over prompts. Enrichment: share of loss ÷ share of positions.",
        rows=table if table is not None else pa.Table.from_pylist([row]),
        data=data,
        layout=shape,
    )


def _footprint_sentence(facts: Facts, row: Row) -> str:
    shares = [
        f"{interval(estimate(row, key), percent)} of the {title}"
        for key, title in SHARES
        if key not in ("share_types", "share_positions_median") and estimate(row, key) is not None
    ]
    enrichment = estimate(row, "enrichment")
    control = estimate(footprint_row(facts, "control"), "enrichment") if facts.rows("footprints") else None
    beside = f"; the matched control's is {interval(control)}" if control else ""
    return (
        f"{plural(int(row.get('num_types') or 0), 'rock')}, {percent(row.get('share_types'))} of the token types, "
        f"{'holds' if row.get('num_types') == 1 else 'hold'} "
        f"{listed(shares)}: an enrichment of {interval(enrichment)}{beside}."
    )


def funnel(facts: Facts) -> Figure | None:
    """Frequency against mean loss, rocks marked."""
    table = facts.table("types")
    if table is None or facts.lacks(table, "the funnel", "count", "loss_post", "token_id"):
        return None
    types = [row for row in facts.types if row["count"] and (row["loss_post"] or 0) > 0]
    others = [row for row in types if row["token_id"] not in facts.rock_ids][:MAX_POINTS]
    rocks = [row for row in types if row["token_id"] in facts.rock_ids]
    groups = ((others, "other token types", REST, "circle-open", 6), (rocks, "rocks", ROCK, "diamond", 10))
    data = [_funnel_trace(facts, *group) for group in groups if group[0]]
    if not data:
        return None
    shape = layout("occurrences", f"mean {label(facts.signal)} after OPD, nats", height=400)
    log_axis(shape["xaxis"], min(row["count"] for row in types), max(row["count"] for row in types))
    log_axis(shape["yaxis"], min(row["loss_post"] for row in types), max(row["loss_post"] for row in types))
    mean = sum(row["r"] or 0 for row in types if "r" in row) / max(sum(row["count"] for row in types), 1)
    if mean > 0:
        shape["shapes"] = [rule(mean, along="y")]
        shape["annotations"] = [_note("mean of all", y=math.log10(mean))]
    above = sum(row["loss_post"] >= mean for row in rocks)
    costly = max(types, key=lambda row: row["loss_post"])
    return Figure(
        name="funnel",
        title="Frequent, costly, or both",
        sentence=f"{above} of {plural(len(rocks), 'rock')} cost more than the mean token ({number(mean, 3)} nats); "
        f"the costliest type, “{visible(costly['token'])}”, costs {number(costly['loss_post'], 2)} nats at "
        f"{plural(costly['count'], 'occurrence')}.",
        estimator="One mark a token type, on the half of the prompts that had no say in choosing the rocks; mean over "
        f"its occurrences of {facts.signal} under the last checkpoint. Both axes are logarithmic.",
        rows=table,
        data=data,
        layout=shape,
    )


def _funnel_trace(facts: Facts, rows: list[Row], name: str, color: str, symbol: str, size: int) -> dict[str, object]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [row["count"] for row in rows],
        "y": [row["loss_post"] for row in rows],
        "text": [_type_hover(row) for row in rows],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": color, "size": size, "symbol": symbol, "opacity": 0.9},
    }


def _type_hover(row: Row) -> str:
    lines = [
        f"{label(row['token'], 40)}  id {row['token_id']}",
        f"{plural(row['count'], 'occurrence')}, {label(str(row.get('cluster', '')), 40)}",
    ]
    before = f"{number(row['loss_pre'], 3)} → " if row.get("loss_pre") is not None else ""
    lines.append(f"mean loss {before}{number(row['loss_post'], 3)} nats")
    if row.get("ccr") is not None:
        lines.append(f"burden {number(row.get('r'), 1)}, context consistency {percent(row['ccr'])}")
    return "<br>".join(lines)


def _note(text: str, **place: object) -> dict[str, object]:
    corner = {"x": 1, "xref": "paper", "xanchor": "right", "yanchor": "bottom", "showarrow": False}
    return {**corner, "text": text, "font": {"size": 11, "color": MUTED}, **place}


def sweep(facts: Facts) -> Figure | None:
    """Stability and coverage against K."""
    table = facts.table("sweep")
    if table is None or facts.lacks(table, "the sweep", "definition", "k", "stability", "coverage"):
        return None
    rows = table.to_pylist()
    wanted = facts.config.get("detect", {}).get("stability", 0.7)
    data = []
    for index, definition in enumerate(dict.fromkeys(row["definition"] for row in rows)):
        own = [row for row in rows if row["definition"] == definition]
        color = ROCK if definition == facts.definition else (REST, THIRD, MUTED)[index % 3]
        for key, dash in (("stability", "solid"), ("coverage", "dot")):
            if all(row[key] is None for row in own):  # counts alone tell no stability
                continue
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": f"{label(definition)}: {key}",
                    "x": [row["k"] for row in own],
                    "y": [row[key] for row in own],
                    "line": {"color": color, "dash": dash, "width": 2.4 if color == ROCK else 1.4},
                    "marker": {"size": 5, "symbol": SYMBOLS[index % len(SYMBOLS)], "color": color},
                    "text": [f"{label(definition)}, K = {row['k']}: {key} {number(row[key])}" for row in own],
                    "hovertemplate": "%{text}<extra></extra>",
                }
            )
    k = facts.stage("detect").get("k")
    shape = layout("K, number of rocks", "stability (Jaccard), coverage (share of loss)", height=380)
    log_axis(shape["xaxis"], min(row["k"] for row in rows), max(row["k"] for row in rows), steps=(1, 2, 5))
    shape["yaxis"]["range"] = [0, 1.04]
    shape["shapes"] = [rule(wanted, along="y")] + ([rule(k, color=ROCK, dash="dash")] if k else [])
    shape["annotations"] = [_note(f"wanted: {number(wanted)}", y=wanted)]
    at = [row for row in rows if row["definition"] == facts.definition and row["k"] == k]
    return Figure(
        name="sweep",
        title="How many rocks?",
        sentence=_sweep_sentence(at[0], facts.definition, wanted) if at else "K was not taken from this sweep.",
        estimator="Stability: mean Jaccard overlap of the top K from 10, 20 … 80 % of the selection prompts (five "
        "draws each) with the top K of all of them. Coverage: share of the loss of the top K. K = auto takes the "
        "largest K that is stable beyond chance.",
        rows=table,
        data=data,
        layout=shape,
    )


def _sweep_sentence(row: Row, definition: str, wanted: float) -> str:
    if row["stability"] is None:
        return f"The first {row['k']} types by `{definition}` cover {percent(row['coverage'], 0)} of the loss."
    chance = f" (chance: {number(row['chance'])})" if row.get("chance") is not None else ""
    word = "stable" if row["stability"] >= wanted else "not stable"
    return (
        f"At K = {row['k']} the `{definition}` set is {word}: top sets from parts of the prompts overlap with it by "
        f"{number(row['stability'])}{chance}, and it covers {percent(row['coverage'], 0)} of the loss."
    )


def density(facts: Facts) -> Figure | None:
    """Share of each rollout's positions that are rocks."""
    if not facts.steps or not facts.rock_ids:
        return None
    ids = ", ".join(map(str, sorted(facts.rock_ids)))
    table = facts.query(
        f"select prompt_id, rollout_id, count(*) as positions, count_if(token_id in ({ids}))::bigint as rocks "
        f"from occurrences where step = {facts.steps[-1]} group by all order by prompt_id, rollout_id"
    )
    if table is None or not len(table):
        return None
    share = np.array(table["rocks"]) / np.array(table["positions"])
    table = table.append_column("share", pa.array(share))
    low, median, high = np.quantile(share, [0.05, 0.5, 0.95])
    edges = np.linspace(0, max(0.05, float(share.max()) * 1.0001), 25)
    counts, _ = np.histogram(share, edges)
    middle = (edges[:-1] + edges[1:]) / 2
    data = [
        {
            "type": "bar",
            "name": "rollouts",
            "x": (100 * middle).tolist(),
            "y": counts.tolist(),
            "marker": {"color": ROCK},
            "text": [
                f"{plural(int(n), 'rollout')} with {percent(a)} to {percent(b)} rocks"
                for n, a, b in zip(counts, edges[:-1], edges[1:])
            ],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
        }
    ]
    shape = layout("rocks among a rollout's positions, %", "rollouts", height=300, bargap=0.06)
    shape["shapes"] = [rule(100 * float(median), color="@ink", dash="dash")]
    none = int((share == 0).sum())
    return Figure(
        name="density",
        title="How dense are rocks in a rollout?",
        sentence=f"In half of the {plural(len(share), 'rollout')}, {percent(float(median))} or more of the positions "
        f"are rocks; 90 % of them lie between {percent(float(low))} and {percent(float(high))}, and {none} hold none.",
        estimator="Per rollout, positions whose token is a rock ÷ all scored positions, over all scored rollouts; the "
        "dashed line is the median.",
        rows=table,
        data=data,
        layout=shape,
    )


def _cluster(row: Row) -> str:
    """A kind of token in words."""
    return CLUSTERS.get(row["cluster"], str(row["cluster"]))


def clusters(facts: Facts) -> Figure | None:
    """What kinds of tokens the rocks are."""
    table = facts.table("clusters")
    if table is None or facts.lacks(table, "the clusters", "cluster", "share_positions", "share_loss"):
        return None
    rows = sorted(table.to_pylist(), key=lambda row: row["share_loss"])
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": title,
            "x": [100 * row[key] for row in rows],
            "y": list(range(len(rows))),
            "marker": {"color": color, "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": "@paper"}},
            "text": [
                f"{label(_cluster(row), 40)}: {percent(row[key])} of the {title}, "
                f"{plural(row.get('num_types') or 0, 'type')}, enrichment {number(row.get('enrichment'))}"
                for row in rows
            ],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
        }
        for key, title, color, pattern in (
            ("share_positions", "positions", REST, "/"),
            ("share_loss", "loss", ROCK, ""),
        )
    ]
    shape = layout("share of all, %", "", height=110 + 54 * len(rows), barmode="group")
    shape["yaxis"] = names_axis([label(_cluster(row), 40) for row in rows])
    top = rows[-1]
    return Figure(
        name="clusters",
        title="What kinds of tokens are they?",
        sentence=f"The costliest kind is {_cluster(top)}: "
        f"{plural(top.get('num_types') or 0, 'rock')} with {percent(top['share_loss'])} of the loss on "
        f"{percent(top['share_positions'])} of the positions (enrichment {number(top.get('enrichment'))}).",
        estimator="Rocks grouped by their text alone; shares of all positions and of all loss, on the half of the "
        "prompts that had no say in choosing them.",
        rows=table,
        data=data,
        layout=shape,
    )
