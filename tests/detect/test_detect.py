"""Detection as a whole: planted truth, null, known answers, bad input, tables."""

import io
import json
from pathlib import Path

import numpy as np
import oracles_detect as oracle
import pyarrow as pa
import pytest
from rich.console import Console

from rocktokens.detect.certified import TypeTests, declare
from rocktokens.detect.figures import render
from rocktokens.detect.occurrences import Occurrences
from rocktokens.detect.rocks import detect_rocks
from rocktokens.detect.settings import DetectConfig
from rocktokens.errors import DataError
from rocktokens.tables import TABLES

QUICK = DetectConfig(k=8, resamples=200)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def planted():
    return oracle.simulate(np.random.default_rng(0))


@pytest.fixture(scope="module")
def report(planted):
    return detect_rocks(planted[0], config=DetectConfig(k=8))


def rows_of(report, table="footprints", key="name"):
    return {row[key]: row for row in report.tables[table].to_pylist()}


def said(report):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(report))
    return console.export_text()


def test_planted_rocks_are_found_and_burden_is_fooled_by_frequency(planted, report):
    for definition in ("certified", "context"):
        assert set(report.sets[definition].tolist()) == set(planted[1].tolist())
    columns, rocks, _ = oracle.simulate(np.random.default_rng(1), rock_share=0.02, rock_loss=1.5, num_prompts=400)
    rare = detect_rocks(columns, config=QUICK)
    found = {name: len(set(rocks.tolist()) & set(ids.tolist())) for name, ids in rare.sets.items()}
    assert found["certified"] == 8
    assert found["burden"] < found["context"]  # the most frequent types carry more loss than rare rocks


def test_nothing_is_declared_when_losses_are_shuffled_within_prompts():
    rng = np.random.default_rng(17)
    declared = 0
    for seed in range(40):
        columns, _, _ = oracle.simulate(rng, num_prompts=40, num_rollouts=1, length=60, num_types=80)
        half = Occurrences.from_table(oracle.shuffle_within_prompts(rng, columns)).halves(seed)[0]
        declared += (declare(TypeTests.of(half.pairs(), 0.75), 0.1) != "").any()
    assert declared <= 8  # P(more than 8 of 40 at 10 %) = 2 %


def test_identical_models_have_no_rocks(planted):
    zero = detect_rocks({**planted[0], "loss_pre": np.zeros(12000), "loss_post": np.zeros(12000)}, config=QUICK)
    assert all(len(ids) == 0 for ids in zero.sets.values())
    assert any("not positive" in note for note in zero.notes)
    assert zero.tables["types"].num_rows == 200
    assert "No rocks" in said(zero)


def test_choice_and_measurement_share_no_prompt_and_numbers_come_from_the_measured_half(planted):
    """Losses of the measured half may change: what is chosen does not."""
    columns = planted[0]
    halves = Occurrences.from_table(columns).halves(0)
    chosen, measured = ({half.names_R["prompt_id"][r].as_py() for r in set(half.rollout_N.tolist())} for half in halves)
    assert not chosen & measured
    assert len(chosen) == len(measured) == 30
    scale = np.where(np.isin(columns["prompt_id"], list(measured)), 2, 1)
    plain = detect_rocks(columns, config=QUICK)
    doubled = detect_rocks({**columns, "loss_post": scale * columns["loss_post"]}, config=QUICK)
    assert {n: ids.tolist() for n, ids in plain.sets.items()} == {n: ids.tolist() for n, ids in doubled.sets.items()}
    one, two = plain.tables["types"].to_pydict(), doubled.tables["types"].to_pydict()
    np.testing.assert_allclose(2 * np.array(one["r"]), two["r"], rtol=1e-5)


