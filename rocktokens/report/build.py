"""The report stage: a run in, one self-contained HTML file and the figures beside it out.

Reads Parquet and the manifest, loads no model. What a run does not have is left out and named; nothing is guessed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from rocktokens.causal import figures as causal
from rocktokens.compare import figures as compare
from rocktokens.detect import figures as detect
from rocktokens.errors import DataError
from rocktokens.facts import Facts, understood
from rocktokens.geometry import figures as geometry
from rocktokens.report.page import as_json, packed, page
from rocktokens.report.run_conclusions import answer
from rocktokens.report.viewer import Decode, fitted, payload
from rocktokens.run import Run, digest_of_value, open_run, write_text
from rocktokens.show import Figure, to_csv
from rocktokens.train import figures as distill

log = logging.getLogger(__name__)

REPORT = "report.html"
# The order of the report; the rollout viewer stands after the footprint.
FIGURES: tuple[Callable[[Facts], Figure | None], ...] = (
    detect.footprint,
    detect.funnel,
    detect.density,
    detect.clusters,
    distill.training_loss,
    distill.persistence,
    geometry.gradients,
    geometry.alignment,
    causal.knockouts,
    causal.grafts,
    compare.accuracy_seconds,
    compare.accuracy_tokens,
    compare.time_spent,
    detect.sensitivity,
)


def report(path: str | Path, *, again: bool = False, decode: Decode | None = None) -> Run:
    """Write report.html and figures/ for a run.

    A report is made anew when any stage was completed since; `again` makes it whatever happened. `decode` turns prompt
    ids into text for the viewer.
    """
    run = open_run(path)
    made_of = contents(run)
    if not again and is_current(run):
        log.info("%s: the report is there; nothing to do", path)
        return run
    facts = Facts(run)
    figures = [figure for make in FIGURES if (figure := _drawn(make, facts)) is not None]
    with understood(run.path):
        viewer = payload(facts, decode)
        if viewer is not None:
            viewer = fitted(viewer, lambda some: len(packed(as_json(some))))
        html = page(facts, answer(facts), figures, viewer)
    write_text(run.path / REPORT, html)
    folder = run.path / "figures"
    for figure in figures:
        write_text(folder / f"{figure.name}.csv", to_csv(figure.rows))
    run.finish("report", {"made_of": made_of, "figures": len(figures), "bytes": len(html.encode())})
    return run


def _drawn(make: Callable[[Facts], Figure | None], facts: Facts) -> Figure | None:
    """A figure; one that the run's values do not allow is left out and named."""
    try:
        with understood(facts.run.path):
            return make(facts)
    except DataError as error:
        facts.notes.append(f"the figure {make.__name__} was left out: {error}")
        return None


def is_current(run: Run) -> bool:
    """Whether the run's report is there and nothing happened since."""
    known = run.facts("report").get("made_of") if run.done("report") else None
    return known == contents(run) and (run.path / REPORT).exists()


def contents(run: Run) -> str:
    """A digest of what a run holds: settings, versions, what every stage recorded and wrote, in whatever order."""
    known = run.manifest
    stages = {name: facts for name, facts in known["stages"].items() if name != "report"}
    config = {name: own for name, own in known["config"].items() if name != "report"}
    return digest_of_value([config, known.get("versions"), stages, known.get("files", {})])
