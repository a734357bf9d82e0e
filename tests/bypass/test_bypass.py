"""The stages bypass and export on a small run made by hand: what is read, written, written back, and refused."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from causal_runs import save_tiny_pair

from rocktokens.bypass import (
    REASONS,
    before_graft,
    bypass,
    evidence_of,
    fingerprint,
    list_for,
    read_bypass,
    write_comparison_back,
)
from rocktokens.causal.graft import skippable
from rocktokens.causal.settings import BypassConfig
from rocktokens.errors import ConfigError, DataError
from rocktokens.models.pair import load_tokenizer
from rocktokens.models.settings import PairConfig
from rocktokens.run import Run, open_run
from rocktokens.settings import to_mapping

NAMES = ("surely", "7", "so", "roughly", "well", "end", "then", "cheap")
CLASSES = ("rock", "rock", "rock", "rock", "learning", "rock", "rock", None)
CONFIRMED = (True, True, False, True, True, True, True, None)
VERDICTS = ("Proven Neutral", "Strong Pillar", "Proven Neutral", "Strong Stumbling Block", "Undecided", None)
VERDICTS += ("Proven Neutral", None)


def types_rows():
    known = {"fall": 0.1, "fall_low": 0.0, "fall_high": 0.2, "num_prompts": 50}
    rows = [{"token_id": 10 + i, "token": name, "r": float(10 - i), **known} for i, name in enumerate(NAMES)]
    for row, kind, confirmed in zip(rows, CLASSES, CONFIRMED):
        row |= {"class": kind, "confirmed": confirmed, "in_certified": kind == "rock"}
    return rows


def census_rows():
    keys = ("kind", "num_problems", "delta", "delta_low", "delta_high")
    return [
        {"token_id": 10 + i, "verdict": verdict, **dict(zip(keys, ("token", 400, 0.0, -0.005, 0.005)))}
        for i, verdict in enumerate(VERDICTS)
        if verdict
    ]


def graft_rows(high=0.004):
    named = {"rocks": [10, 11, 12, 13, 15, 16], "skippable": [10, 16], "all": None}
    return [
        {"arm": arm, "members": ids, "gain": 0.0, "gain_low": -0.004, "gain_high": high, "num_problems": 300}
        for arm, ids in named.items()
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> PairConfig:
    return save_tiny_pair(tmp_path_factory.mktemp("pair"))


def write(run, name, rows):
    pq.write_table(pa.Table.from_pylist(rows), run.path / f"{name}.parquet")


@pytest.fixture
def run(tmp_path, pair) -> Run:
    made = Run.create(tmp_path / "run", {"pair": to_mapping(pair)})
    write(made, "types", types_rows())
    write(made, "census", census_rows())
    write(made, "grafts", graft_rows())
    for stage in ("detect", "knockout", "graft"):
        made.finish(stage, {"rocks": [10, 11, 12, 13, 15, 16]} if stage == "detect" else {})
    return made


def content(run) -> dict:
    return json.loads((run.path / "bypass.json").read_text())


def test_the_list_holds_what_all_tests_let_be_skipped_and_every_costly_type_has_its_reason(run, pair, capfd):
    bypass(run.path, BypassConfig())
    found = content(run)
    assert (found["ids"], found["tokens"]) == ([10, 16], ["surely", "then"])
    reasons = {row["token"]: (row["decision"], row["reason"]) for row in found["decisions"]}
    assert reasons == {
        "surely": ("skip", "neutral"),
        "7": ("keep", "pillar"),
        "so": ("undecided", "not confirmed"),
        "roughly": ("apart", "stumbling block"),
        "well": ("keep", "learning"),
        "end": ("undecided", "not tested"),
        "then": ("skip", "neutral"),
    }
    assert found["decisions"][0]["cost_share"] == pytest.approx(10 / 52)
    assert found["decisions"][0]["graft"] == "skippable"
    assert found["comparison"] == {"status": "not compared", "text": "not compared"}
    assert any("compare" in words for words in found["not_tested"])
    vocabulary = load_tokenizer(pair.student, pair).get_vocab()
    assert found["tokenizer"]["fingerprint"] == fingerprint(vocabulary)
    assert open_run(run.path).facts("bypass")["ids"] == [10, 16]
    shown = " ".join(capfd.readouterr().out.split())  # 80 columns break the sentence
    assert "2 of 6 declared rocks may be skipped" in shown
    assert "1 is a stumbling block" in shown
    assert "not compared" in shown


def test_the_graft_and_the_list_mean_the_same_types(run):
    """The set that the stage graft draws again is the one that the list's rule asks a graft for."""
    wanted = [row["token_id"] for row in evidence_of(run) if REASONS[before_graft(row)][0] == "skip"]
    assert list(skippable(run)) == sorted(wanted) == [10, 16]


