"""What a check says: a verdict, a number, a sentence and a remedy; and the table of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

Status = Literal["fine", "note", "wrong", "not checked"]
STYLES = {"wrong": "bold red", "note": "yellow", "fine": "green", "not checked": "dim"}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    number: str
    """What was measured, with its unit; empty where nothing could be."""
    sentence: str
    remedy: str = ""


def fine(check: str, number: str, sentence: str) -> Finding:
    """Nothing wrong."""
    return Finding(check, "fine", number, sentence)


def note(check: str, number: str, sentence: str, remedy: str = "") -> Finding:
    """Worth knowing, but no fault."""
    return Finding(check, "note", number, sentence, remedy)


def wrong(check: str, number: str, sentence: str, remedy: str) -> Finding:
    """A fault that spoils distillation."""
    return Finding(check, "wrong", number, sentence, remedy)


def unknown(check: str, why: str) -> Finding:
    """What could not be checked, and why."""
    return Finding(check, "not checked", "", why)


def findings_table(findings: Sequence[Finding]) -> Table:
    """Findings for a terminal, faults first."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "check", "number", "what it means", box=None, padding=(0, 1), show_edge=False)
    for finding in sorted(findings, key=lambda own: list(STYLES).index(own.status)):
        said = f"{finding.sentence} → {finding.remedy}" if finding.remedy else finding.sentence
        style = STYLES[finding.status]
        table.add_row(f"[{style}]{finding.status}[/]", finding.check, escape(finding.number), escape(said))
    return table
