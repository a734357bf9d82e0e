"""Occurrences read column by column are those of the whole tables, value for value."""

import numpy as np
import oracles_detect as oracle
import pyarrow as pa
import pytest

from rocktokens.detect.halves import split_halves
from rocktokens.detect.occurrences import Occurrences
from rocktokens.detect.read_halves import read_halves
from rocktokens.detect.rocks import detect_rocks
from rocktokens.detect.settings import DetectConfig
from rocktokens.run import Run
from rocktokens.tables import OCCURRENCES

COLUMNS = ("type_M", "rollout_M", "position_M", "row_N", "prompt_N", "loss_post_N", "loss_pre_N", "token_ids_V")


def tables(rng, steps=(0, 5, 10), missing=()):
    """One table per checkpoint, planted rocks, some values not finite."""
    columns, _, _ = oracle.simulate(rng, num_prompts=24, num_rollouts=3, length=30, num_types=40, num_rocks=4)
    rows = len(columns["position"])
    found = {}
    for step in steps:
        share = step / max(steps)
        kl = (1 - share) * columns["loss_pre"] + share * columns["loss_post"]
        table = {
            "prompt_id": [f"p{code}" for code in columns["prompt_id"]],
            "rollout_id": [f"p{p}#{code % 3}" for p, code in zip(columns["prompt_id"], columns["rollout_id"])],
            "position": columns["position"],
            "token_id": columns["token_id"],
            "kl": kl,
            "is_eos": np.zeros(rows, bool),
        }
        for name in ("log_ratio", "student_logprob", "teacher_logprob", "student_entropy", "teacher_entropy"):
            table[name] = rng.random(rows)
        table["grad_norm"] = np.sqrt(kl)
        for name in missing:
            table[name] = np.full(rows, np.nan)
        found[step] = pa.table({name: pa.array(table[name]) for name in OCCURRENCES.names}).cast(OCCURRENCES)
    return found


def run_of(path, by_step, *, part_rows=400, order=None):
    run = Run.create(path, {})
    for step, table in by_step.items():
        with run.part_writer(step, part_rows=part_rows) as writer:
            table = table if order is None else table.take(order(step, table))
            for start in range(0, len(table), 170):
                writer.write(table.slice(start, 170))
    return run


def assert_same(found, expected):
    for half, other in zip(found.both, expected.both):
        for name in COLUMNS:
            np.testing.assert_array_equal(getattr(half, name), getattr(other, name), err_msg=name)
        for name in ("extras", "entropies", "loss_by_step"):
            assert set(getattr(half, name)) == set(getattr(other, name))
            for key in getattr(half, name):
                np.testing.assert_array_equal(getattr(half, name)[key], getattr(other, name)[key], err_msg=key)
        assert half.notes == other.notes
        assert half.num_left_out == other.num_left_out
        assert half.rollout_ids.to_pylist() == other.rollout_ids.to_pylist()
        assert half.prompt_ids.to_pylist() == other.prompt_ids.to_pylist()


def whole(by_step, config):
    return split_halves(Occurrences.from_checkpoints(by_step, signal=config.signal), config)


@pytest.mark.parametrize("signal", ["kl", "log_ratio"])
@pytest.mark.parametrize("steps", [(10,), (0, 10), (0, 5, 10)])
def test_both_ways_of_reading_agree(tmp_path, rng, signal, steps):
    config = DetectConfig(signal=signal)
    by_step = tables(rng, steps)
    found = read_halves(run_of(tmp_path / "run", by_step), config)
    assert_same(found, whole(by_step, config))


def test_rollouts_in_another_order_in_each_part_agree(tmp_path, rng):
    by_step = tables(rng)

    def by_rollout(step, table):
        mixed = np.random.default_rng(step).permutation(len(table) // 30)
        return (mixed[:, None] * 30 + np.arange(30)).ravel()

    found = read_halves(run_of(tmp_path / "run", by_step, order=by_rollout), DetectConfig())
    assert_same(found, whole(by_step, DetectConfig()))


def test_values_that_are_not_finite_leave_the_measurement_and_stay_as_context(tmp_path, rng):
    by_step = tables(rng)
    kl = by_step[5]["kl"].to_numpy().copy()
    kl[[3, 500]], kl[30 * 3 * 4 : 30 * 3 * 5] = np.nan, np.inf  # two rows, and all of one prompt
    by_step[5] = by_step[5].set_column(4, "kl", pa.array(kl, pa.float32()))
    found = read_halves(run_of(tmp_path / "run", by_step), DetectConfig())
    assert sum(half.num_left_out for half in found.both) == 92
    assert_same(found, whole(by_step, DetectConfig()))


def test_columns_that_are_empty_throughout_were_not_recorded(tmp_path, rng):
    by_step = tables(rng, missing=("log_ratio", "grad_norm", "teacher_entropy"))
    found = read_halves(run_of(tmp_path / "run", by_step), DetectConfig())
    assert list(found.selection.extras) == []
    assert list(found.selection.entropies) == ["student_entropy", "student_entropy_pre"]
    assert_same(found, whole(by_step, DetectConfig()))


@pytest.mark.parametrize("damage", ["shuffled", "gap", "other rollouts", "other tokens", "other length"])
def test_what_is_not_whole_rollouts_is_left_to_the_whole_tables(tmp_path, rng, damage, monkeypatch):
    monkeypatch.setattr("rocktokens.detect.scored.FEW_RUNS", 10)
    by_step = tables(rng)
    order = None
    if damage == "shuffled":
        order = lambda step, table: np.random.default_rng(step).permutation(len(table))  # noqa: E731
    elif damage == "gap":
        by_step = {step: table.slice(1) for step, table in by_step.items()}
    elif damage == "other rollouts":
        by_step[0] = by_step[0].slice(30)
    elif damage == "other length":
        by_step[0] = by_step[0].slice(0, len(by_step[0]) - 1)
    else:
        token = by_step[0]["token_id"].to_numpy().copy()
        token[7] += 1
        by_step[0] = by_step[0].set_column(3, "token_id", pa.array(token, pa.int32()))
    assert read_halves(run_of(tmp_path / "run", by_step, order=order), DetectConfig()) is None


def test_detection_says_the_same_either_way(tmp_path, rng):
    config = DetectConfig(resamples=200)
    by_step = tables(rng)
    found = detect_rocks(read_halves(run_of(tmp_path / "run", by_step), config), None, config)
    expected = detect_rocks(Occurrences.from_checkpoints(by_step), None, config)
    assert found.tables() == expected.tables()
    assert found.facts() == expected.facts()


def test_columns_on_demand_are_not_kept(tmp_path, rng):
    half = read_halves(run_of(tmp_path / "run", tables(rng)), DetectConfig()).selection
    assert half.extras["grad_norm"] is not half.extras["grad_norm"]
    assert "nothing" not in half.extras
    assert len(half.loss_by_step) == 3
