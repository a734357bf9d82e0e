"""The report: what it says follows from the tables, what is missing is named, and nothing in it can run or leave."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from described import differences
from report_fixture import HOSTILE, ROCKS, make_run

from rocktokens import cli, open_run
from rocktokens.causal.figures import counted
from rocktokens.errors import RunError
from rocktokens.facts import Facts
from rocktokens.report import run_conclusions as sentences
from rocktokens.report.build import FIGURES, REPORT, report
from rocktokens.report.method import commands, method
from rocktokens.report.page import as_json, packed, page, viewer_html
from rocktokens.report.viewer import choose, fitted, payload
from rocktokens.score.shown import MAX_ROLLOUTS
from rocktokens.show import estimate, interval, label, number, percent, points, significant, to_csv, visible
from rocktokens.stats import Estimate
from rocktokens.train.figures import training_loss

ORDER = (
    *("verdict", "answer", "footprint", "rocks", "viewer", "funnel", "density", "clusters", "training_loss"),
    *("persistence", "gradients", "alignment", "knockouts", "grafts", "accuracy_seconds"),
    *("accuracy_tokens", "time", "sensitivity", "method"),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run with every stage, reported."""
    path = tmp_path_factory.mktemp("report") / "whole"
    make_run(path)
    report(path)
    return path


@pytest.fixture(scope="module")
def html(whole) -> str:
    return (whole / REPORT).read_text(encoding="utf-8")


@pytest.fixture
def facts(whole) -> Facts:
    return Facts.of(whole)


