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

from rocktokens.core.detection.occurrences import Array, Occurrences
from rocktokens.core.stats import Floats, Intervals, bootstrap_sums

# Shapes: N occurrences, V token types, U units (prompts or groups of them), B resamples.
MAX_UNITS = 1024
MAX_CELLS = 16_000_000  # of one (V, U) column: 64 MB
TYPE_BLOCK = 256


class TypeSums:
    """Sums of named columns over the occurrences of each token type within each unit, and in all."""

    def __init__(self, occurrences: Occurrences, columns: Mapping[str, Array], rng: np.random.Generator) -> None:
        self.num_types = len(occurrences.token_ids_V)
        prompts, prompt_N = np.unique(occurrences.prompt_N, return_inverse=True)
        limit = min(MAX_UNITS, max(100, MAX_CELLS // self.num_types))
        self.num_prompts = len(prompts)
        self.num_units = min(len(prompts), limit)
        unit_P = rng.permutation(len(prompts)) % self.num_units
        self.unit_N: NDArray[np.int64] = unit_P[prompt_N]
        self.type_N = occurrences.type_N
        self._key_N = self.type_N.astype(np.int64) * self.num_units + self.unit_N
        self.cells: dict[str, NDArray[np.float32]] = {}
        self.totals: dict[str, Floats] = {}
        self.add("n", None)
        for name, column_N in columns.items():
            self.add(name, column_N)

    def add(self, name: str, column_N: Array | None) -> None:
        """Add up one more column; None counts occurrences."""
        cells = np.bincount(self._key_N, weights=column_N, minlength=self.num_types * self.num_units)
        cells_VU = cells.reshape(self.num_types, self.num_units)
        self.totals[name] = cells_VU.sum(1)
        self.cells[name] = cells_VU.astype(np.float32)

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
        parts = [
            bootstrap_sums(statistic, [self._block(name, types) for name in names], counts_BU, level=level)
            for types in self._blocks()
        ]
        return Intervals(*(np.concatenate(ends) for ends in zip(*parts)))

    def _blocks(self) -> Iterator[slice]:
        for start in range(0, self.num_types, TYPE_BLOCK):
            yield slice(start, start + TYPE_BLOCK)

    def _block(self, name: str, types: slice) -> Floats:
        if name.endswith("*"):
            return self.by_unit(name[:-1])[:, None]
        return self.cells[name][types].T.astype(float)
