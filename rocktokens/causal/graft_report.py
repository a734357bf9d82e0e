"""Grafts as tables: what a set costs (its shares of loss and gradient) beside what learning it perfectly would gain.

It formats and decides nothing; who grafted, and how, is elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from rocktokens.stats import Estimate


class GraftRow(NamedTuple):
    """One arm's result."""

    arm: str
    num_types: int
    share_positions: float
    """Share of the baseline's positions that the rule draws again."""
    accuracy: Estimate
    gain: Estimate
    num_resumed: int
    num_rollouts: int
    num_tokens: int
    members: tuple[int, ...] = ()
    """Token types of the set, where it was named by its members: the rocks, or those that would be skipped."""


def graft_table(
    rows: Sequence[GraftRow],
    types: Sequence[Mapping[str, Any]],
    rocks: Iterable[int],
    clusters: Mapping[str, Iterable[int]],
) -> pa.Table:
    """grafts.parquet: one row per arm. `types`: rows of types.parquet, where a run has them."""
    total = sum(item["r"] or 0.0 for item in types)
    everything = {item["token_id"] for item in types}
    members: dict[str, set[int]] = {"rest": everything - set(rocks), "all": everything}
    members |= {row.arm: set(row.members) for row in rows if row.members}
    members |= {f"cluster {name}": set(own) for name, own in clusters.items()}
    made = []
    for row in rows:
        own = [item for item in types if item["token_id"] in members.get(row.arm, set())]
        made.append(
            {
                "arm": row.arm,
                "num_types": row.num_types,
                "members": list(row.members) or None,
                "share_positions": row.share_positions,
                "loss_share": sum(item["r"] or 0.0 for item in own) / total if own and total else None,
                "grad_share": sum(item["grad_share"] or 0.0 for item in own) if own else None,
                "accuracy": row.accuracy.value,
                "accuracy_low": row.accuracy.low,
                "accuracy_high": row.accuracy.high,
                "gain": row.gain.value,
                "gain_low": row.gain.low,
                "gain_high": row.gain.high,
                "num_problems": row.gain.num_prompts,
                "num_resumed": row.num_resumed,
                "num_rollouts": row.num_rollouts,
                "num_tokens": row.num_tokens,
            }
        )
    ids = pa.array([row["members"] for row in made], pa.list_(pa.int32()))
    table = pa.Table.from_pylist([{name: row[name] for name in row if name != "members"} for row in made])
    return table.append_column("members", ids)
