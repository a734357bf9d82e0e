"""What every importer makes of a dump: one sample per rollout, with what was recorded at each of its tokens.

What is not in a dump stays empty here; nothing is made up, and text is never tokenised again, because the ids that were
sampled cannot be had back from it.

Shapes: T tokens of one rollout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rocktokens.errors import DataError
from rocktokens.stats import Floats
from rocktokens.values import Row

Names = Mapping[str, str | tuple[str, ...]]
"""Field of `Sample` → the trainer's name for it, or several names of which the first that is there counts."""


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

    @property
    def prompt_name(self) -> str:
        """A name that rollouts of one prompt share: its own, or a digest of the prompt's ids."""
        if self.prompt_id or not self.prompt_ids:
            return self.prompt_id
        return hashlib.blake2b(np.asarray(self.prompt_ids, np.int64).tobytes(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Dump:
    """Everything that was read, in the order of its steps, and what the reader has to say about it."""

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


def sample_of(row: Row, names: Names, where: str, **known: Any) -> Sample:
    """A trainer's row as a sample; DataError names the place and the column that does not fit.

    Args:
        row: what was read.
        names: the trainer's names.
        where: the place, for messages.
        known: fields that do not stand in the row under a name.
    """
    values = {name: first_of(row, theirs) for name, theirs in names.items()} | known
    for name in ("token_ids", "prompt_ids"):
        values[name] = whole_numbers(values.get(name, ()), f"{where}: {names.get(name, name)}")
    ids = values["token_ids"]
    if not ids or min(ids) < 0:
        raise DataError(f"{where}: the rollout has {'a negative token id' if ids else 'no tokens'} in token_ids")
    for name in [name for name in values if name.endswith("_T")]:
        column = floats(values[name])
        if column is not None and len(column) != len(ids):
            raise DataError(
                f"{where}: {names.get(name, name)} has {len(column)} entries for {len(ids)} tokens; were prompt and "
                "rollout cut at different places?"
            )
        values[name] = column > 0 if name == "counts_T" and column is not None else column
    return Sample(**{name: value for name, value in values.items() if value is not None}, source=where)


def first_of(row: Row, names: str | tuple[str, ...]) -> Any:
    """The first value that is there under one of these names, or None."""
    return next(
        (row[name] for name in ((names,) if isinstance(names, str) else names) if row.get(name) is not None), None
    )


def floats(values: Any) -> Floats | None:
    """A column as numbers; empty entries become NaN, a column that is empty throughout becomes None."""
    if values is None:
        return None
    column = np.array([np.nan if value is None else value for value in _listed(values)], np.float64)
    return None if np.isnan(column).all() and len(column) else column


def whole_numbers(values: Sequence[Any], what: str) -> tuple[int, ...]:
    """A column of ids."""
    listed = _listed(values if values is not None else ())
    if any(isinstance(value, bool) or int(value) != value for value in listed):
        raise DataError(f"{what} must hold whole numbers")
    return tuple(int(value) for value in listed)


def _listed(values: Any) -> list[Any]:
    return list(values.tolist()) if hasattr(values, "tolist") else list(values)
