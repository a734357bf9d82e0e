"""Files that are none of ours, given to the commands that read one: one sentence."""

from __future__ import annotations

import random

import pytest
from attacks import SEED, Account, attempt, pair_and_prompts


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return pair_and_prompts(tmp_path_factory.mktemp("foreign"))


@pytest.mark.campaign
def test_foreign_files(tmp_path, pair):
    account = Account("foreign files")
    rng = random.Random(f"{SEED}/foreign")
    deep = "[" * 100_000
    contents = {
        "empty": b"",
        "bytes": rng.randbytes(500),
        "latin": "prompt: caf\xe9".encode("latin-1"),
        "json": b'{"a": 1}',
        "list": b"[1, 2, 3]\n",
        "deep": deep.encode(),
        "surrogate": b'{"prompt": "\\ud800", "answer": "1"}\n',
        "huge number": b'{"prompt": ' + b"9" * 5000 + b"}\n",
        "no prompt": b'{"question": "1"}\n',
        "number": b'{"prompt": 5}\n',
        "nul": b'{"prompt": "a\\u0000b"}\n' * 20,
        "nested": b'{"prompt": {"a": [1]}}\n',
    }
    models = ["--pair.student", pair[0].student, "--pair.teacher", pair[0].teacher]
    for name, content in contents.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_bytes(content)
        for command in (
            ["sample", str(tmp_path / "new"), "--prompts.source", str(file), *models],
            ["distill", str(tmp_path / "new"), "--prompts.source", str(file), *models],
            ["detect", "--occurrences", str(file), "--out", str(tmp_path / "out")],
            ["study", str(tmp_path / f"{name}.yaml"), "--path", str(tmp_path / "new")],
            ["sample", str(tmp_path / "new"), "--pair.student", str(file), "--pair.teacher", pair[0].teacher],
            ["report", str(file)],
        ):
            (tmp_path / f"{name}.yaml").write_bytes(content)
            status, said, problem = attempt(command)
            accepted = name == "nul" and command[0] in ("sample", "distill")
            if not problem and status == 0 and not accepted:
                problem = f"accepted: {said[-200:]}"
            account.note({"content": name, "command": command[0]}, problem)
    account.close()
