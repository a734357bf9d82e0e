"""Files that are none of ours, given to the commands that read one: one sentence."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from attacks import SEED, Account, attempt
from small_runs import save_pair

TEXTS = {
    "empty": b"",
    "latin": "prompt: caf\xe9".encode("latin-1"),
    "json": b'{"a": 1}',
    "list": b"[1, 2, 3]\n",
    "deep": b"[" * 100_000,
    "surrogate": b'{"prompt": "\\ud800", "answer": "1"}\n',
    "huge number": b'{"prompt": ' + b"9" * 5000 + b"}\n",
    "no prompt": b'{"question": "1"}\n',
    "number": b'{"prompt": 5}\n',
    "nul": b'{"prompt": "a\\u0000b"}\n' * 20,
    "nested": b'{"prompt": {"a": [1]}}\n',
}
READERS = ("sample", "distill", "detect", "study", "student", "report")
ACCEPTED = {("nul", "sample"), ("nul", "distill")}
"""A NUL inside a prompt's text is a character like any other."""


def command_of(reader: str, file: Path, pair) -> list[str]:
    """The command line that reads `file` as prompts, occurrences, settings, a model or a run."""
    new, models = str(file.parent / "new"), ["--pair.student", pair[0].student, "--pair.teacher", pair[0].teacher]
    return {
        "sample": ["sample", new, "--prompts.source", str(file), *models],
        "distill": ["distill", new, "--prompts.source", str(file), *models],
        "detect": ["detect", "--occurrences", str(file), "--out", str(file.parent / "out")],
        "study": ["study", str(file), "--path", new],
        "student": ["sample", new, "--pair.student", str(file), "--pair.teacher", pair[0].teacher],
        "report": ["report", str(file)],
    }[reader]


def try_one(case: dict, folder: Path, pair) -> str | None:
    """What went wrong, or None: `case` names the content of the file, the seed of random bytes and the command."""
    content, reader = case["content"], case["command"]
    file = folder / f"{content}.{'yaml' if reader == 'study' else 'jsonl'}"
    file.write_bytes(random.Random(case["seed"]).randbytes(500) if content == "bytes" else TEXTS[content])
    status, said, problem = attempt(command_of(reader, file, pair))
    if not problem and status == 0 and (content, reader) not in ACCEPTED:
        problem = f"accepted: {said[-200:]}"
    return problem


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("foreign"))


@pytest.mark.campaign
def test_foreign_files(tmp_path, pair):
    account = Account("foreign files")
    for content in ("bytes", *TEXTS):
        for reader in READERS:
            case = {"content": content, "seed": f"{SEED}/foreign", "command": reader}
            account.note(case, try_one(case, tmp_path, pair))
    account.close()
