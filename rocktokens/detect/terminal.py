"""Detection on the terminal: the declared rocks and every other costly type, with what supports them.

"No rocks" is an answer and is printed as one. Without the loss before OPD the word is costly.
"""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from rocktokens.detect.certified import COSTLY, LEARNING, LEVELLED, ROCK, UNCLEAR
from rocktokens.detect.rock_report import RockReport
from rocktokens.detect.scores import DEFINITIONS
from rocktokens.show import estimate, interval, number, percent
from rocktokens.values import Row

LIMIT = 30
COLUMNS = ("token", "class", "cluster", "count", "loss pre → post", "fall [95 %]", "R", "CCR", "excess [95 %]", "sets")
TEXT = ("token", "class", "cluster", "sets")


def render(report: RockReport, command: str | None = None, limit: int = LIMIT) -> Table:
    """The rocks, then the other costly types; below them footprints, spread of the loss and what is still needed."""
    rows = [row for row in report.types_table().to_pylist() if row["class"] or row[f"in_{report.definition}"]]
    lines = [*footprint_lines(report), *spread_lines(report), *enough_lines(report, command), *report.notes]
    table = Table(title=title(report), caption=escape("\n".join(lines)), caption_justify="left")
    for name in COLUMNS:
        table.add_column(escape(name), justify="left" if name in TEXT else "right")
    for row in rows[:limit]:
        table.add_row(*map(escape, _cells(row)))
    return table


def _cells(row: Row) -> list[str]:
    named = row["class"] or ""
    return [
        repr(row["token"]),
        f"{named} (not confirmed)" if named and not row["confirmed"] else named,
        row["cluster"],
        f"{row['count']:,}",
        f"{number(row['loss_pre'], 3)} → {number(row['loss_post'], 3)}",
        interval(estimate(row, "fall"), percent, digits=0),
        number(row["r"], 1),
        number(row["ccr"], 2),
        interval(estimate(row, "excess"), digits=1),
        " ".join(name for name in DEFINITIONS if row[f"in_{name}"]),
    ]


def title(report: RockReport) -> str:
    """One line that says how many rocks, by what; or that there are none."""
    count, signal = len(report.rocks), report.config.signal
    if report.definition != "certified":
        return f"{count or 'No'} rocks by `{report.definition}` on {signal}, K = {report.k}"
    if not report.has_pre:
        return f"{len(report.classes[COSTLY])} costly token types on {signal}; rocks cannot be declared"
    counts = {name: len(report.classes[name]) for name in (LEARNING, LEVELLED, UNCLEAR)}
    others = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    rest = f"; of other costly types: {others}" if others else ""
    if not count:
        return f"No rocks are declared on {signal}{rest or '; no token type is costly beyond doubt'}"
    dropped = len(report.classes[ROCK]) - count
    filtered = f" ({dropped} more in contexts that do not recur)" if dropped else ""
    return f"{count} rocks declared on {signal}, {len(report.confirmed)} of them confirmed{filtered}{rest}"


def footprint_lines(report: RockReport) -> list[str]:
    """The footprint of every set, and the overlaps."""
    lines = []
    for name, found in report.footprints.items():
        grad = "" if found.share_grad is None else f", gradient norm {interval(found.share_grad, percent)}"
        lines.append(
            f"{name}: {found.num_types} types, positions {interval(found.share_positions, percent)} "
            f"(median rollout {percent(found.share_positions_median.value)}), "
            f"loss {interval(found.share_loss, percent)}{grad}, enrichment {interval(found.enrichment, number)}"
        )
    named = ", ".join(f"{o.first}/{o.second} {o.jaccard:.2f}" for o in report.overlaps)
    return [*lines, f"overlap (Jaccard): {named}"]


def spread_lines(report: RockReport) -> list[str]:
    """Whether the cost is a matter of types or of single positions."""
    found = report.concentration
    if found.positions_50 != found.positions_50:  # there is no loss
        return []
    shares = " / ".join(map(percent, (found.positions_50, found.positions_80, found.positions_95)))
    explained = found.variance_by_type
    line = f"50 / 80 / 95 % of the loss lie in {shares} of the positions"
    if explained.value == explained.value:
        line += f"; the token type explains {interval(explained, percent)} of its variance"
    if found.a_matter_of_positions:
        line += ". The cost is a matter of single positions; the table `positions` names them"
    return [line]


def enough_lines(report: RockReport, command: str | None) -> list[str]:
    """How many prompts would settle what is unclear, and the command that adds them."""
    enough = report.enough
    if not enough.num_unclear:
        return []
    if enough.prompts_needed is None:
        return [f"{enough.num_unclear} costly types are unclear: their falls lie too close to 1 − κ for more prompts"]
    how = f": {command}" if command else ""
    return [
        f"{enough.num_unclear} costly types are unclear; about {enough.prompts_needed:,} prompts (there are "
        f"{enough.num_prompts:,}) would settle {enough.num_in_reach} of them{how}"
    ]
