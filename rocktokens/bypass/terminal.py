"""The bypass list on the terminal: every costly token type with its evidence and the decision."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from rocktokens.bypass.conclusions import list_sentence, reason_sentence
from rocktokens.bypass.rules import Decision
from rocktokens.show import percent, points, visible

NONE = "–"


def bypass_table(decisions: Sequence[Decision], *, epsilon: float, compared: str, limit: int = 40) -> Table:
    """One row per costly type, those that may be skipped first."""
    order = ("skip", "keep", "undecided")
    rows = sorted(decisions, key=lambda item: (order.index(item.action), -item.evidence.cost_share))
    more = [f"{len(rows) - limit} more are in bypass.json"] if len(rows) > limit else []
    table = Table(
        title=list_sentence(decisions),
        caption="\n".join([*more, f"The list as a whole: {compared}."]),
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    for name in ("token", "class", "cost", "census", "graft ≤", "decision", "reason"):
        table.add_column(name, justify="right" if name in ("cost", "graft ≤") else "left", overflow="fold")
    for item in rows[:limit]:
        found = item.evidence
        named = found.kind if found.confirmed or found.kind != "rock" else f"{found.kind} (not confirmed)"
        cells = (
            visible(found.token),
            named,
            percent(found.cost_share),
            found.verdict or NONE,
            points(item.graft.gain.high) if item.graft else NONE,
            item.action,
            reason_sentence(item, epsilon=epsilon),
        )
        table.add_row(*map(escape, cells))
    return table
