"""`rocktokens import`: from another trainer's files to a run, its detection and its report."""

from __future__ import annotations

import csv
import json

import distilling
import dumps
import numpy as np
import pytest

from rocktokens import Run, open_run
from rocktokens.bypass import fingerprint, read_bypass
from rocktokens.errors import DataError, RunError
from rocktokens.interop.export import export
from rocktokens.interop.import_ import import_dump

ROWS = dumps.rollouts(60)


@pytest.fixture(scope="module")
def spelling(tmp_path_factory):
    return dumps.tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("name", ["slime", "trl"])
def test_a_dump_becomes_a_run_with_detection_and_a_report(tmp_path, spelling, name):
    files = getattr(dumps, name)(tmp_path / "dump", ROWS)
    run = import_dump(name, files, spelling, tmp_path / "run")
    facts = run.facts("import")
    assert facts["rollouts"] == 60
    assert facts["estimator"] == ("full distributions" if name == "trl" else "sampled tokens")
    assert any("without bias" in note for note in facts["notes"]) == (name == "slime")
    assert dict(zip(run.types()["token_id"].to_pylist(), run.types()["token"].to_pylist()))[dumps.COSTLY] == "w7"
    table = run.occurrences("select token_id, avg(log_ratio) as cost from occurrences group by 1 order by 2 desc")
    assert table["token_id"][0].as_py() == dumps.COSTLY
    assert table["cost"][0].as_py() == pytest.approx(1.5, abs=0.2)
    assert run.facts("detect")["signal"] == ("kl" if name == "trl" else "log_ratio")
    page = (run.path / "report.html").read_text()
    assert "w7" in page
    assert "pair" not in run.manifest["config"]


def test_what_the_loss_leaves_out_stays_as_context_without_a_cost(tmp_path, spelling):
    rows = dumps.rollouts(3)
    rows[0]["mask"][1] = 0
    run = import_dump("jsonl", dumps.jsonl(tmp_path / "a.jsonl", rows), spelling, tmp_path / "run", detect=False)
    costs = run.occurrences("select log_ratio from occurrences order by rollout_id, position")["log_ratio"].to_numpy()
    assert np.isnan(costs[1])
    assert np.isfinite(np.delete(costs, 1)).all()


def test_a_dump_without_teacher_values_is_imported_and_says_what_can_be_had(tmp_path, spelling, caplog):
    run = import_dump("prime-rl", dumps.prime_rl(tmp_path / "dump", ROWS), spelling, tmp_path / "run")
    assert not run.done("detect")
    assert not run.steps()
    assert "ref_logprobs" in caplog.text
    assert "engine's log-probabilities against the trainer's" in caplog.text
    engine = run.read("engine")
    gap = engine["engine_logprob"].to_numpy() - engine["student_logprob"].to_numpy()
    assert 0 < np.abs(gap).max() < 0.01


def other_id(rows):
    rows[1]["tokens"][0] = 64


def other_text(rows):
    for row in rows:
        row["text"] = "another tokenizer's text"


@pytest.mark.parametrize(("change", "said"), [(other_id, "token id 64"), (other_text, "do not spell")])
def test_ids_that_are_not_the_tokenizers_are_refused(tmp_path, spelling, change, said):
    rows = dumps.rollouts(4)
    change(rows)
    with pytest.raises(DataError, match=said):
        import_dump("jsonl", dumps.jsonl(tmp_path / "a.jsonl", rows), spelling, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    files = [file for who in "ab" for file in dumps.jsonl(tmp_path / f"{who}.jsonl", ROWS[:2], tokenizer=who)]
    with pytest.raises(DataError, match="several tokenizers"):
        import_dump("jsonl", files, spelling, tmp_path / "run")


def test_another_run_is_never_overwritten(tmp_path, spelling):
    Run.create(tmp_path / "run", {"pair": {"student": "a", "teacher": "b"}})
    with pytest.raises(RunError, match="run of its own"):
        import_dump("jsonl", dumps.jsonl(tmp_path / "a.jsonl", ROWS[:2]), spelling, tmp_path / "run")
    assert "pair" in open_run(tmp_path / "run").manifest["config"]


# What is exported of it


def test_an_imported_runs_costly_types_are_exported_with_their_tokenizer(tmp_path, spelling):
    rows, run, mark = dumps.rollouts(200, seed=3), tmp_path / "run", fingerprint(distilling.tokenizer().get_vocab())
    import_dump("slime", dumps.slime(tmp_path / "dump", rows), spelling, run)

    def exported(form: str) -> str:
        return export(run, form, tmp_path / f"rocks.{form}", listed="rocks").read_text()

    content = json.loads(exported("json"))
    assert (content["ids"], content["tokens"]) == ([dumps.COSTLY], ["w7"])
    assert "costly" in content["comparison"]["text"]
    with pytest.raises(DataError, match="not a bypass list"):
        read_bypass(tmp_path / "rocks.json")
    assert exported("ids") == f"{dumps.COSTLY}\n"
    (row,) = csv.DictReader(exported("csv").splitlines())
    assert (row["token_id"], row["tokenizer"]) == (str(dumps.COSTLY), mark)
    for form in ("json", "trl", "verl"):
        assert json.loads(exported(form))["tokenizer"]["fingerprint"] == mark
    with pytest.raises(DataError, match="rocktokens detect"):
        export(Run.create(tmp_path / "empty").path, "ids", listed="rocks")


# The command


def said(capsys, *words) -> tuple[int, str]:
    from rocktokens.cli import main

    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return end.value.code or 0, "".join(capsys.readouterr())


def test_an_imported_run_is_never_told_to_sample_or_compare(tmp_path, spelling, capsys):
    dumps.slime(tmp_path / "dump", dumps.rollouts(24))
    words = ("--tokenizer", spelling, "--out", tmp_path / "run")
    code, text = said(capsys, "import", "slime", tmp_path / "dump", *words)
    assert "24 rollouts" in text
    page = (tmp_path / "run" / "report.html").read_text()
    assert code == 0
    for command in ("rocktokens sample", "rocktokens compare", "rocktokens score", "rocktokens distill"):
        assert command not in text
        assert command not in page
