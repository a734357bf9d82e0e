"""The tokenizer that names a run's tokens: a copy in the run itself, else the student's.

Names need a tokenizer.json alone, and not transformers: `detect`, `bypass`, `report`, `import` and `export` work where
torch is not installed. Only a tokenizer without that file is loaded by transformers.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocktokens.errors import ConfigError, RockTokensError
from rocktokens.models.settings import PairConfig
from rocktokens.run import Run, reading
from rocktokens.settings import is_granted

log = logging.getLogger(__name__)

FOLDER = "tokenizer"
FILE, DETAILS = "tokenizer.json", "tokenizer_config.json"


class Spelling:
    """A tokenizer by its tokenizer.json: ids to text, the vocabulary, the end token."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        details = path.parent / DETAILS
        with reading(path, "restore it"):
            self._tokenizer = Tokenizer.from_file(str(path))
        with reading(details, "restore it"):
            self._details = json.loads(details.read_text(encoding="utf-8")) if details.is_file() else {}
        self._folder = path.parent

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Tokens and their ids, with those that only tokenizer_config.json names: as transformers has them."""
        added = self._details.get("added_tokens_decoder", {})
        return self._tokenizer.get_vocab() | {own["content"]: int(token_id) for token_id, own in added.items()}

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end token; None where the files name none."""
        named = self._details.get("eos_token")
        return self.get_vocab().get(str(named["content"] if isinstance(named, dict) else named))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of the ids."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def save_pretrained(self, folder: Path) -> None:
        """Copy the files."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in (FILE, DETAILS, "special_tokens_map.json", "chat_template.jinja"):
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, folder / name)


def open_tokenizer(name: str) -> Any:
    """A tokenizer by its directory or hub name."""
    folder, why = Path(name).expanduser(), f"there is no {FILE} in it"
    if (folder / FILE).is_file():
        return Spelling(folder / FILE)
    if not folder.exists() and not folder.is_absolute():
        from huggingface_hub import hf_hub_download

        try:
            hf_hub_download(name, DETAILS)  # lies beside the other file in the hub's cache
            return Spelling(Path(hf_hub_download(name, FILE)))
        except (OSError, ValueError) as error:  # not there, no network, no name of the hub: transformers says which
            why = str(error).splitlines()[0]
    if not importlib.util.find_spec("transformers"):
        raise ConfigError(f'tokenizer {name}: {why}; `pip install "rocktokens[train]"` reads other kinds')
    from rocktokens.models.pair import load_tokenizer

    return load_tokenizer(name, PairConfig(trust_remote_code=is_granted("model code")))


def run_tokenizer(run: Run) -> Any | None:
    """The run's tokenizer; None, with a warning, where it cannot be loaded."""
    copied = run.path / FOLDER
    source = str(copied) if copied.is_dir() else str((run.manifest["config"].get("pair") or {}).get("student") or "")
    try:
        return open_tokenizer(source) if source else None
    except (RockTokensError, ImportError) as error:
        log.warning("tokens are named by their ids: %s", error)
        return None
