"""Sets of candidates in windows, added up over pieces of the occurrences, against one candidate at a time over all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from rocktokens.causal import knockout
from rocktokens.causal.bans import window_sets
from rocktokens.run import Run
from rocktokens.tables import OCCURRENCES


def window_members(
    token_id: int,
    candidates: Sequence[int],
    occurrences: Mapping[str, np.ndarray],
    *,
    tau: float,
    width: int,
    share: float,
) -> tuple[int, ...]:
    """A type with the candidates inside the high-divergence windows of its occurrences (docs/method.md §5).

    `occurrences`: rollout, token and loss of every position, in order. A candidate belongs if it stands inside so often
    that its number is at least `share` of the type's own.
    """
    import torch

    from rocktokens.select.interface import high_divergence_window

    token_N = torch.from_numpy(np.asarray(occurrences["token"], np.int64))
    hit_N = token_N == token_id
    if not bool(hit_N.any()):
        return (token_id,)
    inside_N = high_divergence_window(
        hit_N,
        torch.from_numpy(np.asarray(occurrences["loss"], float)),
        torch.from_numpy(np.asarray(occurrences["rollout"], np.int64)),
        width=width,
        tau=tau,
    )
    ids, counts = np.unique(token_N[inside_N & ~hit_N].numpy(), return_counts=True)
    often = set(ids[counts >= share * int(hit_N.sum())].tolist())
    return tuple(sorted({token_id, *(often & set(candidates))}))


def occurrences(rng: np.random.Generator, rollouts: int, kinds: int = 12) -> dict[str, np.ndarray]:
    """Losses that come in runs, some of them missing."""
    rollout_N = np.repeat(np.arange(rollouts), rng.integers(1, 30, rollouts))
    level_N = np.repeat(rng.exponential(size=len(rollout_N) // 3 + 1), 3)[: len(rollout_N)]
    loss_N = np.where(rng.random(len(rollout_N)) < 0.02, np.nan, level_N * rng.random(len(rollout_N)))
    return {"rollout": rollout_N, "token": rng.integers(0, kinds, len(rollout_N)), "loss": loss_N}


def cut(whole: Mapping[str, np.ndarray], bounds: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """The same in pieces that begin at these rollouts."""
    edges = np.searchsorted(whole["rollout"], [0, *bounds, whole["rollout"][-1] + 1])
    return [{name: column[a:b] for name, column in whole.items()} for a, b in pairwise(edges)]


def test_a_window_set_has_the_candidates_that_stand_beside_in_the_high_run():
    loss = np.array([0, 0, 9, 9, 9, 0, 0, 0, 0, 0, 0, 9, 0, 0.0])
    token = np.array([7, 5, 4, 1, 3, 7, 7, 7, 7, 7, 5, 1, 7, 7])
    table = [{"token": token, "loss": loss, "rollout": np.zeros(14, int)}]
    asked = {"tau": 4.0, "width": 4}
    assert window_sets([1], [1, 3, 4, 5], table, share=0.1, **asked) == {1: (1, 3, 4)}
    assert window_sets([1], [1, 3], table, share=0.1, **asked) == {1: (1, 3)}
    assert window_sets([1], [1, 3, 4], table, share=0.9, **asked) == {1: (1,)}
    assert window_sets([2], [1, 2, 3], table, share=0.1, **asked) == {2: (2,)}
    assert window_sets([2], [2], [], share=0.1, **asked) == {2: (2,)}


@pytest.mark.parametrize("seed", range(12))
def test_pieces_give_the_sets_that_all_occurrences_give(seed):
    rng = np.random.default_rng(seed)
    whole = occurrences(rng, rollouts=40)
    candidates = rng.permutation(14)[:9].tolist()  # some are not candidates, some never occur
    tokens = candidates[: int(rng.integers(1, 9))]
    asked = {
        "tau": float(rng.uniform(0.1, 0.8)),
        "width": int(rng.integers(1, 6)),
        "share": float(rng.uniform(0.01, 0.6)),
    }
    expected = {token: window_members(token, candidates, whole, **asked) for token in tokens}
    for bounds in ([], [7], sorted(rng.integers(0, 40, 5).tolist())):
        assert window_sets(tokens, candidates, cut(whole, bounds), **asked) == expected


@pytest.mark.parametrize("positions", [1, 50, 10**6])
def test_pieces_of_a_run_have_whole_rollouts_in_order(tmp_path, monkeypatch, positions):
    """However the rows lie in the files: here each rollout is torn apart over two, in a random order."""
    rng = np.random.default_rng(3)
    whole = occurrences(rng, rollouts=30)
    number = len(whole["token"])
    position_N = np.arange(number) - np.searchsorted(whole["rollout"], whole["rollout"])
    known = {
        "rollout_id": [f"p{rollout:03d}#0" for rollout in whole["rollout"]],
        "prompt_id": [f"p{rollout:03d}" for rollout in whole["rollout"]],
        "position": position_N,
        "token_id": whole["token"],
        "kl": whole["loss"],
    }
    empty = {name: np.zeros(number) for name in OCCURRENCES.names if name not in known}
    table = pa.table({**known, **empty}).select(OCCURRENCES.names).cast(OCCURRENCES)
    run = Run.create(tmp_path / "run", {})
    with run.part_writer(3, part_rows=100) as writer:
        for rows in np.array_split(rng.permutation(number), 4):
            writer.write(table.take(rows))
    monkeypatch.setattr(knockout, "PIECE_POSITIONS", positions)
    pieces = list(knockout._pieces(run))
    assert len(pieces) == 1 if positions > number else len(pieces) > 2
    for name in ("token", "loss"):
        np.testing.assert_array_equal(
            np.concatenate([piece[name] for piece in pieces]), whole[name].astype(pieces[0][name].dtype)
        )
    counted = np.concatenate([np.unique(piece["rollout"], return_counts=True)[1] for piece in pieces])
    np.testing.assert_array_equal(counted, np.bincount(whole["rollout"]))
