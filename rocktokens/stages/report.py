"""The stage that reports: finds the tokenizer that spells the prompts, where there is one, and calls the report's room.

The report itself reads tables only; a run whose tokenizer is not at hand gets the same report with prompts by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from rocktokens.config import PairConfig
from rocktokens.config.base import from_mapping
from rocktokens.errors import RockTokensError
from rocktokens.report.build import is_current
from rocktokens.report.build import report as build
from rocktokens.runs.store import Run, open_run

log = logging.getLogger(__name__)


def report(path: Path, *, again: bool = False, images: bool = True) -> Run:
    """Write a run's report.html and figures/."""
    run = open_run(path)
    needed = again or not is_current(run)
    return build(path, again=again, images=images, decode=_decoder(run) if needed else None)


def _decoder(run: Run) -> Callable[[Sequence[int]], str] | None:
    """Token ids to text, by the tokenizer beside the student; it is loaded when the first prompt is to be shown."""
    pair = run.manifest["config"].get("pair")
    if not pair or not Path(pair.get("student", "")).exists():
        return None
    try:
        from rocktokens.lm.pair import load_tokenizer

        settings = from_mapping(PairConfig, pair)
        tokenizer = load_tokenizer(settings.student, settings)
    except RockTokensError as error:
        log.info("prompts are shown by name: %s", error)
        return None
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
