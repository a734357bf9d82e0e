"""Is the cost a matter of token types, or of single positions? (docs/method.md §3)

How few positions carry most of the loss, how much of the loss's variance the token type explains, and which positions
cost most. This module knows losses, types and where they stand; it does not know rocks or models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rocktokens.detect.grouped import blocks, counts_and_totals, run_bounds
from rocktokens.detect.occurrences import Array, Occurrences
from rocktokens.stats import Estimate, Floats, bootstrap_estimate

# Shapes: N occurrences, V token types, M recorded rows, P prompts.
from rocktokens.values import Row

LOSS_SHARES = (0.5, 0.8, 0.95)
TYPES_EXPLAIN_LITTLE = 0.25  # below this share of the variance, the cost is a matter of single positions
FEW_PROMPTS = 50  # measured prompts below which intervals of a concentrated loss are too short
CONCENTRATED = 0.2  # share of positions that carries 80 % of a concentrated loss, at most
BEFORE, AFTER = 16, 8  # tokens of context beside a listed position
NUMBERS = ("position", "token_id", "loss_pre", "loss_post", "share_loss")


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
    return Concentration(half, most, nearly_all, explained, len(run_bounds(measurement.prompt_N)) - 1)


def smallest_shares(loss_N: Array, wanted: tuple[float, ...]) -> list[float]:
    """Smallest shares of positions that carry the wanted shares of the loss; NaN where there is no loss."""
    ordered = np.maximum(loss_N, 0)
    ordered.sort()
    ordered = ordered[::-1]
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
    count_V, total_V = counts_and_totals(selection.type_N, selection.loss_post_N, len(selection.token_ids_V))
    mean = float(selection.loss_post_N.mean(dtype=float))
    predicted_V = (total_V + mean) / (count_V + 1)
    loss_N, type_N, bound_P = measurement.loss_post_N, measurement.type_N, run_bounds(measurement.prompt_N)
    columns = [np.empty(len(bound_P) - 1) for _ in range(3)]
    for prompts in blocks(bound_P):
        part = slice(int(bound_P[prompts.start]), int(bound_P[prompts.stop]))
        loss_n, start_p = loss_N[part].astype(float), bound_P[prompts] - part.start
        for column, value_n in zip(columns, ((loss_n - predicted_V[type_N[part]]) ** 2, loss_n, loss_n**2)):
            column[prompts] = np.add.reduceat(value_n, start_p)
    columns.append(np.diff(bound_P).astype(float))
    if np.ptp(loss_N) <= 1e-6 * np.abs(loss_N).max():
        return Estimate(float("nan"), float("nan"), float("nan"), len(columns[0]))
    found = bootstrap_estimate(_explained, columns, rng=rng, resamples=resamples, level=level)
    value = float(np.clip(found.value, 0.0, 1.0))
    return found._replace(value=value).within(0.0, 1.0)


def _explained(wrong: Floats, total: Floats, square: Floats, number: Floats) -> Floats:
    return 1 - wrong / (square - total**2 / number)


def costliest_positions(occurrences: Occurrences | Sequence[Occurrences], texts: list[str], number: int) -> Row:
    """Columns of the positions with the largest loss of all, the costliest first, each with the text around it."""
    halves = [occurrences] if isinstance(occurrences, Occurrences) else occurrences
    chosen = [_largest(half.loss_post_N, number) for half in halves]
    total = sum(float(np.maximum(half.loss_post_N, 0).sum(dtype=float)) for half in halves)
    rows = [row for half, index in zip(halves, chosen) for row in _position_rows(half, texts, index, total)]
    rows.sort(key=lambda row: row[0])
    names = ("prompt_id", "rollout_id", "position", "token_id", "token", "loss_pre", "loss_post", "share_loss")
    columns = {name: [row[1][i] for row in rows[:number]] for i, name in enumerate((*names, "before", "after"))}
    return {name: np.array(column) if name in NUMBERS else column for name, column in columns.items()}


def _largest(loss_N: Array, number: int) -> Array:
    """The occurrences with the largest losses, those that are not positive left out."""
    number = min(number, int((loss_N > 0).sum()))
    if number == 0:
        return np.empty(0, np.int64)
    least = np.partition(loss_N, len(loss_N) - number)[len(loss_N) - number]
    index = np.flatnonzero(loss_N >= least)
    return index[np.argsort(-loss_N[index], kind="stable")][:number]


def _position_rows(occurrences: Occurrences, texts: list[str], chosen: Array, total: float) -> Iterator[Any]:
    """Of each chosen occurrence: its place in the order of all (largest loss first), and its columns."""
    for index, at in zip(chosen.tolist(), occurrences.rows(chosen).tolist()):
        prompt, rollout = int(occurrences.prompt_N[index]), int(occurrences.rollout_M[at])
        position, kind = int(occurrences.position_M[at]), int(occurrences.type_M[at])
        loss = float(occurrences.loss_post_N[index])
        pre = float("nan") if occurrences.loss_pre_N is None else float(occurrences.loss_pre_N[index])
        names = (_name(occurrences.prompt_ids, prompt), _name(occurrences.rollout_ids, rollout))
        token = (int(occurrences.token_ids_V[kind]), texts[kind])
        around = (_text(occurrences, texts, at, range(-BEFORE, 0)), _text(occurrences, texts, at, range(1, AFTER + 1)))
        yield (-loss, rollout, position), (*names, position, *token, pre, loss, loss / total, *around)


def _name(ids: Any, code: int) -> str:
    return str(code if ids is None else ids[code].as_py())


def _text(occurrences: Occurrences, texts: list[str], at: int, offsets: range) -> str:
    """The texts of the neighbours of a recorded row that belong to its rollout."""
    near = [at + offset for offset in offsets if 0 <= at + offset < len(occurrences.type_M)]
    return "".join(texts[occurrences.type_M[i]] for i in near if occurrences.rollout_M[i] == occurrences.rollout_M[at])
