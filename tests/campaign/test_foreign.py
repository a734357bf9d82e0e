"""Files that are none of ours, given to every command that reads one: one sentence."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from attacks import SEED, Account, attempt, pair_and_prompts


def foreign_contents() -> dict[str, bytes]:
    return {
        "empty": b"",
        "bytes": random.Random(f"{SEED}/foreign").randbytes(500),
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


def foreign_commands(home: Path, pair: Any, file: Path) -> dict[str, list[str]]:
    models = ["--pair.student", pair.student, "--pair.teacher", pair.teacher]
    new, out = str(home / "new"), str(home / "out")
    return {
        "sample": ["sample", new, "--prompts.source", str(file), *models],
        "distill": ["distill", new, "--prompts.source", str(file), *models],
        "detect": ["detect", "--occurrences", str(file), "--out", out],
        "detect counts": ["detect", "--counts", str(file), "--out", out],
        "census": ["census", "--outcomes", str(file), "--out", out],
        "study": ["study", str(file.with_suffix(".yaml")), "--path", new],
        "student": ["sample", new, "--pair.student", str(file), "--pair.teacher", pair.teacher],
        "report": ["report", str(file)],
        "import": ["import", "jsonl", str(file), "--tokenizer", pair.student, "--out", out],
    }


def try_foreign(case: dict[str, str], home: Path, pair: Any) -> str | None:
    """A file that is none of ours, given to a command."""
    file = home / f"{case['content']}.jsonl"
    for path in (file, file.with_suffix(".yaml")):
        path.write_bytes(foreign_contents()[case["content"]])
    status, said, problem = attempt(foreign_commands(home, pair, file)[case["command"]])
    accepted = case["content"] == "nul" and case["command"] in ("sample", "distill")
    return f"accepted: {said[-200:]}" if not problem and status == 0 and not accepted else problem


@pytest.mark.campaign
def test_foreign_files(tmp_path):
    account = Account("foreign files")
    pair, _ = pair_and_prompts(tmp_path)
    for content in foreign_contents():
        for command in foreign_commands(tmp_path, pair, tmp_path / "x.jsonl"):
            case = {"content": content, "command": command}
            account.note(case, try_foreign(case, tmp_path, pair))
    account.close()
