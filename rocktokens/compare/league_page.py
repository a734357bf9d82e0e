"""A comparison's league as a Markdown table and as an SVG, for a results folder: text in, text out, no browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rocktokens.show import percent, points

ROW, LEFT, PLOT, RIGHT, TOP = 20, 200, 420, 150, 30
AUDITED = ("bite_tokens", "bite_loss", "end_dropped")
INK, MUTED, FIRST, REST = "#222", "#888", "#d55e00", "#0072b2"


def league_markdown(title: str, results: Mapping[str, Any]) -> str:
    """The league, what savers save beyond simply sampling less, and how far selectors agree.

    Args:
        title: The heading.
        results: What the stage recorded: league, savings, overlap and equal_tokens.
    """
    lines = [f"## {title}", "", f"League at {results['equal_tokens']:,.0f} tokens sampled and scored.", ""]
    lines += _table(
        ("rank", "regime", "accuracy %", "change, points", "tokens × at equal steps", "bite: tokens", "bite: loss",
         "end tokens dropped", "lengths or truncation grew"),
        [
            (
                str(row["rank"]),
                f"`{row['regime']}`",
                f"{100 * row['accuracy']:.1f}",
                "" if row["regime"] == "uniform" else _change(row, "change"),
                f"{row['spent_ratio']:.2f}",
                *("" if row[name] is None else percent(row[name]) for name in AUDITED),
                {True: "yes", False: "no", None: ""}[row["grew"]],
            )
            for row in results["league"]
        ],
    )  # fmt: skip
    if results["savings"]:
        lines += ["", "What each regime that samples less saves beyond simply sampling less:", ""]
        lines += _table(
            ("regime", "best control", "saved of its tokens", "answer", "accuracy over it at equal tokens, points"),
            [
                (
                    f"`{row['regime']}`",
                    f"`{row['control']}`",
                    saved_of(row),
                    row["answer"],
                    _change(row, "over_control"),
                )
                for row in results["savings"]
            ],
        )
    return "\n".join(lines) + "\n"


def saved_of(row: Mapping[str, Any]) -> str:
    """What a regime saves of the best control's tokens, with its interval."""
    if row["saved"] is None and row["saved_low"] is None and row["saved_high"] is None:
        return "did not arrive"
    value, low, high = (
        "never" if end is None else f"{points(end)} %" for end in (row["saved"], row["saved_low"], row["saved_high"])
    )
    return f"{value} [{low}, {high}]"


def _change(row: Mapping[str, Any], name: str) -> str:
    value, low, high = (row[name], row[f"{name}_low"], row[f"{name}_high"])
    return f"{points(value)} [{points(low)}, {points(high)}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def league_svg(title: str, results: Mapping[str, Any]) -> str:
    """One dot with its interval for each regime: the change of accuracy against uniform at equal tokens."""
    rows = results["league"]
    low = min(0.0, *(row["change_low"] for row in rows))
    high = max(0.0, *(row["change_high"] for row in rows))
    room = 0.05 * (high - low or 0.01)
    low, high = low - room, high + room

    def x(value: float) -> float:
        return LEFT + PLOT * (value - low) / (high - low)

    height, width = TOP + ROW * len(rows) + 40, LEFT + PLOT + RIGHT

    def text(x_at: float, y_at: float, said: str, *, anchor: str = "start", color: str = INK, size: int = 12) -> str:
        place = f'x="{x_at:.1f}" y="{y_at:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}"'
        return f"<text {place}>{escape(said)}</text>"

    def line(ends: tuple[float, float, float, float], color: str, more: str) -> str:
        x1, x2, y1, y2 = ends
        return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="{color}" {more}/>'

    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect width="100%" height="100%" fill="#fff"/>']
    parts.append(text(8, 18, title, size=14))
    parts.append(line((x(0), x(0), TOP, height - 36), MUTED, 'stroke-dasharray="3 3"'))
    for place, row in enumerate(rows):
        y, color = TOP + ROW * (place + 0.5), FIRST if row["rank"] == 1 else REST
        said = percent(row["accuracy"]) + ("" if row["regime"] == "uniform" else f"  {points(row['change'])}")
        parts.append(text(LEFT - 10, y + 4, f"{row['rank']}. {row['regime']}", anchor="end"))
        parts.append(line((x(row["change_low"]), x(row["change_high"]), y, y), color, 'stroke-width="2"'))
        parts.append(f'<circle cx="{x(row["change"]):.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')
        parts.append(text(LEFT + PLOT + 10, y + 4, said))
    parts += [text(x(share), height - 22, points(share), anchor="middle", color=MUTED) for share in (low, 0.0, high)]
    under = "change of accuracy against uniform at equal tokens, points (95 % intervals over seeds and prompts)"
    parts += [text(LEFT + PLOT / 2, height - 6, under, anchor="middle"), "</svg>"]
    return "\n".join(parts) + "\n"
