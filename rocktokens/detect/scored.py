"""One checkpoint's occurrences in their Parquet parts, read a column at a time in the order of rollouts and positions.

Where every rollout lies is found by one pass over the keys; a column is then copied run by run into its place. So a
table of any size is read with no more memory than the column that is asked for. This module knows files and rollouts;
it does not know what the columns mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rocktokens.files import reading

if TYPE_CHECKING:
    from rocktokens.run import Run

# Shapes: M rows, K runs of consecutive positions of one rollout, R rollouts.
KEYS = ("prompt_id", "rollout_id", "position")
MIN_RUN = 8  # mean length of a run below which a table counts as shuffled
FEW_RUNS = 10_000  # of a table that may be shuffled all the same
REMEDY = "run `rocktokens score --again`"
Array = NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """Where the rollouts of a table lie. Rollouts are numbered in the order of their names, prompt by prompt."""

    names: list[tuple[str, str]]
    """Prompt and rollout of each number, in order."""
    size_R: Array
    """Positions of each rollout: 0 up to its size, each exactly once."""
    group_K: Array
    """Row group of each run, counted over all parts."""
    offset_K: Array
    """First row of the run within its row group."""
    length_K: Array
    place_K: Array
    """Its place among all rows, in the order of rollouts and positions."""

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return int(self.size_R.sum())

    def of(self, kept_R: Array) -> Layout:
        """Some of the rollouts, given as a mask, as if the table held no others."""
        start_R, size_R = np.cumsum(self.size_R) - self.size_R, np.where(kept_R, self.size_R, 0)
        rollout_K = np.searchsorted(start_R, self.place_K, side="right") - 1
        kept_K = kept_R[rollout_K]
        earlier_R = np.cumsum(size_R) - size_R
        return Layout(
            names=[name for name, kept in zip(self.names, kept_R) if kept],
            size_R=self.size_R[kept_R],
            group_K=self.group_K[kept_K],
            offset_K=self.offset_K[kept_K],
            length_K=self.length_K[kept_K],
            place_K=(self.place_K + (earlier_R - start_R)[rollout_K])[kept_K],
        )


@dataclass
class _Found:
    """Runs as they are met, with rollouts numbered in the order of their first appearance."""

    number_of: dict[tuple[str, str], int] = field(default_factory=dict)
    group: list[Array] = field(default_factory=list)
    offset: list[Array] = field(default_factory=list)
    length: list[Array] = field(default_factory=list)
    rollout: list[Array] = field(default_factory=list)
    first: list[Array] = field(default_factory=list)

    def add(self, group: int, prompt: pa.Array, rollout: pa.Array, position_m: Array) -> None:
        """The runs of one row group."""
        if len(position_m) == 0:
            return
        prompt_m, rollout_m = prompt.indices.to_numpy(), rollout.indices.to_numpy()
        edge = (prompt_m[1:] != prompt_m[:-1]) | (rollout_m[1:] != rollout_m[:-1])
        start = np.concatenate([[0], np.flatnonzero(edge | (np.diff(position_m) != 1)) + 1])
        prompts, rollouts = prompt.dictionary.to_pylist(), rollout.dictionary.to_pylist()
        pairs = zip(prompt_m[start].tolist(), rollout_m[start].tolist())
        number_of = self.number_of
        self.rollout.append(
            np.array([number_of.setdefault((prompts[p], rollouts[r]), len(number_of)) for p, r in pairs])
        )
        self.group.append(np.full(len(start), group))
        self.offset.append(start)
        self.length.append(np.diff(start, append=len(position_m)))
        self.first.append(position_m[start].astype(np.int64))

    @property
    def num_runs(self) -> int:
        """Runs met so far."""
        return sum(map(len, self.group))

    def layout(self) -> Layout | None:
        """The layout with rollouts in the order of their names; None where positions are missing or come twice."""
        group, offset, length, rollout, first = (
            np.concatenate(column) for column in (self.group, self.offset, self.length, self.rollout, self.first)
        )
        names = sorted(self.number_of)
        rank = np.empty(len(names), np.int64)
        rank[[self.number_of[name] for name in names]] = np.arange(len(names))
        rollout = rank[rollout]
        size_R = np.bincount(rollout, weights=length).astype(np.int64)
        start_R = np.cumsum(size_R) - size_R
        place = start_R[rollout] + first
        order = np.lexsort((first, rollout))
        ends = np.concatenate([[0], np.cumsum(length[order])])
        if first.min() < 0 or not np.array_equal(place[order], ends[:-1]):
            return None
        return Layout(names, size_R, group, offset, length, place)


class ScoredStep:
    """The occurrences of one checkpoint."""

    def __init__(self, run: Run, step: int) -> None:
        self.files = sorted((run.path / "occurrences" / f"step={step}").glob("*.parquet"))
        for path in self.files:
            run.verify(path)
        self._groups = [(path, i) for path in self.files for i in range(self._open(path).metadata.num_row_groups)]

    def _open(self, path: Path) -> pq.ParquetFile:
        with reading(path, REMEDY):
            return pq.ParquetFile(path, read_dictionary=list(KEYS[:2]), page_checksum_verification=True)

    def columns(self) -> set[str]:
        """Columns that every part has."""
        return set.intersection(*(set(self._open(path).schema_arrow.names) for path in self.files or [Path()]))

    def layout(self) -> Layout | None:
        """Where its rollouts lie; None for a table whose rows are shuffled or whose positions have gaps."""
        found, rows = _Found(), 0
        for number, table in self._tables(list(KEYS)):
            keys = [table[name].combine_chunks() for name in KEYS]
            keys = [key.chunk(0) if isinstance(key, pa.ChunkedArray) else key for key in keys]
            dictionaries = all(isinstance(key, pa.DictionaryArray) for key in keys[:2])
            if not dictionaries or any(key.null_count for key in keys):
                return None
            found.add(number, keys[0], keys[1], keys[2].to_numpy())
            rows += len(table)
            if found.num_runs > max(FEW_RUNS, rows // MIN_RUN):
                return None
        return found.layout() if rows else None

    def read(self, name: str, layout: Layout, dtype: Any) -> Array:
        """A column in the order of rollouts and positions; empty values of a number become NaN."""
        column_M = np.empty(layout.num_rows, dtype)
        bound = np.searchsorted(layout.group_K, np.arange(len(self._groups) + 1))
        for number, table in self._tables([name]):
            value_m = table[name].to_numpy()
            some = slice(int(bound[number]), int(bound[number + 1]))
            runs = zip(layout.offset_K[some].tolist(), layout.length_K[some].tolist(), layout.place_K[some].tolist())
            for offset, length, place in runs:
                column_M[place : place + length] = value_m[offset : offset + length]
        return column_M

    def any_finite(self, name: str) -> bool:
        """Whether a column holds a finite number at all; reads as far as it has to."""
        return any(np.isfinite(table[name].to_numpy().astype(float)).any() for _, table in self._tables([name]))

    def _tables(self, names: list[str]) -> Any:
        """Number and table of every row group, some columns of it."""
        opened: tuple[Path, pq.ParquetFile] | None = None
        for number, (path, i) in enumerate(self._groups):
            if opened is None or opened[0] != path:
                opened = (path, self._open(path))
            with reading(path, REMEDY):
                table = opened[1].read_row_group(i, columns=names)
            yield number, table
