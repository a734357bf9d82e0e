"""The formats that can be imported, by name; a format's module is loaded when it is used."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rocktokens.errors import ConfigError, DataError
from rocktokens.interop.samples import Dump

FORMATS = {
    "slime": "slime's --dump-details: train_data/N.pt (or rollout_data/N.pt)",
    "prime-rl": "prime-rl's enable_token_export: token_exports/step_N/rank_R.jsonl",
    "trl": "TRL's log_completions Parquet with the telemetry of our trainer",
    "verl": "verl's rollout_data_dir JSONL, or its batch saved as plain tensors (.pt)",
    "jsonl": "JSONL of token_ids, student_logprobs and teacher_logprobs",
}


def read_dump(name: str, files: Sequence[Path]) -> Dump:
    """Read a dump.

    Args:
        name: one of FORMATS.
        files: files, or directories that are searched for the format's files.

    Returns:
        The samples in the order of their steps, and notes for the user.
    """
    if name not in FORMATS:
        near = difflib.get_close_matches(name, FORMATS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(FORMATS)}"
        raise ConfigError(f"no format is called {name!r}; {hint}")
    if not files:
        raise ConfigError(f"give at least one file of {FORMATS[name]}")
    missing = [path for path in files if not path.exists()]
    if missing:
        raise DataError(f"there is no file {missing[0]}")
    dump: Dump = import_module(f"rocktokens.interop.{name.replace('-', '_')}").read(list(files))
    if not dump.samples:
        raise DataError(f"{files[0]} holds no rollouts of {FORMATS[name]}")
    return dump


def files_below(paths: Sequence[Path], *patterns: str) -> list[Path]:
    """The files given, and those of the patterns below the directories given."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            below = sorted({file for pattern in patterns for file in path.rglob(pattern)})
            if not below:
                raise DataError(f"{path} holds no file {' or '.join(patterns)}")
            found += below
        else:
            found.append(path)
    return found
