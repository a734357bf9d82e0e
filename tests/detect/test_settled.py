"""What has not learned yet, groups of prompts, costly positions, rare falls, and the retest."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import detect_calibration
import harder_corpora

from rocktokens import detect_rocks
from rocktokens.detect.figures import render, retested
from rocktokens.detect.occurrences import Occurrences
from rocktokens.detect.settings import DetectConfig
from rocktokens.detect.stage import _retest

QUICK = DetectConfig(resamples=100)


def followed(until, num_prompts=300):
    """A rock, and a type that loses a tenth in each run of 300 steps, scored at checkpoints up to `until`."""
    corpus = harder_corpora.Corpus(np.random.default_rng(3), num_prompts)
    corpus.place(np.array([0, 1]), 0.2)
    mean_V, pace_V = corpus.constant(0.1), corpus.constant(0.1)
    mean_V[:2], pace_V[:2] = 2.0, (1.0, 0.9)
    level_N = (
        mean_V[corpus.type_N] * corpus.hard_P[corpus.prompt_N] * corpus.rng.standard_exponential(len(corpus.type_N))
    )
    keys = {name: column for name, column in corpus.columns(level_N, level_N).items() if not name.startswith("loss")}
    found = {step: level_N * pace_V[corpus.type_N] ** (step / 300) for step in range(0, until + 1, 100)}
    return Occurrences.read({step: pa.table({**keys, "kl": loss_N}) for step, loss_N in found.items()})


def test_not_yet_is_not_a_rock_and_says_when_a_quarter_is_gone():
    report = detect_rocks(followed(300), config=QUICK)
    assert (report.rocks.tolist(), report.classes["not yet"].tolist()) == ([0], [1])
    row = {row["token_id"]: row for row in report.tables["types"].to_pylist()}[1]
    steps = 300 * np.log(0.75) / np.log(0.9)
    assert row["quarter_steps"] == pytest.approx(steps, rel=0.01)
    assert 0 < row["quarter_steps_low"] <= row["quarter_steps"]
    curve = [row for row in report.tables["curves"].to_pylist() if row["token_id"] == 1]
    assert [row["step"] for row in curve] == [0, 100, 200, 300]
    assert all(row["loss_low"] <= row["loss"] <= row["loss_high"] for row in curve)
    assert curve[3]["loss"] / curve[0]["loss"] == pytest.approx(0.9, rel=1e-3)


def test_two_checkpoints_declare_rocks_so_far_and_a_retest_says_what_became_of_them():
    first = detect_rocks(followed(100), config=QUICK)
    assert set(first.classes["rock so far"].tolist()) == set(first.rocks.tolist()) == {0, 1}
    assert "2 rocks so far declared" in render(first).title
    found = _retest(detect_rocks(followed(900), config=QUICK), first.facts())
    assert retested(found) == "1 of 2 rocks of step 100 are still rocks at step 900; “#1” is learning"
    assert _retest(first, first.facts()) is None


@pytest.mark.parametrize(
    ("kind", "num_prompts", "false"),
    [
        *((kind, 60, 0.1) for kind in ("rare spikes", "unequal spikes", "log-normal loss before", "positions")),
        ("near-copies, groups given", 200, 0.1),
        ("learning curves", 60, 0.1),
        ("20,000 types", 200, 0.1),
    ],
)
def test_harder_kinds_in_small(kind, num_prompts, false):
    """benchmarks/detect_calibration.py has 200 corpora of each."""
    rows = [detect_calibration.one((kind, num_prompts, seed)) for seed in range(5)]
    assert np.mean([row["declared_false"] for row in rows]) <= false


def test_groups_from_a_mapping_and_from_a_column_are_the_same():
    columns, _ = harder_corpora.near_copies(np.random.default_rng(0), 200)
    groups = {str(p): str(g) for p, g in zip(columns["prompt_id"].tolist(), columns["group_id"].tolist())}
    plain = pa.table({name: column for name, column in columns.items() if name != "group_id"})
    by_mapping, by_column = Occurrences.read({0: plain}, groups=groups), Occurrences.from_table(columns)
    assert by_mapping.num_prompts == by_column.num_prompts == 20
    for name, own in vars(by_mapping.pairs()).items():
        np.testing.assert_array_equal(own, getattr(by_column.pairs(), name))
