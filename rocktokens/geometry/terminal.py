"""The gradients of the groups of token types on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from rocktokens.geometry.gradients import GroupComparison
from rocktokens.progress import console
from rocktokens.show import percent


def show(comparisons: Sequence[GroupComparison], facts: Mapping[str, Any]) -> None:
    """Print the comparison of the groups, and the shares of gradient and update that rocks hold.

    Args:
        comparisons: Mann–Whitney tests between groups of token types.
        facts: What the stage recorded in the manifest.
    """
    table = Table(title="Gradients of the groups of token types (Mann–Whitney)")
    for name in ("measure", "groups", "medians", "larger in", "p"):
        table.add_column(name, justify="left" if name in ("measure", "groups") else "right")
    for row in comparisons:
        table.add_row(
            row.metric,
            f"{row.first} / {row.second}",
            f"{row.median_first:.3g} / {row.median_second:.3g}",
            percent(row.share_larger, 0),
            f"{row.p_value:.2g}",
        )
    out = console()
    out.print(table)
    out.print(
        f"Rocks hold {percent(facts['rock_grad_share'])} of the gradient norm on "
        f"{percent(facts['rock_position_share'])} of the positions."
    )
    if "optimiser" in facts:
        found = facts["optimiser"]
        tied = "; the head shares its weights with the input embeddings, whose gradients it contains"
        out.print(
            f"On the output head, rocks hold {percent(found['grad_share'])} of the last step's gradient and "
            f"{percent(found['update_share'])} of Adam's update{tied if found['tied'] else ''}."
        )
