"""What a rock set covers: types, positions, loss, gradient norm, and enrichment beside them (docs/method.md §3).

Enrichment is the share of the loss over the share of the positions: 1 means "merely frequent", and it is never left
out. Measured on occurrences that played no part in choosing the set. This module knows sums and masks, not definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rocktokens.detect.grouped import run_bounds, run_sums
from rocktokens.detect.occurrences import Array, Occurrences
from rocktokens.stats import Estimate, Floats, bootstrap_sums, resample_counts

# Shapes: N occurrences, U units of prompts, R rollouts, B resamples.
MEDIAN_RESAMPLES = 500


class Footprint(NamedTuple):
    """Shares of a set of occurrences, each with its interval over prompts."""

    name: str
    num_types: int
    share_types: float
    share_positions: Estimate
    share_positions_median: Estimate
    """Median over rollouts of the share of positions."""
    share_loss: Estimate
    share_grad: Estimate | None
    enrichment: Estimate
    mean_loss: Estimate


class Density(NamedTuple):
    """Share of each rollout's positions that the set covers."""

    rollout_R: Array
    share_R: Floats


def density(occurrences: Occurrences, chosen_N: Array) -> Density:
    """Per rollout, for rollouts that were measured."""
    rollout_N = occurrences.rollout_N
    bound_R = run_bounds(rollout_N)
    return Density(rollout_N[bound_R[:-1]], run_sums(bound_R, chosen_N) / np.diff(bound_R))


def footprint(
    name: str,
    occurrences: Occurrences,
    chosen_N: Array,
    unit_N: Array,
    *,
    num_types: int,
    observed_types: int,
    rng: np.random.Generator,
    resamples: int,
    level: float,
) -> Footprint:
    """Shares of the chosen occurrences among all those given, with bootstrap-t intervals over prompts."""
    num_units = int(unit_N.max()) + 1
    counts_BU = resample_counts(num_units, resamples, rng)
    bound_P = run_bounds(occurrences.prompt_N)
    unit_P, num_prompts = unit_N[bound_P[:-1]], len(bound_P) - 1

    def by_unit(total_P: Floats) -> Floats:
        return np.bincount(unit_P, weights=total_P, minlength=num_units)

    def sums(column_N: Array | None) -> tuple[Floats, Floats]:
        if column_N is None:
            return by_unit(run_sums(bound_P, chosen_N)), by_unit(np.diff(bound_P))

        def known(rows: slice) -> Array:
            return np.nan_to_num(column_N[rows])

        def own(rows: slice) -> Array:
            return np.where(chosen_N[rows], known(rows), column_N.dtype.type(0))

        return by_unit(run_sums(bound_P, own)), by_unit(run_sums(bound_P, known))

    def estimate(statistic: Callable[..., Floats], *columns: Floats) -> Estimate:
        found = bootstrap_sums(statistic, columns, counts_BU, level=level)
        return Estimate(float(found.value_V[0]), float(found.low_V[0]), float(found.high_V[0]), num_prompts)

    least = 0.0 if occurrences.loss_post_N.min() >= 0 else -np.inf  # a sampled log-ratio may be negative
    greatest = 1.0 if least == 0 else np.inf
    own_n, all_n = sums(None)
    own_loss, all_loss = sums(occurrences.loss_post_N)
    share_grad, grad_N = None, occurrences.grad_norm_N
    if grad_N is not None:
        share_grad = estimate(_share, *sums(grad_N)).within(0.0, 1.0)
    return Footprint(
        name=name,
        num_types=num_types,
        share_types=num_types / max(observed_types, 1),
        share_positions=estimate(_share, own_n, all_n).within(0.0, 1.0),
        share_positions_median=_median(occurrences, chosen_N, unit_N, counts_BU[:MEDIAN_RESAMPLES], level),
        share_loss=estimate(_share, own_loss, all_loss).within(least, greatest),
        share_grad=share_grad,
        enrichment=estimate(_enrichment, own_loss, all_loss, own_n, all_n).within(least, np.inf),
        mean_loss=estimate(_share, own_loss, own_n).within(least, np.inf),
    )


def _share(own: Floats, everything: Floats) -> Floats:
    return own / everything


def _enrichment(own_loss: Floats, all_loss: Floats, own_n: Floats, all_n: Floats) -> Floats:
    return (own_loss / all_loss) / (own_n / all_n)


def _median(occurrences: Occurrences, chosen_N: Array, unit_N: Array, counts_BU: Floats, level: float) -> Estimate:
    """Median density with a percentile interval: a median is no smooth function of sums."""
    found = density(occurrences, chosen_N)
    unit_R = unit_N[run_bounds(occurrences.rollout_N)[:-1]]
    order = np.argsort(found.share_R)
    share_R, unit_R = found.share_R[order], unit_R[order]
    medians = np.empty(len(counts_BU))
    for b, count_U in enumerate(counts_BU):
        mass_R = np.cumsum(count_U[unit_R])
        medians[b] = share_R[min(np.searchsorted(mass_R, mass_R[-1] / 2), len(share_R) - 1)]
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    num_prompts = len(run_bounds(occurrences.prompt_N)) - 1
    return Estimate(float(np.median(share_R)), float(low), float(high), num_prompts)
