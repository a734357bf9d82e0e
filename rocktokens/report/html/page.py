"""From figures and sentences to one HTML page that asks nobody for anything.

Scripts are allowed by their hash alone and the page may open no connection, so text from a tokenizer or a prompt can
neither run nor leave, whatever it is. Everything a page holds follows from the run: the same run, the same bytes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from functools import cache
from html import escape
from importlib import resources
from typing import Any

import pyarrow as pa

from rocktokens.report.figures.compare import finals
from rocktokens.report.figures.figure import Figure
from rocktokens.report.formats import (
    NONE,
    code,
    interval,
    number,
    percent,
    plural,
    points,
    prose,
    significant,
    to_csv,
    visible,
)
from rocktokens.report.run_facts import STAGES, Facts, estimate

EMBED_CSV_BYTES = 150_000
SHOWN_ROWS = 40
ROCK_CHIPS = 200


def resource(name: str) -> str:
    """A file of this package."""
    return resources.files("rocktokens.report.html").joinpath(name).read_text(encoding="utf-8")


@cache
def plotly_script() -> str:
    """Plotly's own bundle, as it ships with the Python package."""
    return resources.files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")


@cache
def plotly_packed() -> str:
    """The bundle compressed: a third of the size, and no address of others in the page's text."""
    return base64.b64encode(gzip.compress(plotly_script().encode(), 6, mtime=0)).decode()


def script_hash(text: str) -> str:
    """How a policy names an inline script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def policy(*scripts: str) -> str:
    """Only these scripts run; nothing is fetched, framed or sent."""
    return (
        f"default-src 'none'; script-src {' '.join(map(script_hash, scripts))}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def as_json(value: Any) -> str:
    """JSON that can stand inside a script element: no < > & and no line separators in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def page(facts: Facts, sentences: list[str], figures: list[Figure], viewer: dict[str, Any] | None) -> str:
    """The whole report."""
    blocks = [("answer", "The answer", _answer(facts, sentences))]
    by_name = {figure.name: figure for figure in figures}
    if "footprint" in by_name:
        blocks.append(("footprint", by_name["footprint"].title, _figure(by_name["footprint"], _footprints(facts))))
    if facts.rocks:
        blocks.append(("rocks", "The rocks", _rocks(facts)))
    if viewer is not None:
        blocks.append(("viewer", "Read the rollouts", _viewer(facts, viewer)))
    more = {"accuracy_seconds": _regimes(facts)}
    for figure in figures:
        if figure.name != "footprint":
            blocks.append((figure.name, figure.title, _figure(figure, more.get(figure.name, ""))))
    blocks.append(("method", "Method and settings", _method(facts)))
    student, teacher = facts.pair
    scripts = {"charts_js": resource("charts.js"), "viewer_js": resource("viewer.js")}
    values = {
        "csp": escape(policy(plotly_script(), *scripts.values())),
        "title": escape(f"rocktokens: {visible(facts.name)}"),
        "css": resource("report.css"),
        "contents": _contents(blocks),
        "headline": _headline(facts),
        "subject": f"Student <bdi>{escape(student)}</bdi>, teacher <bdi>{escape(teacher)}</bdi>{_size(facts)}",
        "body": "\n".join(_section(*block) for block in blocks),
        "footer": "Made by rocktokens from this run’s own tables. The page opens no connection.",
        "data": as_json({"figures": [figure.spec() for figure in figures], "viewer": viewer}),
        "plotly": plotly_packed(),
        **scripts,
    }
    # One pass over the template: what is put in is never searched for places again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], resource("report.html"))


def _section(name: str, title: str, html: str) -> str:
    head = f'<h2 id="{name}-title">{escape(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{head}{html}</section>'


def _headline(facts: Facts) -> str:
    if not facts.types:
        return "A run without detected rocks yet"
    count = len(facts.rocks)
    return f"{plural(count, 'token')} that distillation left expensive" if count else "No rock tokens in this run"


def _size(facts: Facts) -> str:
    detect = facts.stage("detect")
    number_of = facts.stage("sample").get("rollouts")
    parts = [plural(number_of, "rollout")] if number_of else []
    parts += [plural(detect["num_prompts"], "prompt")] if detect.get("num_prompts") else []
    parts += [plural(detect["num_occurrences"], "occurrence")] if detect.get("num_occurrences") else []
    parts += [f"checkpoints {', '.join(map(str, facts.steps))}"] if len(facts.steps) > 1 else []
    return "".join(f" · {escape(part)}" for part in parts)


def _contents(blocks: list[tuple[str, str, str]]) -> str:
    return "<ol>" + "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title, _ in blocks) + "</ol>"


def _answer(facts: Facts, sentences: list[str]) -> str:
    items = "".join(f"<li>{prose(sentence)}</li>" for sentence in sentences)
    chips = "".join(f"<li>{code(row['token'])}</li>" for row in facts.rocks[:ROCK_CHIPS])
    listing = f'<ul class="chips" aria-label="All rocks">{chips}</ul>' if len(facts.rocks) > 12 else ""
    missing = facts.not_run
    left = ""
    if missing:
        named = ", ".join(f"<code>{name}</code> ({escape(STAGES[name][1])})" for name in missing)
        left = f'<p class="note" id="not-run">Not run, and so not in this report: {named}.</p>'
    return f'<ol class="answer">{items}</ol>{listing}{left}'


