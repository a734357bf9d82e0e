"""Grafts on the terminal: what each set costs beside what learning it perfectly would gain."""

from __future__ import annotations

import pyarrow as pa
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from rocktokens.show import estimate, interval, percent, points


def render(table: pa.Table, accuracy: float) -> Table:
    """The arms as a table for the terminal."""
    title = f"grafts: the teacher draws in the student's place ({percent(accuracy)} right without)"
    shown = Table(title=title, box=SIMPLE_HEAD)
    for name in ("set", "types", "positions", "loss", "gradient", "right", "gain [95 %]"):
        shown.add_column(escape(name), justify="left" if name == "set" else "right", no_wrap=True)
    for row in table.to_pylist():
        gain = interval(estimate(row, "gain"), points)
        shares = (percent(row[name]) for name in ("share_positions", "loss_share", "grad_share", "accuracy"))
        shown.add_row(escape(row["arm"]), f"{row['num_types']:,}", *shares, escape(gain))
    return shown
