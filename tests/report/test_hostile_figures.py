"""Text of a run inside a chart: whatever a table or run.json holds, Plotly gets no tag, link or colour name from it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_fixture import make_run

from rocktokens.facts import Facts
from rocktokens.report.build import FIGURES, report
from rocktokens.show import Figure, label

LINK = '<a href="javascript:alert(1)">x</a><b>y</b>'
COLOUR = "@rock"
OURS = re.compile(r"<br>|<extra></extra>")
TEXTS = ("text", "name", "ticktext", "title")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("hostile") / "run", prompts=16).path


def columns() -> list[Any]:
    """Every column of text that a figure may draw."""
    return [
        ("clusters", "cluster"),
        ("types", "cluster"),
        ("types", "token"),
        ("census", "verdict"),
        ("census", "kind"),
        ("census", "token"),
        ("sensitivity", "parameter"),
        ("persistence", "group"),
        ("grafts", "arm"),
        ("compare", "regime"),
    ]


def attacked(whole: Path, target: Path, table: str, column: str, text: str) -> Facts:
    """The run with every second value of a column replaced."""
    path = Path(shutil.copytree(whole, target))
    rows = pq.read_table(path / f"{table}.parquet")
    values = [text if at % 2 else value for at, value in enumerate(rows[column].to_pylist())]
    rows = rows.set_column(rows.column_names.index(column), column, pa.array(values, pa.string()))
    pq.write_table(rows, path / f"{table}.parquet")
    return Facts.of(path)


def figures(facts: Facts) -> list[Figure]:
    return [figure for make in FIGURES if (figure := make(facts)) is not None]


def texts(value: Any, key: str = "") -> Iterator[str]:
    """What a figure gives Plotly to write, wherever it stands."""
    if isinstance(value, str):
        if key in TEXTS:
            yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from texts(inner, name)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts(inner, key)


@pytest.mark.parametrize(("table", "column"), columns())
def test_tags_are_written_out(whole, tmp_path, table, column):
    made = figures(attacked(whole, tmp_path / "run", table, column, LINK))
    found = [text for figure in made for text in texts([figure.data, figure.layout])]
    assert any("&lt;a href" in text for text in found), "the text is drawn somewhere"
    for text in found:
        assert not re.search(r"<[a-zA-Z/!]", OURS.sub("", text)), text


@pytest.mark.parametrize(("table", "column"), columns())
def test_no_text_is_taken_for_a_colour(whole, tmp_path, table, column):
    made = figures(attacked(whole, tmp_path / "run", table, column, COLOUR))
    found = [text for figure in made for text in texts([figure.data, figure.layout])]
    assert any("&#64;rock" in text for text in found)
    assert not [text for text in found if text.startswith("@")]


def test_an_at_sign_stays_visible():
    assert label("@paper") == "&#64;paper"


@pytest.mark.parametrize(
    ("stage", "name", "value"),
    [
        ("knockout", "epsilon", "x"),
        ("knockout", "noise_floor", [1]),
        ("detect", "k", {"a": 1}),
        ("detect", "definition", LINK),
        ("detect", "signal", LINK),
        ("detect", "num_prompts", "many"),
        ("geometry", "comparisons", 5),
        ("compare", "verdicts", 7),
        ("distill", "accuracy_before", {"accuracy": "x"}),
    ],
)
def test_a_value_that_no_stage_writes_leaves_out_what_needs_it(whole, tmp_path, stage, name, value):
    path = Path(shutil.copytree(whole, tmp_path / "run"))
    manifest = json.loads((path / "run.json").read_text())
    manifest["stages"].setdefault(stage, {})[name] = value
    (path / "run.json").write_text(json.dumps(manifest))
    from rocktokens.errors import DataError

    try:
        report(path)
    except DataError as error:
        assert "a value that no stage writes" in str(error)  # noqa: PT017
    else:
        assert "<a href=&quot;javascript" not in (path / "report.html").read_text()
