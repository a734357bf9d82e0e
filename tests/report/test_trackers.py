"""Findings for trackers: text for TensorBoard, a table for W&B and trackio, one sentence where one is missing."""

from __future__ import annotations

import io
import sys
import types

import pytest
from report_fixture import make_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rocktokens.errors import ConfigError
from rocktokens.facts import Facts
from rocktokens.report import trackers
from rocktokens.report.images import browser
from rocktokens.report.verdict import verdict


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("trackers") / "run", prompts=10)


def test_tensorboard_gets_the_verdict_and_the_rocks_as_text(run, tmp_path):
    assert trackers.send_findings(run, ["tensorboard"], folder=str(tmp_path)) == ["tensorboard"]
    seen = EventAccumulator(str(tmp_path)).Reload()
    text = seen.Tensors("rocktokens/verdict/text_summary")[0].tensor_proto.string_val[0].decode()
    facts = Facts(run)
    assert verdict(facts).title in text
    assert f"| {facts.rocks[0]['token_id']} |" in text
    assert seen.Scalars("rocktokens/rocks")[0].value == len(facts.rocks)


def test_wandb_gets_a_table_and_the_card(run, monkeypatch):
    logged = {}
    session = types.SimpleNamespace(log=logged.update, finish=lambda: logged.setdefault("finished", True))
    fake = types.ModuleType("wandb")
    fake.run = None
    fake.init = lambda **_: session
    fake.Table = lambda columns, data: (columns, data)
    fake.Html = lambda html: html
    fake.Image = lambda card: card
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert trackers.send_findings(run, ["wandb"]) == ["wandb"]
    columns, data = logged["rocktokens/rocks"]
    assert [row[columns.index("token_id")] for row in data] == [row["token_id"] for row in Facts(run).rocks]
    assert verdict(Facts(run)).title in logged["rocktokens/verdict"]
    assert logged["finished"]


def test_trackio_gets_a_table_the_line_and_the_card(run, monkeypatch):
    logged = {}
    fake, frames = types.ModuleType("trackio"), types.ModuleType("pandas")
    fake.init = lambda **_: None
    fake.log = logged.update
    fake.finish = lambda: logged.setdefault("finished", True)
    fake.Table = lambda dataframe: dataframe
    fake.Image = lambda card: ("image", card.size)
    frames.DataFrame = lambda rows, columns: (columns, rows)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.setitem(sys.modules, "pandas", frames)
    monkeypatch.setattr(trackers, "picture", lambda html: drawn())
    assert trackers.send_findings(run, ["trackio"]) == ["trackio"]
    columns, rows = logged["rocktokens/rocks"]
    assert [row[columns.index("token_id")] for row in rows] == [row["token_id"] for row in Facts(run).rocks]
    assert logged["rocktokens/verdict"] == verdict(Facts(run)).line
    assert logged["rocktokens/card"] == ("image", (3, 2))
    assert logged["finished"]


def drawn() -> bytes:
    """A picture of three by two points."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (3, 2), "white").save(out, "PNG")
    return out.getvalue()


def test_tensorboard_gets_the_card_as_an_image(run, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "picture", lambda html: drawn())
    trackers.send_findings(run, ["tensorboard"], folder=str(tmp_path))
    image = EventAccumulator(str(tmp_path)).Reload().Images("rocktokens/card")[0]
    assert (image.width, image.height) == (3, 2)


def test_without_a_browser_there_is_no_picture(run, monkeypatch):
    monkeypatch.setenv("ROCKTOKENS_BROWSER", "")
    assert trackers.card_picture(Facts(run)) is None


@pytest.mark.skipif(browser() is None, reason="no Chromium on this machine")
def test_the_card_is_drawn(run):
    card = trackers.card_picture(Facts(run))
    assert card.size == (900, 560)
    assert len(set(card.resize((90, 56)).getdata())) > 20


def test_a_tracker_that_fails_stops_nothing(run, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    assert trackers.send_findings(run, ["wandb", "unheard of"]) == []
    assert "wandb did not take the findings" in caplog.text


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install trackio"):
        trackers.require_trackers(["trackio"])
    trackers.require_trackers(["none", "mlflow"])  # not ours to know
