"""TokenMonitor against plain numpy over the whole history."""

from __future__ import annotations

import io
import math

import numpy as np
import online_runs
import pytest
import torch

from rocktokens.divergence.monitor import TokenMonitor
from rocktokens.errors import ConfigError, DataError

V = 9


def history(rng: np.random.Generator, updates: int = 12, rows: int = 30, types: int = V) -> list[tuple]:
    """Tokens, values and gradient norms of every update; some types never occur early, some never late."""
    made = []
    for step in range(updates):
        token_N = rng.integers(0, types - 1 if step < updates // 2 else types, rows)
        made.append((token_N, rng.gamma(1.0, 1.0 + token_N), rng.random(rows)))
    return made


def feed(monitor: TokenMonitor, steps: list[tuple]) -> TokenMonitor:
    for token_N, value_N, norm_N in steps:
        monitor.update(torch.from_numpy(token_N), torch.from_numpy(value_N), torch.from_numpy(norm_N))
    return monitor


def weighted(steps: list[tuple], type_id: int, weight_of_step) -> tuple[np.ndarray, np.ndarray]:
    """All values of a type, and the weight that each has by the update it came in."""
    values = [value_N[token_N == type_id] for token_N, value_N, _ in steps]
    weights = [np.full(len(value), weight_of_step(step)) for step, value in enumerate(values)]
    return np.concatenate(values), np.concatenate(weights)


def test_every_column_equals_the_definition(rng):
    steps, half_life = history(rng), 3.0
    table = feed(TokenMonitor(V, half_life=half_life), steps).table().to_pydict()
    total = sum(value_N.sum() for _, value_N, _ in steps)
    assert sorted(table["token_id"]) == list(range(V))
    for row, type_id in enumerate(table["token_id"]):
        values, _ = weighted(steps, type_id, lambda step: 1.0)
        assert table["count"][row] == len(values)
        assert table["mean"][row] == pytest.approx(values.mean())
        assert table["variance"][row] == pytest.approx(values.var(ddof=1))
        assert table["loss_share"][row] == pytest.approx(values.sum() / total)
        norms = sum(norm_N[token_N == type_id].sum() for token_N, _, norm_N in steps)
        assert table["grad_norm"][row] == pytest.approx(norms)

        early = np.concatenate([value_N[token_N == type_id] for token_N, value_N, _ in steps[:3]])
        assert table["early_mean"][row] == pytest.approx(early.mean() if len(early) else math.nan, nan_ok=True)

        values, weights = weighted(steps, type_id, lambda step: 0.5 ** ((len(steps) - 1 - step) / half_life))
        assert table["recent_mean"][row] == pytest.approx(np.average(values, weights=weights))
        assert table["recent_rows"][row] == pytest.approx(weights.sum() ** 2 / (weights**2).sum())
    assert np.all(np.diff(table["loss_share"]) <= 0)


def test_merged_ranks_equal_one_stream(rng):
    """Rows of every update dealt to three ranks."""
    steps = history(rng)
    whole = feed(TokenMonitor(V, half_life=3.0), steps)
    ranks = [TokenMonitor(V, half_life=3.0) for _ in range(3)]
    for rank, monitor in enumerate(ranks):
        feed(monitor, [tuple(column[rank::3] for column in step) for step in steps])
    merged = ranks[0].merge(ranks[1]).merge(ranks[2])
    assert merged.num_updates == whole.num_updates
    for name, column in whole.table().to_pydict().items():
        np.testing.assert_allclose(merged.table()[name].to_numpy(), column, rtol=1e-9, err_msg=name)
    assert merged.rocks() == whole.rocks()
    assert ranks[0].count.sum() == sum(len(token_N[::3]) for token_N, _, _ in steps)  # merging left it alone


def test_saved_and_restored_goes_on_where_it_stood(rng):
    steps = history(rng)
    whole = feed(TokenMonitor(V, half_life=3.0), steps)
    first = feed(TokenMonitor(V, half_life=3.0), steps[:5])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = TokenMonitor(V, half_life=3.0)
    second.load_state_dict(torch.load(file, weights_only=True))
    feed(second, steps[5:])
    feed(first, steps[5:7])  # the saved state is a copy: going on with the first changes nothing in the second
    for name in whole.table().column_names:
        np.testing.assert_array_equal(second.table()[name].to_numpy(), whole.table()[name].to_numpy(), err_msg=name)
    assert second.num_updates == whole.num_updates


def test_a_saved_monitor_of_another_model_is_refused():
    state = TokenMonitor(V).state_dict()
    with pytest.raises(ConfigError, match="vocabulary 9"):
        TokenMonitor(V + 1).load_state_dict(state)
    with pytest.raises(ConfigError, match="half_life"):
        TokenMonitor(V, half_life=7).load_state_dict(state)
    with pytest.raises(ConfigError, match="version 99"):
        TokenMonitor(V).load_state_dict({**state, "version": 99})


def test_rows_that_are_not_finite_are_left_out_and_nothing_seen_is_not_a_number():
    """Weight-0 rows of fused_divergence are NaN; a broken row must not poison its type for the rest of the run."""
    monitor = TokenMonitor(3)
    assert len(monitor.table()) == 0
    assert monitor.rocks() == []
    monitor.update(torch.tensor([0, 0, 1, 0]), torch.tensor([1.0, math.nan, math.inf, 3.0]), torch.ones(4))
    monitor.update(torch.tensor([1]), torch.tensor([math.nan]))
    monitor.update(torch.tensor([2]), torch.tensor([1.0]))
    assert monitor.num_updates == 3
    assert monitor.count.tolist() == [2, 0, 1]
    assert monitor.mean()[0] == 2.0
    assert np.isnan([monitor.mean()[1], monitor.variance()[2]]).all()  # one value has no variance


@pytest.mark.parametrize(
    ("tokens", "values", "norms"),
    [
        ([0, 1], [1.0], None),
        ([[0]], [[1.0]], None),
        ([V], [1.0], None),
        ([-100], [1.0], None),
        ([0], [1.0], [1.0, 2.0]),
    ],
)
def test_bad_rows_are_refused_and_nothing_is_lost(tokens, values, norms):
    monitor = TokenMonitor(V)
    monitor.update(torch.tensor([3]), torch.tensor([1.0]))
    before = monitor.state_dict()
    with pytest.raises(DataError):
        monitor.update(torch.tensor(tokens), torch.tensor(values), None if norms is None else torch.tensor(norms))
    assert monitor.state_dict()["num_updates"] == before["num_updates"]
    assert torch.equal(monitor.state_dict()["sums"], before["sums"])


def test_planted_rocks_are_found_and_learners_and_cheap_types_are_not(rng):
    """Type 0 stays expensive, type 1 was expensive and learns, type 2 is frequent and cheap, type 3 rare and noisy."""
    monitor = TokenMonitor(5, half_life=10)
    for step in range(60):
        token_N = np.concatenate([np.full(20, 0), np.full(20, 1), np.full(200, 2), np.full(int(step % 30 == 0), 3)])
        mean_V = np.array([2.0, 2.0 * 0.93**step, 0.1, 1.5, 0.0])
        value_N = rng.gamma(2.0, mean_V[token_N.astype(int)] / 2)
        monitor.update(torch.from_numpy(token_N.astype(int)), torch.from_numpy(value_N))
    assert monitor.rocks() == [0]
    assert monitor.rocks(k=0) == []


def test_the_error_of_a_fall_is_that_of_a_ratio(rng):
    """Against the spread of many repetitions."""
    falls, errors = [], []
    for _ in range(200):
        monitor = TokenMonitor(1, half_life=5)
        for step in range(15):
            monitor.update(
                torch.zeros(40, dtype=torch.long), torch.from_numpy(rng.gamma(2.0, 0.5 if step < 5 else 0.3, 40))
            )
        fall_V, error_V = monitor.fall()
        falls.append(fall_V[0])
        errors.append(error_V[0])
    assert np.mean(falls) == pytest.approx(0.4, abs=0.02)
    assert np.mean(errors) == pytest.approx(np.std(falls), rel=0.2)


@pytest.mark.parametrize("kind", ["equal", "learning"])
def test_the_monitor_names_no_rock_where_there_is_none(kind):
    """A small version of benchmarks/online.py."""
    assert [online_runs.simulate_monitor(kind, seed, types=2000, rows=1000) for seed in range(3)] == [0, 0, 0]
