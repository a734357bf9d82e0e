"""`rocktokens export --list rocks`: what was detected, with the tokenizer's fingerprint."""

from __future__ import annotations

import csv
import json

import distilling
import dumps
import pytest

from rocktokens import Run
from rocktokens.bypass import fingerprint, read_bypass
from rocktokens.errors import DataError
from rocktokens.interop.export import export
from rocktokens.interop.import_ import import_dump


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    path = tmp_path_factory.mktemp("imported")
    rows = dumps.rollouts(200, seed=3)
    import_dump("slime", dumps.slime(path / "dump", rows), dumps.tokenizer(path / "tokenizer"), path / "run")
    return path / "run"


def test_an_imported_runs_costly_types_are_exported_with_their_tokenizer(imported, tmp_path):
    mark = fingerprint(distilling.tokenizer().get_vocab())
    content = json.loads(export(imported, "json", tmp_path / "rocks.json", listed="rocks").read_text())
    assert content["ids"] == [dumps.COSTLY]
    assert content["tokens"] == ["w7"]
    assert content["tokenizer"]["fingerprint"] == mark
    assert "costly" in content["comparison"]["text"]
    assert "not a bypass list" in content["comparison"]["text"]
    with pytest.raises(DataError, match="not a bypass list"):
        read_bypass(tmp_path / "rocks.json")
    assert export(imported, "ids", tmp_path / "rocks.txt", listed="rocks").read_text() == f"{dumps.COSTLY}\n"
    rows = list(csv.DictReader(export(imported, "csv", tmp_path / "rocks.csv", listed="rocks").open()))
    assert [(row["token_id"], row["tokenizer"]) for row in rows] == [(str(dumps.COSTLY), mark)]
    for form in ("trl", "verl"):
        found = json.loads(export(imported, form, tmp_path / f"{form}.json", listed="rocks").read_text())
        assert found["tokenizer"]["fingerprint"] == mark


def test_a_run_without_detection_names_the_command(tmp_path):
    Run.create(tmp_path / "run")
    with pytest.raises(DataError, match="rocktokens detect"):
        export(tmp_path / "run", "ids", listed="rocks")
