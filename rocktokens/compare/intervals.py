"""Intervals over seeds and prompts: both are drawn at random, and every seed is tried on every prompt.

Shapes: S seeds, P prompts, C prompts of rollouts that are common to all regimes.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats as sps

from rocktokens.compare.curves import Floats
from rocktokens.errors import DataError
from rocktokens.stats import Estimate

MIN_SEEDS = 3  # two seeds leave one degree of freedom: an interval over them would say nothing


def crossed_estimate(value_SP: ArrayLike, *, level: float = 0.95) -> Estimate:
    """Mean over seeds and problems, both taken as drawn at random, with an interval for either source of chance.

    Every seed is tried on every problem, so the variance of the mean has a part for seeds, one for problems and one
    for the rest (two-way layout); t with Satterthwaite's degrees of freedom, few where the seeds' part is the large
    one. With fewer than three seeds the interval accounts for prompts only, and every display of it must say so.
    """
    values = np.atleast_2d(np.asarray(value_SP, float))
    seeds, problems = values.shape
    if values.size == 0 or not np.isfinite(values).all():
        raise DataError(f"outcomes of {seeds} seeds on {problems} problems must all be known")
    mean = float(values.mean())
    if problems < 2:
        raise DataError("an interval over problems needs at least 2 problems")
    if np.ptp(values) == 0:  # all alike: a share of others this large could still have been missed ("rule of three")
        missed = 1.0 - (1.0 - level) ** (1.0 / problems)
        return Estimate(mean, mean - missed, mean + missed, problems)
    return _t_estimate(mean, *_variance(values), level, problems)


def _variance(values: Floats) -> tuple[float, float]:
    """Variance of the mean of seeds × prompts, and its degrees of freedom."""
    seeds, problems = values.shape
    by_problem = float(values.mean(0).var(ddof=1)) / problems
    if seeds < MIN_SEEDS:
        return by_problem, problems - 1
    by_seed = float(values.mean(1).var(ddof=1)) / seeds
    rest_SP = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    degrees = (seeds - 1) * (problems - 1)
    rest = float((rest_SP**2).sum()) / degrees / (seeds * problems)  # counted once in each of the other two
    variance = by_problem + max(by_seed - rest, 0.0)
    if by_seed <= rest:
        return variance, problems - 1
    spread = by_problem**2 / (problems - 1) + by_seed**2 / (seeds - 1) + rest**2 / degrees
    return variance, variance**2 / spread


def values_by_prompt(loss_C: ArrayLike, positions_C: ArrayLike) -> Floats:
    """One value per prompt; their mean is the mean loss per position, and their spread gives its standard error.

    Prompts have different numbers of positions, so the mean loss is a ratio of two sums. Each value is the mean loss
    plus the prompt's part in it, (summed loss - mean loss x positions) / mean number of positions, which is the usual
    linearisation of a ratio.
    """
    loss, positions = np.asarray(loss_C, float), np.asarray(positions_C, float)
    if positions.sum() <= 0:
        raise DataError("no positions: there is no mean loss")
    mean = loss.sum() / positions.sum()
    return mean + (loss - mean * positions) / positions.mean()


def skewed_estimate(value_SC: ArrayLike, *, level: float = 0.95) -> Estimate:
    """Mean over seeds and prompts with an interval for either, as in `crossed_estimate`, for values that are skewed.

    A few prompts carry much of a loss, and Student's interval around such a mean is too short on one side. Hall's
    (1992) cubic transformation of t takes the skewness out; it is monotone, so that the interval is its inverse. No
    interval where there are fewer than three prompts, or no spread.
    """
    values = np.atleast_2d(np.asarray(value_SC, float))
    mean, number = float(values.mean()), values.shape[1]
    if number < 3 or np.ptp(values.mean(0)) <= 1e-9 * np.abs(values).max():
        return Estimate(mean, math.nan, math.nan, number)
    variance, degrees = _variance(values)
    skew = float(sps.skew(values.mean(0), bias=False))
    quantile = float(sps.t.ppf((1 + level) / 2, degrees)) / math.sqrt(number)
    spread = math.sqrt(variance * number)
    low, high = (mean - spread * _unskewed(sign * quantile, skew, number) for sign in (1, -1))
    return Estimate(mean, low, high, number)


def _unskewed(ratio: float, skew: float, number: int) -> float:
    """(mean - truth) / spread whose image under Hall's transformation is `ratio`."""
    if abs(skew) < 1e-6:
        return ratio
    return 3 / skew * float(np.cbrt(1 + skew * (ratio - skew / (6 * number))) - 1)


def seed_estimate(value_S: ArrayLike, *, level: float = 0.95, ratio: bool = False) -> Estimate:
    """Mean over seeds with a t interval (a ratio's is taken on logarithms); fewer than three seeds have none."""
    values = np.asarray(value_S, float)
    if not len(values):
        raise DataError("no seeds: nothing to estimate")
    values = np.log(values) if ratio else values
    mean = float(values.mean())
    if len(values) < MIN_SEEDS:
        found = Estimate(mean, math.nan, math.nan, len(values))
    else:
        found = _t_estimate(mean, float(values.var(ddof=1)) / len(values), len(values) - 1, level, len(values))
    if not ratio:
        return found
    return Estimate(math.exp(found.value), math.exp(found.low), math.exp(found.high), len(values))


def _t_estimate(mean: float, variance: float, degrees: float, level: float, number: int) -> Estimate:
    half = float(sps.t.ppf((1 + level) / 2, degrees)) * math.sqrt(variance)
    return Estimate(mean, mean - half, mean + half, number)
