"""prime-rl's `trainer.enable_token_export = true`: token_exports/step_N/rank_R.jsonl.

Written by src/prime_rl/trainer/rl/token_export.py, one object per sequence, prompt and rollout in one list, all columns
aligned with `token_ids`: `loss_mask`, `inference_logprobs`, `trainer_logprobs`, `entropy`, `advantages`, … The stock
export leaves out `ref_logprobs`, the teacher's; where a record has them (one line added to `_export_columns`) they are
read. Read from prime-rl's source, August 2026.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rocktokens.errors import DataError
from rocktokens.interop.formats import files_below
from rocktokens.interop.samples import Dump, Sample, checked, floats, json_lines, whole_numbers
from rocktokens.values import Row

SCHEMA_VERSION = 1
REQUIRED = ("token_ids", "loss_mask", "trainer_logprobs")
TEACHER = ("ref_logprobs", "teacher_logprobs")
WITHOUT_TEACHER = (
    "prime-rl's export has no teacher log-probabilities (ref_logprobs); add them to _export_columns in "
    "prime_rl/trainer/rl/token_export.py, one line: see docs/other-trainers.md"
)


def read(files: list[Path]) -> Dump:
    """Every sequence of every rank's file; directories that are still being written are refused."""
    samples: list[Sample] = []
    for path in files_below(files, "rank_*.jsonl"):
        if path.parent.name.startswith("step_") and not (path.parent / "STABLE").exists():
            raise DataError(f"{path.parent} has no file STABLE: prime-rl is still writing it, or was stopped. Wait.")
        for number, (where, row) in enumerate(json_lines(path)):
            samples.append(_sample(row, where, f"{path.stem}/{number}"))
    with_teacher = all(sample.teacher_logprob_T is not None for sample in samples)
    return Dump(tuple(sorted(samples, key=lambda sample: sample.step)), () if with_teacher else (WITHOUT_TEACHER,))


def _sample(row: Row, where: str, name: str) -> Sample:
    missing = [key for key in REQUIRED if key not in row]
    if missing:
        raise DataError(f"{where}: no column {missing[0]}; this is no token export of prime-rl")
    if row.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise DataError(f"{where}: schema version {row['schema_version']}; this program reads {SCHEMA_VERSION}")
    tokens, counts = whole_numbers(row["token_ids"], f"{where}: token_ids"), np.asarray(row["loss_mask"], bool)
    if len(counts) != len(tokens):
        raise DataError(f"{where}: loss_mask has {len(counts)} entries for {len(tokens)} tokens")
    if not counts.any():
        raise DataError(f"{where}: no token of the sequence carries loss")
    first = int(np.flatnonzero(counts)[0])  # the rollout begins where the first token counts

    def column(*names: str) -> Any:
        values = floats(next((row[key] for key in names if row.get(key) is not None), None))
        if values is not None and len(values) != len(tokens):
            raise DataError(f"{where}: {names[0]} has {len(values)} entries for {len(tokens)} tokens")
        return None if values is None else values[first:]

    return checked(
        Sample(
            step=int(row.get("step") or 0),
            rollout_id=f"{row.get('step', 0)}/{name}",
            token_ids=tokens[first:],
            prompt_ids=tokens[:first],
            counts_T=counts[first:],
            student_logprob_T=column("trainer_logprobs"),
            engine_logprob_T=column("inference_logprobs"),
            teacher_logprob_T=column(*TEACHER),
            student_entropy_T=column("entropy"),
            source=where,
        )
    )
