"""slime's `--dump-details DIR`: DIR/train_data/N.pt, written by slime/observability/train_data_utils.py.

A train dump is {"format_version": 2, "rollout_id": N, "samples": [...], "dp_shards": [...]}. Each sample has `tokens`
(prompt and rollout), `response_lengths`, `total_lengths`, `loss_masks`, and where computed `log_probs` (trainer's
forward), `rollout_log_probs` (engine's), `teacher_log_probs` and `opd_reverse_kl` (log_probs - teacher_log_probs), each
over the rollout's tokens. A rollout dump (rollout_data/N.pt) has Sample.to_dict(): `tokens`, `response_length`,
`loss_mask`, `rollout_log_probs`, `teacher_log_probs`, `response`, `status`. Read from slime's source, August 2026.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rocktokens.errors import DataError
from rocktokens.interop.formats import files_below
from rocktokens.interop.samples import Dump, Sample, checked, floats, load_tensors, whole_numbers

# Names of one thing in train dumps and in rollout dumps.
from rocktokens.values import Row

LENGTH, MASK = ("response_lengths", "response_length"), ("loss_masks", "loss_mask")


def read(files: list[Path]) -> Dump:
    """Every sample of every dump; train dumps are preferred where a directory holds both kinds."""
    samples: list[Sample] = []
    engine_only = False
    for path in _preferred(files_below(files, "*.pt")):
        content = load_tensors(path)
        if not isinstance(content, dict) or not isinstance(content.get("samples"), list):
            raise DataError(f"{path} is no dump of slime's --dump-details: it has no list `samples`")
        step = _number(content.get("rollout_id"), path)
        for number, row in enumerate(content["samples"]):
            samples.append(_sample(row, step, number, f"{path}, sample {number}"))
            engine_only |= samples[-1].student_logprob_T is None
    notes = (
        ("the files hold no log-probabilities of the trainer (log_probs); the engine's stand for the student's",)
        if engine_only
        else ()
    )
    return Dump(tuple(sorted(samples, key=lambda sample: sample.step)), notes)


def _preferred(paths: list[Path]) -> list[Path]:
    """Without evaluation dumps, and without rollout dumps of steps whose train dump is there."""
    train = {path.name for path in paths if path.parent.name == "train_data"}
    return [
        path
        for path in paths
        if not path.name.startswith("eval_") and not (path.parent.name == "rollout_data" and path.name in train)
    ]


def _number(value: Any, path: Path) -> int:
    digits = "".join(letter for letter in str(value if value is not None else path.stem) if letter.isdigit())
    return int(digits) if digits else 0


def _first(row: Row, names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _sample(row: Row, step: int, number: int, where: str) -> Sample:
    if row.get("tokens") is None or _first(row, LENGTH) is None:
        raise DataError(f"{where}: tokens or response_lengths are missing; there are {', '.join(sorted(row))}")
    tokens, length = whole_numbers(row["tokens"], f"{where}: tokens"), int(_first(row, LENGTH))
    if not 0 < length <= len(tokens):
        raise DataError(f"{where}: a response of {length} tokens does not fit {len(tokens)} tokens in all")
    mask, status = _first(row, MASK), row.get("status")
    index = row.get("sample_index", row.get("index"))
    return checked(
        Sample(
            step=step,
            rollout_id=f"{step}/{number if index is None else int(index)}",
            token_ids=tokens[-length:],
            prompt_ids=tokens[:-length],
            counts_T=None if mask is None else np.asarray(floats(mask), float) > 0,
            student_logprob_T=floats(row.get("log_probs")),
            engine_logprob_T=floats(row.get("rollout_log_probs")),
            teacher_logprob_T=floats(row.get("teacher_log_probs")),
            log_ratio_T=floats(row.get("opd_reverse_kl")),
            student_entropy_T=floats(row.get("entropy")),
            text=row.get("response"),
            answer=row.get("label"),
            truncated=None if status is None else status == "truncated",
            source=where,
        )
    )
