"""From figures and sentences to one self-contained HTML page: no network requests.

Scripts and styles are allowed by their hash alone and the page may open no connection, so text from a tokenizer or a
prompt can neither run nor leave, whatever it is. Everything a page holds follows from the run: the same run, the same
bytes.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from functools import cache
from html import escape
from importlib import resources
from typing import Any

import pyarrow as pa

from rocktokens.facts import Facts
from rocktokens.report.card import answer_html, card_html
from rocktokens.report.policy import report_policy
from rocktokens.report.tables import (
    census_table,
    costly_table,
    footprints_table,
    regimes_table,
    rocks_table,
    table_html,
)
from rocktokens.report.verdict import verdict
from rocktokens.show import NONE, Figure, plural, prose, significant, to_csv, visible
from rocktokens.values import Row

EMBED_CSV_BYTES = 150_000
SHOWN_ROWS = 40


def resource(name: str) -> str:
    """A file of this package."""
    return resources.files("rocktokens.report").joinpath(name).read_text(encoding="utf-8")


@cache
def plotly_script() -> str:
    """Plotly's own bundle, as it ships with the Python package."""
    return resources.files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")


@cache
def plotly_packed() -> str:
    """The bundle compressed: a third of the size, and no address of others in the page's text."""
    return packed(plotly_script())


def packed(text: str) -> str:
    """Text as the page carries it: gzip, then base64; the same text gives the same bytes."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


@cache
def own_policy() -> str:
    """The policy of every report that this version writes; `view` sends it as a header too."""
    return report_policy([plotly_script(), *page_scripts().values()], resource("report.css"))


def page_scripts() -> dict[str, str]:
    """The report's own scripts by their place in the template."""
    return {f"{name}_js": resource(f"{name}.js") for name in ("charts", "tables", "viewer")}


@cache
def served_style() -> str:
    """The stylesheet of the pages that `view` makes: the reader's system decides between light and dark."""
    css = resource("report.css")
    dark = css.split('[data-theme="dark"] {', 1)[1].split("}", 1)[0]
    return f"{css}@media (prefers-color-scheme: dark) {{ :root {{{dark}}} }}"


def as_json(value: Any) -> str:
    """JSON that can stand inside a script element: no < > & and no line separators in it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def page(facts: Facts, sentences: list[str], figures: list[Figure], viewer: dict[str, object] | None) -> str:
    """The whole report."""
    found = verdict(facts)
    blocks = [
        ("verdict", "Verdict", card_html(facts, found)),
        ("answer", "In five sentences", answer_html(facts, sentences)),
    ]
    by_name = {figure.name: figure for figure in figures}
    if "footprint" in by_name:
        blocks.append(("footprint", by_name["footprint"].title, _figure(by_name["footprint"], footprints_table(facts))))
    if facts.rocks:
        blocks.append(("rocks", "The rocks", rocks_table(facts) + costly_table(facts)))
    elif costly := costly_table(facts):
        blocks.append(("rocks", "Costly, but no rocks", costly))
    if viewer is not None:
        blocks.append(("viewer", "Read the rollouts", viewer_html(viewer)))
    more = {"accuracy_seconds": regimes_table(facts), "knockouts": census_table(facts)}
    for figure in figures:
        if figure.name != "footprint":
            blocks.append((figure.name, figure.title, _figure(figure, more.get(figure.name, ""))))
    blocks.append(("method", "Method and settings", _method(facts)))
    student, teacher = facts.pair
    values = {
        "csp": escape(own_policy()),
        "title": escape(f"{found.title} · {visible(facts.name)}"),
        "css": resource("report.css"),
        "contents": _contents(blocks),
        "headline": prose(found.title),
        "subject": f"Student <bdi>{escape(student)}</bdi>, teacher <bdi>{escape(teacher)}</bdi>{_size(facts)}",
        "body": "\n".join(_section(*block) for block in blocks),
        "footer": "Made by rocktokens from this run’s own tables. The page opens no connection.",
        "data": as_json({"figures": [figure.spec() for figure in figures]}),
        "viewer": "" if viewer is None else packed(as_json(viewer)),
        "plotly": plotly_packed(),
        **page_scripts(),
    }
    # One pass over the template: what is put in is never searched for places again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], resource("report.html"))


def _section(name: str, title: str, html: str) -> str:
    head = f'<h2 id="{name}-title">{escape(title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{head}{html}</section>'


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
    ids = [row.get("token_id") for row in head] if "token_id" in shown else None
    count = len(figure.rows)
    title = f"First {SHOWN_ROWS} of {count} rows" if count > SHOWN_ROWS else f"{plural(count, 'row')} as a table"
    table = table_html([escape(name) for name in shown], cells, name=figure.name, ids=ids)
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
{more}<details><summary>{title}</summary>{table}</details>"""


def _cell(value: object) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return significant(value, 4)
    return f"<bdi>{escape(visible(str(value)))}</bdi>"


def viewer_html(viewer: Row, part: str | None = None) -> str:
    """The viewer's own markup; its data travel apart, compressed. `part` says which rollouts these are."""
    shown, total = len(viewer["rollouts"]), viewer["total"]
    if part is None and shown == total:
        part = f"All {total} rollouts"
    elif part is None:
        part = (
            f"{shown} of {plural(total, 'rollout')}, taken evenly over the run; `rocktokens view` pages through all "
            "of them"
        )
    edges = ["< 0.01", "0.01", "0.03", "0.1", "0.3", "1", "≥ 3"]
    legend = "".join(f'<span class="t l{place}">{escape(edge)}</span>' for place, edge in enumerate(edges))
    return resource("viewer.html").replace("{{part}}", prose(part)).replace("{{legend}}", legend)


def _method(facts: Facts) -> str:
    from rocktokens.report.method import method

    return method(facts)
