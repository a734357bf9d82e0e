"""The end of a study on the terminal: the same verdict as the report's card, wrapped to the terminal's width.

What is found is also printed when it is found: the rocks after `detect`, the census' verdicts after `knockout`, and so
on, a line or two each.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from rocktokens.facts import Facts
from rocktokens.report.verdict import Verdict, verdict
from rocktokens.show import interval, listed, percent, visible

NAMED = 8
NAMES = {"which": "rocks", "cost": "cost", "matter": "needed", "without": "skipped"}


def summary(facts: Facts, report: Path | None, *, width: int = 80) -> list[str]:
    """Lines of at most `width` columns: title, line, the four answers, accuracies, the next command, the report."""
    found = verdict(facts)
    lines = [plain(found.title), *_wrapped(plain(found.line), width), ""]
    rows = [(NAMES[tile.name], _tile(facts, found, tile.name)) for tile in found.tiles]
    if found.accuracies:
        said = " → ".join(f"{interval(item.value, percent)} {item.name}" for item in found.accuracies)
        rows.append(("accuracy", said))
    if found.command:
        rows.append(("next", found.command))
    rows.append(("report", str(report) if report is not None else facts.command("report") or ""))
    for name, text in rows:
        if name in ("next", "report"):  # a path or a command must stay in one piece to be pasted
            lines.append(f"  {name:9} {plain(text)}")
        else:
            lines += _wrapped(f"  {name:9} {plain(text)}", width, indent=12)
    return lines


def _tile(facts: Facts, found: Verdict, name: str) -> str:
    tile = next(tile for tile in found.tiles if tile.name == name)
    if name == "which" and facts.rocks:
        return f"{tile.value}: {listed([visible(row['token']) for row in facts.rocks], NAMED)}"
    value = "" if tile.value == "–" else tile.value
    said = tile.chip if not value else value if tile.chip in value else f"{value}, {tile.chip}"
    return f"{said}. {tile.detail}"


def found_by(stage: str, facts: Facts) -> str | None:
    """What a stage that has just ended found, in one line; None where it has nothing to tell."""
    found = verdict(facts)
    if stage == "detect" and facts.types:
        cost = next(tile for tile in found.tiles if tile.name == "cost")
        return plain(f"{facts.rock_word}s: {_tile(facts, found, 'which')}; {cost.value}" if facts.rocks else found.line)
    if stage == "knockout" and facts.ran("knockout"):
        return plain(f"needed at inference: {_tile(facts, found, 'matter')}")
    if stage == "compare" and facts.ran("compare"):
        return plain(f"trained without them: {_tile(facts, found, 'without')}")
    if stage == "distill" and found.accuracies:
        said = " → ".join(f"{interval(item.value, percent)} {item.name}" for item in found.accuracies)
        return plain(f"accuracy: {said}")
    return None


def plain(text: str) -> str:
    """Without the marks that the report sets as code."""
    return text.replace("`", "")


def _wrapped(text: str, width: int, *, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text, max(width, 40), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
