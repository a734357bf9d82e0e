"""Control occurrences: non-rocks that cover as much of the rollouts as the rocks do, in runs of the same lengths.

Types cannot be matched on number, for rocks are frequent; occurrences can. A second control matches the loss mass too,
so that "it is only the high loss" can be told from "it is these tokens". This module knows masks, rollouts and losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rocktokens.detect.grouped import BLOCK_ROWS, index_type
from rocktokens.detect.occurrences import Array
from rocktokens.errors import DataError
from rocktokens.stats import Floats

# Shapes: N occurrences in rollout and position order, S slots that a run could take, J runs.
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Control:
    """Chosen occurrences and how well they match the rocks."""

    chosen_N: Bools
    num_wanted: int
    num_placed: int
    num_runs_split: int
    """Runs that fitted nowhere in one piece and were halved."""
    loss_wanted: float
    loss_placed: float


def run_starts_lengths(mask_N: Bools, rollout_N: Array) -> tuple[Array, Array]:
    """Maximal runs of set positions; a run ends with its rollout."""
    edge_N = np.empty(len(mask_N), bool)
    edge_N[:1] = True
    edge_N[1:] = (mask_N[1:] != mask_N[:-1]) | (rollout_N[1:] != rollout_N[:-1])
    starts = np.flatnonzero(edge_N).astype(index_type(len(mask_N)))
    lengths = np.diff(starts, append=starts.dtype.type(len(mask_N)))
    inside = mask_N[starts]
    return starts[inside], lengths[inside]


class _Losses:
    """Mean losses of runs; found from the running sum of all losses."""

    def __init__(self, loss_N: Array) -> None:
        self.mass_N = np.zeros(len(loss_N) + 1)
        np.cumsum(loss_N, dtype=float, out=self.mass_N[1:])

    def means(self, begin_J: Array, length: Array | int) -> Floats:
        """Mean loss of the runs that begin there."""
        return (self.mass_N[begin_J + length] - self.mass_N[begin_J]) / length


def matched_control(
    rock_N: Bools, rollout_N: Array, loss_N: Array, *, rng: np.random.Generator, match_loss: bool = False
) -> Control:
    """Place runs of the rocks' lengths on non-rock occurrences, apart from each other, longest first.

    Rows must be in rollout and position order. With `match_loss`, places are drawn with weight exp(β · mean loss),
    β chosen for each length so that the placed runs carry the loss of the rocks' runs of that length.
    """
    if len(rock_N) == 0 or not rock_N.any():
        raise DataError("a control needs rock occurrences to be matched to; there are none")
    starts, lengths = run_starts_lengths(rock_N, rollout_N)
    losses = _Losses(loss_N) if match_loss else None
    # Of runs that need no certain loss, the number alone counts.
    mean_J = np.zeros(len(starts)) if losses is None else losses.means(starts, lengths)
    wanted = {int(length): mean_J[lengths == length] for length in np.unique(lengths)}
    free_N = ~rock_N
    chosen_N = np.zeros(len(rock_N), bool)
    num_split, length = 0, max(wanted)
    while length >= 1:
        means = wanted.get(length, mean_J[:0])
        if len(means):
            begin_S = _draw(free_N, rollout_N, losses, length, means, rng)
            _occupy(chosen_N, free_N, begin_S, length)
            left = means[len(begin_S) :]
            if len(left) and length > 1:
                num_split += len(left)
                for half in (length - length // 2, length // 2):
                    wanted[half] = np.concatenate([wanted.get(half, mean_J[:0]), left])
        length = max((n for n in wanted if n < length), default=0)
    return Control(
        chosen_N=chosen_N,
        num_wanted=int(rock_N.sum()),
        num_placed=int(chosen_N.sum()),
        num_runs_split=num_split,
        loss_wanted=float(loss_N[rock_N].sum(dtype=float)),
        loss_placed=float(loss_N[chosen_N].sum(dtype=float)),
    )


def _draw(
    free_N: Bools,
    rollout_N: Array,
    losses: _Losses | None,
    length: int,
    means: Floats,
    rng: np.random.Generator,
) -> Array:
    """Starts of up to len(means) places for runs of one length, one free position apart at least."""
    begin_S = _slots(free_N, rollout_N, length, rng)
    num = min(len(means), len(begin_S))
    if num == len(begin_S):
        return begin_S
    key_S = rng.gumbel(size=len(begin_S))
    if losses is not None:
        tilt = _tilt(losses, begin_S, length, num, float(np.mean(means)), rng)
        for first in range(0, len(begin_S), BLOCK_ROWS):
            slots = slice(first, first + BLOCK_ROWS)
            key_S[slots] += tilt * losses.means(begin_S[slots], length)
    np.negative(key_S, out=key_S)
    return begin_S[np.argpartition(key_S, num)[:num]]


def _slots(free_N: Bools, rollout_N: Array, length: int, rng: np.random.Generator) -> Array:
    """Where runs of one length could begin: as many as fit into each free stretch, shifted together at random."""
    starts, lengths = run_starts_lengths(free_N, rollout_N)
    count = (lengths + 1) // (length + 1)
    fits = count > 0
    starts, lengths, count = starts[fits], lengths[fits], count[fits]
    offset = rng.integers(0, lengths - (count * (length + 1) - 1) + 1)
    earlier = np.cumsum(count, dtype=count.dtype) - count
    begin_S = np.arange(count.sum(), dtype=starts.dtype)
    begin_S *= length + 1
    begin_S += np.repeat((starts + offset - earlier * (length + 1)).astype(starts.dtype), count)
    return begin_S


def _tilt(
    losses: _Losses,
    begin_S: Array,
    length: int,
    num: int,
    target: float,
    rng: np.random.Generator,
    sample: int = 50_000,
) -> float:
    """β for which the `num` places drawn with weight exp(β · mean loss) have the target mean, by bisection."""
    few_S = begin_S if len(begin_S) <= sample else begin_S[rng.choice(len(begin_S), sample, replace=False)]
    some = losses.means(few_S, length)
    picked = max(1, round(num * len(some) / len(begin_S)))
    noise = rng.gumbel(size=len(some))

    def drawn_mean(beta: float) -> float:
        return float(some[np.argpartition(-(noise + beta * some), min(picked, len(some) - 1))[:picked]].mean())

    scale = 1.0 / max(float(some.std()), 1e-12)
    low, high = -30.0 * scale, 30.0 * scale
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if drawn_mean(middle) < target else (low, middle)
    return (low + high) / 2


def _occupy(chosen_N: Bools, free_N: Bools, begin_S: Array, length: int) -> None:
    """Mark placed runs; their neighbours are no longer free, or two runs would grow together."""
    for offset in range(length):
        chosen_N[begin_S + offset] = True
    for offset in range(-1, length + 1):
        free_N[np.clip(begin_S + offset, 0, len(free_N) - 1)] = False
