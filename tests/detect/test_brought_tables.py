"""`detect --counts` and `census --outcomes` as a user runs them: the run, its report and what a notebook shows."""

from __future__ import annotations

import pytest

from rocktokens import open_run
from rocktokens.cli import main

COUNTS = "token_id,count,mean_loss,token\n7,100,0.5, So\n3,400,0.1,the\n9,10,2.0,Wait\n1,40,0.1,**\n"


def run_command(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return int(caught.value.code or 0)


@pytest.fixture
def counts(tmp_path):
    path = tmp_path / "counts.csv"
    path.write_text(COUNTS)
    return path


def test_counts_become_a_run_with_burden_coverage_and_enrichment(counts, tmp_path, capsys):
    out = tmp_path / "run"
    totals = ("--corpus-positions", "1000", "--corpus-loss", "200")
    assert run_command("detect", "--counts", counts, "--out", out, "--k", "2", *totals) == 0
    said = capsys.readouterr().out
    assert "enrichment: 0.900" in said
    assert "persistence" in said
    run = open_run(out)
    facts = run.facts("detect")
    assert facts["rocks"] == [7, 3]
    assert facts["enrichment"] == pytest.approx(0.9)
    assert facts["coverage"] == pytest.approx(0.45)
    assert any("cannot be had" in note for note in facts["notes"])
    assert run.rocks()["token"].to_pylist() == [" So", "the"]
    assert run.types()["r"].to_pylist() == pytest.approx([50, 40, 20, 4])
    assert run.types()["loss_pre"].null_count == 4
    assert run.types()["cluster"].to_pylist()[0] == "discourse"


def test_without_totals_no_enrichment_is_made_up(counts, tmp_path, capsys):
    assert run_command("detect", "--counts", counts, "--out", tmp_path / "run") == 0
    facts = open_run(tmp_path / "run").facts("detect")
    assert (facts["enrichment"], facts["coverage"], facts["coverage_of_listed"]) == (None, None, 1.0)
    assert "--corpus-positions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "words", "share"),
    [
        ("1,5,0\n2,3,0\n", (), None),
        ("1,0,0.5\n2,3,-0.2\n", ("--signal", "log_ratio", "--k", "1"), None),
        ("1,5,0.5\n2,3,-0.9\n", ("--signal", "log_ratio", "--k", "1"), None),
        ("1,0,0.5\n2,3,0.2\n", ("--k", "1"), 1.0),
    ],
)
def test_a_loss_that_is_not_above_0_has_no_shares(rows, words, share, tmp_path, capsys):
    path, out = tmp_path / "counts.csv", tmp_path / "run"
    path.write_text(f"token_id,count,mean_loss\n{rows}")
    assert run_command("detect", "--counts", path, "--out", out, *words) == 0
    said = capsys.readouterr().out
    facts = open_run(out).facts("detect")
    assert facts["coverage_of_listed"] == share
    assert ("not above 0" in " ".join(facts["notes"])) == (share is None)
    assert ("– of their loss" in said) == (share is None)
    assert "nan" not in said
    assert run_command("report", out, "--no-images") == 0


@pytest.mark.parametrize(
    ("rows", "words", "rocks", "mean_loss"),
    [
        ("7,0,0.3\n5,10,0.1\n", (), [5], 0.1),
        ("1,0,0.5\n2,3,-0.2\n", ("--signal", "log_ratio", "--k", "1"), [2], -0.2),
    ],
)
def test_types_that_do_not_occur_are_not_listed_as_costly(rows, words, rocks, mean_loss, tmp_path):
    path, out = tmp_path / "counts.csv", tmp_path / "run"
    path.write_text(f"token_id,count,mean_loss\n{rows}")
    assert run_command("detect", "--counts", path, "--out", out, *words) == 0
    run = open_run(out)
    facts = run.facts("detect")
    assert (facts["rocks"], facts["k"]) == (rocks, 1)
    assert facts["mean_loss"] == pytest.approx(mean_loss)
    assert run.read("footprints")["num_types"].to_pylist() == [1]
    assert run.types()["in_burden"].to_pylist() == [True, False]
    assert run.types()["token_id"].to_pylist()[0] == rocks[0]


def test_geometry_says_that_it_needs_rollouts(counts, tmp_path, capsys):
    assert run_command("detect", "--counts", counts, "--out", tmp_path / "run") == 0
    assert run_command("geometry", tmp_path / "run") != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "made from a table of counts; geometry needs rollouts" in said
    assert "damaged" not in said


def test_counts_have_a_report_and_a_card(counts, tmp_path):
    out = tmp_path / "run"
    totals = ("--corpus-positions", "1000", "--corpus-loss", "200")
    assert run_command("detect", "--counts", counts, "--out", out, "--k", "2", *totals) == 0
    assert run_command("report", out, "--no-images") == 0
    page = (out / "report.html").read_text()
    assert "table of counts" in page
    assert "recur in similar contexts" not in page
    run = open_run(out)
    html = run._repr_html_()
    assert "costly" in html
    assert f"rocktokens score {out}" not in page
    # Complete: nothing is done twice; other totals are noticed.
    before = (out / "types.parquet").stat().st_mtime_ns
    assert run_command("detect", "--counts", counts, "--out", out, "--k", "2", *totals) == 0
    assert (out / "types.parquet").stat().st_mtime_ns == before
    assert run_command("detect", "--counts", counts, "--out", out, "--k", "2") == 0
    assert open_run(out).facts("detect")["enrichment"] is None


def test_bad_use_is_said_in_one_sentence(counts, tmp_path, capsys):
    def said(*words):
        assert run_command(*words) != 0
        text = capsys.readouterr().err
        assert "Traceback" not in text
        return text

    assert "--out" in said("detect", "--counts", counts)
    assert "one of" in said("detect", tmp_path, "--counts", counts, "--out", tmp_path / "run")
    assert "belong to --counts" in said("detect", tmp_path, "--corpus-loss", "3")
    assert "only burden" in said("detect", "--counts", counts, "--out", tmp_path / "run", "--definition", "context")
    assert not (tmp_path / "run").exists()
    counts.write_text(COUNTS.replace("400", "-400"))
    assert "never negative" in said("detect", "--counts", counts, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_of_its_own_is_not_overwritten(counts, tmp_path, capsys):
    from rocktokens import Run

    run = Run.create(tmp_path / "own", {"pair": {"student": "s", "teacher": "t"}})
    run.finish("distill", {})
    assert run_command("detect", "--counts", counts, "--out", tmp_path / "own") == 1
    assert "run of its own" in capsys.readouterr().err
