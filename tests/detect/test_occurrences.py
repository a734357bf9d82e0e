"""Reading occurrences: any order, any parts, Arrow or Parquet give the same rows; what does not fit is refused."""

import numpy as np
import oracles_detect as oracle
import pyarrow as pa
import pytest

from rocktokens.detect.occurrences import Occurrences, last_third, parquet
from rocktokens.errors import DataError
from rocktokens.run import Run
from rocktokens.tables import OCCURRENCES

COLUMNS = ("type_M", "rollout_M", "position_M", "row_N", "prompt_N", "loss_post_N", "loss_pre_N", "token_ids_V")
ROWS = {
    "rollout_id": [1, 0, 0, 1, 0],
    "position": [1, 0, 1, 0, 2],
    "token_id": [7, 3, 9, 7, 3],
    "loss": [1.0, 2, 3, 4, 5],
}


def test_a_column_of_prompts_tells_rollouts_apart_as_text_and_as_trls_messages():
    for prompts in (["a", "b"], [[{"role": "user", "content": text}] for text in "ab"]):
        given = {"prompt": [prompts[rollout % 2] for rollout in (1, 0, 2, 3)], "rollout_id": [1, 0, 2, 3]}
        found = Occurrences.from_table({**given, "position": [0] * 4, "token_id": [7] * 4, "loss": [1.0] * 4})
        assert found.num_prompts == 2


def tables(rng, steps=(0, 5, 10), missing=()):
    """One table per checkpoint, planted rocks."""
    columns, _, _ = oracle.simulate(rng, num_prompts=24, num_rollouts=3, length=30, num_types=40, num_rocks=4)
    keys = {
        "prompt_id": [f"p{code}" for code in columns["prompt_id"]],
        "rollout_id": [f"p{p}#{code % 3}" for p, code in zip(columns["prompt_id"], columns["rollout_id"])],
        "is_eos": np.zeros(len(columns["position"]), bool),
    }
    found = {}
    for step in steps:
        share = step / max(steps)
        kl = (1 - share) * columns["loss_pre"] + share * columns["loss_post"]
        table = {name: rng.random(len(kl)) for name in OCCURRENCES.names}  # what no test looks at
        table |= {
            **columns,
            **keys,
            "kl": kl,
            "grad_norm": np.sqrt(kl),
            **{name: np.full(len(kl), np.nan) for name in missing},
        }
        found[step] = pa.table({name: pa.array(table[name]) for name in OCCURRENCES.names}).cast(OCCURRENCES)
    return found


def run_of(path, by_step, order):
    """The SELECT for each checkpoint of a run that holds these tables in parts."""
    run = Run.create(path, {})
    for step, table in by_step.items():
        mixed = table.take(order(step, len(table)))
        for start in range(0, len(table), 400):
            run.write_part(step, mixed.slice(start, 400), part=f"{start:05d}")
    return {step: parquet(sorted((path / f"occurrences/step={step}").glob("*.parquet"))) for step in by_step}


def assert_same(found, expected):
    for half, other in zip(found.halves(0), expected.halves(0)):
        for name in COLUMNS:
            np.testing.assert_array_equal(getattr(half, name), getattr(other, name), err_msg=name)
        assert set(half.columns) == set(other.columns)
        for name in half.columns:
            np.testing.assert_array_equal(half.column(name), other.column(name), err_msg=str(name))
        assert half.notes == other.notes
        assert half.names_R.to_pylist() == other.names_R.to_pylist()
        for name, total in half.sums({"loss": half.loss_post_N}).items():  # to the bit
            np.testing.assert_array_equal(total, other.sums({"loss": other.loss_post_N})[name])


def whole(step, size):
    return np.arange(size)


