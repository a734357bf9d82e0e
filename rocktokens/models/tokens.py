"""The tokenizer that names a run's tokens: a copy in the run itself, else the student's."""

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
    """The run's tokenizer; None, with a warning, where it cannot be loaded."""
    source = str(run.path / FOLDER) if (run.path / FOLDER).is_dir() else _student(run)
    try:
        from rocktokens.models.pair import load_tokenizer

        return load_tokenizer(source, PairConfig(trust_remote_code=is_granted("model code"))) if source else None
    except (RockTokensError, ImportError) as error:
        log.warning("tokens are named by their ids: %s", error)
        return None


def _student(run: Run) -> str:
    return str((run.manifest["config"].get("pair") or {}).get("student") or "")


class Spelling:
    """Token ids to text by a tokenizer.json alone: no transformers, no torch."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of the ids."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def spelling(run: Run) -> Any | None:
    """The run's tokenizer.json or the student's where there is one, else its tokenizer by transformers."""
    for path in (run.path / FOLDER / "tokenizer.json", Path(_student(run) or "-") / "tokenizer.json"):
        if path.is_file():
            with reading(path, "restore it"):
                return Spelling(path)
    return run_tokenizer(run)
