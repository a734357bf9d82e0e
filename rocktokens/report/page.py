"""From figures and sentences to one self-contained HTML page, by jinja2 templates that escape what they are given.

Scripts and styles are allowed by their hash alone and a report may open no connection, so text from a tokenizer or a
prompt can neither run nor leave, whatever it is. Everything a page holds follows from the run: the same run, the same
bytes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pyarrow as pa
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from rocktokens.facts import Facts
from rocktokens.report.conclusions import all_accuracies, answer, verdict
from rocktokens.report.method import method
from rocktokens.report.tables import (
    accuracies_table,
    census_table,
    costly_table,
    footprints_table,
    regimes_table,
    rocks_table,
)
from rocktokens.show import Column, Figure, Table, interval, number, percent, plural, significant, text, to_csv, visible
from rocktokens.values import Json, Row

REPORT = "report.html"
EMBED_CSV_BYTES = 150_000
SHOWN_ROWS = 40
CHIPS = 24

NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'"
# What only a header can say, a page's own element cannot: nobody may show the page inside theirs.
UNFRAMED = "frame-ancestors 'none'"
DATA_POLICY = f"{NOTHING}; {UNFRAMED}; sandbox"


def resource(name: str) -> str:
    """A file of this package."""
    return resources.files("rocktokens.report").joinpath(name).read_text(encoding="utf-8")


@cache
def templates() -> Environment:
    """The templates of the report and of the pages that `view` makes."""
    found = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"prose": prose, "visible": visible, "interval": interval, "plural": plural}
    found.globals |= {"percent": percent, "number": number, "chips": CHIPS}
    return found


def prose(sentence: str) -> Markup:
    """A sentence as HTML: `commands` and “tokens” set as code."""
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(sentence)))
    return Markup(re.sub(r"“([^”]*)”", r"<code><bdi>\1</bdi></code>", text))


# What a page may run, load and send


def content_hash(text: str) -> str:
    """How a policy names an inline script or stylesheet."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_policy(scripts: Sequence[str], style: str, *, more: str = "") -> str:
    """A page with these scripts and this stylesheet; nothing else is run, fetched, framed or sent."""
    return f"{NOTHING}; script-src {' '.join(map(content_hash, scripts))}; style-src {content_hash(style)}{more}"


@cache
def own_policy() -> str:
    """The policy of every report that this version writes; `view` sends it as a header too.

    Plotly adds an empty style element, which has a hash too, and fills it through the document's own interface.
    """
    more = f" {content_hash('')}; img-src data: blob:"
    return page_policy([plotly_script(), *report_scripts()], resource("report.css"), more=more)


@cache
def plotly_script() -> str:
    """Plotly's own bundle, as it ships with the Python package."""
    return resources.files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")


@cache
def plotly_packed() -> str:
    """The bundle compressed: a third of the size, and no address of others in the page's text."""
    return packed(plotly_script())


def report_scripts() -> list[str]:
    """The report's own scripts, in the order of the page."""
    return [resource(f"{name}.js") for name in ("charts", "tables", "viewer")]


def packed(text: str) -> str:
    """Text as the page carries it: gzip, then base64; the same text gives the same bytes."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def as_json(value: Any) -> str:
    """JSON that can stand inside a script element: no < > & and no line separators in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


# The report


def page(facts: Facts, figures: list[Figure], viewer: Json | None) -> str:
    """The whole report."""
    found = verdict(facts)
    rocks, costly, all_found = rocks_table(facts), costly_table(facts), all_accuracies(facts)
    by_name = {figure.name: figure for figure in figures}
    sections = {"verdict": "Verdict", "answer": "In five sentences"}
    sections |= {"footprint": by_name["footprint"].title} if "footprint" in by_name else {}
    if facts.rocks or costly.data:
        sections["rocks"] = "The rocks" if facts.rocks else "Costly, but no rocks"
    sections |= {"viewer": "Read the rollouts"} if viewer is not None else {}
    sections |= {figure.name: figure.title for figure in figures}
    sections["method"] = "Method and settings"
    return (
        templates()
        .get_template(REPORT)
        .render(
            csp=own_policy(),
            css=Markup(resource("report.css")),
            scripts=[Markup(script) for script in report_scripts()],
            plotly=Markup(plotly_packed()),
            data=Markup(as_json({"figures": [figure.spec() for figure in figures]})),
            viewer_packed="" if viewer is None else Markup(packed(as_json(viewer))),
            sections=sections,
            facts=facts,
            found=found,
            sizes=_sizes(facts),
            sentences=answer(facts),
            accuracies=accuracies_table(all_found) if len(all_found) > 1 else None,
            figures={figure.name: _figure(figure) for figure in figures},
            more={
                "footprint": footprints_table(facts),
                "accuracy_seconds": regimes_table(facts),
                "knockouts": census_table(facts),
            },
            overlaps=[(a, b, number(value)) for a, b, value in facts.stage("detect").get("overlaps") or []],
            rocks=rocks,
            costly=costly,
            method=method(facts),
            **viewer_values(viewer),
        )
    )


def viewer_values(viewer: Row | None, part: str | None = None) -> Json:
    """What the viewer's template shows; its data travel apart, compressed. `part` says which rollouts these are."""
    if part is None and viewer is not None:
        shown, total = len(viewer["rollouts"]), viewer["total"]
        part = f"{shown} of {plural(total, 'rollout')}, taken evenly over the run; `rocktokens view` pages through all"
        part = f"All {total} rollouts" if shown == total else f"{part} of them"
    return {"part": part, "levels": ["< 0.01", "0.01", "0.03", "0.1", "0.3", "1", "≥ 3"]}


def _sizes(facts: Facts) -> list[str]:
    detect, rollouts = facts.stage("detect"), facts.stage("sample").get("rollouts")
    counts = {"rollout": rollouts, "prompt": detect.get("num_prompts"), "occurrence": detect.get("num_occurrences")}
    sizes = [plural(count, noun) for noun, count in counts.items() if count]
    return sizes + ([f"checkpoints {', '.join(map(str, facts.steps))}"] if len(facts.steps) > 1 else [])


def _figure(figure: Figure) -> Json:
    """A figure with its rows as a table and as CSV: inside the page where they are few, else a file next to it."""
    schema = figure.rows.schema
    shown = [name for name in schema.names if not pa.types.is_nested(schema.field(name).type)]
    columns = []
    for name in shown:
        kind = schema.field(name).type
        form = (
            (significant, {"digits": 4}) if pa.types.is_floating(kind) else (text,) if pa.types.is_integer(kind) else ()
        )
        columns.append(Column(name, name, *form))
    head = figure.rows.select(shown).slice(0, SHOWN_ROWS).to_pylist()
    rows, count = to_csv(figure.rows), len(figure.rows)
    href = f"figures/{figure.name}.csv"
    if len(rows) <= EMBED_CSV_BYTES:
        href = "data:text/csv;charset=utf-8;base64," + base64.b64encode(rows.encode()).decode()
    return {
        "figure": figure,
        "href": href,
        "table": Table(columns, head, name=figure.name, ids="token_id" if "token_id" in shown else None),
        "summary": f"First {SHOWN_ROWS} of {count} rows"
        if count > SHOWN_ROWS
        else f"{plural(count, 'row')} as a table",
    }
