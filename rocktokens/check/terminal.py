"""What `check` prints: the sizes of a pair's models side by side, and a budget stage by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

SIZES = {
    "family": "model_type",
    "parameters": "parameters",
    "layers": "layers",
    "width": "width",
    "output head rows": "vocabulary",
    "context": "context",
}


class BudgetRow(NamedTuple):
    """One stage's needs: hours on one device, hours on all of them, bytes of memory and of disk, and a remark."""

    stage: str
    device_hours: float
    hours: float
    memory: float
    disk: float
    note: str


def sizes_table(student: Mapping[str, object], teacher: Mapping[str, object]) -> Table:
    """Sizes of both models, by the names of `SIZES`."""
    table = Table("", "student", "teacher", box=None)
    for label, name in SIZES.items():
        table.add_row(label, *(_number(size[name]) for size in (student, teacher)))
    return table


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else escape(str(value))


def budget_table(rows: Sequence[BudgetRow], machine: str) -> Table:
    """What every stage takes on a machine."""
    table = Table("stage", "device-hours", f"hours on {machine}", "memory", "disk", "", box=None)
    for row in rows:
        hours = f"{row.device_hours:,.1f}", f"{row.hours:,.1f}"
        table.add_row(row.stage, *hours, f"{row.memory / 1e9:,.0f} GB", f"{row.disk / 1e9:,.1f} GB", escape(row.note))
    return table
