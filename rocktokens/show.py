"""How results are shown: formats of numbers and tokens, the one `Table`, and the base of every figure.

A `Table` is rendered by rich on a terminal, as escaped HTML in the page and in a notebook, and as plain rows for
`--json`. A `Figure` is Plotly data and layout with named colours ("@rock", "@ink"), which the page resolves for light,
dark and print. Token texts come from a tokenizer and prompts from strangers: nothing here trusts them. What a browser
would hide or act upon is shown by its code point.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rocktokens.stats import Estimate
from rocktokens.values import Json, Row

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.table import Table as RichTable

NBSP = "\u00a0"
MINUS = "\u2212"
NONE = "–"
PERCENT = f"{NBSP}%"
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
_JOINER = 0x200D
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

# One colour per meaning, the same in every figure; chosen among Okabe and Ito's, told apart by shape or dash as well.
ROCK, REST, RARE, THIRD, MUTED, INK, GRID = "@rock", "@rest", "@rare", "@third", "@muted", "@ink", "@grid"
SERIES = (REST, ROCK, THIRD, RARE, MUTED, "@fifth", "@sixth")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "x", "star")


# Formats


def text(value: object) -> str:
    """Any value as text; a dash for None."""
    return NONE if value is None else str(value)


def number(value: float | None, digits: int = 2) -> str:
    """A number with `digits` decimals, a true minus sign and thin spaces between thousands; a dash for None."""
    if value is None or not math.isfinite(value):
        return NONE
    text = f"{value:,.{digits}f}".replace(",", "\u202f")
    if float(f"{value:.{digits}f}") == 0:
        text = text.lstrip("-")
    return text.replace("-", MINUS)


def significant(value: float | None, digits: int = 3) -> str:
    """A number to `digits` significant digits."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    return number(value, max(0, digits - 1 - math.floor(math.log10(abs(value)))))


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage."""
    return NONE if value is None or not math.isfinite(value) else number(100 * value, digits) + PERCENT


def points(value: float | None, digits: int = 1, *, signed: bool = True) -> str:
    """A change of a share in percentage points, by default with its sign."""
    if value is None or not math.isfinite(value):
        return NONE
    text = number(100 * value, digits)
    return f"+{text}" if signed and float(f"{100 * value:.{digits}f}") > 0 else text


def p_value(value: float | None) -> str:
    """A p value; tiny ones as a bound."""
    if value is None or not math.isfinite(value):
        return NONE
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def bracket(estimate: Estimate | None, form: Any = number, **options: Any) -> str:
    """The interval alone; nothing where there is none."""
    if estimate is None or not (math.isfinite(estimate.low) and math.isfinite(estimate.high)):
        return ""
    low, high = (form(end, **options).removesuffix(PERCENT) for end in (estimate.low, estimate.high))
    return f"[{low}, {high}]"


def interval(estimate: Estimate | None, form: Any = number, **options: Any) -> str:
    """A value with its interval."""
    if estimate is None:
        return NONE
    return f"{form(estimate.value, **options)} {bracket(estimate, form, **options)}".rstrip(" ")


def plural(count: int, noun: str, many: str | None = None) -> str:
    """A count with its noun."""
    return f"{count:,}".replace(",", "\u202f") + " " + (noun if count == 1 else many or noun + "s")


def listed(words: Sequence[str], limit: int = 12) -> str:
    """Words as a list in a sentence; the rest counted."""
    shown = list(words[:limit])
    rest = len(words) - len(shown)
    if rest:
        return ", ".join(shown) + f" and {rest} more"
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1] if shown else ""


def at_home(text: str) -> str:
    """The same with `~` for the reader's home directory: reports are passed on, and whose machine it was is no finding.

    Only where a path begins, so that a shell still expands it; within quotes it would not.
    """
    home = re.escape(str(Path.home()).rstrip("/"))
    return re.sub(rf"(?:^|(?<=\s)){home}(?=/|\s|$)", "~", text) if home else text


def visible(token: str, *, flow: bool = False) -> str:
    """A token so that nothing in it is hidden or acts: controls as pictures, direction marks by code point.

    `flow`: as it stands in running text, where spaces stay spaces and a line break also breaks the line.
    """
    if token == "":
        return "" if flow else "∅"
    out, pictured = [], {letter for letter in token if unicodedata.category(letter) in ("So", "Sk", "Mn")}
    for place, letter in enumerate(token):
        code = ord(letter)
        if letter == "\n":
            out.append("↵\n" if flow else "↵")
        elif letter == "\t":
            out.append("⇥\t" if flow else "⇥")
        elif letter == " ":
            out.append(" ")
        elif code < 0x20:
            out.append(chr(0x2400 + code))
        elif code == 0x7F:
            out.append("\u2421")
        elif code == _JOINER and 0 < place < len(token) - 1 and pictured >= {token[place - 1], token[place + 1]}:
            out.append(letter)  # holds one emoji together
        elif unicodedata.category(letter) in _HIDDEN or (letter.isspace() and letter != "\u00a0"):
            out.append(f"⟨U+{code:04X}⟩")
        else:
            out.append(letter)
    if not flow:
        text = "".join(out)
        bare = text.strip(" ")
        lead, tail = len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))
        return "␣" * len(text) if not bare else "␣" * lead + bare + "␣" * tail
    return "◌" + "".join(out) if unicodedata.combining(token[0]) else "".join(out)


def label(token: str, limit: int = 18) -> str:
    """Text of a run inside a chart, e.g. a token: Plotly reads a few tags, so they are escaped; long ones are cut."""
    text = visible(token)
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    # Plotly resolves entities once; a bare $…$ would be read as TeX where MathJax is loaded, and the page takes a text
    # that begins with @ for the name of a colour.
    return escape(text, quote=False).replace("$", "&#36;").replace("@", "&#64;")


def to_csv(table: pa.Table) -> str:
    """A table as CSV. Text that a spreadsheet would run, or that holds control characters, is written as JSON."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.column_names)
    for row in zip(*(column.to_pylist() for column in table.columns)):
        writer.writerow([_cell(value) for value in row])
    return out.getvalue()


