"""Grafts: what is copied, what the arms draw again, what is gained; on Markov chains and through the stage."""

from __future__ import annotations

import markov
import numpy as np
import pyarrow as pa
import pytest
from causal_runs import make_tiny_run

from rocktokens.bypass import bypass
from rocktokens.causal.figures import graft_terminal
from rocktokens.causal.graft import graft, graft_table, make_arms
from rocktokens.causal.graft import run_graft as graft_stage
from rocktokens.causal.inference import change
from rocktokens.causal.knockout import knockout
from rocktokens.causal.settings import BaselineConfig, BypassConfig, GraftConfig, KnockoutConfig
from rocktokens.errors import ConfigError, DataError
from rocktokens.run import open_run
from rocktokens.world import get_world

LIMIT = 5
BASE = BaselineConfig(problems=800, max_new_tokens=LIMIT)
CONFIG = GraftConfig(problems=800, resamples=500)


def right_if_odd(text, answer):
    return len(text.split()) % 2 == 1


def grafted(student, teacher, rocks, *, base=BASE, config=CONFIG, problems=800, **options):
    return graft(
        markov.MarkovEngine(student),
        lambda rules, own: markov.MarkovGrafter(student, teacher, rules, own),
        markov.prompts(problems),
        rocks,
        vocabulary=len(student),
        decode=lambda ids: " ".join(map(str, ids)),
        checker=right_if_odd,
        config=config,
        baseline=base,
        **options,
    )


def accuracy_of(law):
    return sum(p for path, p in law.items() if len(path) % 2 == 1)


def test_gains_are_those_of_the_laws():
    student, teacher = markov.chain(1), markov.chain(101)
    found = grafted(student, teacher, [2], clusters={"digits": [1, 3]})
    before = accuracy_of(markov.law(student, LIMIT))
    share = next(row for row in found.rows if row.arm == "rocks").share_positions
    rock = np.array([0, 0, 1.0, 0, 0])
    rules = {
        "rocks": rock,
        "placebo": rock,
        "rest": 1 - rock,
        "all": np.ones(5),
        "control": (1 - rock) * share / (1 - share),
        "cluster digits": np.array([0, 1.0, 0, 1.0, 0]),
    }
    assert {row.arm for row in found.rows} == rules.keys()
    for row in found.rows:
        redrawn_by = student if row.arm == "placebo" else teacher
        gain = accuracy_of(markov.graft_law(student, redrawn_by, rules[row.arm], LIMIT)) - before
        assert row.gain.low - 0.01 <= gain <= row.gain.high + 0.01
    assert accuracy_of(markov.law(teacher, LIMIT)) - before == pytest.approx(
        accuracy_of(markov.graft_law(student, teacher, np.ones(5), LIMIT)) - before
    )


def test_a_teacher_that_is_the_student_gains_what_the_placebo_gains():
    student = markov.chain(2)
    rows = {row.arm: row for row in grafted(student, student, [3]).rows}
    assert rows["all"].gain.low - 0.01 <= 0 <= rows["all"].gain.high + 0.01
    assert rows["rocks"].gain.value == pytest.approx(rows["placebo"].gain.value, abs=0.03)
    assert rows["placebo"].gain.high < -0.02  # drawing again alone has an effect, which the placebo shows


def test_arms_of_named_sets():
    """The control draws as many tokens as the rocks have; the sets beside the rocks are arms of their own."""
    shares = np.array([0.2, 0.1, 0.3, 0.2, 0.2])
    arms = make_arms({"rocks": [2], "skippable": [3, 1]}, 5, 0.3)
    assert [arm.name for arm in arms] == ["rocks", "placebo", "control", "rest", "all", "skippable"]
    rocks, placebo, control, rest, everything, skippable = arms
    assert placebo.own
    assert (control.redraw_V * shares).sum() == pytest.approx(shares[2])
    assert control.redraw_V[2] == 0
    assert (rocks.redraw_V + rest.redraw_V == everything.redraw_V).all()
    assert skippable.redraw_V.tolist() == [0, 1, 0, 1, 0]


def test_what_is_refused():
    with pytest.raises(ConfigError, match="nothing to graft"):
        make_arms({"rocks": []}, 5, 0.2)
    with pytest.raises(DataError, match="no meaning"):
        graft(None, None, [], [1], vocabulary=5, decode=str, checker=None)
    with pytest.raises(ConfigError, match="problems"):
        GraftConfig(problems=1)


def test_a_gain_has_its_sign_and_one_that_changed_nothing_is_not_known_to_the_last_digit():
    before_P, after_P = np.zeros(80), np.repeat([1.0, 0.0], [20, 60])
    gain, loss, none = (
        change(after, before, resamples=2000, rng=np.random.default_rng(0))
        for after, before in ((after_P, before_P), (before_P, after_P), (before_P, before_P))
    )
    assert 0 < gain.low < gain.value == 0.25 < gain.high < 0.5
    assert -0.5 < loss.low < loss.value == -0.25 < loss.high < 0
    exact = 1 - 0.025 ** (1 / 80)  # what a share may be that was never seen in 80 problems
    assert none == (0.0, pytest.approx(-exact), pytest.approx(exact), 80)