def test_types_without_classes_get_one_sentence(run):
    write(run, "types", [{"token_id": 10, "token": "surely", "r": 1.0}])  # an import
    with pytest.raises(DataError, match="run `rocktokens detect"):
        bypass(run.path, BypassConfig())


def test_the_same_run_gives_the_same_file(run):
    bypass(run.path, BypassConfig())
    first = {name: (run.path / name).stat().st_mtime_ns for name in ("bypass.json", "run.json")}
    bypass(run.path, BypassConfig())
    assert {name: (run.path / name).stat().st_mtime_ns for name in first} == first
    (run.path / "bypass.json").write_text("{")
    bypass(run.path, BypassConfig())
    assert content(run)["ids"] == [10, 16]


def compared(run, *, ids=(10, 16), verdict="unchanged", seeds=3):
    row = {"regime": "freeze", "delta": -0.001, "delta_low": -0.008, "delta_high": 0.006, "verdict": verdict}
    row |= {"num_seeds": seeds, "num_problems": 400}
    run.finish("compare", {"regimes": [row], "frozen_by": {"freeze": list(ids)}, "steps": 150})


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({}, "passed", "compared: −0.1 [−0.8, 0.6]"),
        ({"verdict": "costs"}, "failed", "compared: −0.1 [−0.8, 0.6]"),
        ({"verdict": "undecided"}, "undecided", "compared: −0.1 [−0.8, 0.6]"),
        ({"seeds": 1}, "undecided", "compared: −0.1 [−0.8, 0.6] (interval over prompts only: 1 seed)"),
        ({"ids": (10,)}, "not compared", "not compared"),
    ],
)
def test_a_comparison_is_written_back_if_it_froze_this_list(run, changes, status, text):
    bypass(run.path, BypassConfig())
    compared(open_run(run.path), **changes)
    write_comparison_back(open_run(run.path))
    found = read_bypass(run.path)
    assert (found.status, found.text) == (status, text)
    assert any("rocktokens compare" in words for words in found.content["not_tested"]) == (status == "not compared")
    written = (run.path / "bypass.json").stat().st_mtime_ns
    bypass(run.path, BypassConfig())  # made again, it remembers
    assert read_bypass(run.path).content == found.content
    assert (run.path / "bypass.json").stat().st_mtime_ns == written


def test_a_list_from_elsewhere_gets_its_verdict_too(run):
    own = {"format": "rocktokens bypass list", "version": 1, "ids": [10, 16]}
    (run.path / "bypass.json").write_text(json.dumps(own))
    compared(open_run(run.path))
    write_comparison_back(open_run(run.path))
    assert read_bypass(run.path).status == "passed"
    assert read_bypass(run.path).content.keys() == {*own, "comparison"}


def test_freeze_takes_the_list_and_refuses_an_empty_one_or_another_tokenizers(run, pair, tmp_path):
    tokenizer = load_tokenizer(pair.student, pair)
    assert list_for(run, None, tokenizer, freezes=True) is None  # there is no list yet
    bypass(run.path, BypassConfig())
    assert list_for(run, None, tokenizer, freezes=True) == (10, 16)
    elsewhere = Run.create(tmp_path / "elsewhere", {})
    assert list_for(elsewhere, str(run.path), tokenizer, freezes=False) == (10, 16)

    class Other:
        def get_vocab(self):
            return {"x": 0}

    with pytest.raises(DataError, match="another tokenizer"):
        list_for(run, None, Other(), freezes=True)
    write(run, "grafts", graft_rows(high=0.03))
    bypass(run.path, BypassConfig())
    with pytest.raises(ConfigError, match="nothing to freeze"):
        list_for(run, None, tokenizer, freezes=True)
