"""Is the cost a matter of token types, or of single positions? (METHOD §3, point 6)

How few positions carry most of the loss, how much of the loss's variance the token type explains, and which positions
cost most. This module knows losses, types and where they stand; it does not know rocks or models.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rocktokens.core.detection.occurrences import Array, Occurrences
from rocktokens.core.stats import Estimate, Floats, bootstrap_estimate

# Shapes: N occurrences, V token types, M recorded rows, P prompts.
LOSS_SHARES = (0.5, 0.8, 0.95)
TYPES_EXPLAIN_LITTLE = 0.25  # below this share of the variance, the cost is a matter of single positions
FEW_PROMPTS = 50  # measured prompts below which intervals of a concentrated loss are too short
CONCENTRATED = 0.2  # share of positions that carries 80 % of a concentrated loss, at most
BEFORE, AFTER = 16, 8  # tokens of context beside a listed position


class Concentration(NamedTuple):
    """How the loss is spread over positions and types."""

    positions_50: float
    """Smallest share of positions that carries 50 % of the loss."""
    positions_80: float
    positions_95: float
    variance_by_type: Estimate
    """Share of the variance of the loss that the token type explains, predicted from the other half's type means."""
    num_prompts_measured: int

    @property
    def a_matter_of_positions(self) -> bool:
        """Whether the token type explains little of what a position costs."""
        return bool(self.variance_by_type.value < TYPES_EXPLAIN_LITTLE)

    @property
    def intervals_too_short(self) -> bool:
        """Whether there are so few measured prompts, and so concentrated a loss, that intervals cover too little."""
        return bool(self.num_prompts_measured < FEW_PROMPTS and self.positions_80 <= CONCENTRATED)


def concentration(
    selection: Occurrences, measurement: Occurrences, *, rng: np.random.Generator, resamples: int, level: float
) -> Concentration:
    """Spread of the measured half's loss; negative values of a sampled signal count as no cost."""
    half, most, nearly_all = smallest_shares(measurement.loss_post_N, LOSS_SHARES)
    explained = variance_by_type(selection, measurement, rng=rng, resamples=resamples, level=level)
    return Concentration(half, most, nearly_all, explained, len(np.unique(measurement.prompt_N)))


def smallest_shares(loss_N: Array, wanted: tuple[float, ...]) -> list[float]:
    """Smallest shares of positions that carry the wanted shares of the loss; NaN where there is no loss."""
    ordered = np.sort(np.maximum(loss_N, 0))[::-1]
    running = np.cumsum(ordered, dtype=float)
    if running[-1] <= 0:
        return [float("nan")] * len(wanted)
    # The tolerance keeps rounding in the running sum from adding a position.
    return [float((np.searchsorted(running, share * running[-1] * (1 - 1e-9)) + 1) / len(ordered)) for share in wanted]


def variance_by_type(
    selection: Occurrences, measurement: Occurrences, *, rng: np.random.Generator, resamples: int, level: float
) -> Estimate:
    """1 − Σ (loss − predicted)² ÷ Σ (loss − mean)², the prediction being the type's mean on the other half.

    Type means of few occurrences are drawn towards the mean of all by one occurrence's weight. Constant loss: NaN.
    """
    number = len(selection.token_ids_V)
    count_V = np.bincount(selection.type_N, minlength=number)
    mean = float(selection.loss_post_N.mean(dtype=float))
    total_V = np.bincount(selection.type_N, weights=selection.loss_post_N, minlength=number)
    predicted_V = (total_V + mean) / (count_V + 1)
    loss_N = measurement.loss_post_N.astype(float)
    _, prompt_N = np.unique(measurement.prompt_N, return_inverse=True)
    wrong_N = (loss_N - predicted_V[measurement.type_N]) ** 2
    columns = [np.bincount(prompt_N, weights=column_N) for column_N in (wrong_N, loss_N, loss_N**2)]
    columns.append(np.bincount(prompt_N).astype(float))
    if np.ptp(loss_N) <= 1e-6 * np.abs(loss_N).max():
        return Estimate(float("nan"), float("nan"), float("nan"), len(columns[0]))
    found = bootstrap_estimate(_explained, columns, rng=rng, resamples=resamples, level=level)
    value = float(np.clip(found.value, 0.0, 1.0))
    return found._replace(value=value).within(0.0, 1.0)


def _explained(wrong: Floats, total: Floats, square: Floats, number: Floats) -> Floats:
    return 1 - wrong / (square - total**2 / number)


def costliest_positions(occurrences: Occurrences, texts: list[str], number: int) -> dict[str, Any]:
    """Columns of the positions with the largest loss, the costliest first, each with the text round it."""
    loss_N = occurrences.loss_post_N
    number = min(number, int((loss_N > 0).sum()))
    chosen = np.argpartition(-loss_N, number - 1)[:number] if number else np.empty(0, np.int64)
    chosen = chosen[np.lexsort((chosen, -loss_N[chosen]))]
    row, type_N = occurrences.row_N[chosen], occurrences.type_N
    rollout = occurrences.rollout_M[row]
    total = float(np.maximum(loss_N, 0).sum(dtype=float))
    pre = np.full(len(chosen), np.nan) if occurrences.loss_pre_N is None else occurrences.loss_pre_N[chosen]
    return {
        "prompt_id": _names(occurrences.prompt_ids, occurrences.prompt_N[chosen]),
        "rollout_id": _names(occurrences.rollout_ids, rollout),
        "position": occurrences.position_M[row],
        "token_id": occurrences.token_ids_V[type_N[chosen]],
        "token": [texts[v] for v in type_N[chosen]],
        "loss_pre": pre,
        "loss_post": loss_N[chosen],
        "share_loss": loss_N[chosen] / total if total > 0 else np.empty(0),
        "before": [_text(occurrences, texts, at, range(-BEFORE, 0)) for at in row],
        "after": [_text(occurrences, texts, at, range(1, AFTER + 1)) for at in row],
    }


def _names(ids: Any, code_n: Array) -> list[str]:
    return [str(code if ids is None else ids[int(code)].as_py()) for code in code_n]


def _text(occurrences: Occurrences, texts: list[str], at: int, offsets: range) -> str:
    """The texts of the neighbours of a recorded row that belong to its rollout."""
    near = [at + offset for offset in offsets if 0 <= at + offset < len(occurrences.type_M)]
    return "".join(texts[occurrences.type_M[i]] for i in near if occurrences.rollout_M[i] == occurrences.rollout_M[at])
