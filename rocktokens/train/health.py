"""Numbers by which a training run is seen to go wrong: growth, repetition, mismatch, resolution.

What is too much is said by whoever asks (the trainer's alarms, `check`); this module only measures.

Shapes: S steps, T tokens of one rollout, N tokens of all rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Half the gap between 1 and the next larger number of each format.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Logits of language models are of this size, nats; rounding them is what a divergence cannot fall below.
LOGIT_SIZE = 10.0
# Sums of float32 over a vocabulary are not better than this.
SUM_FLOOR = 1e-7


class Change(NamedTuple):
    """A value at the start and at the end of a series."""

    early: float
    late: float

    @property
    def ratio(self) -> float:
        """late / early; infinite where it began at 0."""
        return self.late / self.early if self.early > 0 else float("inf") if self.late > 0 else 1.0


def change(values_S: ArrayLike, window: int) -> Change | None:
    """Mean over the first and over the last `window` known values; None while the windows would overlap."""
    known_S = np.asarray(values_S, float)
    known_S = known_S[np.isfinite(known_S)]
    if len(known_S) < 2 * window:
        return None
    return Change(float(known_S[:window].mean()), float(known_S[-window:].mean()))


def numerical_floor(dtype: str) -> float:
    """The reverse KL, in nats, that rounding the logits once to this format makes between equal models.

    Second order of the KL in a relative error u of logits of size s: (u s)^2 / 2.
    """
    return max(SUM_FLOOR, 0.5 * (UNIT_ROUNDOFF[dtype] * LOGIT_SIZE) ** 2)


def repeated_share(token_T: Sequence[int], width: int = 8) -> float:
    """Share of the rollout's n-grams that have occurred in it before; 0 where it is shorter than two of them."""
    if len(token_T) <= width:
        return 0.0
    grams = [tuple(token_T[at : at + width]) for at in range(len(token_T) - width + 1)]
    return 1.0 - len(set(grams)) / len(grams)


class Mismatch(NamedTuple):
    """How far two records of the same tokens' log-probabilities lie apart, nats."""

    kl: float
    """Estimate of KL(engine || trainer) over the engine's samples: mean of r - 1 - log r, r = p_trainer / p_engine."""
    largest: float
    """Largest absolute difference at one token."""
    at: int
    """Where it is."""
    num_tokens: int


def mismatch(engine_N: ArrayLike, trainer_N: ArrayLike) -> Mismatch | None:
    """Engine's against trainer's log-probabilities of sampled tokens; None where no token has both."""
    engine, trainer = np.asarray(engine_N, float), np.asarray(trainer_N, float)
    at = np.flatnonzero(np.isfinite(engine) & np.isfinite(trainer))
    if not len(at):
        return None
    log_r = trainer[at] - engine[at]
    largest = int(np.abs(log_r).argmax())
    kl = float(np.mean(np.expm1(np.clip(log_r, -50, 50)) - log_r))
    return Mismatch(kl, float(abs(log_r[largest])), int(at[largest]), len(at))


def lost_updates(weights_N: NDArray[np.floating], learning_rate: float, dtype: str) -> float:
    """Share of weights that a step of the size of the learning rate (Adam's) leaves unchanged in this format.

    A weight w of a format with unit roundoff u is left as it is by a step smaller than about u |w|.
    """
    size_N = np.abs(np.asarray(weights_N, float))
    return float(np.mean(learning_rate < UNIT_ROUNDOFF[dtype] * size_N)) if len(size_N) else 0.0
