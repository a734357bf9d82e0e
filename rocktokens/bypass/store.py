"""bypass.json: which token types training may skip, as a file that any trainer can read.

    found = read_bypass("runs/mine/bypass.json", fingerprint=fingerprint(tokenizer.get_vocab()))
    found.ids                               # token ids; meaningless under another tokenizer, hence the fingerprint

Nothing in the file is executed or believed: ids are checked, and a list made with another tokenizer is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rocktokens.errors import DataError
from rocktokens.values import Json

NAME = "bypass.json"
FORMAT, VERSION = "rocktokens bypass list", 1


@dataclass(frozen=True)
class BypassList:
    """A bypass list as it was read."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    fingerprint: str | None
    """Of the tokenizer that the ids belong to; None: the list does not say."""
    status: str
    """not compared, passed, failed or undecided: what training without these types did to accuracy."""
    text: str
    """The same in words, e.g. "compared: −0.1 [−0.8, 0.6]"."""
    content: Json
    """Everything the file holds."""


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """A digest of a tokenizer's tokens and their ids; the same for two tokenizers that give the same ids."""
    pairs = sorted((int(token_id), token) for token, token_id in vocabulary.items())
    return hashlib.blake2b(json.dumps(pairs).encode(), digest_size=16).hexdigest()


def read_bypass(path: str | Path, *, fingerprint: str | None = None) -> BypassList:
    """Read and check a bypass list.

    Args:
        path: a bypass.json, or a run directory that has one.
        fingerprint: of the tokenizer at hand (see `fingerprint`); a list of another one is refused.
    """
    path = Path(path)
    path = path / NAME if path.is_dir() else path
    if not path.is_file():
        raise DataError(f"there is no bypass list {path}; `rocktokens bypass RUN` makes one")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ids, said = content["ids"], (content["format"], content["version"])
        whole = said == (FORMAT, VERSION) and all(type(item) is int and item >= 0 for item in ids)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        whole = False
    if not whole or len(set(ids)) < len(ids):
        raise DataError(f"{path} is damaged, or not a bypass list: {FORMAT!r}, version {VERSION}, with different ids")
    made_with = content.get("tokenizer")
    theirs = made_with.get("fingerprint") if isinstance(made_with, dict) else None
    if fingerprint is not None and theirs is not None and theirs != fingerprint:
        raise DataError(
            f"{path} was made with another tokenizer: its fingerprint is {theirs}, this one's is {fingerprint}. "
            "Token ids mean other tokens here; make a list for this pair with `rocktokens bypass`."
        )
    comparison = content.get("comparison")
    comparison = comparison if isinstance(comparison, dict) else {}
    tokens = content.get("tokens")
    tokens = tokens if isinstance(tokens, list) and len(tokens) == len(ids) else [f"#{token_id}" for token_id in ids]
    status, text = str(comparison.get("status", "not compared")), str(comparison.get("text", "not compared"))
    return BypassList(tuple(ids), tuple(map(str, tokens)), theirs, status, text, content)
