"""The report stage: a run in, one self-contained HTML file and the rows of its figures out.

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
from rocktokens.models.tokens import FOLDER, run_tokenizer
from rocktokens.report.page import REPORT, page
from rocktokens.report.viewer import Decode, fitted, payload
from rocktokens.run import Run, digest_of_value, open_run, working_on, write_text
from rocktokens.show import Figure, to_csv
from rocktokens.stage import Stage, stale_stages
from rocktokens.train import figures as distill

log = logging.getLogger(__name__)

FIGURES: dict[str, Callable[[Facts], Figure | None]] = {
    "footprint": detect.footprint,
    "funnel": detect.funnel,
    "clusters": detect.clusters,
    "training_loss": distill.training_loss,
    "persistence": detect.persistence,
    "gradients": geometry.gradients,
    "alignment": geometry.alignment,
    "knockouts": causal.knockouts,
    "grafts": causal.grafts,
    "accuracy_tokens": compare.accuracy_tokens,
    "time": compare.time_spent,
    "sensitivity": detect.sensitivity,
}


def report(path: str | Path, *, again: bool = False, decode: Decode | None = None) -> Run:
    """Write a run's report.html and figures/.

    Args:
        path: The run.
        again: Write it although nothing was completed since the last one.
        decode: Token ids to text; unset: the run's own tokenizer, where it is on this disk.
    """
    path = Path(path)
    with working_on(path):
        run = open_run(path)
        stage = Stage(run, "report", {}, {"the run": contents(run)})
        if (path / REPORT).exists() and not stage.due(again):
            return run
        stale = [name for name in stale_stages(run) if name != "report"]
        if stale:
            log.warning("%s: run %s again: what it read has changed, and tables may not agree", path, ", ".join(stale))
        facts = Facts(run)
        figures = [figure for name in FIGURES if (figure := _drawn(name, facts)) is not None]
        with understood(path):
            viewer = payload(facts, decode or decoder_of(run))
            html = page(facts, figures, None if viewer is None else fitted(viewer))
        write_text(path / REPORT, html)
        for figure in figures:
            write_text(path / "figures" / f"{figure.name}.csv", to_csv(figure.rows))
        stage.finish({"figures": len(figures), "bytes": len(html.encode())})
        return run


def _drawn(name: str, facts: Facts) -> Figure | None:
    """A figure; one that the run's values do not allow is left out and named."""
    try:
        with understood(facts.run.path):
            return FIGURES[name](facts)
    except DataError as error:
        facts.notes.append(f"the figure {name} was left out: {error}")
        return None


def contents(run: Run) -> str:
    """A digest of what a run holds: settings, versions, what every stage recorded and wrote, in whatever order."""
    known = run.manifest
    stages = {name: facts for name, facts in known["stages"].items() if name != "report"}
    config = {name: own for name, own in known["config"].items() if name != "report"}
    return digest_of_value([config, known.get("versions"), stages, known.get("files", {})])


def decoder_of(run: Run) -> Decode | None:
    """Token ids to text, by the run's tokenizer where it is on this disk; None where it is not."""
    student = (run.manifest["config"].get("pair") or {}).get("student", "")
    if not (run.path / FOLDER).is_dir() and not (student and Path(student).exists()):
        return None
    tokenizer = run_tokenizer(run)
    return None if tokenizer is None else lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
