"""The doctor's findings as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

STYLES = {"wrong": "bold red", "note": "yellow", "fine": "green", "not checked": "dim"}


def findings_table(findings: Sequence[Any]) -> Table:
    """Faults first, each with its number, its sentence and its remedy."""
    table = Table("", "check", "number", "what it means", box=None, padding=(0, 1), show_edge=False)
    order = list(STYLES)
    for finding in sorted(findings, key=lambda own: order.index(own.status)):
        said = f"{finding.sentence} → {finding.remedy}" if finding.remedy else finding.sentence
        style = STYLES[finding.status]
        table.add_row(f"[{style}]{finding.status}[/]", finding.check, _plain(finding.number), _plain(said))
    return table


def _plain(text: str) -> str:
    """Text in which square brackets are not taken for styles."""
    return text.replace("[", "\\[")
