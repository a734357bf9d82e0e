"""The verdict: every state from the tables that lead to it, and the same words wherever it is shown."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pyarrow as pa
import pytest
from report_fixture import make_run

from rocktokens.facts import Facts
from rocktokens.report.conclusions import Verdict, found_by, summary, verdict
from rocktokens.report.stage import REPORT, report
from rocktokens.run import Run, open_run

TABLES = {
    "knockout": ["census", "knockouts", "baseline"],
    "compare": ["compare", "compare_summary"],
    "graft": ["grafts"],
}


def change(run: Run, name: str, make) -> None:
    """Rewrite a table row by row."""
    run.write(name, pa.Table.from_pylist([make(row) for row in run.read(name).to_pylist()]))
    run.finish("score", run.facts("score"))  # records the new file


def freeze(run: Run, word: str, delta: float, **more: Any) -> None:
    """What the comparison found of the freeze regime."""
    known = {"verdict": word, "delta": delta, "delta_low": delta - 0.01, "delta_high": delta + 0.01, "flops_ratio": 0.9}
    change(run, "compare_summary", lambda row: {**row, **known, **more} if row["regime"] == "freeze" else row)


def forget(run: Run, *stages: str) -> None:
    """As if these stages had never run."""
    for stage in stages:
        run.reopen(stage)
        for name in TABLES[stage]:
            (run.path / f"{name}.parquet").unlink()


def said(found: Verdict) -> str:
    return " ".join([found.title, *(f"{tile.value} {tile.answer} {tile.detail}" for tile in found.tiles)])


def no_rocks(run: Run) -> None:
    change(run, "types", lambda row: {**row, "in_certified": False, "class": "learning" if row["count"] > 50 else None})


def only_pillars(run: Run) -> None:
    forget(run, "compare")
    change(run, "census", lambda row: {**row, "verdict": "Strong Pillar"})


def empty_list(run: Run) -> None:
    forget(run, "compare")
    rows = [{"token_id": token_id, "decision": "undecided", "reason": "why"} for token_id in Facts(run).rock_ids]
    (run.path / "bypass.json").write_text(json.dumps({"decisions": rows, "ids": []}))
    change(run, "census", lambda row: {**row, "verdict": "Undecided"})


def costly(run: Run) -> None:
    change(run, "types", lambda row: {**row, "loss_pre": None})
    freeze(run, "unchanged", 0.0)


def not_declarable(run: Run) -> None:
    """A trainer's telemetry, or occurrences without loss_pre: costly types, and no test of whether they learn."""
    forget(run, "compare", "knockout", "graft")
    change(run, "types", lambda row: {**row, "loss_pre": None, "in_certified": False, "class": "costly"})


def unclear(run: Run) -> None:
    change(run, "types", lambda row: {**row, "in_certified": False, "class": "unclear"})


def nothing_frozen(run: Run) -> None:
    """Seen on a full study: rocks declared, an empty bypass list, and a card that said no rock was declared."""
    for table in ("compare", "compare_summary"):
        kept = [row for row in run.read(table).to_pylist() if not row["regime"].startswith("freeze")]
        run.write(table, pa.Table.from_pylist(kept))
    run.finish("compare", {**run.facts("compare"), "nothing_to_freeze": "nothing was frozen"})


def named_types(run: Run) -> None:
    """`compare --rocks` freezes any types; where none is declared, "all rocks" were not left out."""
    no_rocks(run)
    frozen = {"regime": "freeze_rocks", "verdict": "undecided", "delta": 0.02, "delta_low": -0.1, "delta_high": 0.1}
    for table in ("compare", "compare_summary"):
        kept = [row for row in run.read(table).to_pylist() if row["regime"] == "uniform"]
        run.write(table, pa.Table.from_pylist([*kept, *({**row, **frozen} for row in kept)]))
    run.finish("compare", run.facts("compare") | {"frozen_by": {"freeze_rocks": [3, 4]}})