def _cell(value: object) -> object:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, str) and (
        value.startswith(_FORMULA) or any(c in value for c in "\x00\r\n") or value != value.strip()
    ):
        return json.dumps(value)
    return value


# Tables


FILTER_FROM = 8
"""Rows from which a table in the page gets a filter."""


def estimate(row: Row, name: str) -> Estimate | None:
    """A column as a value with its interval (NAME_low, NAME_high); None where empty."""
    value = row.get(name)
    if value is None or not math.isfinite(value):
        return None
    low, high = (math.nan if row.get(end) is None else row[end] for end in (f"{name}_low", f"{name}_high"))
    return Estimate(float(value), low, high, 0)


class Column(NamedTuple):
    """One column of a `Table`."""

    header: str
    key: str
    """Where its value stands in a row; an interval's ends stand in KEY_low and KEY_high."""
    form: Callable[..., str] | None = None
    """How a value is written; unset: as text, on the left."""
    options: Mapping[str, Any] = {}
    """Keyword arguments of `form`."""
    interval: bool = False
    """Whether the value is written with its interval."""
    token: bool = False
    """Whether it holds tokens, which the page sets as code and links to their occurrences."""
    styles: Mapping[str, str] = {}
    """Styles of the terminal by value."""

    def cell(self, row: Row) -> str:
        """The text of one cell."""
        if self.form is None:
            value = row.get(self.key)
            if isinstance(value, bool):
                return "yes" if value else "no"
            # Markup belongs to a page's own table; an empty cell is not an empty token.
            own = hasattr(value, "__html__") or (value == "" and not self.token)
            return value if own else NONE if value is None else visible(str(value))  # type: ignore[return-value]
        if self.interval:
            return interval(estimate(row, self.key), self.form, **self.options)
        return self.form(row.get(self.key), **self.options)


