"""Token types from counts on the terminal: the first by burden, what they cover, and what cannot be said."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from rocktokens.detect.counted import CountedReport
from rocktokens.show import number, percent, plural, visible

SHOWN = 20


def render(report: CountedReport, types: pa.Table, notes: Sequence[str]) -> Group:
    """The first types by burden as a table, with what the first K hold below it."""
    held = report.chosen
    lines = [
        f"The first {held.k} of {plural(len(types), 'type')} by burden: {percent(held.share_of_listed)} of their loss"
    ]
    if held.share_loss is not None:
        lines.append(f"coverage: {percent(held.share_loss)} of the corpus' loss")
    if held.share_positions is not None:
        lines.append(f"positions: {percent(held.share_positions)} of the corpus'")
    if held.enrichment is not None:
        lines.append(f"enrichment: {number(held.enrichment, 3)}; 1 means merely frequent")
    table = Table(title=f"{plural(len(types), 'token type')} by burden", box=None, padding=(0, 1, 0, 0))
    for name in ("token", "id", "count", "mean loss", "burden"):
        table.add_column(name, justify="left" if name == "token" else "right", no_wrap=True)
    for row in types.slice(0, SHOWN).to_pylist():
        cells = (visible(row["token"]), str(row["token_id"]), f"{row['count']:,}", number(row["loss_post"], 3))
        table.add_row(*map(escape, cells), number(row["r"], 1))
    return Group(table, *map(escape, [*lines, *notes]))
