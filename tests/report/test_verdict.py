"""The verdict: every state from the tables that lead to it, and the same words wherever it is shown."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pytest
from report_fixture import make_run

from rocktokens.facts import Facts
from rocktokens.report.conclusions import found_by, summary, verdict
from rocktokens.report.stage import REPORT, report
from rocktokens.run import Run, open_run


def change(run: Run, name: str, make) -> None:
    """Rewrite a table row by row."""
    run.write(name, pa.Table.from_pylist([make(row) for row in run.read(name).to_pylist()]))
    run.save()


def freeze(run: Run, word: str, delta: float) -> None:
    """What the comparison found of the freeze regime."""
    known = {"verdict": word, "delta": delta, "delta_low": delta - 0.01, "delta_high": delta + 0.01, "flops_ratio": 0.9}
    change(run, "compare_summary", lambda row: {**row, **known} if row["regime"] == "freeze" else row)


def forget(run: Run, *stages: str) -> None:
    """As if these stages had never run."""
    tables = {
        "knockout": ["census", "knockouts", "baseline"],
        "compare": ["compare", "compare_summary"],
        "graft": ["grafts"],
    }
    for stage in stages:
        run.reopen(stage)
        for name in tables.get(stage, []):
            (run.path / f"{name}.parquet").unlink()


@pytest.mark.parametrize(
    ("word", "delta", "state", "said"),
    [
        ("unchanged", -0.001, "skip", "skipping them changes nothing: −0.1 [−1.1, +0.9] points"),
        ("gains", 0.03, "skip", "skipping them raises accuracy: +3.0 [+2.0, +4.0] points"),
        ("costs", -0.05, "keep", "skipping them costs accuracy: −5.0 [−6.0, −4.0] points"),
        ("undecided", -0.02, "cannot tell", "not decided: −2.0 [−3.0, −1.0] points"),
    ],
)
def test_the_comparison_decides(run, word, delta, state, said):
    freeze(run, word, delta)
    found = verdict(Facts(run))
    assert found.state == state
    assert said in found.line
    assert "saves 10.0\u00a0% of the compute" in found.line
    assert found.tiles[3].value.startswith(f"{100 * delta:+.1f}".replace("-", "−"))


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_verdict_that_an_earlier_version_recorded_from_too_few_seeds_is_not_believed(run, seeds):
    freeze(run, "costs", -0.05)
    change(run, "compare_summary", lambda row: {**row, "num_seeds": seeds})
    found = verdict(Facts(run))
    assert found.state == "cannot tell"
    assert "not decided: −5.0 [−6.0, −4.0] points" in found.line
    assert "where a decision takes 3 (the interval is over prompts only)" in found.tiles[3].detail


def test_no_rocks_is_an_answer_of_its_own(run):
    change(run, "types", lambda row: {**row, "in_certified": False, "class": "learning" if row["count"] > 50 else None})
    found = verdict(Facts(run))
    assert found.state == "no rocks"
    assert found.title.startswith("No rock tokens")
    assert "costly and learning" in found.line
    assert "frequent" not in found.tiles[1].chip


def test_a_set_that_the_other_half_does_not_confirm_is_unstable(run):
    change(run, "types", lambda row: {**row, "confirmed": False if row["in_certified"] else None})
    found = verdict(Facts(run))
    assert found.state == "unstable"
    assert "confirms 0 of 4" in found.line


def test_pillars_are_named_before_anything_was_compared(run):
    forget(run, "compare")
    change(run, "census", lambda row: {**row, "verdict": "Strong Pillar"})
    found = verdict(Facts(run))
    assert found.state == "keep"
    assert found.title == "Keep the rock tokens: 4 of 4 are needed"
    assert found.command == f"rocktokens compare {run.path}"


def test_stages_that_did_not_run_are_asked_for_with_a_command_that_can_be_pasted(run, monkeypatch):
    forget(run, "compare", "knockout", "graft")
    found = verdict(Facts(run))
    assert found.state == "not run"
    assert [tile.command for tile in found.tiles] == [
        None,
        None,
        f"rocktokens knockout {run.path}",
        f"rocktokens compare {run.path}",
    ]
    monkeypatch.chdir(run.path.parent)
    assert Facts(run).command("detect") == "rocktokens detect run"
    assert Facts(open_run("run")).command("detect") == "rocktokens detect run"


def test_a_directory_with_spaces_is_quoted(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "my run")
    assert Facts.of(tmp_path / "my run").command("detect") == f"rocktokens detect '{tmp_path / 'my run'}'"


def test_an_imported_run_is_not_told_to_run_what_needs_models(run):
    forget(run, "compare", "knockout", "graft")
    run.manifest["config"].pop("pair")
    run.save()
    found = verdict(Facts(run))
    assert found.state == "imported"
    assert all(tile.command is None for tile in found.tiles)
    report(run.path, again=True)
    html = (run.path / REPORT).read_text()
    assert "rocktokens compare" not in html.split('id="method"')[0]
    assert "rocktokens knockout" not in html.split('id="method"')[0]


def test_without_a_loss_before_distillation_the_word_is_costly(run):
    change(run, "types", lambda row: {**row, "loss_pre": None})
    freeze(run, "unchanged", 0.0)
    assert verdict(Facts(run)).title == "All 4 costly tokens can be skipped"


def test_nothing_detected_yet(tmp_path):
    run = make_run(tmp_path / "run", stages="score", prompts=4)
    found = verdict(Facts(run))
    assert found.state == "not run"
    assert found.command == f"rocktokens detect {run.path}"


def test_the_bypass_list_says_which_are_kept(run):
    forget(run, "compare")
    rocks = sorted(Facts(run).rock_ids)
    rows = [{"token_id": token_id, "decision": "undecided", "reason": "the census is undecided"} for token_id in rocks]
    (run.path / "bypass.json").write_text(json.dumps({"decisions": rows, "ids": []}))
    change(run, "census", lambda row: {**row, "verdict": "Undecided"})
    assert verdict(Facts(run)).state == "cannot tell"


def test_seconds_without_an_interval_are_no_saving(run):
    freeze(run, "unchanged", 0.0)
    change(run, "compare_summary", lambda row: {**row, "seconds_ratio_low": None, "seconds_ratio_high": None})
    found = verdict(Facts(run))
    assert "second" not in found.line + found.tiles[3].detail
    bounds = {"seconds_ratio": 0.9, "seconds_ratio_low": 0.8, "seconds_ratio_high": 1.0}
    change(run, "compare_summary", lambda row: {**row, **bounds})
    assert "0.90 [0.80, 1.00] × the seconds" in verdict(Facts(run)).tiles[3].detail


def test_title_card_terminal_and_stages_say_the_same(run):
    freeze(run, "unchanged", -0.001)
    facts = Facts(run)
    found = verdict(facts)
    report(run.path, again=True)
    html = (run.path / REPORT).read_text()
    assert f"<h1>{found.title}</h1>" in html
    assert f"<title>{found.title} · run</title>" in html
    card = html.split('id="verdict"')[1].split("</section>")[0]
    assert found.line in card
    assert found.label in card
    lines = summary(facts, run.path / REPORT)
    assert lines[0] == found.title
    assert " ".join(lines).replace("  ", " ").count("skipping them changes nothing") == 1
    assert all(len(line) <= 80 for line in lines if not line.startswith(("  report", "  next")))
    assert "4 of" in found_by("detect", facts)
    assert "needed" in found_by("knockout", facts)


def test_the_accuracies_are_explained(run):
    report(run.path, again=True)
    html = (run.path / REPORT).read_text()
    explained = html.split('<details id="accuracies">')[1].split("</details>")[0]
    for words in ("student before distillation", "sampled rollouts", "regime uniform", "measured on"):
        assert words in explained
    card = html.split('id="verdict"')[1].split("</section>")[0]
    assert "35.0\u00a0% [30.0, 40.0]" in card
    assert "78.0\u00a0%" in card  # the teacher's: the graft at every position


def test_rocks_that_are_not_on_the_list_are_not_called_undeclared(run):
    """Seen on a full study: six rocks declared, an empty bypass list, and a card that said no rock was declared."""

    def without(table: str) -> None:
        kept = [row for row in run.read(table).to_pylist() if row["regime"] not in ("freeze", "freeze_rocks")]
        run.write(table, pa.Table.from_pylist(kept))

    for table in ("compare", "compare_summary"):
        without(table)
    run.finish("compare", {**run.facts("compare"), "nothing_to_freeze": "nothing was frozen"})
    facts = Facts(open_run(run.path))
    found = verdict(facts)
    tile = next(tile for tile in found.tiles if tile.name == "without")
    assert f"none of the {len(facts.rocks)} declared rocks is on the bypass list" in tile.detail
    assert "no rock is declared" not in found.line + tile.detail


def test_token_types_that_the_user_named_are_not_called_rocks(run):
    """`compare --rocks` freezes any types; where none is declared, "all rocks" were not left out."""
    change(run, "types", lambda row: {**row, "in_certified": False, "class": None})
    frozen = {"verdict": "undecided", "delta": 0.02, "delta_low": -0.1, "delta_high": 0.1}
    kept = [row for row in run.read("compare_summary").to_pylist() if row["regime"] == "uniform"]
    run.write("compare_summary", pa.Table.from_pylist([*kept, {**kept[0], "regime": "freeze_rocks", **frozen}]))
    table = run.read("compare").to_pylist()
    others = [row | {"regime": "freeze_rocks"} for row in table if row["regime"] == "uniform"]
    run.write("compare", pa.Table.from_pylist([*(row for row in table if row["regime"] == "uniform"), *others]))
    run.finish("compare", run.facts("compare") | {"frozen_by": {"freeze_rocks": [3, 4]}})
    assert verdict(Facts(run)).tiles[3].detail.startswith("2 token types that no test declares rocks left out: ")