def test_cost_stands_beside_benefit():
    found = grafted(markov.chain(1), markov.chain(101), [2], clusters={"digits": [1]}, problems=100)
    types = [{"token_id": v, "r": 1.0 + v, "grad_share": 0.2} for v in range(5)]
    sets = {"rocks": [2], "cluster digits": [1]}
    rows = {row["arm"]: row for row in graft_table(found.rows, types, sets).to_pylist()}
    assert {arm: row["members"] for arm, row in rows.items() if row["members"]} == {"rocks": [2]}
    assert rows["rocks"]["loss_share"] == pytest.approx(3 / 15)
    assert rows["rest"]["grad_share"] == pytest.approx(0.8)
    assert rows["cluster digits"]["loss_share"] == pytest.approx(2 / 15)
    assert rows["control"]["loss_share"] is None
    assert len(graft_terminal(graft_table(found.rows, [], sets), found.accuracy).data) == len(found.rows)


def test_the_stage_grafts_on_the_baseline_that_the_knockouts_left(tmp_path, caplog, monkeypatch):
    path = make_tiny_run(tmp_path)
    base = BaselineConfig(problems=30, max_new_tokens=12)
    run = knockout(path, KnockoutConfig(candidates=("7",), until="budget", resamples=200), base)
    before = run.read("baseline")
    monkeypatch.delattr("rocktokens.sample.rollouts.rollout_row")  # nothing is sampled again
    run = graft_stage(path, GraftConfig(rocks=("7", "+"), problems=30, resamples=200), base)
    rows = {row["arm"]: row for row in run.read("grafts").to_pylist()}
    assert rows.keys() == {"rocks", "placebo", "control", "rest", "all"}
    assert set(run.read("graft_rollouts")["rollout_id"].to_pylist()) <= set(before["rollout_id"].to_pylist())
    assert run.facts("graft")["accuracy"] == run.facts("knockout")["accuracy"]
    with caplog.at_level("INFO"):
        graft_stage(path, GraftConfig(rocks=("7", "+"), problems=30, resamples=200), base)
    assert "nothing to do" in caplog.text


def declared(run, token_ids, rocks):
    """A detection by hand: these types, by falling burden, of which some are confirmed rocks."""
    rows = []
    for place, token in enumerate(token_ids):
        rock = token in rocks
        rows.append({"token_id": token, "token": f"t{token}", "cluster": "unknown", "r": 100.0 - place, "count": 10})
        rows[-1] |= {"class": "rock" if rock else None, "confirmed": rock, "in_certified": rock}
    run.write("types", pa.Table.from_pylist(rows))
    run.finish("detect", {"definition": "certified", "rocks": list(rocks), "thresholds": {}})


def test_without_rocks_census_and_grafts_run_on_candidates_and_the_list_says_so(tmp_path, caplog):
    path = make_tiny_run(tmp_path)
    seven, plus, minus = (get_world("arithmetic").vocabulary[text] for text in ("7", "+", "-"))
    declared(open_run(path), [seven, plus, minus], rocks=())
    base = BaselineConfig(problems=20, max_new_tokens=12)
    config = KnockoutConfig(top=2, until="budget", resamples=200, controls=False)
    run = knockout(path, config, base)
    assert run.read("census")["token_id"].to_pylist() == [seven, plus]
    with caplog.at_level("INFO"):
        run = graft_stage(path, GraftConfig(top=2, problems=20, resamples=200, clusters=False), base)
    rows = {row["arm"]: row["members"] for row in run.read("grafts").to_pylist()}
    assert sorted(rows["candidates"]) == sorted([seven, plus])
    assert "no rocks are declared" in caplog.text
    assert bypass(path, BypassConfig()).facts("bypass")["ids"] == []


def test_a_census_that_changes_what_would_be_skipped_makes_the_graft_due(tmp_path):
    """The set that has to be grafted follows from the census: another verdict, another graft."""
    path = make_tiny_run(tmp_path)
    seven, plus = (get_world("arithmetic").vocabulary[text] for text in ("7", "+"))
    declared(open_run(path), [seven, plus], rocks=(seven, plus))
    base = BaselineConfig(problems=20, max_new_tokens=12)
    config = GraftConfig(problems=20, resamples=200, clusters=False)
    run = knockout(path, KnockoutConfig(until="budget", resamples=200, controls=False), base)
    rows = run.read("census").to_pylist()
    for row, verdict in zip(rows, ("Proven Neutral", "Strong Pillar")):
        row["verdict"] = verdict
    run.write("census", pa.Table.from_pylist(rows))
    arms = {row["arm"]: row["members"] for row in graft_stage(path, config, base).read("grafts").to_pylist()}
    assert sorted(arms["rocks"]) == sorted([seven, plus])
    assert arms["skippable"] == [rows[0]["token_id"]]
    rows[0]["verdict"] = "Undecided"
    open_run(path).write("census", pa.Table.from_pylist(rows))
    arms = [row["arm"] for row in graft_stage(path, config, base).read("grafts").to_pylist()]
    assert "skippable" not in arms
