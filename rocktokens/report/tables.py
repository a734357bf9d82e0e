"""Tables of the report: each scrolls with a visible cue, sorts by its headers, filters, and copies as CSV or token ids.

Without scripts a table is still a table; `tables.js` adds the rest. Cells are HTML that was escaped by whoever made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rocktokens.causal.figures import census_rows, verdicts_by_token
from rocktokens.compare.figures import finals
from rocktokens.facts import Facts
from rocktokens.report.evidence import decisions
from rocktokens.show import NONE, estimate, interval, number, percent, plural, points, visible
from rocktokens.values import Row

ROCK_ROWS = 200
FILTER_FROM = 8
"""Rows from which a table gets a filter."""


def table_html(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    chosen: int | None = None,
    left: tuple[int, ...] = (0,),
    name: str = "table",
    ids: Sequence[int | None] | None = None,
) -> str:
    """A table with its tools.

    Args:
        header: Column titles, HTML.
        rows: Cells, HTML.
        chosen: The row to set in bold.
        left: Columns that are text and stand on the left.
        name: What a copied or saved file is called.
        ids: Token id of every row; with it the table offers to copy the ids.
    """

    def cell(tag: str, place: int, html: str) -> str:
        return f'<{tag} class="left">{html}</{tag}>' if place in left else f"<{tag}>{html}</{tag}>"

    sorting = [f'<button type="button" class="sort">{title}</button>' for title in header]
    head = "".join(cell("th", *item).replace("<th", '<th scope="col"', 1) for item in enumerate(sorting))
    body = []
    for place, row in enumerate(rows):
        kind = ' class="chosen"' if place == chosen else ""
        token = f' data-id="{ids[place]}"' if ids is not None and ids[place] is not None else ""
        body.append(f"<tr{kind}{token}>" + "".join(cell("td", *item) for item in enumerate(row)) + "</tr>")
    return (
        f'<div class="table" data-table="{escape(name)}">{_tools(len(rows), ids is not None)}'
        '<div class="scroll" tabindex="0" role="region" aria-label="Table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        '<button type="button" class="cue" hidden>More columns →</button></div>'
    )


def _tools(count: int, has_ids: bool) -> str:
    """Shown by the script, which they need."""
    sift = '<input type="search" class="sift" aria-label="Filter rows" placeholder="Filter rows" autocomplete="off">'
    ids = '<button type="button" class="link" data-copy="ids">Copy ids</button>' if has_ids else ""
    return (
        f'<div class="tools" hidden>{sift if count >= FILTER_FROM else ""}<output></output>{ids}'
        '<button type="button" class="link" data-copy="csv">Copy CSV</button></div>'
    )


def chip(token: str, token_id: Any) -> str:
    """A token that leads to its occurrences in the viewer."""
    shown = f"<code><bdi>{escape(visible(token))}</bdi></code>"
    if not isinstance(token_id, int):
        return shown
    return f'<a class="token" href="#viewer:type={token_id}" title="Show its occurrences">{shown}</a>'


def footprints_table(facts: Facts) -> str:
    """Footprints of every definition and control, side by side, and the overlaps of the sets."""
    table = facts.rows("footprints")
    if not table:
        return ""
    keys = ("share_positions", "share_positions_median", "share_loss", "share_grad")
    rows = [
        [
            escape(row["name"].replace("_", ", matched on ")),
            str(row.get("num_types", NONE)),
            percent(row.get("share_types")),
        ]
        + [interval(estimate(row, key), percent) for key in keys]
        + [interval(estimate(row, "enrichment"))]
        for row in table
    ]
    header = ["set", "types", "of types", "of positions", "median rollout", "of loss", "of gradient norm", "enrichment"]
    names = [row["name"] for row in table]
    chosen = names.index(facts.definition) if facts.definition in names else None
    html = table_html(header, rows, chosen=chosen, name="footprints")
    overlaps = facts.stage("detect").get("overlaps") or []
    said = ", ".join(f"{escape(str(a))} / {escape(str(b))} {number(value)}" for a, b, value in overlaps)
    return html + (f'<p class="note">Overlap of the sets (Jaccard): {said}.</p>' if said else "")


def rocks_table(facts: Facts) -> str:
    """One row per declared token: what it costs, whether it learns, what banning it does, and the decision."""
    verdicts, decided = verdicts_by_token(facts), decisions(facts)
    shown = facts.rocks[:ROCK_ROWS]
    has_class = any(row.get("class") for row in shown)
    has_fall = any(row.get("fall") is not None for row in shown)
    rows = []
    for row in shown:
        sets = ", ".join(name for name in ("certified", "burden", "context") if row.get(f"in_{name}"))
        census = verdicts.get(row["token_id"], {})
        decision = decided.get(row["token_id"])
        cells = [chip(row["token"], row["token_id"]), str(row["token_id"])]
        cells += [f"{number(row.get('loss_pre'), 3)} → {number(row.get('loss_post'), 3)}"]
        cells += [interval(estimate(row, "fall"), percent, digits=0)] if has_fall else []
        cells += [f"{escape(str(row.get('class') or NONE))}{_confirmed(row)}"] if has_class else []
        cells += [escape(census.get("verdict", NONE)), interval(estimate(census, "delta"), points)]
        cells += [f"{escape(decision[0])}: {escape(decision[1])}" if decision else NONE] if decided else []
        cells += [
            escape(str(row.get("cluster", NONE))),
            number(row.get("count"), 0),
            interval(estimate(row, "r"), digits=1),
            number(row.get("ccr")),
            number(row.get("r_ctx"), 1),
            escape(sets),
        ]
        rows.append(cells)
    header = ["token", "id", "loss before → after"]
    header += ["fall"] if has_fall else []
    header += ["class"] if has_class else []
    header += ["banned at inference", "Δ, points"] + (["decision"] if decided else [])
    header += ["kind", "count", "burden R", "CCR", "R_ctx", "sets"]
    words = {"class", "banned at inference", "decision", "kind", "sets", "token"}
    left = tuple(place for place, title in enumerate(header) if title in words)
    more = f" The first {ROCK_ROWS} of {len(facts.rocks)} are shown." if len(facts.rocks) > ROCK_ROWS else ""
    basis = "numbers from the half of the prompts that had no say in choosing, with 95 % intervals"
    return (
        f'<p class="says">Best first by the <code>{escape(facts.definition)}</code> definition; {basis}.{more}</p>'
        + table_html(header, rows, left=left, name="rocks", ids=[row["token_id"] for row in shown])
    )


def _confirmed(row: Row) -> str:
    return {True: ", confirmed", False: ", not confirmed"}.get(row.get("confirmed"), "")  # type: ignore[arg-type]


def costly_table(facts: Facts) -> str:
    """Costly token types that are not called rocks: learning, levelled off, unclear."""
    kinds = [row for row in facts.types if row.get("class") and row["token_id"] not in facts.rock_ids]
    shown = [row for row in kinds if str(row["class"]).startswith(("learning", "unclear"))][:ROCK_ROWS]
    if not shown:
        return ""
    decided = decisions(facts)
    rows = [
        [
            chip(row["token"], row["token_id"]),
            str(row["token_id"]),
            escape(str(row["class"])),
            f"{number(row.get('loss_pre'), 3)} → {number(row.get('loss_post'), 3)}",
            interval(estimate(row, "fall"), percent, digits=0),
            number(row.get("count"), 0),
            escape(": ".join(decided[row["token_id"]])) if row["token_id"] in decided else NONE,
        ]
        for row in shown
    ]
    header = ["token", "id", "class", "loss before → after", "fall", "count", "decision"]
    title = f"{plural(len(kinds), 'other costly type')}: they learn, or the data do not settle whether they do"
    ids = [row["token_id"] for row in shown]
    return f"<h3>{title}</h3>" + table_html(header, rows, left=(0, 2, 6), name="costly", ids=ids)


def census_table(facts: Facts) -> str:
    """Every candidate of the census, rocks marked."""
    known = [(row, estimate(row, "delta")) for row in census_rows(facts)]
    rows, ids = [], []
    for row, effect in known:
        single = row["members"][0] if len(row.get("members") or ()) == 1 else None
        rock = bool(row.get("members")) and all(token_id in facts.rock_ids for token_id in row["members"])
        rows.append(
            [
                chip(row["token"], single),
                NONE if single is None else str(single),
                "◆ rock" if rock else "",
                escape(row["kind"]),
                escape(row["verdict"]),
                interval(effect, points),
                percent(row.get("used_share")),
                number(100 * row["placebo_floor"], 1) if row.get("placebo_floor") is not None else NONE,
            ]
        )
        ids.append(single)
    if not rows:
        return ""
    header = ["banned", "id", "rock?", "kind", "verdict", "Δ, points", "used in", "noise floor"]
    return table_html(header, rows, left=(0, 2, 3, 4), name="census", ids=ids)


def regimes_table(facts: Facts) -> str:
    """What the comparison found for every regime. Seconds only where they have an interval; compute in FLOPs."""
    found = finals(facts)
    rows = []
    for regime, row in found.items():
        base = regime == "uniform"
        seconds = estimate(row, "seconds_ratio")
        timed = seconds is not None and seconds.low == seconds.low
        rows.append(
            [
                escape(regime),
                escape(str(row.get("verdict") or NONE)) if not base else NONE,
                NONE if base else interval(estimate(row, "delta"), points),
                interval(estimate(row, "accuracy"), percent),
                number(row.get("flops_ratio"), 3),
                interval(seconds) if timed and not base else NONE,
                percent(row.get("kept_share")),
                f"{number(row['ceiling'])} ×" if row.get("ceiling") else NONE,
                str(row.get("num_seeds", NONE)),
            ]
        )
    header = ["regime", "accuracy is", "change, points", "accuracy", "FLOPs ×", "seconds ×", "kept", "ceiling", "seeds"]
    return table_html(header, rows, left=(0, 1), name="regimes") if rows else ""