@dataclass(frozen=True)
class Table:
    """Columns and rows: one table for the terminal, the page, a notebook and `--json`."""

    columns: Sequence[Column]
    data: Sequence[Row]
    title: str = ""
    caption: Sequence[str] = ()
    """Lines below it."""
    name: str = "table"
    """What a copied or saved file is called."""
    ids: str | None = None
    """Key of a row's token id, where rows are of tokens: the page offers to copy the ids."""
    chosen: int | None = None
    """The row to set in bold."""
    limit: int | None = None
    """Rows that are shown; `rows` returns all."""

    def rows(self) -> list[Row]:
        """The values behind the cells, for `--json`."""
        ends = {True: ("", "_low", "_high"), False: ("",)}
        keys = [f"{column.key}{end}" for column in self.columns for end in ends[column.interval]]
        return [{key: row[key] for key in keys if key in row} for row in self.data]

    def cells(self) -> list[list[str]]:
        """The text of every shown cell."""
        return [[column.cell(row) for column in self.columns] for row in self.data[: self.limit]]

    def __rich__(self) -> RichTable:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        lines = [*self.caption]
        if self.limit is not None and len(self.data) > self.limit:
            lines.insert(0, f"{len(self.data) - self.limit} more in {self.name}")
        table = RichTable(
            title=Text(self.title, style="table.title") if self.title else None,
            caption=Text("\n".join(lines), style="table.caption") if lines else None,
            caption_justify="left",
            box=SIMPLE_HEAD,
        )
        for column in self.columns:
            words = column.form is None
            table.add_column(
                Text(column.header), justify="left" if words else "right", no_wrap=not words, overflow="fold"
            )
        for row, cells in zip(self.data, self.cells()):
            styles = (column.styles.get(str(row.get(column.key)), "") for column in self.columns)
            table.add_row(*(Text(cell, style=style) for cell, style in zip(cells, styles)))
        return table

    def html(self, *, tools: bool = True) -> str:
        """Escaped HTML; with `tools`, what the page's script needs to sort, filter and copy."""
        from markupsafe import Markup

        return Markup(_table_template().render(table=self, tools=tools, filter_from=FILTER_FROM))

    def _repr_html_(self) -> str:
        return self.html(tools=False)


_TABLE = """{% macro token(text, id) -%}
{% if tools and id is integer %}<a class="token" href="#viewer:type={{ id }}" title="Show its occurrences">{% endif -%}
<code><bdi>{{ text }}</bdi></code>{% if tools and id is integer %}</a>{% endif %}
{%- endmacro -%}
{% if tools %}<div class="table" data-table="{{ table.name }}"><div class="tools" hidden>
{%- if table.data | length >= filter_from %}<input type="search" class="sift" aria-label="Filter rows"
 placeholder="Filter rows" autocomplete="off">{% endif %}<output></output>
{%- if table.ids %}<button type="button" class="link" data-copy="ids">Copy ids</button>{% endif -%}
<button type="button" class="link" data-copy="csv">Copy CSV</button></div>
<div class="scroll" tabindex="0" role="region" aria-label="Table">
{%- elif table.title %}<p>{{ table.title }}</p>{% endif -%}
<table><thead><tr>
{%- for column in table.columns %}<th scope="col"{% if not column.form %} class="left"{% endif %}>
{%- if tools %}<button type="button" class="sort">{{ column.header }}</button>{% else %}{{ column.header }}{% endif -%}
</th>{% endfor %}</tr></thead><tbody>
{%- for cells in table.cells() %}{% set row = loop.index0 %}{% set id = table.data[row].get(table.ids) -%}
<tr{% if row == table.chosen %} class="chosen"{% endif %}{% if id is integer %} data-id="{{ id }}"{% endif %}>
{%- for cell in cells %}{% set column = table.columns[loop.index0] -%}
<td{% if not column.form %} class="left"{% endif %}>
{%- if column.token %}{{ token(cell, id) }}{% else %}{{ cell }}{% endif %}</td>{% endfor %}</tr>
{%- endfor %}</tbody></table>
{%- if tools %}</div><button type="button" class="cue" hidden>More columns →</button></div>
{%- else %}{% for line in table.caption %}<p>{{ line }}</p>{% endfor %}{% endif %}"""


@cache
def _table_template() -> Any:
    from jinja2 import Environment

    return Environment(autoescape=True).from_string(_TABLE)


