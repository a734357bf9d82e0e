"""The report: what it says follows from the tables, what is missing is named, and nothing in it can run or leave."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_fixture import HOSTILE, make_run

from rocktokens import open_run
from rocktokens.errors import ConfigError, DataError, RunError
from rocktokens.facts import Facts
from rocktokens.report.conclusions import verdict
from rocktokens.report.page import SECTIONS, appendix, as_json, packed, page
from rocktokens.report.stage import FIGURES, REPORT, report
from rocktokens.report.viewer import fitted, payload
from rocktokens.show import Figure, percent, to_csv, visible

LINK, COLOUR = '<a href="javascript:alert(1)">x</a><b>y</b>', "@rock"
NOTEBOOK = Path(__file__).parents[2] / "examples" / "read_a_run.ipynb"


def figures(facts: Facts) -> list[Figure]:
    return [figure for make in FIGURES.values() if (figure := make(facts)) is not None]


def sections(html: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', html)


def data_of(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="report-data">(.*?)</script>', html, re.S)[1])


def viewer_of(html: str) -> dict:
    text = re.search(r'id="viewer-packed">([A-Za-z0-9+/=]*)</script>', html)[1]
    return json.loads(gzip.decompress(base64.b64decode(text)))


class Elements(HTMLParser):
    """What a browser would make of a page: elements with their attributes, and the text outside scripts."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        if not self.cdata_elem:
            self.text += data


# The page


def test_the_page_has_seven_sections_is_small_and_names_no_other_address(html):
    assert sections(html) == list(SECTIONS)
    assert sorted(name for _, names in SECTIONS.values() for name in names) == sorted(FIGURES)
    assert len(html.encode()) < 8_000_000
    assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", html.split('id="plotly-packed"')[0])
    assert "http://" not in html
    assert "https://" not in html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert "default-src &#39;none&#39;" in policy
    assert "connect-src" not in policy  # falls back to none
    assert "unsafe" not in policy  # scripts and styles by their hash alone
    assert ' style="' not in html  # a policy without escape hatches leaves attributes of style out
    assert "U+202F" not in html  # no character of our own is spelled out


def test_every_figure_has_a_sentence_an_estimator_its_rows_and_a_text_for_every_point(whole, html, facts):
    specs = data_of(html)["figures"]
    assert [spec["name"] for spec in specs] == list(FIGURES)
    for figure, spec in zip(figures(facts), specs, strict=True):
        assert figure.sentence.endswith(".")
        assert len(figure.estimator) > 40
        link = re.search(rf'<a href="data:text/csv;charset=utf-8;base64,([^"]*)" download="{figure.name}.csv"', html)
        rows = list(csv.reader(io.StringIO(base64.b64decode(link[1]).decode())))
        assert (rows[0], len(rows)) == (figure.rows.column_names, 1 + len(figure.rows))
        assert (whole / "figures" / f"{figure.name}.csv").read_text() == to_csv(figure.rows)
        painted = json.loads(re.sub(r'"@\w+"', '"#123456"', json.dumps(spec)))
        go.Figure(data=painted["data"], layout=painted["layout"])  # Plotly accepts it
        for trace in spec["data"]:
            assert trace.get("hoverinfo") == "skip" or len(trace["text"]) == len(trace["x"])


def test_the_same_run_gives_the_same_bytes_in_whatever_order_it_was_completed(html, facts):
    for part in ("stages", "config"):
        facts.run.manifest[part] = dict(reversed(facts.run.manifest[part].items()))
    assert page(facts, figures(facts), fitted(payload(facts))) == html


def test_a_large_vocabulary_and_a_long_training_fit_in_the_page(facts):
    """Some 8,000 types with their gradients and 200,000 steps."""
    for name in ("types", "geometry"):
        table = facts.table(name)
        parts = [table.set_column(0, "token_id", pa.array(np.arange(len(table)) + 1000 * n)) for n in range(1, 200)]
        facts._tables[name] = pa.concat_tables([table, *parts])
    training = facts.table("training").slice(1)
    long = pa.concat_tables([training] * 2000)
    facts._tables["training"] = long.set_column(
        training.column_names.index("step"), "step", pa.array(np.arange(1, len(long) + 1))
    )
    html = page(facts, figures(facts), payload(facts))
    assert len(html.encode()) < 8_000_000
    loss = next(spec for spec in data_of(html)["figures"] if spec["name"] == "training_loss")
    assert max(len(trace["x"]) for trace in loss["data"]) <= 2_000


