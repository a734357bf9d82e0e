"""Formats, the one table, and text that nobody trusts."""

from __future__ import annotations

import csv
import io
import json

import pyarrow as pa
import pytest
from rich.console import Console

from rocktokens.show import (
    Column,
    Table,
    interval,
    label,
    listed,
    number,
    p_value,
    percent,
    plural,
    points,
    significant,
    to_csv,
    visible,
)
from rocktokens.stats import Estimate

NAN = float("nan")


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (number(-0.004, 2), "0.00"),
        (number(-1234.5, 1), "−1\u202f234.5"),
        (number(None), "–"),
        (percent(0.1234), "12.3\u00a0%"),
        (points(0.012), "+1.2"),
        (points(-0.0001), "0.0"),
        (significant(0.00123456), "0.00123"),
        (significant(1.5e-7), "1.50e−07"),
        (significant(NAN), "–"),
        (p_value(1e-9), "p < 0.001"),
        (interval(Estimate(0.5, 0.4, 0.6, 9), percent), "50.0\u00a0% [40.0, 60.0]"),
        (interval(Estimate(0.5, NAN, NAN, 9)), "0.50"),
        (plural(1, "rock"), "1 rock"),
        (plural(2000, "rock"), "2\u202f000 rocks"),
        (listed(["a", "b", "c"]), "a, b and c"),
        (listed(["a", "b", "c"], 2), "a, b and 1 more"),
        (label("<b>x</b>"), "&lt;b&gt;x&lt;/b&gt;"),
        (label("$\\alpha$"), "&#36;\\alpha&#36;"),
        (label("@paper"), "&#64;paper"),
        (label("a" * 50), "a" * 17 + "…"),
        (visible(" So"), "␣So"),
        (visible("\n\n"), "↵↵"),
        (visible("\t"), "⇥"),
        (visible("  "), "␣␣"),
        (visible(""), "∅"),
        (visible("\x00"), "␀"),
        (visible("\x7f"), "␡"),
        (visible("\u202e"), "⟨U+202E⟩"),
        (visible("\u200b"), "⟨U+200B⟩"),
        (visible("\u2028"), "⟨U+2028⟩"),
        (visible("\ufffd"), "\ufffd"),
        (visible("é"), "é"),
        (visible("👩‍👧"), "👩‍👧"),
        (visible("a\u200db"), "a⟨U+200D⟩b"),
        (visible(" So\n", flow=True), " So↵\n"),
    ],
)
def test_numbers_and_tokens_are_written_the_same_way_everywhere(shown, wanted):
    assert shown == wanted


def test_csv_gives_numbers_back_and_disarms_formulas():
    table = pa.table({"token": ["=1+1", "a,b", "\n", "ok"], "x": [0.1, None, NAN, 3.0]})
    rows = list(csv.reader(io.StringIO(to_csv(table))))
    assert rows[1] == ['"=1+1"', "0.1"]
    assert rows[2] == ["a,b", ""]
    assert json.loads(rows[3][0]) == "\n"


ROWS = [
    {"token": " <b>", "token_id": 3, "kind": "[red]", "fall": 0.1, "fall_low": 0.05, "fall_high": 0.2, "right": True},
    {"token": "x", "token_id": 4, "kind": None, "fall": None, "right": False},
]
TABLE = Table(
    [
        Column("token", "token", token=True),
        Column("kind", "kind", styles={"[red]": "bold"}),
        Column("fall [95 %]", "fall", percent, {"digits": 0}, interval=True),
        Column("right", "right"),
    ],
    ROWS,
    title="Two [bold]tokens",
    caption=("a < b",),
    ids="token_id",
)


def test_a_table_on_the_terminal_takes_nothing_for_a_style():
    out = Console(width=80, file=io.StringIO())
    out.print(TABLE)
    said = out.file.getvalue()
    assert "Two [bold]tokens" in said
    assert "␣<b>" in said
    assert "[red]" in said
    assert "10\u00a0% [5, 20]" in said
    assert "a < b" in said


def test_a_table_in_a_page_is_escaped_and_links_its_tokens():
    html = TABLE.html()
    assert "<b>" not in html
    assert 'href="#viewer:type=3"' in html
    assert 'data-id="4"' in html
    assert html.count("–") == 2  # what is not known
    assert '<th scope="col"><button type="button" class="sort">fall [95 %]</button></th>' in html
    assert "button" not in TABLE._repr_html_()
