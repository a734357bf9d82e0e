"""The rocks on the terminal: one line per rock, then the footprint of every set and how far the sets overlap."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from rocktokens.core.detection.rock_report import RockReport
from rocktokens.core.detection.scores import DEFINITIONS
from rocktokens.report.formats import interval, number, percent


def render(report: RockReport, limit: int = 30) -> Table:
    """The rocks by the chosen definition as a table."""
    shown = report.types_table().slice(0, min(limit, max(len(report.rocks), 1))).to_pylist()
    table = Table(title=title(report), caption="\n".join((*summary(report), *report.notes)), caption_justify="left")
    for name in ("token", "cluster", "count", "loss pre → post", "R", "CCR", "R_ctx", "excess [95 %]", "sets"):
        table.add_column(name, justify="left" if name in ("token", "cluster", "sets") else "right")
    for row in shown:
        excess = [number(row[name], 1) for name in ("excess", "excess_low", "excess_high")]
        table.add_row(
            escape(repr(row["token"])),
            row["cluster"],
            number(row["count"], 0),
            f"{number(row['loss_pre'], 3)} → {number(row['loss_post'], 3)}",
            number(row["r"], 1),
            number(row["ccr"], 2),
            number(row["r_ctx"], 1),
            f"{excess[0]} \\[{excess[1]}, {excess[2]}]",
            " ".join(name for name in DEFINITIONS if row[f"in_{name}"]),
        )
    return table


def title(report: RockReport) -> str:
    """One line that says how many rocks there are, and by which definition."""
    return f"{len(report.rocks)} rocks by `{report.definition}` on {report.config.signal}, K = {report.k}"


def summary(report: RockReport) -> list[str]:
    """The footprint of every set, and the overlaps, in a few lines."""
    lines = []
    for name, found in report.footprints.items():
        grad = "" if found.share_grad is None else f", gradient norm {interval(found.share_grad, percent)}"
        lines.append(
            f"{name}: {percent(found.share_types)} of types, positions {interval(found.share_positions, percent)} "
            f"(median rollout {percent(found.share_positions_median.value)}), "
            f"loss {interval(found.share_loss, percent)}{grad}, enrichment {interval(found.enrichment)}"
        )
    lines.append("overlap: " + ", ".join(f"{o.first}/{o.second} {o.jaccard:.2f}" for o in report.overlaps))
    return lines
