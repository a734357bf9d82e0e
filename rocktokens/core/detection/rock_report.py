"""What detection found, as plain data: the tables of a run and the facts of its manifest.

This room formats; it decides nothing. Tables are pyarrow, ready for a store that this room does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rocktokens.config import DetectConfig
from rocktokens.core.detection.controls import Control
from rocktokens.core.detection.footprint import Density, Footprint
from rocktokens.core.detection.occurrences import Array
from rocktokens.core.detection.persistence import PersistenceRow
from rocktokens.core.detection.scores import Thresholds
from rocktokens.core.detection.sensitivity import Overlap, SensitivityRow
from rocktokens.core.detection.sweep import SweepRow
from rocktokens.core.stats import Estimate


class ClusterRow(NamedTuple):
    """Rocks of one kind, measured."""

    cluster: str
    num_types: int
    share_positions: float
    share_loss: float
    enrichment: float


@dataclass(frozen=True)
class RockReport:
    """Everything detection found. Sets were chosen on one half of the prompts, numbers measured on the other."""

    config: DetectConfig
    definition: str
    k: int
    sets: dict[str, Array]
    """Token ids of the rocks by each definition, best first."""
    thresholds: Thresholds
    types: dict[str, Any]
    """Columns of the types table."""
    sweep: list[SweepRow]
    sensitivity: list[SensitivityRow]
    footprints: dict[str, Footprint]
    """By definition, and of both controls (`control`, `control_loss`) of the chosen one."""
    density: Density
    clusters: list[ClusterRow]
    controls: dict[str, Control]
    overlaps: list[Overlap]
    groups: dict[str, Array]
    """Token ids of rocks, rare high-loss types and random others, for persistence and geometry."""
    persistence: list[PersistenceRow]
    num_occurrences: int
    num_left_out: int
    num_prompts: int
    num_rollouts: int
    num_types: int
    num_prompts_measured: int
    notes: tuple[str, ...]

    @property
    def rocks(self) -> Array:
        """Token ids of the rocks by the chosen definition, best first."""
        return self.sets[self.definition]

    def types_table(self) -> pa.Table:
        """One row a token type observed, rocks of the chosen definition first, then by burden."""
        table = pa.table({name: _column(values) for name, values in self.types.items()})
        rank = np.asarray(self.types[f"rank_{self.definition}"], float)
        order = np.lexsort((-np.asarray(self.types["r"], float), np.where(rank > 0, rank, np.inf)))
        return table.take(pa.array(order))

    def sweep_table(self) -> pa.Table:
        """One row a definition and K."""
        return _table(self.sweep, SweepRow._fields)

    def sensitivity_table(self) -> pa.Table:
        """One row a threshold, step and definition."""
        return _table(self.sensitivity, SensitivityRow._fields)

    def persistence_table(self) -> pa.Table:
        """One row a group and arm; no rows where only one checkpoint was scored."""
        return _table(self.persistence, PersistenceRow._fields)

    def footprint_table(self) -> pa.Table:
        """One row a definition or control."""
        return _table(list(self.footprints.values()), Footprint._fields)

    def cluster_table(self) -> pa.Table:
        """One row a cluster."""
        return _table(self.clusters, ClusterRow._fields)

    def facts(self) -> dict[str, Any]:
        """The few numbers a manifest keeps."""
        return {
            "definition": self.definition,
            "signal": self.config.signal,
            "k": self.k,
            "rocks": [int(token_id) for token_id in self.rocks],
            "thresholds": {name: getattr(self.thresholds, name) for name in Thresholds.__dataclass_fields__},
            "num_occurrences": self.num_occurrences,
            "num_left_out": self.num_left_out,
            "num_prompts": self.num_prompts,
            "num_types": self.num_types,
            "overlaps": [list(overlap) for overlap in self.overlaps],
            "notes": list(self.notes),
        }


def _column(values: Any) -> pa.Array:
    """An arrow column; what is not finite is empty."""
    array = np.asarray(values)
    if array.dtype.kind == "f":
        return pa.array(array.astype(float), mask=~np.isfinite(array))
    return pa.array(values)


def _table(rows: Sequence[tuple[Any, ...]], names: tuple[str, ...]) -> pa.Table:
    """Rows as columns; an Estimate becomes value, _low and _high, quartiles become _q25, _q50 and _q75."""
    columns: dict[str, Any] = {}
    for position, name in enumerate(names):
        values = [row[position] for row in rows]
        if any(isinstance(value, Estimate) for value in values):
            for suffix, field in (("", "value"), ("_low", "low"), ("_high", "high")):
                columns[name + suffix] = [np.nan if value is None else getattr(value, field) for value in values]
        elif any(isinstance(value, tuple) for value in values):
            for index, suffix in enumerate(("_q25", "_q50", "_q75")):
                columns[name + suffix] = [value[index] for value in values]
        else:
            columns[name] = values
    return pa.table({name: _column(values) for name, values in columns.items()})
