"""What every importer makes of a dump: one sample per rollout, with what was recorded at each of its tokens.

An importer knows the names and shapes of one trainer's files and nothing else. What is not in a dump stays empty here;
nothing is made up, and text is never tokenised again, because the ids that were sampled cannot be had back from it.

Shapes: T tokens of one rollout.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rocktokens.errors import DataError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """One rollout of a dump."""

    step: int
    rollout_id: str
    token_ids: tuple[int, ...]
    """Sampled ids, as the engine returned them."""
    prompt_ids: tuple[int, ...] = ()
    prompt_id: str = ""
    """Which prompt it answers; empty: rollouts with the same prompt ids share a prompt."""
    counts_T: NDArray[np.bool_] | None = None
    """Which tokens the trainer's loss counts; None: all."""
    student_logprob_T: Floats | None = None
    """Log-probabilities of the sampled tokens by the trainer's forward pass."""
    engine_logprob_T: Floats | None = None
    """The same by the engine that sampled them."""
    teacher_logprob_T: Floats | None = None
    log_ratio_T: Floats | None = None
    """Student's minus teacher's log-probability, where only the difference was recorded."""
    kl_T: Floats | None = None
    """Reverse KL over the whole vocabulary; no trainer but ours records it."""
    student_entropy_T: Floats | None = None
    teacher_entropy_T: Floats | None = None
    grad_norm_T: Floats | None = None
    text: str | None = None
    answer: str | None = None
    correct: bool | None = None
    truncated: bool | None = None
    source: str = ""
    """File and place in it, for messages."""

    @property
    def ratio_T(self) -> Floats | None:
        """log p_student - log p_teacher of every sampled token; None where the dump has no teacher values."""
        if self.log_ratio_T is not None:
            return self.log_ratio_T
        student_T = self.student_logprob_T if self.student_logprob_T is not None else self.engine_logprob_T
        if student_T is None or self.teacher_logprob_T is None:
            return None
        return student_T - self.teacher_logprob_T


@dataclass(frozen=True)
class Dump:
    """Everything that was read, and what the reader has to say about it."""

    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()
    tokenizers: frozenset[str] = field(default_factory=frozenset)
    """Tokenizers that the files name, where they do."""

    @property
    def has_teacher(self) -> bool:
        """Whether every sample has the teacher's log-probabilities, or the difference to them."""
        return all(sample.ratio_T is not None for sample in self.samples)

    @property
    def has_kl(self) -> bool:
        """Whether every sample has the exact divergence."""
        return all(sample.kl_T is not None for sample in self.samples)


def checked(sample: Sample) -> Sample:
    """A sample whose columns have one entry per token; DataError names the file and the column where not."""
    size = len(sample.token_ids)
    if not size:
        raise DataError(f"{sample.source}: the rollout has no tokens")
    if min(sample.token_ids) < 0:
        raise DataError(f"{sample.source}: token id {min(sample.token_ids)} is negative")
    for item in fields(sample):
        column = getattr(sample, item.name)
        if item.name.endswith("_T") and column is not None and len(column) != size:
            raise DataError(
                f"{sample.source}: {item.name.removesuffix('_T')} has {len(column)} entries for {size} tokens; were "
                "prompt and rollout cut at different places?"
            )
    return sample


def prompt_name(prompt_ids: Sequence[int], fallback: str) -> str:
    """A name that rollouts of one prompt share: a digest of its ids."""
    if not len(prompt_ids):
        return fallback
    return hashlib.blake2b(np.asarray(prompt_ids, np.int64).tobytes(), digest_size=6).hexdigest()


def floats(values: object) -> Floats | None:
    """A column as numbers; empty entries become NaN, a column that is empty throughout becomes None."""
    if values is None:
        return None
    column = np.array([np.nan if value is None else value for value in _listed(values)], np.float64)
    return None if np.isnan(column).all() and len(column) else column


def whole_numbers(values: Any, what: str) -> tuple[int, ...]:
    """A column of ids."""
    listed = _listed(values)
    if any(isinstance(value, bool) or int(value) != value for value in listed):
        raise DataError(f"{what} must hold whole numbers")
    return tuple(int(value) for value in listed)


def _listed(values: Any) -> list[Any]:
    return list(values.tolist()) if hasattr(values, "tolist") else list(values)


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Objects of a JSONL file, each with a name for messages; blank lines are passed over."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{where}: not valid JSON ({error})") from None
            if not isinstance(row, dict):
                raise DataError(f"{where}: a row must be a JSON object, got {type(row).__name__}")
            yield where, row


def load_tensors(path: Path) -> object:
    """A torch file, read without executing anything in it; DataError where that is not possible."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises its own, pickle's and zip's errors here
        reason = " ".join(str(error).split())
        remedy = (
            "it holds Python objects, whose loading can execute code; nothing was executed. Save plain dictionaries, "
            "lists and tensors instead"
            if zipfile.is_zipfile(path)
            else "it is damaged or no torch file; nothing was executed"
        )
        raise DataError(f"{path} cannot be read with weights_only: {remedy} ({reason[:160]})") from None
