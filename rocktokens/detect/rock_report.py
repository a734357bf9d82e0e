"""What detection found, as plain data and as tables.

This module decides nothing and prints nothing. Tables are pyarrow, ready for a store that this module does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rocktokens.detect import schemas
from rocktokens.detect.controls import Control
from rocktokens.detect.enough import EnoughData
from rocktokens.detect.footprint import Density, Footprint
from rocktokens.detect.occurrences import Array
from rocktokens.detect.persistence import PersistenceRow
from rocktokens.detect.positions import Concentration
from rocktokens.detect.scores import Thresholds
from rocktokens.detect.sensitivity import Overlap, SensitivityRow
from rocktokens.detect.settings import DetectConfig
from rocktokens.detect.sweep import SweepRow
from rocktokens.remarks import Remark, in_words
from rocktokens.values import Json, Row


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
    ks: dict[str, int]
    """How many types each definition keeps; for `certified`, how many it declared."""
    sets: dict[str, Array]
    """Token ids of the rocks by each definition, best first."""
    classes: dict[str, Array]
    """Token ids of the costly types by class: rock, learning, "learning, levelled off", unclear; or costly, where the
    loss before OPD is not known."""
    confirmed: Array
    """Token ids of the rocks by `certified` that the other half of the prompts declares as well."""
    has_pre: bool
    """Whether the loss before OPD is known; without it no type can be declared a rock."""
    thresholds: Thresholds
    types: Row
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
    concentration: Concentration
    positions: dict[str, object]
    """Columns of the table of the costliest positions."""
    enough: EnoughData
    num_occurrences: int
    num_left_out: int
    num_prompts: int
    num_rollouts: int
    num_types: int
    num_prompts_measured: int
    remarks: tuple[Remark, ...]
    """What a reader must know beside the numbers."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The remarks as sentences."""
        return in_words(self.remarks)

    @property
    def rocks(self) -> Array:
        """Token ids of the rocks by the chosen definition, best first; may be none."""
        return self.sets[self.definition]

    @property
    def k(self) -> int:
        """How many types the chosen definition keeps."""
        return self.ks[self.definition]

    def _repr_html_(self) -> str:
        """The declared tokens as a table, for notebooks; made by report/notebook.py, found by its name."""
        return str(import_module("rocktokens.report.notebook").rocks_html(self))

    def tables(self) -> dict[str, pa.Table]:
        """Every table by its name in a run."""
        return {
            "types": self.types_table(),
            "sweep": self.sweep_table(),
            "sensitivity": self.sensitivity_table(),
            "persistence": self.persistence_table(),
            "footprints": self.footprint_table(),
            "clusters": self.cluster_table(),
            "positions": self.positions_table(),
        }

    def types_table(self) -> pa.Table:
        """One row per token type observed: rocks of the chosen definition first, then other costly types, by burden."""
        rank = np.asarray(self.types[f"rank_{self.definition}"], float)
        rock = np.asarray(self.types[f"in_{self.definition}"], bool)
        costly = np.array([name is not None for name in self.types["class"]])
        burden = -np.asarray(self.types["r"], float)
        order = np.lexsort((burden, np.where(rock, rank, np.inf), ~costly, ~rock))
        return _from_columns(self.types, schemas.TYPES).take(pa.array(order))

    def sweep_table(self) -> pa.Table:
        """One row per definition and K."""
        return _table(self.sweep, SweepRow._fields, schemas.SWEEP)

    def sensitivity_table(self) -> pa.Table:
        """One row per threshold, step and definition."""
        return _table(self.sensitivity, SensitivityRow._fields, schemas.SENSITIVITY)

    def persistence_table(self) -> pa.Table:
        """One row per group and comparison; no rows where only one checkpoint was scored."""
        return _table(self.persistence, PersistenceRow._fields, schemas.PERSISTENCE)

    def footprint_table(self) -> pa.Table:
        """One row per definition or control."""
        return _table(list(self.footprints.values()), Footprint._fields, schemas.FOOTPRINTS)

    def cluster_table(self) -> pa.Table:
        """One row per cluster."""
        return _table(self.clusters, ClusterRow._fields, schemas.CLUSTERS)

    def positions_table(self) -> pa.Table:
        """One row per position, the costliest first."""
        return _from_columns(self.positions, schemas.POSITIONS)

    def facts(self) -> Json:
        """The few numbers a manifest keeps."""
        spread = self.concentration
        return {
            "definition": self.definition,
            "signal": self.config.signal,
            "k": self.k,
            "ks": self.ks,
            "rocks": _ids(self.rocks),
            "confirmed": _ids(self.confirmed),
            "classes": {name: _ids(ids) for name, ids in self.classes.items() if len(ids)},
            "can_declare": self.has_pre,
            "kappa": self.config.kappa,
            "q": self.config.q,
            "thresholds": {name: getattr(self.thresholds, name) for name in Thresholds.__dataclass_fields__},
            "concentration": {
                "positions_50": _known(spread.positions_50),
                "positions_80": _known(spread.positions_80),
                "positions_95": _known(spread.positions_95),
                "variance_by_type": [_known(value) for value in spread.variance_by_type[:3]],
                "a_matter_of_positions": spread.a_matter_of_positions,
            },
            "enough": {
                "num_unclear": self.enough.num_unclear,
                "num_in_reach": self.enough.num_in_reach,
                "prompts_needed": self.enough.prompts_needed,
            },
            "num_occurrences": self.num_occurrences,
            "num_left_out": self.num_left_out,
            "num_prompts": self.num_prompts,
            "num_prompts_measured": self.num_prompts_measured,
            "num_types": self.num_types,
            "overlaps": [list(overlap) for overlap in self.overlaps],
            "notes": list(self.notes),
        }


def _ids(token_ids: Array) -> list[int]:
    return [int(token_id) for token_id in token_ids]


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _from_columns(columns: Row, schema: pa.Schema) -> pa.Table:
    """Columns in the order and the types of a schema; a column that is not there is empty."""
    number = len(next(iter(columns.values())))
    arrays = [_column(columns[field.name], field.type) if field.name in columns else pa.nulls(number, field.type)
              for field in schema]  # fmt: skip
    return pa.Table.from_arrays(arrays, schema=schema)


def _column(values: object, kind: pa.DataType) -> pa.Array:
    """An arrow column; what is not finite is empty."""
    array = np.asarray(values)
    if array.dtype.kind == "f":
        array = array.astype(float)
        return pa.array(array, mask=~np.isfinite(array)).cast(kind)
    return pa.array(array.tolist() if array.dtype.kind in "OU" else array, type=kind)


def _table(rows: Sequence[tuple[Any, ...]], names: tuple[str, ...], schema: pa.Schema) -> pa.Table:
    """Rows as columns; an Estimate becomes value, _low and _high, quartiles become _q25, _q50 and _q75."""
    columns: Row = {}
    for position, name in enumerate(names):
        values = [row[position] for row in rows]
        if f"{name}_high" in schema.names:
            for suffix, field in (("", "value"), ("_low", "low"), ("_high", "high")):
                columns[name + suffix] = [np.nan if value is None else getattr(value, field) for value in values]
        elif f"{name}_q25" in schema.names:
            for index, suffix in enumerate(("_q25", "_q50", "_q75")):
                columns[name + suffix] = [value[index] for value in values]
        else:
            columns[name] = values
    return _from_columns(columns, schema)
