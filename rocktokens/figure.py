"""What a figure is: Plotly data and layout with named colours, one sentence, its estimator, and its rows.

Colours are names ("@rock", "@ink"); the page resolves them for light, dark and print. Traces are plain SVG ones, so no
figure needs WebGL. This module knows charts; it does not know what is drawn in them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

# One colour per meaning, the same in every figure; chosen among Okabe and Ito's, told apart by shape or dash as well.
from rocktokens.values import Json

ROCK, REST, RARE, THIRD, MUTED, INK, GRID = "@rock", "@rest", "@rare", "@third", "@muted", "@ink", "@grid"
SERIES = (REST, ROCK, THIRD, RARE, MUTED, "@fifth", "@sixth")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot", "solid")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "x", "star")


@dataclass(frozen=True)
class Figure:
    """One figure of the report."""

    name: str
    title: str
    sentence: str
    """What it shows, generated from the data. Plain text."""
    estimator: str
    """How its numbers were estimated."""
    rows: pa.Table
    data: list[Json] = field(default_factory=list)
    layout: Json = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def spec(self) -> Json:
        """What the page needs to draw it."""
        return {"data": self.data, "layout": self.layout, "name": self.name, "title": self.title}


def layout(x: str, y: str, *, height: int = 340, **more: Any) -> Json:
    """The house layout: no box, light grid, axis titles, legend above."""
    base: Json = {
        "height": height,
        "margin": {"l": 56, "r": 16, "t": 36, "b": 48, "pad": 4},
        "xaxis": axis(x),
        "yaxis": axis(y),
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        "hovermode": "closest",
        "dragmode": False,
        "bargap": 0.3,
    }
    for key, value in more.items():
        base[key] = {**base[key], **value} if isinstance(base.get(key), dict) else value
    return base


def axis(title: str, **more: object) -> dict[str, object]:
    """An axis with its title."""
    return {
        "title": {"text": title, "standoff": 8},
        "gridcolor": GRID,
        "zerolinecolor": GRID,
        "linecolor": MUTED,
        "automargin": True,
        "fixedrange": True,
        **more,
    }


def log_axis(shape: Json, low: float, high: float, *, suffix: str = "", steps: tuple[int, ...] = (1,)) -> None:
    """Make an axis logarithmic with its ticks written out: 0.001, 0.01, …; Plotly's own would read 100µ, or 2 for 20.

    Args:
        shape: The axis.
        low: Smallest value drawn, above 0.
        high: Largest value drawn.
        suffix: What follows every tick, e.g. a percent sign.
        steps: Ticks within a decade: (1,) or (1, 2, 5).
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first <= 1:
        steps = (1, 2, 5)
    places = [step * 10.0**decade for decade in range(first, last + 1) for step in steps]
    places = [place for place in places if low / 2 <= place <= high * 2]
    shape |= {"type": "log", "tickmode": "array", "tickvals": places}
    shape["ticktext"] = [f"{place:.12f}".rstrip("0").rstrip(".") + suffix for place in places]
    room = 0.06 * max(math.log10(high / low), 0.3)
    shape["range"] = [math.log10(low) - room, math.log10(high) + room]


def errors(value: list[Any], low: list[Any], high: list[Any], color: str) -> dict[str, object]:
    """Error bars from the ends of intervals; none where an end is missing."""

    def gap(a: Any, b: Any) -> float:
        return max(0.0, a - b) if a is not None and b is not None else 0.0

    return {
        "type": "data",
        "symmetric": False,
        "array": [gap(h, v) for v, h in zip(value, high)],
        "arrayminus": [gap(v, w) for v, w in zip(value, low)],
        "color": color,
        "thickness": 1.4,
        "width": 3,
    }


def names_axis(names: list[str], title: str = "") -> Json:
    """An axis of names at 0, 1, 2 …; by number, since a token such as 12 would be taken for a value."""
    return axis(
        title,
        tickmode="array",
        tickvals=list(range(len(names))),
        ticktext=names,
        range=[-0.6, len(names) - 0.4],
        showgrid=False,
        zeroline=False,
    )


def band(low: float, high: float, *, along: str = "x", color: str = MUTED, opacity: float = 0.16) -> dict[str, object]:
    """A shaded band across the whole figure, between two values of one axis."""
    ends = {"x0": low, "x1": high, "y0": 0, "y1": 1, "xref": "x", "yref": "paper"}
    if along == "y":
        ends = {"y0": low, "y1": high, "x0": 0, "x1": 1, "yref": "y", "xref": "paper"}
    return {"type": "rect", "fillcolor": color, "opacity": opacity, "line": {"width": 0}, "layer": "below", **ends}


def rule(at: float, *, along: str = "x", color: str = MUTED, dash: str = "dot") -> Json:
    """A line across the whole figure at one value of one axis."""
    line = {"color": color, "width": 1.2, "dash": dash}
    if along == "y":
        return {"type": "line", "y0": at, "y1": at, "x0": 0, "x1": 1, "yref": "y", "xref": "paper", "line": line}
    return {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "xref": "x", "yref": "paper", "line": line}