@pytest.mark.parametrize(
    ("make", "state", "words"),
    [
        (lambda run: freeze(run, "unchanged", -0.001), "skip", "−0.1 [−1.1, +0.9] points no change"),
        (lambda run: freeze(run, "gains", 0.03), "skip", "+3.0 [+2.0, +4.0] points gains"),
        (lambda run: freeze(run, "costs", -0.05), "keep", "keep them: training without them costs accuracy"),
        (lambda run: freeze(run, "costs", -0.05), "keep", "10.0\u00a0% of the FLOPs saved"),
        (lambda run: freeze(run, "undecided", -0.02), "undecided", "−2.0 [−3.0, −1.0] points undecided"),
        (lambda run: freeze(run, "costs", -0.05, num_seeds=2), "undecided", "where a decision takes 3"),
        (no_rocks, "none", "learning"),
        (unclear, "undecided", "tokens are costly; whether they resist distillation is not yet known"),
        (not_declarable, "not tested", "tokens are costly; whether they resist distillation: not tested"),
        (lambda run: change(run, "types", lambda row: {**row, "confirmed": False}), "undecided", "confirms 0 of 4"),
        (only_pillars, "keep", "keep them: the student needs 4 of 4"),
        (empty_list, "undecided", "4 of 4 undecided"),
        (costly, "skip", "4 tokens are costly; training may skip them"),
        (nothing_frozen, "not tested", "none of 4 declared rocks is on the bypass list"),
        (named_types, "none", "2 token types that no test declares rocks left out: "),
    ],
)
def test_tables_lead_to_states(run, make, state, words):
    make(run)
    found = verdict(Facts(open_run(run.path)))
    assert found.state == state
    assert words in said(found)
    # Green is for what is proven, grey for what was not tested; the list of runs and the page have no other source.
    tones = {"skip": "good", "none": "plain", "keep": "bad", "undecided": "open", "not tested": "none"}
    assert found.tone == tones[state] == found.json()["colour"]
    assert ("not tested" in found.title) == (state == "not tested")


def test_stages_that_did_not_run_are_asked_for_with_a_command_that_can_be_pasted(run, tmp_path, monkeypatch):
    forget(run, "compare", "knockout", "graft")
    found = verdict(Facts(run))
    assert found.state == "not tested"
    wanted = [None, None, f"rocktokens knockout {run.path}", f"rocktokens compare {run.path}"]
    assert [tile.command for tile in found.tiles] == wanted
    shutil.copytree(run.path, tmp_path / "my run")
    assert Facts.of(tmp_path / "my run").command("detect") == f"rocktokens detect '{tmp_path / 'my run'}'"
    monkeypatch.chdir(run.path.parent)
    assert Facts(open_run("run")).command("detect") == "rocktokens detect run"
    scored = make_run(tmp_path / "scored", stages="score", prompts=4)
    assert verdict(Facts(scored)).command == "rocktokens detect scored"


def test_title_card_terminal_and_stages_say_the_same(run):
    freeze(run, "unchanged", -0.001)
    facts = Facts(run)
    found = verdict(facts)
    report(run.path, again=True)
    html = (run.path / REPORT).read_text()
    assert f"<h1>{found.title}</h1>" in html
    assert f"<title>{found.title} · run</title>" in html
    card = html.split('id="verdict"')[1].split("</section>")[0]
    for words in (found.label, "35.0\u00a0% [30.0, 40.0]", "78.0\u00a0%"):  # before, and the teacher's
        assert words in card
    lines = dict(line.split(maxsplit=1) for line in summary(facts))
    assert list(lines) == ["tokens", "skip", "saves", "accuracy", "look", "decide"]
    assert lines["skip"] == "yes: −0.1 [−1.1, +0.9] points, 3 seeds"
    assert lines["look"] == f"rocktokens view {run.path}"
    assert all(len(text) <= 71 for name, text in lines.items() if name not in ("look", "decide"))
    assert "4 of" in found_by("detect", facts)
    assert "needed" in found_by("knockout", facts)