def test_stages_not_run_and_damaged_tables_are_left_out_and_named(tmp_path):
    with pytest.raises(RunError):
        report(tmp_path)
    scored = make_run(tmp_path / "scored", stages="score", prompts=4)
    html = (report(scored.path).path / REPORT).read_text()
    assert sections(html) == ["verdict", "viewer", "appendix"]
    assert f"rocktokens detect {scored.path}" in html
    run = make_run(tmp_path / "run", stages="detect", prompts=8)
    (run.path / "clusters.parquet").write_bytes(b"not parquet")
    report(run.path)
    html = (run.path / REPORT).read_text()
    assert sections(html) == ["verdict", "viewer", "cost", "learn", "appendix"]
    assert 'id="funnel"' in html
    assert 'id="clusters"' not in html
    assert "clusters.parquet was left out" in html
    left_out = html.split('id="not-run"')[1].split("</p>")[0]
    for stage in ("distill", "geometry", "knockout", "graft", "compare"):
        assert f"<code>{stage}</code>" in left_out


def test_a_missing_column_leaves_out_the_figure_that_needs_it_and_says_so(facts):
    facts._tables["clusters"] = facts.table("clusters").drop_columns(["share_loss"])
    assert FIGURES["clusters"](facts) is None
    assert any("no column share_loss" in note for note in facts.notes)
    assert len(verdict(facts).tiles) == 4


def test_geometry_of_another_rock_set_is_grouped_anew_and_said(facts):
    table = facts.table("geometry")
    facts._tables["geometry"] = table.set_column(1, "group", pa.array(["rocks"] * len(table)))
    rocks = [row for row in table.to_pylist() if row["token_id"] in facts.rock_ids]
    assert percent(sum(row["grad_share"] for row in rocks)) in FIGURES["gradients"](facts).sentence
    assert any("another rock set" in note for note in facts.notes)


def test_settings_do_not_name_the_readers_home(run, monkeypatch):
    home = run.path.parent
    monkeypatch.setattr(Path, "home", lambda: home)
    run.manifest["config"]["pair"] |= {"student": str(home / "models" / "student"), "teacher": f"{home}body/teacher"}
    said = json.dumps(appendix(Facts(run)))
    assert "~/models/student" in said
    assert f"{home}/" not in said
    assert f"{home}body/teacher" in said  # begins alike, and is not in the home directory


# The viewer


def test_rollouts_are_left_out_until_the_page_fits(facts, monkeypatch):
    monkeypatch.setattr("rocktokens.report.viewer.MAX_BYTES", 60_000)
    found = payload(facts)
    small = fitted(found)
    assert 0 < len(small["rollouts"]) < len(found["rollouts"])
    assert len(packed(as_json(small))) <= 60_000
    assert f"{len(small['rollouts'])} of 160 rollouts" in page(facts, [], small)


def test_rollouts_without_a_column_are_shown_without_it_or_not_at_all(tmp_path):
    run = make_run(tmp_path / "run", stages="score", prompts=4)
    table = run.read("rollouts")
    for column in table.column_names:
        pq.write_table(table.drop_columns([column]), run.path / "rollouts.parquet")
        facts = Facts.of(run.path)
        shown = payload(facts)
        if column in ("prompt_id", "rollout_id", "token_ids"):
            assert shown is None
            assert any(column in note for note in facts.notes)
        else:
            assert len(shown["rollouts"]) == 16


# Hostile text and values


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "a 'b' <img src=x>"
    make_run(path, hostile=True, prompts=24)
    report(path)
    return path


