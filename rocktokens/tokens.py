"""The tokenizer that names a run's tokens: a copy in the run itself, else the one beside the pair's student."""

from __future__ import annotations

import logging
from typing import Any

from rocktokens.errors import RockTokensError
from rocktokens.models.settings import PairConfig
from rocktokens.permissions import is_granted
from rocktokens.run import Run

log = logging.getLogger(__name__)

FOLDER = "tokenizer"


def run_tokenizer(run: Run) -> Any | None:
    """The run's tokenizer; None, with a word in the log, where it cannot be loaded."""
    known = run.manifest["config"].get("pair") or {}
    own = run.path / FOLDER
    source = str(own) if own.is_dir() else str(known.get("student") or "")
    if not source:
        return None
    from rocktokens.models.pair import load_tokenizer

    try:
        return load_tokenizer(source, PairConfig(trust_remote_code=is_granted("model code")))
    except RockTokensError as error:
        log.warning("tokens are named by their ids: %s", error)
        return None
