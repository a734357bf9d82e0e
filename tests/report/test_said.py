"""What commands say: 80 columns, --json from the one verdict, an empty list is called empty."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from report_fixture import make_run

from rocktokens.cli import main
from rocktokens.facts import Facts
from rocktokens.report.conclusions import verdict


def call(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_detect_and_bypass_fit_80_columns_and_their_json_is_the_verdict(tmp_path, capsys):
    run = make_run(tmp_path / "run", stages="detect", prompts=12)
    for words in (("detect", "--again"), ("bypass", "--again")):
        said = call(capsys, words[0], str(run.path), words[1])
        found = verdict(Facts.of(run.path))
        assert str(found) in said
        lines = [line for line in said.splitlines() if str(run.path) not in line and line != str(found)]
        assert max(map(len, lines)) <= 80
        stated = json.loads(call(capsys, words[0], str(run.path), "--json"))["verdict"]
        assert (stated["state"], stated["sentence"], stated["colour"]) == (found.state, found.title, found.tone)
    with pytest.raises(SystemExit):
        main(["export", str(run.path), "--format", "verl"])
    assert "the list is empty" in capsys.readouterr().err


def test_occurrences_without_a_first_loss_are_not_tested_everywhere(tmp_path, capsys):
    rows = [
        {"rollout_id": f"p{n // 4}#{n % 4}", "prompt_id": f"p{n // 4}", "position": at, "token_id": at % 7}
        | {"loss": 1.5 if at % 7 == 3 else 0.02}
        for n in range(160)
        for at in range(21)
    ]
    pa.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    out = tmp_path / "out"
    stated = json.loads(
        call(capsys, "detect", "--occurrences", str(tmp_path / "rows.parquet"), "--out", str(out), "--json")
    )
    assert stated["verdict"]["state"] == "not tested"
    assert "not tested" in stated["verdict"]["sentence"]
    assert stated["verdict"]["colour"] == "none"
    assert {own["answer"] for own in stated["verdict"]["answers"].values()} == {"not tested"}
    call(capsys, "report", str(out))
    html = (out / "report.html").read_text()
    assert f"<h1>{stated['verdict']['sentence']}</h1>" in html
    assert 'class="badge good"' not in html
