"""Grafts as tables: what a set costs (its shares of loss and gradient) beside what learning it perfectly would gain.

It formats and decides nothing; who grafted, and how, is elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from rocktokens.core.stats import Estimate


class GraftRow(NamedTuple):
    """One arm's result."""

    arm: str
    num_types: int
    share_positions: float
    """Share of the baseline's positions that the rule draws again."""
    accuracy: float
    gain: Estimate
    num_resumed: int
    num_rollouts: int
    num_tokens: int


def graft_table(
    rows: Sequence[GraftRow],
    types: Sequence[Mapping[str, Any]],
    rocks: Iterable[int],
    clusters: Mapping[str, Iterable[int]],
) -> pa.Table:
    """grafts.parquet: one row an arm. `types`: rows of types.parquet, where a run has them."""
    total = sum(item["r"] or 0.0 for item in types)
    everything = {item["token_id"] for item in types}
    chosen = set(rocks)
    members: dict[str, set[int]] = {"rocks": chosen, "rest": everything - chosen, "all": everything}
    members |= {f"cluster {name}": set(own) for name, own in clusters.items()}
    made = []
    for row in rows:
        own = [item for item in types if item["token_id"] in members.get(row.arm, set())]
        made.append(
            {
                "arm": row.arm,
                "num_types": row.num_types,
                "share_positions": row.share_positions,
                "loss_share": sum(item["r"] or 0.0 for item in own) / total if own and total else None,
                "grad_share": sum(item["grad_share"] or 0.0 for item in own) if own else None,
                "accuracy": row.accuracy,
                "gain": row.gain.value,
                "gain_low": row.gain.low,
                "gain_high": row.gain.high,
                "num_problems": row.gain.num_prompts,
                "num_resumed": row.num_resumed,
                "num_rollouts": row.num_rollouts,
                "num_tokens": row.num_tokens,
            }
        )
    return pa.Table.from_pylist(made)


def render(table: pa.Table, accuracy: float) -> Table:
    """The arms as a table for the terminal."""
    title = f"grafts: the teacher draws in the student's place ({100 * accuracy:.1f} % right without)"
    shown = Table(title=title, box=SIMPLE_HEAD)
    for name in ("set", "types", "positions", "loss", "gradient", "right", "gain [95 %]"):
        shown.add_column(escape(name), justify="left" if name == "set" else "right", no_wrap=True)
    for row in table.to_pylist():
        gain = f"{100 * row['gain']:+.1f} [{100 * row['gain_low']:+.1f}, {100 * row['gain_high']:+.1f}]"
        shares = (_percent(row[name]) for name in ("share_positions", "loss_share", "grad_share", "accuracy"))
        shown.add_row(escape(row["arm"]), f"{row['num_types']:,}", *shares, escape(gain))
    return shown


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
