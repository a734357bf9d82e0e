"""Per-type, per-prompt sums: the one table that ranking, sweeps and intervals are computed from.

Beyond 1,024 prompts (fewer where there are very many types), prompts are merged at random into groups of equal number:
groups of independent prompts are independent too, so intervals stay valid and the cost stays linear in occurrences.
This module knows types, prompts and columns to add up; it does not know what the columns mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy

import numpy as np
from numpy.typing import NDArray

from rocktokens.detect.grouped import BLOCK_ROWS, run_bounds
from rocktokens.detect.occurrences import Array, Occurrences
from rocktokens.parallel import for_each
from rocktokens.stats import Floats, Intervals, bootstrap_sums

# Shapes: N occurrences, V token types, U units (prompts or groups of them), P prompts, B resamples.
MAX_UNITS = 1024
MAX_CELLS = 16_000_000  # of one (V, U) column: 64 MB
TYPE_BLOCK = 256
Column = Array | Callable[[slice], Array]
"""One value per occurrence, or a function that gives those of some rows."""


class TypeSums:
    """Sums of named columns over the occurrences of each token type within each unit, and in all."""

    def __init__(self, occurrences: Occurrences, columns: Mapping[str, Column], rng: np.random.Generator) -> None:
        self.num_types = len(occurrences.token_ids_V)
        size_P = np.diff(run_bounds(occurrences.prompt_N))
        limit = min(MAX_UNITS, max(100, MAX_CELLS // self.num_types))
        self.num_prompts = len(size_P)
        self.num_units = min(self.num_prompts, limit)
        unit_P = rng.permutation(self.num_prompts) % self.num_units
        self.unit_N: NDArray[np.int16] = np.repeat(unit_P.astype(np.int16), size_P)
        self.type_N = occurrences.type_N
        self.cells: dict[str, NDArray[np.float32]] = {}
        self.totals: dict[str, Floats] = {}
        self._add({"n": None, **columns}, len(self.type_N), lambda rows: rows)

    def add_count(self, name: str, row_n: Array) -> None:
        """Count some of the occurrences, given by their rows."""
        self._add({name: None}, len(row_n), lambda part: row_n[part])

    def _add(
        self, columns: Mapping[str, Column | None], number: int, rows_of: Callable[[slice], Array | slice]
    ) -> None:
        """Add up columns over rows; None counts them."""
        size = self.num_units * self.num_types
        total: dict[str, Floats] = {}
        for start in range(0, max(number, 1), BLOCK_ROWS):
            block = slice(start, min(start + BLOCK_ROWS, number))
            rows = rows_of(block)
            # A prompt's occurrences lie together, so that one unit's cells stay in the cache.
            key_n = self.unit_N[rows].astype(np.int64) * self.num_types + self.type_N[rows]

            def work(name: str, block: slice = block, key_n: Array = key_n) -> None:
                column = columns[name]
                weight_n = None if column is None else column(block) if callable(column) else column[block]
                found = np.bincount(key_n, weights=weight_n, minlength=size)
                if name in total:
                    total[name] += found
                else:
                    total[name] = found

            for_each(work, columns)
        for name in columns:
            cells_UV = total.pop(name).reshape(self.num_units, self.num_types)
            self.totals[name] = cells_UV.sum(0)
            self.cells[name] = np.ascontiguousarray(cells_UV.T, dtype=np.float32)

    def fork(self) -> TypeSums:
        """A copy that can be added to; what is there already is shared."""
        own = copy(self)
        own.cells, own.totals = dict(self.cells), dict(self.totals)
        return own

    def by_unit(self, name: str, chosen_V: Array | None = None) -> Floats:
        """Sums over all types, or over some of them, (U,)."""
        cells = self.cells[name] if chosen_V is None else self.cells[name][chosen_V]
        return cells.sum(0, dtype=float)

    def intervals(
        self, statistic: Callable[..., Floats], names: list[str], counts_BU: Floats, level: float
    ) -> Intervals:
        """Bootstrap-t interval per type; a name ending in `*` is the column summed over all types."""
        parts: dict[int, Intervals] = {}

        def work(types: slice) -> None:
            columns = [self._block(name, types) for name in names]
            parts[types.start] = bootstrap_sums(statistic, columns, counts_BU, level=level)

        for_each(work, self._blocks())
        return Intervals(*(np.concatenate(ends) for ends in zip(*(parts[start] for start in sorted(parts)))))

    def _blocks(self) -> Iterator[slice]:
        for start in range(0, self.num_types, TYPE_BLOCK):
            yield slice(start, start + TYPE_BLOCK)

    def _block(self, name: str, types: slice) -> Floats:
        if name.endswith("*"):
            return self.by_unit(name[:-1])[:, None]
        return self.cells[name][types].T.astype(float)