def table_html(
    header: list[str], rows: list[list[str]], *, chosen: int | None = None, left: tuple[int, ...] = (0,)
) -> str:
    """Cells are HTML already."""

    def cell(tag: str, place: int, html: str) -> str:
        return f'<{tag} class="left">{html}</{tag}>' if place in left else f"<{tag}>{html}</{tag}>"

    head = "".join(cell("th", place, name) for place, name in enumerate(header))
    body = "".join(
        ('<tr class="chosen">' if place == chosen else "<tr>")
        + "".join(cell("td", *item) for item in enumerate(row))
        + "</tr>"
        for place, row in enumerate(rows)
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _footprints(facts: Facts) -> str:
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
    html = table_html(header, rows, chosen=names.index(facts.definition) if facts.definition in names else None)
    overlaps = facts.stage("detect").get("overlaps") or []
    said = ", ".join(f"{escape(str(a))} / {escape(str(b))} {number(value)}" for a, b, value in overlaps)
    return html + (f'<p class="note">Overlap of the sets (Jaccard): {said}.</p>' if said else "")


def _rocks(facts: Facts) -> str:
    from rocktokens.report.figures.causal import verdicts_by_token

    verdicts = verdicts_by_token(facts)
    rows = []
    for row in facts.rocks[:ROCK_CHIPS]:
        sets = ", ".join(name for name in ("burden", "context", "excess") if row.get(f"in_{name}"))
        before = number(row.get("loss_pre"), 3)
        verdict = verdicts.get(row["token_id"], {}).get("verdict", NONE)
        rows.append(
            [
                code(row["token"]),
                escape(str(row.get("cluster", NONE))),
                number(row.get("count"), 0),
                f"{before} → {number(row.get('loss_post'), 3)}",
                escape(verdict),
                interval(estimate(row, "r"), digits=1),
                number(row.get("ccr")),
                number(row.get("r_ctx"), 1),
                interval(estimate(row, "excess"), digits=1),
                escape(sets),
            ]
        )
    header = ["token", "kind", "count", "loss before → after", "banned", "burden R", "CCR", "R_ctx", "excess", "sets"]
    return (
        f'<p class="says">Best first by the <code>{escape(facts.definition)}</code> definition; numbers from the half '
        "of the prompts that had no say in choosing, with 95 % intervals.</p>"
        + table_html(header, rows, left=(0, 1, 4, 9))
    )


def _regimes(facts: Facts) -> str:
    """What the comparison read off every regime."""
    found = finals(facts)
    rows = [
        [
            escape(regime),
            interval(estimate(row, "accuracy"), percent),
            NONE if regime == "uniform" else interval(estimate(row, "delta"), points),
            NONE if regime == "uniform" else interval(estimate(row, "change_same_seconds"), points),
            interval(estimate(row, "seconds_ratio")),
            percent(row.get("kept_share")),
            f"{number(row['ceiling'])}×" if row.get("ceiling") else NONE,
            escape(str(row.get("verdict") or NONE)),
        ]
        for regime, row in found.items()
    ]
    header = [
        "regime",
        "accuracy",
        "change, points",
        "at the same seconds",
        "seconds ×",
        "kept",
        "ceiling",
        "accuracy is",
    ]
    return table_html(header, rows, left=(0, 7)) if rows else ""


def csv_link(name: str, rows: pa.Table) -> str:
    """Rows inside the page where they are few, else as a file beside it."""
    text = to_csv(rows)
    href = f"figures/{name}.csv"
    if len(text) <= EMBED_CSV_BYTES:
        href = "data:text/csv;charset=utf-8;base64," + base64.b64encode(text.encode()).decode()
    return f'<a href="{href}" download="{name}.csv">{plural(len(rows), "row")} as CSV</a>'


def _figure(figure: Figure, more: str = "") -> str:
    notes = "".join(f'<p class="note">{prose(note)}</p>' for note in figure.notes)
    shown = [name for name in figure.rows.column_names if not pa.types.is_nested(figure.rows.schema.field(name).type)]
    head = figure.rows.select(shown).slice(0, SHOWN_ROWS).to_pylist()
    cells = [[_cell(row[name]) for name in shown] for row in head]
    count = len(figure.rows)
    title = f"First {SHOWN_ROWS} of {count} rows" if count > SHOWN_ROWS else f"{plural(count, 'row')} as a table"
    return f"""
<p class="says">{prose(figure.sentence)}</p>
<div class="chart" data-figure="{figure.name}" tabindex="0" role="group"
 aria-label="Chart: {escape(figure.title)}. Arrow keys read its points."><p class="waiting">Drawing…</p></div>
<p class="reading-line" aria-live="polite"></p>{notes}
<div class="under"><span class="est" tabindex="0">How it was estimated
<span role="tooltip">{escape(figure.estimator)}</span></span>
{csv_link(figure.name, figure.rows)}
<button type="button" class="link" data-save="svg" data-figure="{figure.name}">SVG</button>
<button type="button" class="link" data-save="png" data-figure="{figure.name}">PNG</button></div>
{more}<details><summary>{title}</summary>{table_html([escape(name) for name in shown], cells)}</details>"""


def _cell(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return significant(value, 4)
    return f"<bdi>{escape(visible(str(value)))}</bdi>"


def _viewer(facts: Facts, viewer: dict[str, Any]) -> str:
    shown, total = len(viewer["rollouts"]), viewer["total"]
    part = (
        f"{shown} of {plural(total, 'rollout')}, taken evenly over the run"
        if shown < total
        else f"All {total} rollouts"
    )
    edges = ["< 0.01", "0.01", "0.03", "0.1", "0.3", "1", "≥ 3"]
    legend = "".join(f'<span class="t l{place}">{escape(edge)}</span>' for place, edge in enumerate(edges))
    html = resource("viewer.html")
    return html.replace("{{part}}", part).replace("{{legend}}", legend)


def _method(facts: Facts) -> str:
    from rocktokens.report.html.method import method

    return method(facts)
