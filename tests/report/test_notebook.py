"""What a notebook shows, and the example notebook executed cell by cell."""

from __future__ import annotations

import json
from pathlib import Path

import plotly.graph_objects as go
import pytest
from report_fixture import make_run

from rocktokens.causal.census import Census
from rocktokens.detect.rocks import Occurrences, detect_rocks
from rocktokens.errors import ConfigError, DataError
from rocktokens.facts import Facts
from rocktokens.report.notebook import FIGURES
from rocktokens.report.verdict import verdict
from rocktokens.run import open_run
from rocktokens.stats import Estimate

NOTEBOOK = Path(__file__).parents[2] / "examples" / "read_a_run.ipynb"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("notebook") / "run", prompts=16)


def test_a_run_shows_its_verdict(run):
    html = run._repr_html_()
    found = verdict(Facts(run))
    assert found.title in html
    assert all(tile.chip in html for tile in found.tiles)
    assert "<script" not in html


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_every_figure_of_the_report_is_a_plotly_figure(run, name):
    figure = run.plot(name)
    assert isinstance(figure, go.Figure)
    assert figure.data
    assert "@" not in json.dumps(figure.to_plotly_json()["layout"], default=str)


def test_the_funnel_holds_the_types_own_numbers(run):
    drawn = {(x, round(y, 9)) for trace in run.plot("funnel").data for x, y in zip(trace.x, trace.y)}
    known = {(row["count"], round(row["loss_post"], 9)) for row in run.types().to_pylist() if row["loss_post"]}
    assert drawn <= known
    assert len(drawn) > 10


def test_what_cannot_be_drawn_is_named(run, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'funnel'"):
        run.plot("funel")
    with pytest.raises(DataError, match="nothing to draw"):
        make_run(tmp_path / "run", stages="score", prompts=4).plot("knockouts")


def test_a_detection_shows_its_rocks_and_a_census_its_verdicts(run):
    table = run.occurrences("select * exclude (step) from occurrences where step = 100")
    report = detect_rocks(Occurrences.read({0: table, 100: table}))
    html = report._repr_html_()
    assert html.count("<tr>") == 1 + min(len(report.rocks), 50)
    assert "of" in html
    census = Census((), Estimate(0.5, 0.4, 0.6, 10), 0.01, 0.05, 1, (0, 0), 0, 0, 0)
    assert "baseline accuracy 50.0" in census._repr_html_()


def test_the_example_notebook_runs(run, monkeypatch, capsys):
    """Every cell in order in one namespace, as a kernel would; no notebook package is needed for it."""
    monkeypatch.setenv("ROCKTOKENS_RUN", str(run.path))
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            assert cell["outputs"] == []  # kept clean: the outputs belong to whoever runs it
    assert isinstance(names["figure"], go.Figure)
    assert open_run(run.path).rocks().equals(names["rocks"])