def test_hostile_text_adds_no_element_and_shows_as_itself(html, hostile):
    attacked = (hostile / REPORT).read_text(encoding="utf-8")
    plain, found = Elements(html), Elements(attacked)
    tags = [tag for tag, _ in found.found]
    assert tags.count("script") == [tag for tag, _ in plain.found].count("script") == 6
    assert not {"img", "iframe", "object", "b", "form"} & set(tags)
    assert tags.count("svg") == 2  # the card's accuracies and the strip of losses
    for _, attributes in found.found:
        assert not [name for name in attributes if name.startswith("on")]
        assert not (attributes.get("href") or "").startswith("javascript")
    assert {type_["text"] for type_ in viewer_of(attacked)["types"]} >= {visible(text) for text in HOSTILE[1:]}
    assert visible(HOSTILE[0]) in found.text
    assert "\u202e" not in found.text
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", attacked)
    # A character that byte-level BPE cut in two is spelled where its pieces stand.
    assert "🙂" in payload(Facts.of(hostile))["rollouts"][0]["spells"].values()


def texts(value: Any, key: str = "") -> list[str]:
    """What a figure gives Plotly to write, wherever it stands."""
    if isinstance(value, str):
        return [value] if key in ("text", "name", "ticktext", "title") else []
    if isinstance(value, dict):
        return [text for name, item in value.items() for text in texts(item, name)]
    return [text for item in value for text in texts(item, key)] if isinstance(value, list | tuple) else []


DRAWN = {"clusters": "cluster", "types": "token", "census": "token", "sensitivity": "parameter", "persistence": "group"}
DRAWN |= {"grafts": "arm", "compare": "regime"}


@pytest.mark.parametrize(("table", "column"), [*DRAWN.items(), ("census", "verdict"), ("census", "kind")])
def test_text_of_a_run_is_no_tag_and_no_colour_in_a_chart(facts, table, column):
    rows = facts.table(table)
    for attack, shown in ((LINK, "&lt;a href"), (COLOUR, "&#64;rock")):
        values = [attack if at % 2 else value for at, value in enumerate(rows[column].to_pylist())]
        attacked = Facts(facts.run)
        place = rows.column_names.index(column)
        attacked._tables[table] = rows.set_column(place, column, pa.array(values, pa.string()))
        found = [text for figure in figures(attacked) for text in texts([figure.data, figure.layout]) if text]
        assert any(shown in text for text in found), "the text is drawn somewhere"
        for text in found:
            assert not re.search(r"<[a-zA-Z/!]", re.sub(r"<br>|<extra></extra>", "", text)), text
            assert not text.startswith("@")


def test_a_value_that_no_stage_writes_leaves_out_the_figure_that_needs_it(run):
    run.manifest["stages"]["geometry"]["comparisons"] = 5
    run.save()
    assert "was left out" in (report(run.path).path / REPORT).read_text()


# A notebook


def test_a_notebook_shows_the_verdict_and_any_figure(whole, tmp_path):
    run = open_run(whole)
    card, found = run._repr_html_(), verdict(Facts(run))
    assert found.title in card
    assert all(tile.answer in card for tile in found.tiles)
    assert "<script" not in card
    for name in FIGURES:
        figure = run.plot(name)
        assert isinstance(figure, go.Figure)
        assert "@" not in json.dumps(figure.to_plotly_json()["layout"], default=str)
    with pytest.raises(ConfigError, match="funnel"):
        run.plot("funel")
    with pytest.raises(DataError, match="nothing to draw"):
        make_run(tmp_path / "run", stages="score", prompts=4).plot("knockouts")


def test_the_example_notebook_runs(whole, tmp_path, monkeypatch):
    """Every cell in order in one namespace, as a kernel would; no notebook package is needed for it."""
    monkeypatch.setenv("ROCKTOKENS_RUN", str(shutil.copytree(whole, tmp_path / "run")))
    names: dict[str, object] = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            assert cell["outputs"] == []  # kept clean: the outputs belong to whoever runs it
    assert isinstance(names["figure"], go.Figure)
    assert open_run(whole).rocks().equals(names["rocks"])
