"""The whole story through the command line, on a small budget in the built-in world: what the numbers mean, that a
second run does nothing, and that stages killed in the middle end with the same tables."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from oracles import probabilities, reverse_kl
from story import study
from transformers import AutoModelForCausalLM

from rocktokens.show import visible
from rocktokens.study import STAGES
from rocktokens.tables import TABLES, table_of
from rocktokens.world import get_world

WORLD = get_world("arithmetic")
TRUTH = WORLD.truth()
INTERVAL = re.compile(r"\d(?:\s%)? \[[−+]?[\d.]+, [−+]?[\d.]+\]")


def test_every_stage_is_complete_and_leaves_no_draft(story):
    assert set(STAGES) <= set(story.run.manifest["stages"])
    assert not list(story.run.path.rglob("*.tmp"))
    assert not list(story.run.path.glob("*.parts"))


def test_every_table_and_column_is_described_in_the_schema(story):
    """And no column is empty unless the schema says that it may be."""
    run, found = story.run, []
    for path in sorted(run.path.glob("*.parquet")):
        known = table_of(path.stem)
        if known is None:
            found.append(f"{path.stem}: no such table")
            continue
        table, meanings = run.read(path.stem), {column.name: column.meaning for column in known.columns}
        for name in table.column_names:
            if name not in meanings:
                if not (path.stem == "training" and name.startswith(("shadow_kept_", "overlap_"))):
                    found.append(f"{path.stem}.{name}: not described")
            elif len(table) and table[name].null_count == len(table) and "mpty" not in meanings[name]:
                found.append(f"{path.stem}.{name}: empty")
    assert {"occurrences", "telemetry", "top_tokens"} <= TABLES.keys()
    assert found == []


def test_every_token_is_scored_at_every_checkpoint_with_its_exact_loss(story):
    run = story.run
    assert run.steps() == run.checkpoints() == [0, 3, 6]
    row = run.read("rollouts").to_pylist()[0]
    total = sum(len(ids) for ids in run.read("rollouts")["token_ids"].to_pylist())
    counts = run.query("select step, count(*) as n, min(kl) as least from occurrences group by 1").to_pylist()
    assert all(found["n"] == total and found["least"] >= 0 for found in counts)
    ids = torch.tensor([row["prompt_ids"] + row["token_ids"]])
    start = len(row["prompt_ids"]) - 1
    with torch.no_grad():
        logits = [
            AutoModelForCausalLM.from_pretrained(source).double()(ids).logits[0, start:-1].numpy()
            for source in (run.checkpoint(6), WORLD.teacher_path)
        ]
    width = min(own.shape[-1] for own in logits)
    wanted = [reverse_kl(*(probabilities(own[:width]) for own in both)) for both in zip(*logits)]
    found = run.query(
        f"select kl from occurrences where step = 6 and rollout_id = '{row['rollout_id']}' order by position"
    )
    np.testing.assert_allclose(found["kl"].to_numpy(), wanted, atol=2e-5)


def test_the_planted_rocks_are_found(story):
    types = {row["token_id"]: row for row in story.run.types().to_pylist()}
    for token_id in TRUTH.rocks.ids:
        assert types[token_id]["in_context"]
    planted = {*TRUTH.rocks.ids, *TRUTH.costly.ids}
    best = sorted((row for row in types.values() if row["in_context"]), key=lambda row: row["place_context"])
    assert {row["token_id"] for row in best[: len(TRUTH.rocks)]} <= planted
    for row in story.run.read("footprints").to_pylist():
        assert row["enrichment"] == pytest.approx(row["share_loss"] / row["share_positions"])
        assert row["enrichment_low"] <= row["enrichment"] <= row["enrichment_high"]


def test_the_planted_rocks_do_not_learn_and_the_rest_does(story):
    mean = story.run.query(
        f"select step, token_id in {TRUTH.rocks.ids} as planted, avg(kl) as kl from occurrences group by all"
    )
    kl = {(row["step"], row["planted"]): row["kl"] for row in mean.to_pylist()}
    assert kl[6, True] == pytest.approx(kl[0, True], rel=0.1)
    assert kl[6, False] < 0.9 * kl[0, False]


def test_verdicts_are_the_worlds_truth(story):
    assert not TRUTH.rocks_matter_at_inference
    census = {row["token_id"]: row for row in story.run.read("census").to_pylist()}
    for token_id in TRUTH.rocks.ids:
        assert census[token_id]["verdict"] == "Proven Neutral"
    pillars = [census[token_id] for token_id in TRUTH.pillars.ids if token_id in census]
    assert "Strong Pillar" in {row["verdict"] for row in pillars}
    assert "Strong Stumbling Block" not in {row["verdict"] for row in pillars}


def test_effects_are_those_of_the_rollouts(story):
    """Δ again from the rows: a rollout without the token is the baseline's, one with it the resumed one's."""
    knockouts = story.run.read("knockouts").to_pylist()
    baseline = {row["rollout_id"]: row for row in story.run.read("baseline").to_pylist()}
    for row in story.run.read("census").to_pylist():
        own = [item for item in knockouts if item["set_id"] == row["set_id"] and item["arm"] in ("knockout", "control")]
        problems = sorted({item["prompt_id"] for item in baseline.values()})[: row["num_problems"]]
        change = sum(item["correct"] - baseline[item["rollout_id"]]["correct"] for item in own)
        if row["num_problems"] == len(problems) == 80:
            assert row["delta"] == pytest.approx(change / 160)


def test_the_teacher_is_worth_following_and_the_frozen_rocks_carry_no_loss(story):
    grafts = {row["arm"]: row for row in story.run.read("grafts").to_pylist()}
    # Rocks do not matter here, so `all` and `rest` are both the teacher's accuracy, and chance orders them: of 48
    # rollouts one more or less is 2 points. What must hold: the rest is not decidedly better than everything, and
    # everything is decidedly better than nothing, the rocks alone or as many positions drawn again by the student.
    assert grafts["rest"]["gain"] <= grafts["all"]["gain_high"]
    assert grafts["all"]["gain"] <= grafts["rest"]["gain_high"]
    assert grafts["all"]["gain_low"] > max(0, grafts["rocks"]["gain_high"], grafts["placebo"]["gain_high"])
    summary = {row["regime"]: row for row in story.run.read("compare_summary").to_pylist()}
    # With an epsilon of 15 points some of the neutral, unlearnable types pass, and nothing else does.
    listed = set(story.run.facts("bypass")["ids"])
    assert listed
    assert listed <= set(TRUTH.unlearnable.ids) & set(story.run.facts("detect")["rocks"])
    assert summary.keys() == {"uniform", "freeze", "freeze_rocks"}
    assert summary["uniform"]["kept_share"] == 1
    rocks = story.run.facts("detect")["rocks"]
    share = story.run.query(f"select avg((token_id in {tuple(rocks)})::int) as s from occurrences")["s"][0].as_py()
    assert summary["freeze_rocks"]["kept_share"] == pytest.approx(1 - share, abs=0.05)
    assert summary["freeze_rocks"]["ceiling"] == pytest.approx(1 / summary["freeze_rocks"]["kept_share"])


def test_the_reports_first_section_names_the_planted_rocks_and_the_verdicts(story):
    first = (story.run.path / "report.html").read_text().split('<section id="verdict"')[1].split("</section>")[0]
    for token in TRUTH.rocks.tokens:
        assert f"<bdi>{visible(token)}</bdi>" in first
    assert "not-run" not in first


def test_a_study_ends_with_six_lines(story):
    rows = dict(line.split(maxsplit=1) for line in story.said.strip().splitlines()[-6:])
    assert list(rows) == ["tokens", "skip", "saves", "accuracy", "look", "decide"]
    assert rows["tokens"].startswith(f"{len(story.run.facts('detect')['rocks'])} (")
    assert rows["look"] == f"rocktokens view {story.run.path}"
    assert rows["decide"].startswith("rocktokens ")
    for name, count in {"tokens": 1, "skip": 1, "accuracy": 3}.items():
        assert len(INTERVAL.findall(rows[name])) == count, rows[name]
    assert max(len(text) for name, text in rows.items() if name not in ("look", "decide")) <= 71


def test_a_second_run_does_nothing(story):
    def state() -> dict[str, tuple[int, int]]:
        files = [path for path in story.run.path.rglob("*") if path.is_file() and path.name != ".lock"]
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}

    before = state()
    again = study(story.run.path)
    assert state() == before
    assert again.said.splitlines()[2:] == story.said.splitlines()[2:]  # but for the seconds in its heading
    assert again.seconds < story.seconds / 2
