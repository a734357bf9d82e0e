"""Accuracy is counted, and has its interval, in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as sps

from rocktokens.errors import DataError
from rocktokens.stats import accuracy_estimate, right_shares

PACKAGE = Path(__file__).parents[1] / "rocktokens"


def same(text: str, answer: str) -> bool:
    return text == answer


def test_shares_are_those_of_each_prompt():
    texts = ["4", "5", "4", "4", "x", "7", "7", "x"]
    assert right_shares(texts, ["4", "4", "7", "x"], same, rollouts=2).tolist() == [0.5, 1.0, 0.5, 0.5]
    assert right_shares(texts[:2], ["4", "4"], same).tolist() == [1.0, 0.0]


def test_rollouts_that_do_not_divide_into_prompts_are_refused():
    with pytest.raises(DataError, match="2 prompts with 2 rollouts each cannot have 3"):
        right_shares(["a", "b", "c"], ["a", "b"], same, rollouts=2)


def test_single_outcomes_have_wilsons_interval():
    found = accuracy_estimate([1.0] * 7 + [0.0] * 3, rng=np.random.default_rng(0))
    expected = sps.binomtest(7, 10).proportion_ci(method="wilson")
    assert found == pytest.approx((0.7, expected.low, expected.high, 10))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_outcomes_that_are_all_alike_are_not_certain(share):
    """Seen: the comparison showed [0, 0] after 50 wrong rollouts, as if no right one were possible."""
    found = accuracy_estimate([share] * 50, rng=np.random.default_rng(0))
    assert found.value == share
    assert 0.0 <= found.low <= share <= found.high <= 1.0
    assert found.high - found.low > 0.05


def test_the_interval_covers_the_accuracy_as_often_as_it_says():
    rng, covered, times = np.random.default_rng(5), 0, 300
    for _ in range(times):
        chance_P = rng.beta(2.0, 2.0, 80)
        share_P = rng.binomial(4, chance_P) / 4
        found = accuracy_estimate(share_P, rng=rng, resamples=200)
        covered += found.low <= 0.5 <= found.high
    assert covered / times == pytest.approx(0.95, abs=0.035)


def test_nothing_to_check_is_refused():
    with pytest.raises(DataError, match="accuracy cannot be measured"):
        accuracy_estimate([], rng=np.random.default_rng(0))


def test_nobody_else_makes_intervals_of_outcomes():
    """Wilson's interval is for other shares (rollouts that are cut); accuracies come from core/accuracy.py."""
    allowed = {"accuracy.py", "stats.py", "check/run.py", "check/stage.py"}
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id in ("wilson_interval", "mean_estimate")
    }
    assert users <= allowed
