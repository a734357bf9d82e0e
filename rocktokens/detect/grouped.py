"""Sums over runs of equal codes in a sorted column: prompts and rollouts, whose occurrences lie together.

Columns are read in blocks, so that what is computed beside them stays small. This module knows sorted codes and
columns; it does not know what they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from rocktokens.detect.occurrences import Array
from rocktokens.stats import Floats

# Shapes: N occurrences, P runs of equal codes.
BLOCK_ROWS = 2_000_000
SIDE_BY_SIDE = 12_000_000
"""Occurrences up to which several parts, each with columns of its own, are computed at once."""


def threads_for(num_rows: int) -> int | None:
    """Threads for parts that each hold columns of so many rows: all cores, or one where memory would run short."""
    return None if num_rows <= SIDE_BY_SIDE else 1


def index_type(num_rows: int) -> type[np.int32] | type[np.int64]:
    """The smaller type of whole numbers that holds indices into so many rows, and twice as many."""
    return np.int32 if 2 * num_rows < 2**31 else np.int64


def run_bounds(code_N: Array) -> NDArray[np.int64]:
    """Where each run of equal codes begins, and the number of codes as the last entry."""
    change = np.flatnonzero(code_N[1:] != code_N[:-1]) + 1
    return np.concatenate([[0], change, [len(code_N)]]) if len(code_N) else np.zeros(1, np.int64)


def blocks(bound_P: Array, rows: int = BLOCK_ROWS, most_runs: int | None = None) -> Iterator[slice]:
    """Consecutive runs with about so many rows in all; at least one run each."""
    first = 0
    while first < len(bound_P) - 1:
        last = int(np.searchsorted(bound_P, bound_P[first] + rows, side="right")) - 1
        last = last if most_runs is None else min(last, first + most_runs)
        last = max(last, first + 1)
        yield slice(first, last)
        first = last


def run_sums(bound_P: Array, column: Array | Callable[[slice], Array]) -> Floats:
    """Sum of a column, or of what a function gives for some rows, over each run, in double precision."""
    total_P = np.empty(len(bound_P) - 1)
    for runs in blocks(bound_P):
        start, stop = int(bound_P[runs.start]), int(bound_P[runs.stop])
        rows = slice(start, stop)
        part_N = np.asarray(column(rows) if callable(column) else column[rows], float)
        total_P[runs] = np.add.reduceat(part_N, bound_P[runs.start : runs.stop] - start)
    return total_P


def counts_and_totals(code_N: Array, value_N: Array, size: int) -> tuple[NDArray[np.int64], Floats]:
    """How often each code occurs, and the sum of its values in the order of rows: what bincount gives, in blocks."""
    count, total = np.zeros(size, np.int64), np.zeros(size)
    for start in range(0, len(code_N), BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        code_n = code_N[rows].astype(np.intp)
        count += np.bincount(code_n, minlength=size)
        np.add.at(total, code_n, value_N[rows].astype(float))
    return count, total
