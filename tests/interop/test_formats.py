"""Importers against files built to the other trainers' source."""

from __future__ import annotations

import os

import dumps
import numpy as np
import pytest
import torch

from rocktokens.errors import ConfigError, DataError
from rocktokens.interop.formats import FORMATS, read_dump

ROWS = dumps.rollouts(12)


# Files of a format, in the richest form it has.
WRITTEN = {
    "slime": dumps.slime,
    "prime-rl": lambda path, rows: dumps.prime_rl(path, rows, teacher=True),
    "trl": dumps.trl,
    "verl": dumps.verl_jsonl,
    "jsonl": lambda path, rows: dumps.jsonl(path / "mine.jsonl", rows),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("whole_directory", [False, True])
def test_every_format_gives_back_what_was_sampled_and_what_it_cost(tmp_path, name, whole_directory):
    files = WRITTEN[name](tmp_path, ROWS)
    dump = read_dump(name, [tmp_path] if whole_directory else files)
    assert len(dump.samples) == len(ROWS)
    assert dump.has_teacher
    assert dump.has_kl == (name == "trl")
    for sample, row in zip(dump.samples, ROWS):
        assert (sample.step, list(sample.token_ids)) == (row["step"], row["tokens"])
        assert name == "trl" or list(sample.prompt_ids) == row["prompt"]
        np.testing.assert_allclose(sample.ratio_T, row["student"] - row["teacher"], atol=1e-5)
        np.testing.assert_allclose(sample.student_logprob_T, row["student"], atol=1e-5)


def test_verls_batch_has_the_teacher_one_place_to_the_left(tmp_path):
    dump = read_dump("verl", dumps.verl_batch(tmp_path, ROWS))
    for sample, row in zip(dump.samples, ROWS):
        assert list(sample.token_ids) == row["tokens"]
        assert list(sample.prompt_ids) == row["prompt"]
        np.testing.assert_allclose(sample.teacher_logprob_T, row["teacher"], atol=1e-5)


def test_the_rollout_of_prime_rl_begins_where_the_first_token_counts(tmp_path):
    rows = dumps.rollouts(2)
    rows[0]["mask"][2] = 0  # a tool's output in the middle
    sample = read_dump("prime-rl", dumps.prime_rl(tmp_path, rows, teacher=True)).samples[0]
    assert list(sample.prompt_ids) == rows[0]["prompt"]
    assert sample.counts_T.tolist() == [bool(m) for m in rows[0]["mask"]]


# What is refused


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["slime", "verl"])
def test_a_pickle_is_refused_and_nothing_in_it_is_executed(tmp_path, name):
    touched, file = tmp_path / "executed", tmp_path / "0.pt"
    torch.save({"samples": [Evil(str(touched))], "prompts": 1, "responses": 2}, file)
    with pytest.raises(DataError, match=r"weights_only.*nothing was executed"):
        read_dump(name, [file])
    assert not touched.exists()


@pytest.mark.parametrize(
    ("make", "name", "says"),
    [
        (lambda p: dumps.verl_jsonl(p, ROWS, ids=False), "verl", "text only.*reward_extra_infos_dict"),
        (lambda p: dumps.verl_batch(p, ROWS, top_k=4), "verl", "top 4 tokens"),
        (lambda p: dumps.trl(p, ROWS, telemetry=False), "trl", "text alone.*telemetry"),
        (lambda p: dumps.prime_rl(p, ROWS, stable=False), "prime-rl", "STABLE"),
    ],
)
def test_files_that_cannot_serve_say_what_is_missing(tmp_path, make, name, says):
    with pytest.raises(DataError, match=f"(?s){says}"):
        read_dump(name, make(tmp_path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1: not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"ids": [1]}', "token_ids"),
        ('{"token_ids": []}', "no tokens"),
        ('{"token_ids": [1.5]}', "whole numbers"),
        ('{"token_ids": [-1]}', "negative"),
        ('{"token_ids": [1, 2], "student_logprobs": [0.1]}', "student_logprobs has 1 entries"),
        ("", "holds no rollouts"),
    ],
)
def test_broken_lines_are_named(tmp_path, text, says):
    file = tmp_path / "mine.jsonl"
    file.write_text(text + "\n")
    with pytest.raises(DataError, match=says):
        read_dump("jsonl", [file])


def test_files_that_are_not_there_or_not_of_the_format_are_named(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'prime-rl'"):
        read_dump("prime_rl", [])
    with pytest.raises(DataError, match="no file"):
        read_dump("slime", [tmp_path / "x.pt"])
    with pytest.raises(DataError, match=r"holds no file \*.pt"):
        read_dump("slime", [tmp_path])
    torch.save({"a": torch.ones(2)}, tmp_path / "0.pt")
    with pytest.raises(DataError, match="no list `samples`"):
        read_dump("slime", [tmp_path / "0.pt"])
    (tmp_path / "1.pt").write_bytes(b"not a torch file")
    with pytest.raises(DataError, match="damaged or no torch file"):
        read_dump("slime", [tmp_path / "1.pt"])