class Elements(HTMLParser):
    """What a browser would make of a page: elements with their attributes, and the text outside scripts."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        inside = self.found and self.found[-1][0] in ("script", "style") and self.cdata_elem
        (self.scripts if inside else self.text).append(data)


def data_of(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="report-data">(.*?)</script>', html, re.S)[1])


def viewer_of(html: str) -> dict:
    packed = re.search(r'id="viewer-packed">([A-Za-z0-9+/=]*)</script>', html)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_sections_stand_in_the_order_of_the_contract(html):
    assert re.findall(r'<section id="(\w+)"', html) == list(ORDER)


def test_the_page_is_small_and_names_no_other_address(html):
    assert len(html.encode()) < 8_000_000
    assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", html.split('id="plotly-packed"')[0])
    assert "http://" not in html
    assert "https://" not in html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)[1]
    assert "default-src &#x27;none&#x27;" in policy
    assert "connect-src" not in policy  # falls back to none
    assert "unsafe" not in policy  # scripts and styles by their hash alone
    assert ' style="' not in html  # a policy without escape hatches leaves attributes of style out


def test_the_answer_has_five_sentences_with_the_tables_own_numbers(html, facts):
    said = sentences.answer(facts)
    assert len(said) == 5
    row = next(row for row in facts.rows("footprints") if row["name"] == "context")
    assert percent(row["share_loss"]) in said[1]
    assert f"[{number(100 * row['share_loss_low'], 1)}, {number(100 * row['share_loss_high'], 1)}]" in said[1]
    for token in ROCKS:
        assert f"“{visible(token)}”" in said[0]
    first = html.split('<section id="answer"')[1].split("</section>")[0]
    for token in ROCKS:
        assert f"<bdi>{visible(token)}</bdi>" in first
    change = [r for r in facts.rows("persistence") if (r["group"], r["arm"], r["step"]) == ("rocks", "checkpoint", 100)]
    assert number(change[0]["before"], 3) in said[2]
    assert "strong stumbling block" in said[3]
    assert "noise floor" in said[3]
    assert "from uniform training" in said[4]
    assert "of its seconds" in said[4]


@pytest.mark.parametrize(
    ("estimate", "said"),
    [
        (Estimate(2.0, 1.5, 2.5, 9), "2.0 times what their frequency explains"),
        (Estimate(0.9, 0.8, 0.95, 9), "merely frequent"),
        (Estimate(1.1, 0.9, 1.3, 9), "no more than their frequency explains"),
    ],
)
def test_enrichment_is_put_into_words_by_its_interval(estimate, said):
    assert said in sentences._frequent(estimate)


def test_a_change_is_read_against_the_noise(facts):
    noisy = "one checkpoint against itself on other texts changes as much"
    assert "did not learn" in sentences._against_noise(facts, Estimate(-0.01, -0.03, 0.01, 9))
    assert "fell by more" in sentences._against_noise(facts, Estimate(-0.5, -0.6, -0.4, 9))
    assert noisy in sentences._against_noise(facts, Estimate(-1e-6, -2e-6, -1e-7, 9))


def test_every_figure_has_a_sentence_an_estimator_and_its_rows(whole, html, facts):
    figures = [make(facts) for make in FIGURES]
    assert all(figures)
    for figure in figures:
        assert figure.sentence.endswith(".")
        assert len(figure.estimator) > 40
        link = re.search(rf'<a href="data:text/csv;charset=utf-8;base64,([^"]*)" download="{figure.name}.csv"', html)
        rows = list(csv.reader(io.StringIO(base64.b64decode(link[1]).decode())))
        assert rows[0] == figure.rows.column_names
        assert len(rows) == 1 + len(figure.rows)
        assert (whole / "figures" / f"{figure.name}.csv").read_text() == to_csv(figure.rows)


def test_plotly_accepts_every_figure(html):
    specs = data_of(html)["figures"]
    assert [spec["name"] for spec in specs] == [
        name for name in ORDER if name not in ("verdict", "answer", "rocks", "viewer", "method")
    ]
    for spec in specs:
        painted = re.sub(r'"@\w+"', '"#123456"', json.dumps(spec))
        go.Figure(data=json.loads(painted)["data"], layout=json.loads(painted)["layout"])


def test_every_hoverable_point_has_a_text_for_the_keyboard(html):
    for spec in data_of(html)["figures"]:
        for trace in spec["data"]:
            assert trace.get("hoverinfo") == "skip" or len(trace["text"]) == len(trace["x"])


def test_the_same_run_gives_the_same_bytes(whole, html):
    report(whole, again=True)
    assert (whole / REPORT).read_text(encoding="utf-8") == html


def test_a_large_vocabulary_still_fits_in_the_page(whole):
    facts = Facts.of(whole)
    for name in ("types", "geometry"):
        table = facts.table(name)
        parts = [table.set_column(0, "token_id", pa.array(np.arange(len(table)) + 1000 * n)) for n in range(1, 200)]
        facts._tables[name] = pa.concat_tables([table, *parts])
    figures = [make(facts) for make in FIGURES]
    assert len(figures[1].rows) > 7000
    html = page(facts, sentences.answer(facts), figures, payload(facts))
    assert len(html.encode()) < 8_000_000


def test_the_order_of_completion_does_not_show(whole, html):
    facts = Facts.of(whole)
    for part in ("stages", "config"):
        facts.run.manifest[part] = dict(reversed(facts.run.manifest[part].items()))
    figures = [make(facts) for make in FIGURES]
    assert page(facts, sentences.answer(facts), figures, payload(facts)) == html


def test_a_report_is_made_anew_only_when_a_stage_was_added(tmp_path):
    run = make_run(tmp_path / "run", stages="detect", prompts=8)
    report(run.path)
    stamp = (run.path / REPORT).stat().st_mtime_ns
    report(run.path)
    assert (run.path / REPORT).stat().st_mtime_ns == stamp
    again = report(run.path)
    again.finish("graft", {})
    report(run.path)
    assert (run.path / REPORT).stat().st_mtime_ns != stamp


def test_stages_not_run_are_left_out_and_named(tmp_path):
    run = make_run(tmp_path / "run", stages="detect", prompts=8)
    report(run.path)
    html = (run.path / REPORT).read_text()
    sections = re.findall(r'<section id="(\w+)"', html)
    assert "knockouts" not in sections
    assert "accuracy_seconds" not in sections
    left_out = html.split('id="not-run"')[1].split("</p>")[0]
    for stage in ("distill", "geometry", "knockout", "graft", "compare"):
        assert f"<code>{stage}</code>" in left_out
    assert f"run <code>rocktokens knockout {tmp_path / 'run'}</code>" in html


def test_a_run_that_was_only_scored_gets_a_report(tmp_path):
    run = make_run(tmp_path / "run", stages="score", prompts=4)
    report(run.path)
    html = (run.path / REPORT).read_text()
    assert re.findall(r'<section id="(\w+)"', html) == ["verdict", "answer", "viewer", "method"]
    assert f"rocktokens detect {run.path}" in html


@pytest.mark.parametrize(
    "name", ["types", "sensitivity", "persistence", "footprints", "clusters", "geometry", "census"]
)
def test_a_missing_column_leaves_out_what_needs_it_and_nothing_else_fails(whole, name):
    tables = {figure: Facts.of(whole).table(figure) for figure in (name, "training", "compare", "rollouts", "grafts")}
    for column in tables[name].column_names:
        facts = Facts.of(whole)
        facts._tables |= tables | {name: tables[name].drop_columns([column])}
        made = [figure for make in FIGURES if make.__name__ != "density" and (figure := make(facts)) is not None]
        assert len(made) >= len(FIGURES) - (4 if column == "token_id" else 3), column
        assert len(sentences.answer(facts)) == 5


@pytest.mark.parametrize("name", ["training", "compare", "grafts", "knockouts"])
def test_missing_columns_of_later_stages_likewise(whole, name):
    for column in Facts.of(whole).table(name).column_names:
        facts = Facts.of(whole)
        facts._tables[name] = facts.table(name).drop_columns([column])
        for make in FIGURES[5:13]:
            make(facts)
        assert len(sentences.answer(facts)) == 5


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


def test_loss_over_training_comes_from_what_there_is(whole):
    from rocktokens.train.figures import training_loss

    assert "optimiser step’s own rollouts" in training_loss(Facts.of(whole)).estimator
    facts = Facts.of(whole)
    facts._tables["training"] = facts.table("training").drop_columns(["loss_rocks"])
    figure = training_loss(facts)
    assert "under every kept checkpoint" in figure.estimator
    rows = figure.rows.to_pylist()
    assert [row["step"] for row in rows] == [0, 50, 100]
    ids = ", ".join(map(str, facts.rock_ids))
    mean = facts.run.query(f"select avg(kl) as m from occurrences where step = 50 and token_id in ({ids})")["m"][
        0
    ].as_py()
    assert rows[1]["loss_rocks"] == pytest.approx(mean)


def test_geometry_of_another_rock_set_is_grouped_anew_and_said(whole):
    from rocktokens.geometry.figures import alignment, gradients

    facts = Facts.of(whole)
    table = facts.table("geometry")
    facts._tables["geometry"] = table.set_column(1, "group", pa.array(["rocks"] * len(table)))
    figure = gradients(facts)
    rocks = [row for row in table.to_pylist() if row["token_id"] in facts.rock_ids]
    assert percent(sum(row["grad_share"] for row in rocks)) in figure.sentence
    assert any("another rock set" in note for note in facts.notes)
    assert "p = " not in alignment(facts).sentence


def test_a_baseline_without_room_is_said(whole):
    facts = Facts.of(whole)
    facts.run.manifest["stages"]["knockout"]["accuracy"] = 0.0
    assert "leaves no room for an effect" in sentences.answer(facts)[3]


def test_without_a_declared_rock_the_answer_says_what_was_not_proven_and_what_the_census_found(whole, monkeypatch):
    facts = Facts.of(whole)
    monkeypatch.setattr(type(facts), "definition", "certified")
    monkeypatch.setattr(type(facts), "rocks", [])
    monkeypatch.setattr(type(facts), "rock_ids", frozenset())
    said = sentences.answer(facts)
    assert "no type is proven to cost more than the tokens around it and to have stopped learning" in said[0]
    assert said[3].startswith("No rock could be tested; of the costliest candidates, ")
    assert "strong stumbling block" in said[3]


def test_what_the_comparison_recorded_goes_before_what_we_average(html, facts):
    said = sentences.answer(facts)[4]
    row = next(row for row in facts.rows("compare_summary") if row["regime"] == "freeze")
    assert f"{interval(estimate(row, 'delta'), points)} points" in said
    section = html.split('<section id="accuracy_seconds"')[1].split("</section>")[0]
    assert "can be skipped here: trained without them" in section
    assert "mean over seeds and problems, both random and crossed" in section
    assert "1.28 ×" in section


def test_a_damaged_table_is_named_and_the_rest_reported(tmp_path):
    run = make_run(tmp_path / "run", stages="detect", prompts=8)
    (run.path / "clusters.parquet").write_bytes(b"not parquet")
    report(run.path)
    html = (run.path / REPORT).read_text()
    assert "clusters.parquet was left out" in html
    assert 'section id="clusters"' not in html
    assert 'section id="funnel"' in html


def test_no_run_is_an_error_that_says_so(tmp_path):
    with pytest.raises(RunError, match=r"holds no run\.json"):
        report(tmp_path)


# Hostile text


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("report") / "a 'b' <img src=x>"
    make_run(path, hostile=True, prompts=12)
    report(path)
    return (path / REPORT).read_text(encoding="utf-8")


def test_hostile_text_adds_no_element_and_no_handler(html, hostile):
    plain, attacked = Elements(html), Elements(hostile)
    tags = [tag for tag, _ in attacked.found]
    assert tags.count("script") == [tag for tag, _ in plain.found].count("script") == 6
    assert not {"img", "iframe", "object", "b", "form"} & set(tags)
    assert tags.count("svg") == 2  # the card's accuracies and the strip of losses
    for _, attributes in attacked.found:
        assert not [name for name in attributes if name.startswith("on")]
        assert not (attributes.get("href") or "").startswith("javascript")


def test_hostile_text_shows_as_itself(hostile):
    texts = {type_["text"] for type_ in viewer_of(hostile)["types"]}
    assert texts >= {visible(text) for text in HOSTILE[1:]}
    shown = "".join(Elements(hostile).text)
    assert visible(HOSTILE[2]) in shown or visible(HOSTILE[1]) in shown
    assert "\u202e" not in shown
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", hostile)


def test_a_charts_label_cannot_be_markup_tex_or_a_template():
    assert label("<b>x</b>") == "&lt;b&gt;x&lt;/b&gt;"
    assert "$" not in label("$\\alpha$")
    assert label("a" * 50).endswith("…")


def test_a_cut_character_is_spelled_where_its_pieces_stand(tmp_path):
    run = make_run(tmp_path / "run", hostile=True, prompts=4)
    rollout = payload(Facts.of(run.path))["rollouts"][0]
    assert "🙂" in rollout["spells"].values()


# Words and numbers


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" So", "␣So"),
        ("\n\n", "↵↵"),
        ("\t", "⇥"),
        ("  ", "␣␣"),
        ("", "∅"),
        ("\x00", "␀"),
        ("\x7f", "␡"),
        ("\u202e", "⟨U+202E⟩"),
        ("\u200b", "⟨U+200B⟩"),
        ("\u2028", "⟨U+2028⟩"),
        ("\ufffd", "\ufffd"),
        ("é", "é"),
        ("👩‍👧", "👩‍👧"),
        ("a\u200db", "a⟨U+200D⟩b"),
    ],
)
def test_invisible_characters_are_shown(token, shown):
    assert visible(token) == shown


def test_running_text_keeps_spaces_and_breaks_lines():
    assert visible(" So\n", flow=True) == " So↵\n"


def test_numbers_are_written_the_same_way_everywhere():
    assert number(-0.004, 2) == "0.00"
    assert number(-1234.5, 1) == "−1\u202f234.5"
    assert percent(0.1234) == "12.3\u00a0%"
    assert points(0.012) == "+1.2"
    assert points(-0.0001) == "0.0"
    assert significant(0.00123456) == "0.00123"
    assert significant(float("nan")) == "–"
    assert interval(Estimate(0.5, 0.4, 0.6, 9), percent) == "50.0\u00a0% [40.0, 60.0]"
    assert interval(Estimate(0.5, float("nan"), float("nan"), 9)) == "0.50"


def test_csv_gives_numbers_back_and_disarms_formulas():
    table = pa.table({"token": ["=1+1", "a,b", "\n", "ok"], "x": [0.1, None, float("nan"), 3.0]})
    rows = list(csv.reader(io.StringIO(to_csv(table))))
    assert rows[1] == ['"=1+1"', "0.1"]
    assert rows[2] == ["a,b", ""]
    assert json.loads(rows[3][0]) == "\n"


# The viewer


def test_the_viewer_holds_the_numbers_of_parquet(whole, facts):
    viewer = payload(facts)
    stored = {
        (row["rollout_id"], row["position"]): row
        for row in facts.run.query("select * from occurrences where step = 100").to_pylist()
    }
    for rollout in viewer["rollouts"]:
        for place, token in enumerate(rollout["tokens"]):
            row = stored[rollout["id"], place]
            assert viewer["types"][token]["id"] == row["token_id"]
            for column in ("kl", "teacher_entropy", "grad_norm", "student_logprob"):
                assert rollout["columns"][column][place] == pytest.approx(row[column], rel=6e-4)
    assert viewer["total"] == 160
    assert len(viewer["rollouts"]) == MAX_ROLLOUTS


def test_rollouts_are_taken_evenly_right_and_wrong_in_turn():
    rows = [{"rollout_id": str(n), "correct": n % 10 == 0, "length": 10} for n in range(1000)]
    chosen = choose(rows)
    assert chosen == choose(rows)
    assert len({row["rollout_id"] for row in chosen}) == len(chosen) == MAX_ROLLOUTS
    assert [row["correct"] for row in chosen[:4]] == [True, False, True, False]
    places = np.sort([int(row["rollout_id"]) for row in chosen])
    assert np.diff(places).max() < 60
    long = [{"rollout_id": str(n), "correct": None, "length": 9000} for n in range(50)]
    assert len(choose(long)) == 12


def test_no_character_of_our_own_is_spelled_out(html):
    assert "U+202F" not in html


def test_only_the_rocks_have_the_rocks_colour_among_the_grafts(facts):
    figure = next(figure for make in FIGURES if (figure := make(facts)) is not None and figure.name == "grafts")
    colours = dict(zip(figure.layout["yaxis"]["ticktext"], figure.data[0]["marker"]["color"]))
    assert [name for name, colour in colours.items() if colour == "@rock"] == ["rocks"]


def test_the_commands_of_a_report_are_ones_that_the_program_takes(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    run = open_run(tmp_path / "copy")
    run.manifest["config"]["graft"] = {"clusters": False, "problems": 24}
    run.manifest["config"]["graft_baseline"] = {"reuse_prompts": True}
    line = next(line for line in commands(Facts(run)) if " graft " in line)
    command = cli.parse(shlex.split(line)[1:])
    assert not command.graft.clusters
    assert command.graft.problems == 24
    assert command.baseline.reuse_prompts


def test_the_home_directory_of_whoever_ran_it_is_not_in_the_report(whole, tmp_path, monkeypatch):
    home = tmp_path / "somebody"
    shutil.copytree(whole, home / "run")
    monkeypatch.setattr(Path, "home", lambda: home)
    run = open_run(home / "run")
    run.manifest["config"]["pair"] |= {"student": str(home / "models" / "student"), "teacher": f"{home}body/teacher"}
    facts = Facts(run)
    assert "--pair.student ~/models/student" in " ".join(commands(facts))
    said = method(facts)
    assert f"{home}/" not in said
    assert f"{home}body/teacher" in said  # begins alike, and is not in the home directory


def test_what_is_not_shown_to_be_saturated_is_not_said_to_fall(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "copy")
    run = open_run(tmp_path / "copy")
    slope = {"saturated": False, "fall": 0.64, "low": -0.08, "high": 1.35, "num_steps": 107}
    run.finish("distill", {"steps": 320, "saturated": False, "saturation": slope})
    said = str(training_loss(Facts(run)))
    assert "The slope test does not show saturation: over the last 107 steps the loss fell by" in said
    assert "135.0" in said


def test_verdicts_are_counted_in_words():
    assert counted("Strong Pillar", 5) == "5 strong pillars"
    assert counted("Strong Stumbling Block", 1) == "1 strong stumbling block"
    assert counted("Undecided", 3) == "3 undecided"


def test_every_column_that_is_written_is_described(whole):
    assert differences(open_run(whole)) == []


@pytest.mark.slow
def test_large_runs_keep_the_page_below_eight_megabytes_and_say_what_they_show(tmp_path):
    """Prompts of 24,000 tokens, 15 MB of reference answers, 200,000 training steps."""
    run = make_run(tmp_path / "run", prompts=40)
    rows = run.read("rollouts").to_pylist()
    for row in rows:
        row["prompt_ids"] = row["prompt_ids"] * 6000
        row["answer"] = "7" * (15_000_000 // len(rows))
    run.write("rollouts", pa.Table.from_pylist(rows, schema=run.read("rollouts").schema))
    steps = np.arange(1, 200_001)
    training = run.read("training")
    first = training.slice(len(training) - 1, 1).to_pylist()[0]
    columns = {name: [value] * len(steps) for name, value in first.items()}
    columns |= {"step": steps, "loss_rocks": 0.5 + 1e-7 * steps, "loss_rest": 0.09 - 1e-7 * steps}
    run.write("training", pa.table(columns, schema=training.schema))
    run.finish("score", run.facts("score"))
    report(run.path)
    html = (run.path / REPORT).read_text(encoding="utf-8")
    assert len(html.encode()) < 8_000_000
    viewer = viewer_of(html)
    assert max(len(row["prompt"]) for row in viewer["rollouts"]) < 5_000
    assert "characters left out" in viewer["rollouts"][0]["prompt"]
    loss = next(spec for spec in data_of(html)["figures"] if spec["name"] == "training_loss")
    assert max(len(trace["x"]) for trace in loss["data"]) <= 2_000


def test_rollouts_are_left_out_until_the_page_fits(whole, monkeypatch):
    monkeypatch.setattr("rocktokens.report.viewer.MAX_BYTES", 60_000)
    found = payload(Facts.of(whole))
    small = fitted(found, lambda some: len(packed(as_json(some))))
    assert 0 < len(small["rollouts"]) < len(found["rollouts"])
    assert len(packed(as_json(small))) <= 60_000
    assert f"{len(small['rollouts'])} of 160 rollouts" in viewer_html(small)
