"""What training writes down: one row per optimiser step, and the account at the end.

Rows live in memory and in every resume checkpoint; training.parquet is rewritten whole from them, so that a resumed run
never holds a step twice. This module knows rows of numbers, not how they came about.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from rocktokens.tables import FLOP_STAGES, TABLES
from rocktokens.train.saturation import Saturation, saturation
from rocktokens.train.step_meter import STAGES

# Saturation is tested every so many steps, and believed when it holds so many times in a row.
from rocktokens.values import Json, Row

SATURATION_EVERY = 10
SATURATION_TIMES = 3


class RunDirectory(Protocol):
    """What training asks of a run; `rocktokens.Run` is one."""

    path: Path
    manifest: Json

    def describe(self, sections: dict[str, object]) -> None:
        """Add sections to the configuration in the manifest."""
        ...

    def write(self, name: str, table: pa.Table) -> Path:
        """Write NAME.parquet whole."""
        ...

    def has(self, name: str) -> bool:
        """Whether NAME.parquet exists."""
        ...

    def read(self, name: str) -> pa.Table:
        """NAME.parquet as a table."""
        ...

    def checkpoint(self, step: int) -> Path:
        """Directory of a kept checkpoint."""
        ...

    def telemetry_writer(self, step: int, *, part: str = "") -> AbstractContextManager[Any]:
        """Where the occurrences of a training step go."""
        ...


class TrainingRecord:
    """One row per optimiser step; shadow selectors add columns of their own."""

    def __init__(self, name: str = "training") -> None:
        self.name = name
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Add a step."""
        self.rows.append(row)

    def column(self, name: str) -> np.ndarray:
        """A column as floats; NaN where empty."""
        return np.array([np.nan if row.get(name) is None else row[name] for row in self.rows], float)

    def table(self) -> pa.Table:
        """All rows, the documented columns first."""
        kinds = {column.name: column.type for column in TABLES["training"].columns}
        extra = sorted({key for row in self.rows for key in row} - kinds.keys())
        kinds |= dict.fromkeys(extra, pa.float64())
        return pa.table({name: pa.array([row.get(name) for row in self.rows], kind) for name, kind in kinds.items()})

    def write(self, run: RunDirectory) -> None:
        """Write the table, whole, in place of what was there."""
        run.write(self.name, self.table())

    def state_dict(self) -> Json:
        """Every row so far."""
        return {"rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state: Json) -> None:
        """Go on after the rows of a checkpoint."""
        self.rows = [dict(row) for row in state["rows"]]

    def summary(self) -> dict[str, float]:
        """Totals over the run: where time and work went."""
        if not self.rows:
            return {}
        found = {f"seconds_{stage}": float(np.nansum(self.column(f"seconds_{stage}"))) for stage in STAGES}
        found |= {f"flops_{stage}": float(np.nansum(self.column(f"flops_{stage}"))) for stage in FLOP_STAGES}
        seconds, tokens = float(np.nansum(self.column("seconds"))), float(np.nansum(self.column("tokens")))
        kept = float(np.nansum(self.column("kept_share") * self.column("tokens"))) / max(tokens, 1.0)
        found |= {
            "steps": float((self.column("step") > 0).sum()),
            "seconds": seconds,
            "tokens": tokens,
            "kept_share": kept,
        }
        found |= {"ceiling": 1.0 / max(kept, 1e-9), "tokens_per_second": tokens / max(seconds, 1e-9)}
        return found


class TokenBudget(NamedTuple):
    """A training that takes its planned steps and then goes on until so many tokens were sampled and scored."""

    steps: int
    tokens: int

    def is_spent(self, record: TrainingRecord) -> bool:
        """Whether both are used up."""
        taken, spent = record.column("step"), record.column("tokens") + record.column("scored")
        return bool(len(taken)) and taken.max() >= self.steps and float(np.nansum(spent)) >= self.tokens


class StepPlan(NamedTuple):
    """How many optimiser steps a training may take, and in how many of them the learning rate still rises."""

    total: int = 0
    warmup: int = 0

    @classmethod
    def of(cls, args: Any, total: int) -> StepPlan:
        """The plan of a trainer's arguments; `total` is at most the number of steps that are taken."""
        total = max(int(total), 0)
        return cls(total, int(args.get_warmup_steps(total)))


def saturation_of(
    record: TrainingRecord, on: Literal["loss", "rest"], plan: StepPlan, back: int = 0
) -> Saturation | None:
    """The slope test on the record after the warm-up, leaving out the last `back` steps."""
    step_S, losses = record.column("step"), record.column("loss" if on == "loss" else "loss_rest")
    last = (float(step_S.max()) if len(step_S) else 0.0) - back
    seen_S = (step_S > plan.warmup) & (step_S <= last)
    return saturation(losses[seen_S], remaining=max(plan.total - int(last), 0))


def has_saturated(record: TrainingRecord, on: Literal["loss", "rest"], plan: StepPlan) -> bool:
    """Whether the loss no longer falls, now and at the tests before: one test alone is believed too easily."""
    tests = [saturation_of(record, on, plan, SATURATION_EVERY * back) for back in range(SATURATION_TIMES)]
    return all(found is not None and found.saturated for found in tests)


def is_out_of_time(record: TrainingRecord, hours: float | None) -> bool:
    """Whether the training has taken so many hours, those before an interruption included."""
    return hours is not None and float(np.nansum(record.column("seconds"))) >= 3600 * hours