def by_rollout(step, size):
    return (np.random.default_rng(step).permutation(size // 30)[:, None] * 30 + np.arange(30)).ravel()


def shuffled(step, size):
    return np.random.default_rng(step).permutation(size)


@pytest.mark.parametrize(
    ("order", "signal", "steps"),
    [
        (whole, "kl", (10,)),
        (by_rollout, "log_ratio", (0, 10)),
        (by_rollout, "kl", (0, 5, 10)),
        (shuffled, "kl", (0, 5, 10)),
    ],
)
def test_parts_in_any_order_are_the_table_as_a_whole(tmp_path, rng, order, signal, steps):
    by_step = tables(rng, steps)
    found = Occurrences.read(run_of(tmp_path / "a [run]*", by_step, order), signal=signal)
    assert_same(found, Occurrences.read(by_step, signal=signal))
    assert found.steps == (list(steps) if len(steps) > 1 else [])


def test_sums_by_prompt_and_type_are_those_of_a_loop(rng):
    half = Occurrences.read(tables(rng)).halves(0)[0]
    pairs = half.pairs()
    expected = {}
    for prompt, kind, loss in zip(half.prompt_N, half.type_N, half.loss_post_N):
        expected.setdefault((prompt, kind), []).append(float(loss))
    assert list(zip(pairs.prompt_S, pairs.type_S)) == sorted(expected)
    assert pairs.n_S.tolist() == [len(expected[key]) for key in sorted(expected)]
    np.testing.assert_allclose(pairs.loss_S, [sum(expected[key]) for key in sorted(expected)], rtol=1e-12)
    late = half.sums({"late": half.column(5)})["late"]
    assert pairs.late_share == 0.5
    np.testing.assert_array_equal(pairs.late_S, late)


def test_values_that_are_not_finite_leave_the_measurement_and_stay_as_context(rng):
    by_step = tables(rng)
    kl = by_step[5]["kl"].to_numpy().copy()
    kl[[3, 500]], kl[30 * 3 * 4 : 30 * 3 * 5] = np.nan, np.inf  # two rows, and all of one prompt
    by_step[5] = by_step[5].set_column(4, "kl", pa.array(kl, pa.float32()))
    found = Occurrences.read(by_step)
    assert (len(found), found.num_prompts, len(found.type_M)) == (24 * 90 - 92, 23, 24 * 90)
    assert "92 of 2160" in found.notes[0]


def test_columns_that_are_empty_throughout_were_not_recorded(rng):
    found = Occurrences.read(tables(rng, missing=("log_ratio", "grad_norm")))
    assert set(found.columns) == {0, 5, 10}
    assert found.on_other_signal() is None
    assert found.column("grad_norm") is None


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda table: table.slice(30), "different"),
        (lambda table: table.slice(0, len(table) - 1), "different"),
        (lambda table: table.set_column(3, "token_id", pa.array(np.zeros(len(table), np.int32))), "tokenizer"),
        (lambda table: table.drop_columns("kl"), "kl at step 0"),
    ],
)
def test_checkpoints_must_hold_the_same_occurrences(rng, damage, word):
    by_step = tables(rng)
    by_step[0] = damage(by_step[0])
    with pytest.raises(DataError, match=word):
        Occurrences.read(by_step)


def test_a_table_in_any_order_with_a_prompt_for_each_rollout():
    found = Occurrences.from_table(ROWS)
    assert found.token_ids_V.tolist() == [3, 7, 9]
    assert found.type_N.tolist() == [0, 2, 0, 1, 1]
    assert found.loss_post_N.tolist() == [2, 3, 5, 4, 1]
    assert found.prompt_N.tolist() == [0, 0, 0, 1, 1]
    assert any("no prompt_id" in note for note in found.notes)
    named = Occurrences.from_table({**ROWS, "rollout_id": pa.array(["b", "a", "a", "b", "a"]).dictionary_encode()})
    assert named.loss_post_N.tolist() == [2, 3, 5, 4, 1]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"loss": None}, "loss"),
        ({"token_id": None}, "token_id"),
        ({"position": [0, 0, 1, 0, 0]}, "twice"),
        ({"position": [0, 0.5, 1, 0, 2]}, "whole"),
        ({"token_id": [7, -3, 9, 7, 3]}, ">= 0"),
        ({"token_id": ["a", "b", "c", "d", "e"]}, "whole"),
        ({"rollout_id": pa.array([0, None, 0, 0, 1])}, "rollout_id"),
        ({"loss": ["a", "b", "c", "d", "e"]}, "finite"),
        ({"loss": [np.nan] * 5}, "finite"),
    ],
)
def test_broken_tables_are_refused(change, word):
    columns = {name: column for name, column in (ROWS | change).items() if column is not None}
    with pytest.raises(DataError, match=word):
        Occurrences.from_table(columns)


def test_empty_tables_and_too_few_prompts_are_refused():
    with pytest.raises(DataError, match="no rows"):
        Occurrences.from_table({name: pa.array([], pa.int64()) for name in ROWS})
    with pytest.raises(DataError, match="4 prompts"):
        Occurrences.from_table(ROWS).halves(0)


def test_the_last_third_is_found_among_uneven_steps():
    assert last_third([0, 43, 86, 129, 171, 214, 257, 300]) == (171, 129 / 300)
    assert last_third([0, 300]) == (None, 0.0)
