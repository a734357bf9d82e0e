"""What a notebook shows of a run: the verdict, and any figure of the report.

`Run` finds this module by its name when a notebook asks it for HTML, because it imports nothing from above.
"""

from __future__ import annotations

import difflib
import re
from html import escape
from typing import Any

from markupsafe import Markup

from rocktokens.errors import ConfigError, DataError
from rocktokens.facts import Facts
from rocktokens.report.conclusions import verdict
from rocktokens.report.page import resource
from rocktokens.report.stage import FIGURES
from rocktokens.run import Run
from rocktokens.show import Column, Table, visible

# The report's light colours by the names that figures use, from the stylesheet that the page has them from.
COLOURS = dict(re.findall(r"--(\w+): (#\w+);", resource("report.css").partition("}")[0]))


def run_html(run: Run) -> str:
    """A run's verdict: the title, and the four questions in a table."""
    found = verdict(Facts(run))
    colours = {"good": "third", "bad": "rock", "open": "fifth", "none": "muted", "plain": "ink"}
    head = Markup('<h3>{}</h3><p><b style="color:{}">{}</b> {}</p>')
    shown = head.format(found.title, COLOURS[colours[found.tone]], found.label, visible(str(run.path)))
    columns = [Column(name, name) for name in ("question", "answer", "value", "detail")]
    rows = [tile._asdict() for tile in found.tiles]
    return shown + Table(columns, rows, caption=(f"Accuracy: {found.accuracy}",)).html(tools=False)


def plot(run: Run, name: str) -> Any:
    """A figure of the report as a plotly figure.

    Args:
        run: The run.
        name: One of the report's figures, e.g. funnel, knockouts or training_loss.

    Returns:
        A `plotly.graph_objects.Figure` in the report's light colours.
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
