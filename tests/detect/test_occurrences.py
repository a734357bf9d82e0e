"""Occurrences from anybody's table: order, joins, rows without a loss, refusals."""

import numpy as np
import pyarrow as pa
import pytest

from rocktokens.detect.occurrences import Occurrences
from rocktokens.errors import DataError

ROWS = {
    "prompt_id": ["b", "b", "a", "a", "a"],
    "rollout_id": [0, 0, 0, 0, 1],
    "position": [0, 1, 1, 0, 0],
    "token_id": [7, 3, 9, 7, 3],
    "loss": [0.1, 0.2, 0.3, 0.4, 0.5],
}


def checkpoint(kl, **changes):
    columns = {**ROWS, "kl": kl, "log_ratio": np.negative(kl), "student_entropy": kl, **changes}
    del columns["loss"]
    return pa.table(columns)


def test_rows_come_in_rollout_and_position_order():
    occurrences = Occurrences.from_table(ROWS)
    np.testing.assert_allclose(occurrences.loss_post_N, [0.4, 0.3, 0.5, 0.1, 0.2])
    assert occurrences.token_ids_V[occurrences.type_N].tolist() == [7, 9, 3, 7, 3]
    assert occurrences.rollout_N.tolist() == [0, 0, 1, 2, 2]
    assert occurrences.prompt_N.tolist() == [0, 0, 0, 1, 1]
    assert occurrences.num_prompts == 2
    assert occurrences.rollout_ids.to_pylist() == [0, 1, 0]
    assert occurrences.rollout_prompt_R.tolist() == [0, 0, 1]


def test_rows_without_a_loss_stay_as_context_only():
    occurrences = Occurrences.from_table({**ROWS, "loss": [0.1, np.nan, 0.3, np.inf, 0.5]})
    assert len(occurrences) == 3
    assert occurrences.num_left_out == 2
    assert len(occurrences.type_M) == 5
    assert occurrences.row_N.tolist() == [1, 2, 3]
    assert "2 of 5" in occurrences.notes[0]


def test_empty_values_of_arrow_count_as_no_loss():
    table = pa.table({**ROWS, "loss": pa.array([0.1, None, 0.3, 0.4, 0.5])})
    assert Occurrences.from_table(table).num_left_out == 1


def test_without_prompts_every_rollout_is_one():
    columns = {**ROWS, "rollout_id": ["x", "x", "y", "y", "z"]}
    del columns["prompt_id"]
    occurrences = Occurrences.from_table(columns)
    assert occurrences.num_prompts == 3
    assert "no prompt_id" in occurrences.notes[0]


def test_checkpoints_are_joined_in_any_order():
    post = checkpoint([0.1, 0.2, 0.3, 0.4, 0.5])
    middle = checkpoint([1.1, 1.2, 1.3, 1.4, 1.5])
    pre = checkpoint([2.1, 2.2, 2.3, 2.4, 2.5])
    shuffled = {0: pre.take([3, 0, 4, 1, 2]), 50: middle.take([1, 0, 2, 3, 4]), 100: post}
    plain = Occurrences.from_checkpoints({0: pre, 50: middle, 100: post})
    mixed = Occurrences.from_checkpoints(shuffled)
    np.testing.assert_allclose(plain.loss_pre_N - plain.loss_post_N, 2.0, rtol=1e-6)
    for name in ("loss_pre_N", "loss_post_N", "other_pre_N", "other_post_N"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(mixed, name))
    assert sorted(mixed.loss_by_step) == [0, 50, 100]
    np.testing.assert_array_equal(mixed.loss_by_step[50], plain.loss_by_step[50])
    np.testing.assert_allclose(mixed.entropies["student_entropy_pre"], mixed.loss_pre_N)
    other = mixed.other_signal()
    np.testing.assert_allclose(other.loss_post_N, -mixed.loss_post_N)


def test_one_checkpoint_has_no_pre():
    occurrences = Occurrences.from_checkpoints({10: checkpoint([0.1, 0.2, 0.3, 0.4, 0.5])})
    assert occurrences.loss_pre_N is None
    assert occurrences.loss_by_step == {}


def test_a_nan_at_any_checkpoint_leaves_the_occurrence_out():
    by_step = {0: checkpoint([np.nan, 1, 1, 1, 1]), 1: checkpoint([1, 1, 1, 1, 1]), 2: checkpoint([1, 1, 1, 1, np.nan])}
    assert len(Occurrences.from_checkpoints(by_step)) == 3


@pytest.mark.parametrize(
    ("by_step", "words"),
    [
        ({}, "score"),
        ({0: checkpoint([1, 1, 1, 1, 1]).slice(1), 1: checkpoint([1, 1, 1, 1, 1])}, "share 4 of 4 and 5"),
        ({0: checkpoint([1] * 5, token_id=[7, 3, 9, 7, 4]), 1: checkpoint([1] * 5)}, "another tokenizer"),
        ({0: checkpoint([1] * 5).drop_columns(["token_id"]), 1: checkpoint([1] * 5)}, "step 0 lacks"),
        ({0: checkpoint([1] * 5), 1: checkpoint([1] * 5).drop_columns(["kl"])}, "step 1 lacks"),
    ],
)
def test_checkpoints_that_do_not_belong_together_are_refused(by_step, words):
    with pytest.raises(DataError, match=words):
        Occurrences.from_checkpoints(by_step)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({k: v for k, v in ROWS.items() if k != "loss"}, "loss"),
        ({k: v for k, v in ROWS.items() if k != "token_id"}, "token_id"),
        ({**ROWS, "position": [0, 0, 1, 0, 0]}, "given twice"),
        ({**ROWS, "token_id": [7, -3, 9, 7, 3]}, ">= 0"),
        ({**ROWS, "rollout_id": pa.array([0, None, 0, 0, 1])}, "empty values"),
        ({**ROWS, "loss": [np.nan] * 5}, "finite"),
        ({k: [] for k in ROWS}, "no rows"),
    ],
)
def test_broken_tables_are_refused(columns, words):
    with pytest.raises(DataError, match=words):
        Occurrences.from_table(columns)
