"""Plain JSONL: one rollout per line, with its token ids and two lists of log-probabilities.

    {"prompt_ids": [...], "token_ids": [...], "student_logprobs": [...], "teacher_logprobs": [...],
     "step": 10, "prompt_id": "a", "mask": [...], "kl": [...], "text": "...", "correct": true, "truncated": false}

Only `token_ids` is required. The lists run over the rollout's tokens, the prompt's not included.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rocktokens.errors import DataError
from rocktokens.interop.formats import files_below
from rocktokens.interop.samples import Dump, Sample, checked, floats, json_lines, whole_numbers
from rocktokens.values import Row

LISTS = ("prompt_ids", "token_ids", "student_logprobs", "teacher_logprobs", "engine_logprobs", "kl", "mask")
KNOWN = {*LISTS, "student_entropy", "teacher_entropy", "step", "prompt_id", "rollout_id", "text", "answer", "correct"}
KNOWN |= {"truncated", "tokenizer"}


def read(files: list[Path]) -> Dump:
    """Every line of every file."""
    samples, tokenizers, unknown = [], set(), set()
    for path in files_below(files, "*.jsonl"):
        for number, (where, row) in enumerate(json_lines(path)):
            samples.append(_sample(row, where, f"{path.stem}/{number}"))
            tokenizers |= {str(row["tokenizer"])} if row.get("tokenizer") else set()
            unknown |= row.keys() - KNOWN
    notes = (f"columns that are not read: {', '.join(sorted(unknown))}",) if unknown else ()
    return Dump(tuple(sorted(samples, key=lambda sample: sample.step)), notes, frozenset(tokenizers))


def _sample(row: Row, where: str, name: str) -> Sample:
    if not isinstance(row.get("token_ids"), list):
        raise DataError(f"{where}: there is no list token_ids; a row has {', '.join(sorted(row)) or 'nothing'}")
    mask = row.get("mask")
    return checked(
        Sample(
            step=int(row.get("step") or 0),
            rollout_id=str(row.get("rollout_id", name)),
            token_ids=whole_numbers(row["token_ids"], f"{where}: token_ids"),
            prompt_ids=whole_numbers(row.get("prompt_ids") or [], f"{where}: prompt_ids"),
            prompt_id=str(row.get("prompt_id") or ""),
            counts_T=None if mask is None else np.asarray(mask, bool),
            student_logprob_T=floats(row.get("student_logprobs")),
            engine_logprob_T=floats(row.get("engine_logprobs")),
            teacher_logprob_T=floats(row.get("teacher_logprobs")),
            kl_T=floats(row.get("kl")),
            student_entropy_T=floats(row.get("student_entropy")),
            teacher_entropy_T=floats(row.get("teacher_entropy")),
            text=row.get("text"),
            answer=row.get("answer"),
            correct=row.get("correct"),
            truncated=row.get("truncated"),
            source=where,
        )
    )
