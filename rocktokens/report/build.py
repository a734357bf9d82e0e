"""The report stage: a run in, one self-contained HTML file and the figures beside it out.

Reads Parquet and the manifest, loads no model. What a run does not have is left out and named; nothing is guessed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

from rocktokens.errors import RunError
from rocktokens.report.conclusions.run import answer
from rocktokens.report.figures import causal, compare, detect, distill, geometry, sensitivity
from rocktokens.report.figures.figure import Figure
from rocktokens.report.figures.images import export
from rocktokens.report.formats import to_csv
from rocktokens.report.html.page import as_json, packed, page
from rocktokens.report.html.viewer import Decode, fitted, payload
from rocktokens.report.run_facts import Facts
from rocktokens.runs.store import Run, open_run

log = logging.getLogger(__name__)

REPORT = "report.html"
# The order of the report; the rollout viewer stands after the footprint.
FIGURES: tuple[Callable[[Facts], Figure | None], ...] = (
    detect.footprint,
    detect.funnel,
    detect.sweep,
    detect.density,
    detect.clusters,
    distill.training_loss,
    distill.persistence,
    geometry.gradients,
    geometry.alignment,
    causal.knockouts,
    causal.grafts,
    compare.accuracy_seconds,
    compare.time_spent,
    sensitivity.sensitivity,
)


def report(path: str | Path, *, again: bool = False, decode: Decode | None = None, images: bool = True) -> Run:
    """Write report.html and figures/ for a run.

    A report is made anew when any stage was completed since; `again` makes it whatever happened. `decode` turns prompt
    ids into text for the viewer; `images` also writes every figure as SVG and PNG where a Chromium is at hand.
    """
    run = open_run(path)
    made_of = _digest(run)
    if not again and is_current(run):
        log.info("%s: the report is there; nothing to do", path)
        return run
    facts = Facts(run)
    figures = [figure for make in FIGURES if (figure := make(facts)) is not None]
    viewer = payload(facts, decode)
    if viewer is not None:
        viewer = fitted(viewer, lambda some: len(packed(as_json(some))))
    html = page(facts, answer(facts), figures, viewer)
    _write(run.path / REPORT, html)
    folder = run.path / "figures"
    for figure in figures:
        _write(folder / f"{figure.name}.csv", to_csv(figure.rows))
    written, note = (
        export(run.path / REPORT, folder, [figure.name for figure in figures]) if images else (0, "not asked for")
    )
    if note:
        log.info("figures as SVG and PNG were not written: %s", note)
    run.finish("report", {"made_of": made_of, "figures": len(figures), "images": written, "bytes": len(html.encode())})
    return run


def is_current(run: Run) -> bool:
    """Whether the run's report is there and nothing happened since."""
    known = run.facts("report").get("made_of") if run.done("report") else None
    return known == _digest(run) and (run.path / REPORT).exists()


def _digest(run: Run) -> str:
    """Tells apart what runs hold: settings, versions and what every stage recorded, in whatever order."""
    stages = {name: facts for name, facts in run.manifest["stages"].items() if name != "report"}
    text = json.dumps([run.manifest["config"], run.manifest.get("versions"), stages], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8", newline="\n")
        draft.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}; free some space, then repeat") from error
