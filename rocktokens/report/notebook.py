"""What a notebook shows of a run: the verdict card, and any figure of the report.

`Run` finds this module by its name when a notebook asks it for HTML, because it imports nothing from above.
"""

from __future__ import annotations

import difflib
import re
from html import escape
from typing import Any

from rocktokens.errors import ConfigError, DataError
from rocktokens.facts import Facts
from rocktokens.report.conclusions import said_accuracies, verdict
from rocktokens.report.page import resource, templates
from rocktokens.report.stage import FIGURES
from rocktokens.run import Run
from rocktokens.show import visible

# The report's light colours by the names that figures use, from the stylesheet that the page has them from.
COLOURS = dict(re.findall(r"--(\w+): (#\w+);", resource("report.css").partition("}")[0]))
TONES = {"good": COLOURS["third"], "bad": COLOURS["rock"], "open": COLOURS["fifth"], "none": COLOURS["muted"]}
CARD = """{% macro badge(tone, text) %}<span style="color:{{ tones[tone] }};border:1.5px solid {{ tones[tone] }};
border-radius:999px;padding:0 .6em;white-space:nowrap">{{ text }}</span>{% endmacro %}
<div class="rocktokens-run"><h3>{{ found.title | prose }}</h3>
<p>{{ badge(found.tone, found.label) }} {{ found.line | prose }}</p><table>
{% for tile in found.tiles %}<tr><td>{{ tile.question }}</td><td>{{ badge(tile.tone, tile.chip) }}</td>
<td><b>{{ tile.value }}</b></td><td style="text-align:left">{{ tile.detail | prose }}</td></tr>{% endfor %}
</table>{% if accuracies %}<p>Accuracy: {{ accuracies }}</p>{% endif %}<p>{{ path }}</p></div>"""


def run_html(run: Run) -> str:
    """A run's verdict card."""
    found = verdict(Facts(run))
    card = templates().from_string(CARD)
    return card.render(found=found, tones=TONES, accuracies=said_accuracies(found), path=visible(str(run.path)))


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
