"""What a check says: a verdict, a number, a sentence and a remedy; and the table of all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rocktokens.errors import DataError
from rocktokens.progress import console

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


def judge(check: str, fault: bool, number: str, fine: str, wrong: str, remedy: str) -> Finding:
    """A fault that spoils distillation, with its remedy, or nothing wrong; each with its sentence."""
    return Finding(check, "wrong", number, wrong, remedy) if fault else Finding(check, "fine", number, fine)


def unknown(check: str, why: str) -> Finding:
    """What could not be checked, and why."""
    return Finding(check, "not checked", "", why)


def report(findings: Sequence[Finding], *, as_json: bool = False) -> None:
    """Print findings, faults first, or as a JSON list; DataError where there is a fault."""
    from rich.markup import escape
    from rich.table import Table

    faults = [finding.check for finding in findings if finding.status == "wrong"]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        table = Table("", "check", "number", "what it means", box=None, padding=(0, 1), show_edge=False)
        for finding in sorted(findings, key=lambda own: list(STYLES).index(own.status)):
            said = f"{finding.sentence} → {finding.remedy}" if finding.remedy else finding.sentence
            style = STYLES[finding.status]
            table.add_row(f"[{style}]{finding.status}[/]", finding.check, escape(finding.number), escape(said))
        console().print(table)
        if not faults:
            print(f"no fault in {sum(finding.status in ('fine', 'note') for finding in findings)} checks")
    if faults:
        raise DataError(f"{len(faults)} of {len(findings)} checks found a fault: {', '.join(faults)}")