def test_footprint_adds_up(planted, report):
    columns, rocks, _ = planted
    found, control = (rows_of(report)[name] for name in ("context", "control"))
    assert found["share_positions"] == pytest.approx(np.isin(columns["token_id"], rocks).mean(), abs=0.02)
    assert found["share_positions_low"] < found["share_positions"] < found["share_positions_high"]
    assert found["enrichment"] == pytest.approx(found["share_loss"] / found["share_positions"])
    assert found["share_grad"] < found["share_loss"]  # grad_norm is the root of the loss here
    assert found["share_types"] == 8 / 200
    assert control["share_positions"] == pytest.approx(found["share_positions"], rel=0.02)
    assert control["enrichment"] < 1
    assert sum(report.tables["clusters"]["share_loss"].to_pylist()) == pytest.approx(found["share_loss"])


@pytest.mark.parametrize(("k", "wanted"), [(3, 3), (5000, 200)])
def test_k_is_a_number_within_the_types(planted, k, wanted):
    found = detect_rocks(planted[0], config=DetectConfig(k=k, resamples=100))
    assert len(found.sets["burden"]) == wanted


def test_tables_are_those_of_the_schema_and_the_terminal_names_the_rocks(report):
    types = report.tables["types"]
    assert types["in_certified"].to_pylist() == [True] * 8 + [False] * 192
    assert types["place_certified"].to_pylist()[:8] == list(range(1, 9))
    assert types["class"].to_pylist()[:8] == ["rock so far"] * 8
    for name, table in report.tables.items():
        assert table.schema.equals(TABLES[name].schema), name
    assert report.facts()["rocks"] == report.rocks.tolist()
    moved = {(row["parameter"], row["step"]): row for row in report.tables["sensitivity"].to_pylist()}
    values = {("kappa", -1): 0.65, ("kappa", 1): 0.85, ("q", -1): 0.05, ("q", 1): 0.2}
    assert {key: row["value"] for key, row in moved.items() if key[1]} == pytest.approx(values)
    assert moved["kappa", -1]["num_rocks"] >= moved["base", 0]["num_rocks"] >= moved["kappa", 1]["num_rocks"]
    text = said(report)
    assert all(word in text for word in (f"#{report.rocks[0]}", "enrichment", "control"))


class Letters(list):
    """Only what detection asks of a tokenizer: its length, and texts of ids."""

    def decode(self, ids, skip_special_tokens=False):
        return "[bold]$" if ids[0] % 2 else "word"


def test_a_tokenizer_names_tokens_and_hostile_text_stays_text(planted):
    named = detect_rocks(planted[0], Letters([0] * 1000), QUICK)
    assert set(named.tables["clusters"]["cluster"].to_pylist()) == {"math", "content"}
    assert "[bold]$" in said(named)
    with pytest.raises(DataError, match="tokenizer"):
        detect_rocks(planted[0], Letters([0] * 10))


def test_an_embedding_encodes_contexts(planted):
    embedding = np.random.default_rng(2).standard_normal((1000, 24))
    found = detect_rocks(planted[0], config=QUICK, embedding_VH=embedding)
    assert set(found.sets["context"].tolist()) == set(planted[1].tolist())


@pytest.mark.parametrize("signal", ["kl", "log_ratio"])
def test_both_signals_are_compared(planted, signal):
    columns = planted[0]
    noise = np.random.default_rng(4).normal(0, 0.3, 12000)
    base = {name: columns[name] for name in ("prompt_id", "rollout_id", "position", "token_id")}
    by_step = {
        step: pa.table({**base, "kl": columns[name], "log_ratio": columns[name] + noise})
        for step, name in ((0, "loss_pre"), (9, "loss_post"))
    }
    occurrences = Occurrences.read(by_step, signal=signal)
    found = detect_rocks(occurrences, config=DetectConfig(k=8, signal=signal, resamples=200))
    overlap = {(first, second): value for first, second, value in found.overlaps}
    other = "log_ratio" if signal == "kl" else "kl"
    assert overlap[f"context on {signal}", f"context on {other}"] > 0.7
    assert len(overlap) == 6


def test_the_notebook_of_published_tables_runs():
    cells = json.loads((EXAMPLES / "published_tables.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            assert cell["outputs"] == []  # kept clean: the outputs belong to whoever runs it
    assert names["enrichment"] == pytest.approx(0.9)
    assert names["kinds"] == {" So": "discourse", "the": "content"}
    assert names["census"] == {3: "Proven Neutral", 7: "Strong Pillar"}
