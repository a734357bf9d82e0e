"""How a run shows itself in a notebook. The pictures are made by the report, which is found by its name."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Displayed:
    """A verdict card and figures for a run, made by report/notebook.py."""

    def _repr_html_(self) -> str:
        return str(import_module("rocktokens.report.notebook").run_html(self))

    def plot(self, name: str) -> Any:
        """A figure of the report by its name, e.g. `funnel`, as a plotly figure."""
        return import_module("rocktokens.report.notebook").plot(self, name)
