"""The league as a figure, a table and a drawing: what they say is in the tables they come from."""

from __future__ import annotations

from xml.etree import ElementTree

import pyarrow as pa
import pytest

from rocktokens.compare.league import LEAGUE_FROM, accuracy_tokens, league, league_sentence
from rocktokens.compare.league_page import league_markdown, league_svg
from rocktokens.facts import Facts
from rocktokens.run import Run
from rocktokens.tables import TABLES

NAMES = ("small", "prefix", "uniform", "tip", "teachable", "no_teacher")


def place(rank: int, name: str, change: float) -> dict:
    own = {"rank": rank, "regime": name, "accuracy": 0.7 + change, "change": change, "spent_ratio": 1.0}
    own |= {"change_low": change - 0.02, "change_high": change + 0.02, "bite_tokens": 0.5, "bite_loss": 0.1}
    return own | {"end_dropped": 1.0 if name == "tip" else 0.0, "grew": False}


PLACES = [
    place(1 if change > 0.01 else 3, name, change) for name, change in zip(NAMES, (0.05, 0.04, 0, -0.01, -0.1, -0.5))
]
RESULTS = {
    "equal_tokens": 12_345.0,
    "league": PLACES,
    "savings": [
        {"regime": "prefix", "control": "small", "answer": "no", "saved": -0.1, "saved_low": None, "saved_high": 0.2,
         "over_control": -0.01, "over_control_low": -0.03, "over_control_high": 0.01},
        {"regime": "cut", "control": "small", "answer": "no", "saved": None, "saved_low": None, "saved_high": None,
         "over_control": -0.2, "over_control_low": -0.3, "over_control_high": -0.1},
    ],
}  # fmt: skip


@pytest.fixture
def facts(tmp_path) -> Facts:
    run = Run.create(tmp_path / "run")
    run.write("compare_league", pa.Table.from_pylist(PLACES, schema=TABLES["compare_league"].schema))
    rows = [
        {
            "regime": name,
            "seed": seed,
            "step": step,
            "accuracy": 0.3 + step / 100 + seed / 50,
            "tokens_total": 100 * step,
        }
        for name in NAMES
        for seed in range(3)
        for step in (0, 20, 40)
    ]
    run.write("compare", pa.Table.from_pylist(rows, schema=TABLES["compare"].schema))
    run.finish("compare", {})
    return Facts.of(tmp_path / "run")


def test_the_figure_shows_every_regime_with_its_interval_and_what_must_be_known(facts):
    figure = league(facts)
    assert figure is not None
    (data,) = figure.data
    assert data["x"] == [100 * row["change"] for row in PLACES[::-1]]
    assert data["error_x"]["array"] == pytest.approx([2.0] * len(PLACES))
    assert "At equal tokens small leads with 75.0\u00a0%, and prefix cannot be told from it" in league_sentence(facts)
    assert any("Left end tokens without loss: tip" in note for note in figure.notes)


def test_curves_have_intervals_over_seeds(facts):
    figure = accuracy_tokens(facts)
    assert figure is not None
    curve = next(data for data in figure.data if data["name"] == "uniform")
    assert curve["x"] == [0, 2000, 4000]
    assert curve["y"] == pytest.approx([32, 52, 72])
    # Three seeds at -2, 0 and 2 points: the half width is t(0.975, 2) x 2 / root 3.
    assert curve["error_y"]["array"] == pytest.approx([4.9683] * 3, abs=1e-3)


def test_a_few_regimes_need_no_league(tmp_path):
    run = Run.create(tmp_path / "run")
    few = PLACES[: LEAGUE_FROM - 1]
    run.write("compare_league", pa.Table.from_pylist(few, schema=TABLES["compare_league"].schema))
    run.finish("compare", {})
    assert league(Facts.of(tmp_path / "run")) is None
    assert accuracy_tokens(Facts.of(tmp_path / "run")) is None


def test_the_page_has_a_row_for_every_regime_and_every_saving():
    page = league_markdown("A world", RESULTS)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(PLACES) + 1 + len(RESULTS["savings"])
    assert "| 1 | `small` | 75.0 | +5.0 [+3.0, +7.0] |" in page
    assert "| `prefix` | `small` | −10.0 % [never, +20.0 %] | no |" in page
    assert "| `cut` | `small` | did not arrive | no |" in page
    assert "12,345 tokens" in page


def test_the_drawing_is_well_formed_and_escapes_names():
    odd = {**RESULTS, "league": [*PLACES, place(7, "<b>&", -0.6)]}
    root = ElementTree.fromstring(league_svg("A < B", odd))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "7. <b>&" in texts
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == len(PLACES) + 1
