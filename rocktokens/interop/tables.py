"""From a dump to the tables of a run: rollouts, occurrences, and what only a dump has."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa

from rocktokens.interop.samples import Dump, Sample, prompt_name
from rocktokens.tables import METRICS, OCCURRENCES, ROLLOUTS

# Measure of an occurrence → where a sample has it.
from rocktokens.values import Row

COLUMNS = {
    "kl": "kl_T",
    "log_ratio": "ratio_T",
    "teacher_logprob": "teacher_logprob_T",
    "student_entropy": "student_entropy_T",
    "teacher_entropy": "teacher_entropy_T",
    "grad_norm": "grad_norm_T",
}


def names_of(dump: Dump) -> list[tuple[str, str]]:
    """(prompt, rollout) of every sample, each rollout once: names that several samples share get a number."""
    seen: dict[str, int] = {}
    found = []
    for sample in dump.samples:
        times = seen.get(sample.rollout_id, 0)
        seen[sample.rollout_id] = times + 1
        rollout = sample.rollout_id if not times else f"{sample.rollout_id}#{times}"
        found.append((sample.prompt_id or prompt_name(sample.prompt_ids, rollout), rollout))
    return found


def rollouts_table(dump: Dump, texts: list[str]) -> pa.Table:
    """One row per rollout, as `sample` would have written it."""
    rows = [
        {
            "prompt_id": prompt,
            "rollout_id": rollout,
            "prompt_ids": list(sample.prompt_ids),
            "token_ids": list(sample.token_ids),
            "text": text,
            "answer": sample.answer,
            "correct": sample.correct,
            "truncated": sample.truncated,
            "seed": None,
        }
        for sample, (prompt, rollout), text in zip(dump.samples, names_of(dump), texts)
    ]
    return pa.Table.from_pylist(rows, schema=ROLLOUTS)


def occurrences_table(dump: Dump, eos_ids: Collection[int]) -> pa.Table:
    """One row per token; what the trainer's loss left out stays as context, without a loss."""
    columns = _keys(dump)
    columns["token_id"] = pa.array(_flat(dump, lambda sample: np.asarray(sample.token_ids)), pa.int32())
    for name in METRICS:
        columns[name] = pa.array(_flat(dump, lambda sample, name=name: _measure(sample, name)), pa.float32())
    columns["is_eos"] = pa.array(np.isin(columns["token_id"].to_numpy(), list(eos_ids)))
    return pa.table(columns).select(OCCURRENCES.names).cast(OCCURRENCES)


def engine_table(dump: Dump) -> pa.Table | None:
    """Log-probabilities of the engine that sampled beside those of the trainer; None where a dump has one of them."""
    if any(sample.engine_logprob_T is None or sample.student_logprob_T is None for sample in dump.samples):
        return None
    columns = _keys(dump)
    for name in ("engine_logprob", "student_logprob"):
        found = _flat(dump, lambda sample, name=name: _counted(sample, getattr(sample, f"{name}_T")))
        columns[name] = pa.array(found, pa.float32())
    return pa.table(columns)


def steps_table(dump: Dump) -> pa.Table:
    """The trainer's step of every rollout, and where it was read."""
    names = names_of(dump)
    return pa.table(
        {
            "prompt_id": [prompt for prompt, _ in names],
            "rollout_id": [rollout for _, rollout in names],
            "step": pa.array([sample.step for sample in dump.samples], pa.int64()),
            "source": [sample.source for sample in dump.samples],
        }
    )


def _keys(dump: Dump) -> Row:
    names = names_of(dump)
    size_R = np.array([len(sample.token_ids) for sample in dump.samples])
    rows = pa.array(np.repeat(np.arange(len(size_R)), size_R))
    return {
        "prompt_id": pa.array([prompt for prompt, _ in names]).take(rows),
        "rollout_id": pa.array([rollout for _, rollout in names]).take(rows),
        "position": pa.array(np.concatenate([np.arange(size) for size in size_R]), pa.int32()),
    }


def _flat(dump: Dump, column: Any) -> Any:
    return np.concatenate([column(sample) for sample in dump.samples])


def _measure(sample: Sample, name: str) -> Any:
    if name == "student_logprob":  # the trainer's, else the engine's: whichever the ratio was taken from
        found = sample.student_logprob_T if sample.student_logprob_T is not None else sample.engine_logprob_T
    else:
        found = getattr(sample, COLUMNS[name])
    return _counted(sample, found)


def _counted(sample: Sample, column_T: Any) -> Any:
    if column_T is None:
        return np.full(len(sample.token_ids), np.nan)
    return column_T if sample.counts_T is None else np.where(sample.counts_T, column_T, np.nan)
