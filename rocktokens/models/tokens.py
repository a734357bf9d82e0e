"""The tokenizer that names a run's tokens: a copy in the run itself, else the one beside the pair's student."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocktokens.errors import RockTokensError
from rocktokens.models.settings import PairConfig
from rocktokens.run import Run, reading
from rocktokens.settings import is_granted

log = logging.getLogger(__name__)

FOLDER = "tokenizer"


def run_tokenizer(run: Run) -> Any | None:
    """The run's tokenizer; None, with a word in the log, where it cannot be loaded."""
    known = run.manifest["config"].get("pair") or {}
    own = run.path / FOLDER
    source = str(own) if own.is_dir() else str(known.get("student") or "")
    if not source:
        return None
    try:
        from rocktokens.models.pair import load_tokenizer

        return load_tokenizer(source, PairConfig(trust_remote_code=is_granted("model code")))
    except (RockTokensError, ImportError) as error:
        log.warning("tokens are named by their ids: %s", error)
        return None


class Spelling:
    """What turns token ids into text, from a tokenizer.json: no transformers, no torch."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of the ids."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def spelling(run: Run) -> Any | None:
    """What names the run's tokens: its own tokenizer.json or the student's, else its tokenizer by transformers."""
    for folder in (run.path / FOLDER, Path((run.manifest["config"].get("pair") or {}).get("student") or "-")):
        path = folder / "tokenizer.json"
        if path.is_file():
            with reading(path, "restore it"):
                return Spelling(path)
    return run_tokenizer(run)
