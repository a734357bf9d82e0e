"""What a notebook shows: a run's verdict card, the tables of a detection or a census, and any figure of the report.

`Run`, `RockReport` and `Census` find this module by name when a notebook asks them for HTML, because their layers
import nothing from above.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from rocktokens.causal import figures as causal
from rocktokens.compare import figures as compare
from rocktokens.detect import figures as detect
from rocktokens.errors import ConfigError, DataError
from rocktokens.facts import Facts
from rocktokens.geometry import figures as geometry
from rocktokens.report.card import LABELS
from rocktokens.report.verdict import verdict
from rocktokens.run import Run
from rocktokens.show import NONE, Figure, interval, number, percent, plural, points, prose, visible
from rocktokens.stats import Estimate
from rocktokens.train import figures as distill

FIGURES: dict[str, Callable[[Facts], Figure | None]] = {
    "footprint": detect.footprint,
    "funnel": detect.funnel,
    "density": detect.density,
    "clusters": detect.clusters,
    "training_loss": distill.training_loss,
    "persistence": distill.persistence,
    "gradients": geometry.gradients,
    "alignment": geometry.alignment,
    "knockouts": causal.knockouts,
    "grafts": causal.grafts,
    "accuracy_seconds": compare.accuracy_seconds,
    "time": compare.time_spent,
    "sensitivity": detect.sensitivity,
}
# The report's light colours by the names that figures use.
COLOURS = {
    "paper": "#ffffff",
    "ink": "#1c1e21",
    "muted": "#5a616c",
    "grid": "#e3e1da",
    "rock": "#b3400e",
    "rest": "#0b62a6",
    "rare": "#7a3e9d",
    "third": "#00745a",
    "fifth": "#826300",
    "sixth": "#a82c74",
}
TONES = {"good": COLOURS["third"], "bad": COLOURS["rock"], "open": COLOURS["fifth"], "none": COLOURS["muted"]}
MAX_ROWS = 50


def plot(run: Run, name: str) -> Any:
    """A figure of the report as a plotly figure.

    Args:
        run: The run.
        name: One of the report's figures, e.g. funnel, knockouts or training_loss.

    Returns:
        A `plotly.graph_objects.Figure`, in the report's light colours, with its sentence as the title.
    """
    import plotly.graph_objects as go

    if name not in FIGURES:
        near = difflib.get_close_matches(name, FIGURES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(FIGURES)}"
        raise ConfigError(f"the report has no figure {name!r}; {hint}")
    facts = Facts(run)
    figure = FIGURES[name](facts)
    if figure is None:
        why = "; ".join(facts.notes) or "the stage that it rests on has not run"
        raise DataError(f"{run.path} has nothing to draw for {name!r}: {why}")
    spec = _painted(figure.spec())
    shape = {**spec["layout"], "title": {"text": escape(figure.title), "x": 0}, "paper_bgcolor": COLOURS["paper"]}
    shape |= {"plot_bgcolor": COLOURS["paper"], "font": {"color": COLOURS["ink"]}}
    shape["margin"] = {**shape["margin"], "t": 84}
    return go.Figure(data=spec["data"], layout=shape)


def _painted(value: Any) -> Any:
    """The specification with colours in place of their names."""
    if isinstance(value, str) and value.startswith("@"):
        return COLOURS[value[1:]]
    if isinstance(value, dict):
        return {key: _painted(item) for key, item in value.items()}
    return [_painted(item) for item in value] if isinstance(value, list) else value


def run_html(run: Run) -> str:
    """A run's verdict card."""
    facts = Facts(run)
    found = verdict(facts)
    tiles = "".join(
        f"<tr><td>{escape(tile.question)}</td><td>{_badge(tile.tone, tile.chip)}</td>"
        f"<td><b>{escape(tile.value)}</b></td>"
        f'<td style="text-align:left">{prose(tile.detail)}</td></tr>'
        for tile in found.tiles
    )
    said = " → ".join(f"{interval(item.value, percent)} {item.name}" for item in found.accuracies)
    accuracy = f"<p>Accuracy: {escape(said)}</p>" if said else ""
    where = f'<p style="color:{COLOURS["muted"]}">{escape(visible(str(run.path)))}</p>'
    return (
        f'<div class="rocktokens-run"><h3>{prose(found.title)}</h3><p>{_badge(found.tone, LABELS[found.state])} '
        f"{prose(found.line)}</p><table>{tiles}</table>{accuracy}{where}</div>"
    )


def rocks_html(report: Any) -> str:
    """The declared tokens of a detection (a `RockReport`), with what each costs."""
    rows = [row for row in report.tables["types"].to_pylist() if row[f"in_{report.definition}"]]
    cells = [
        [
            f"<code>{escape(visible(row['token']))}</code>",
            str(row["token_id"]),
            escape(str(row.get("class") or NONE)),
            number(row["count"], 0),
            f"{number(row.get('loss_pre'), 3)} → {number(row['loss_post'], 3)}",
            number(row.get("r"), 1),
        ]
        for row in rows[:MAX_ROWS]
    ]
    word = "rock" if report.has_pre else "costly token"
    title = f"{plural(len(rows), word)} of {plural(report.num_types, 'token type')} by `{report.definition}`"
    header = ["token", "id", "class", "count", "loss before → after", "burden R"]
    return f'<div class="rocktokens-rocks"><p>{prose(title)}</p>{_table(header, cells, len(rows))}</div>'


def census_html(census: Any) -> str:
    """The verdicts of a census (a `Census`), largest effects first."""
    rows = [row for row in census.results if row.banned.role == "candidate"]
    rows.sort(key=lambda row: -abs(row.delta))
    cells = [
        [
            f"<code>{escape(visible(row.banned.token))}</code>",
            str(row.banned.token_id),
            escape(row.verdict),
            interval(Estimate(row.delta, row.low, row.high, 0), points),
            percent(row.used_share),
        ]
        for row in rows[:MAX_ROWS]
    ]
    counts = ", ".join(f"{count} {escape(name)}" for name, count in census.counts().items())
    base = interval(census.accuracy, percent)
    header = ["banned", "id", "verdict", "Δ, points", "used in"]
    said = f"{plural(len(rows), 'candidate')}: {counts}; baseline accuracy {base}"
    said += f", ε = {number(100 * census.epsilon, 1)} points"
    return f'<div class="rocktokens-census"><p>{said}</p>{_table(header, cells, len(rows))}</div>'


def _badge(tone: str, text: str) -> str:
    colour = TONES[tone]
    style = f"color:{colour};border:1.5px solid {colour};border-radius:999px;padding:0 .6em;white-space:nowrap"
    return f'<span style="{style}">{escape(text)}</span>'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], count: int) -> str:
    head = "".join(f"<th>{name}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    more = f"<p>{count - len(rows)} more</p>" if count > len(rows) else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"
