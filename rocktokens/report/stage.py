"""The report stage: finds the tokenizer that spells the prompts, where there is one, and calls the report package.

The report itself reads tables only; a run whose tokenizer is not at hand gets the same report with prompts by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from rocktokens.report.build import REPORT, contents
from rocktokens.report.build import report as build
from rocktokens.run import Run, open_run, working_on
from rocktokens.stage import Stage, stale_stages
from rocktokens.tokens import FOLDER, run_tokenizer

log = logging.getLogger(__name__)


def report(path: Path, *, again: bool = False) -> Run:
    """Write a run's report.html and figures/."""
    with working_on(path):
        run = open_run(path)
        stage = Stage(run, "report", {}, {"the run": contents(run)})
        if not (path / REPORT).exists() or stage.due(again):
            stale = [name for name in stale_stages(run) if name != "report"]
            if stale:
                log.warning(
                    "%s: what %s read has changed since; run %s again, or the report shows tables that do not agree",
                    path,
                    ", ".join(stale),
                    "it" if len(stale) == 1 else "them",
                )
            stage.run = build(path, again=True, decode=decoder_of(run))
            stage.finish(stage.run.facts("report"))
        return stage.run


def decoder_of(run: Run) -> Callable[[Sequence[int]], str] | None:
    """Token ids to text, by the run's tokenizer where it is on this disk."""
    student = (run.manifest["config"].get("pair") or {}).get("student", "")
    if not (run.path / FOLDER).is_dir() and not (student and Path(student).exists()):
        return None
    tokenizer = run_tokenizer(run)
    return None if tokenizer is None else lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