# Figures


@dataclass(frozen=True)
class Figure:
    """One figure of the report."""

    name: str
    title: str
    sentence: str
    """What it shows, generated from the data. Plain text."""
    estimator: str
    """How its numbers were estimated."""
    rows: pa.Table
    data: list[Json] = field(default_factory=list)
    layout: Json = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def spec(self) -> Json:
        """What the page needs to draw it."""
        return {"data": self.data, "layout": self.layout, "name": self.name, "title": self.title}


def layout(x: str, y: str, *, height: int = 340, **more: Any) -> Json:
    """The house layout: no box, light grid, axis titles, legend above."""
    base: Json = {
        "height": height,
        "margin": {"l": 56, "r": 16, "t": 36, "b": 48, "pad": 4},
        "xaxis": axis(x),
        "yaxis": axis(y),
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        "hovermode": "closest",
        "dragmode": False,
        "bargap": 0.3,
    }
    for key, value in more.items():
        base[key] = {**base[key], **value} if isinstance(base.get(key), dict) else value
    return base


def axis(title: str, **more: object) -> dict[str, object]:
    """An axis with its title."""
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": GRID,
        "zerolinecolor": GRID,
        "linecolor": MUTED,
        "automargin": True,
        "fixedrange": True,
        **more,
    }


def log_axis(shape: Json, low: float, high: float, *, suffix: str = "") -> None:
    """Make an axis logarithmic with its ticks written out: 0.001, 0.01, …; Plotly's own would read 100µ, or 2 for 20.

    Args:
        shape: The axis.
        low: Smallest value drawn, above 0.
        high: Largest value drawn.
        suffix: What follows every tick, e.g. a percent sign.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 1 else (1,)
    places = [step * 10.0**decade for decade in range(first, last + 1) for step in steps]
    places = [place for place in places if low / 2 <= place <= high * 2]
    shape |= {"type": "log", "tickmode": "array", "tickvals": places}
    shape["ticktext"] = [f"{place:.12f}".rstrip("0").rstrip(".") + suffix for place in places]
    room = 0.06 * max(math.log10(high / low), 0.3)
    shape["range"] = [math.log10(low) - room, math.log10(high) + room]


def errors(value: list[Any], low: list[Any], high: list[Any], color: str) -> dict[str, object]:
    """Error bars from the ends of intervals; none where an end is missing."""

    def gap(a: Any, b: Any) -> float:
        return max(0.0, a - b) if a is not None and b is not None else 0.0

    return {
        "type": "data",
        "symmetric": False,
        "array": [gap(h, v) for v, h in zip(value, high)],
        "arrayminus": [gap(v, w) for v, w in zip(value, low)],
        "color": color,
        "thickness": 1.4,
        "width": 3,
    }


def names_axis(names: list[str], title: str = "") -> Json:
    """An axis of names at 0, 1, 2 …; by number, since a token such as 12 would be taken for a value."""
    return axis(
        title,
        tickmode="array",
        tickvals=list(range(len(names))),
        ticktext=names,
        range=[-0.6, len(names) - 0.4],
        showgrid=False,
        zeroline=False,
    )


def band(low: float, high: float, *, along: str = "x", color: str = MUTED, opacity: float = 0.16) -> dict[str, object]:
    """A shaded band across the whole figure, between two values of one axis."""
    ends = {"x0": low, "x1": high, "y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
    if along == "y":
        ends = {"y0": low, "y1": high, "x0": 0, "x1": 1, "yref": "y", "xref": "paper"}
    return {"type": "rect", "fillcolor": color, "opacity": opacity, "line": {"width": 0}, "layer": "below", **ends}


def rule(at: float, *, along: str = "x", color: str = MUTED, dash: str = "dot") -> Json:
    """A line across the whole figure at one value of one axis."""
    line = {"color": color, "width": 1.2, "dash": dash}
    if along == "y":
        return {"type": "line", "y0": at, "y1": at, "x0": 0, "x1": 1, "yref": "y", "xref": "paper", "line": line}
    return {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "xref": "x", "yref": "paper", "line": line}
