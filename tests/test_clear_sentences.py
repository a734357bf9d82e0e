"""One clear sentence in place of a traceback, for settings and files that cannot work."""

from __future__ import annotations

from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from small_runs import DISTILL, save_pair
from tiny import tiny_tokenizer

from rocktokens.cli import main
from rocktokens.errors import ConfigError, DataError, RunError
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import load_prompts
from rocktokens.train.stage import distill


def said(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code in (1, 2)
    text = "".join(capsys.readouterr())
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"prompt": "caf\xe9"}\n', "not UTF-8 text"),
        (b'{"prompt": "\\ud800"}\n', "surrogate"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "not valid JSON|holds text"),
    ],
)
def test_prompt_files_that_are_none(tmp_path, content, words):
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=words):
        load_prompts(PromptsConfig(source=str(tmp_path / "bad.jsonl")), tiny_tokenizer())


def test_duplicate_prompts_are_counted(tmp_path, caplog):
    (tmp_path / "double.jsonl").write_text('{"prompt": "w4 w5"}\n' * 3 + '{"prompt": "w6"}\n')
    load_prompts(PromptsConfig(source=str(tmp_path / "double.jsonl")), tiny_tokenizer())
    assert "2 of 4 prompts stand there more than once" in caplog.text


def test_a_split_is_refused_where_a_stage_has_a_part_of_its_own(tmp_path):
    """`distill` trains on a part of the prompts; a mistyped split must not be passed over for that."""
    with pytest.raises(ConfigError, match="no split 'nosuch'"):
        load_prompts(PromptsConfig(source="arithmetic", split="nosuch", limit=4), tiny_tokenizer(), part="train")
    with pytest.raises(ConfigError, match="leave answer_field out"):
        load_prompts(PromptsConfig(source="arithmetic", answer_field="nosuch", limit=4), tiny_tokenizer())
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "w5 w6"}\n' * 3)
    with pytest.raises(ConfigError, match="no splits"):
        load_prompts(PromptsConfig(source=str(file), split="test"), tiny_tokenizer())


def test_unknown_splits_and_answer_columns(tmp_path):
    with pytest.raises(ConfigError, match="no split 'nosuch'; there are train, detection, causal"):
        load_prompts(PromptsConfig(split="nosuch"), tiny_tokenizer())
    (tmp_path / "p.jsonl").write_text('{"prompt": "w4 w5"}\n')
    with pytest.raises(DataError, match=r"no row of .* has column 'solution'"):
        load_prompts(PromptsConfig(source=str(tmp_path / "p.jsonl"), answer_field="solution"), tiny_tokenizer())


def test_token_ids_are_whole_numbers(tmp_path, capsys):
    rows = {"rollout_id": ["a", "a"], "position": [0, 1], "token_id": [5.5, 6.0], "loss": [1.0, 2.0]}
    pq.write_table(pa.table(rows), tmp_path / "o.parquet")
    text = said(capsys, "detect", "--occurrences", str(tmp_path / "o.parquet"), "--out", str(tmp_path / "out"))
    assert "token_id must hold whole numbers" in " ".join(text.split())


def test_flags_that_would_be_ignored_are_refused(tmp_path, capsys):
    assert "--occurrences" in said(capsys, "detect", str(tmp_path), "--out", str(tmp_path / "out"))


def test_a_name_that_is_too_long(tmp_path, capsys):
    assert "File name too long" in said(capsys, "report", str(tmp_path / ("a" * 300)))


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_made(tmp_path):
    pair, prompts = save_pair(tmp_path / "pair")
    from dataclasses import replace

    with pytest.raises(ConfigError, match="nosuchtracker, which is not installed"):
        distill(tmp_path / "run", pair, prompts, replace(DISTILL, report_to=("nosuchtracker",)))
    assert not (tmp_path / "run").exists()


def test_resume_files_are_tensors_or_refused(tmp_path):
    from rocktokens.train.checkpoints import _load_resume_file

    torch.save({"step": torch.tensor(1)}, tmp_path / "optimizer.pt")
    assert _load_resume_file(tmp_path / "optimizer.pt")["step"] == 1
    torch.save({"evil": PurePosixPath("x")}, tmp_path / "optimizer.pt")
    with pytest.raises(RunError, match="damaged or holds more than tensors"):
        _load_resume_file(tmp_path / "optimizer.pt")
    (tmp_path / "rng_state.pth").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(RunError, match="damaged"):
        _load_resume_file(tmp_path / "rng_state.pth")
