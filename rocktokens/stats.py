"""Numbers with their errors: bootstrap over prompts, multiple testing, power, accuracies.

Tokens of one prompt are not independent, so prompts are what is resampled, everywhere. This module knows arrays of
per-prompt sums and outcomes; it does not know what a token, a rock or a model is. Every generator is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats as sps

from rocktokens.errors import DataError

# Shapes: P prompts (or groups of prompts), V parallel statistics such as token types, B resamples.
Floats = NDArray[Any]
MAX_PROMPTS = 4096  # beyond, prompts are resampled in groups
LEAST_ERROR = 0.1  # of a resample, as a share of the error of the whole
MIN_SEEDS = 3  # trainings: two leave one degree of freedom, and an interval over them would say nothing


class Estimate(NamedTuple):
    """A value, the ends of its interval, and the number of prompts it rests on."""

    value: float
    low: float
    high: float
    num_prompts: int

    def within(self, least: float, greatest: float) -> Estimate:
        """The same with an interval that ends where the possible ends."""
        low, high = max(self.low, least), min(self.high, greatest)
        return self._replace(low=min(low, self.value), high=max(high, self.value))


class Intervals(NamedTuple):
    """Many estimates of one kind, one for each parallel statistic."""

    value_V: Floats
    low_V: Floats
    high_V: Floats

    def within(self, least: float, greatest: float) -> Intervals:
        """The same with intervals that end where the possible ends."""
        return self._replace(low_V=np.maximum(self.low_V, least), high_V=np.minimum(self.high_V, greatest))


def resample_counts(num_prompts: int, resamples: int, rng: np.random.Generator) -> Floats:
    """How often each prompt is drawn in each resample, (B, P): multiplied with per-prompt sums it resamples them."""
    if num_prompts < 1:
        raise DataError("nothing to resample: no prompts")
    return rng.multinomial(num_prompts, np.full(num_prompts, 1.0 / num_prompts), size=resamples).astype(float)


def _delta_variance(
    statistic: Callable[..., Floats], columns: Sequence[Floats], totals: Sequence[Floats], counts_BP: Floats
) -> Floats:
    """Variance of a function of sums by the delta method, within each resample; slopes by central differences."""
    num_prompts = counts_BP.shape[1]
    slopes = []
    for k, total in enumerate(totals):
        step = np.maximum(np.abs(total) * 1e-5, 1e-12)
        above, below = list(totals), list(totals)
        above[k], below[k] = total + step, total - step
        slopes.append((statistic(*above) - statistic(*below)) / (2 * step))
    variance: Floats = np.zeros(1)
    for i in range(len(columns)):
        for j in range(i, len(columns)):
            covariance = counts_BP @ (columns[i] * columns[j]) - totals[i] * totals[j] / num_prompts
            variance = variance + (1 if i == j else 2) * slopes[i] * slopes[j] * covariance
    return variance * num_prompts / (num_prompts - 1)


def _jackknife_error(statistic: Callable[..., Floats], columns: Sequence[Floats], totals: Sequence[Floats]) -> Floats:
    """Standard error from leaving out one prompt at a time; larger, and more honest, than the delta method's."""
    num_prompts = columns[0].shape[0]
    scale = num_prompts / (num_prompts - 1)
    left_out = statistic(*[(total - column) * scale for total, column in zip(totals, columns)])
    known = np.isfinite(left_out)  # without its only prompt, a share may be 0 / 0
    mean = np.where(known, left_out, 0).sum(0) / np.maximum(known.sum(0), 1)
    return np.sqrt((np.where(known, left_out - mean, 0) ** 2).sum(0) / scale)


def bootstrap_sums(
    statistic: Callable[..., Floats], columns: Sequence[ArrayLike], counts_BP: Floats, *, level: float = 0.95
) -> Intervals:
    """Bootstrap-t intervals of any smooth function of sums over prompts, for V statistics at once.

    `columns` are per-prompt sums, each (P, V) or (P, 1); `statistic` takes their totals. Percentile intervals cover
    too little where prompts are few or skewed. So: studentised within each resample, a jackknife error outside, and
    each end the farther one of the bootstrap's and Student's t. Coverage: benchmarks/detect_calibration.py.
    """
    data = [np.asarray(column, float).reshape(len(np.asarray(column)), -1) for column in columns]
    num_prompts = data[0].shape[0]
    if num_prompts < 2:
        raise DataError(f"an interval over prompts needs at least 2 prompts, got {num_prompts}")
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        totals = [column.sum(0, keepdims=True) for column in data]
        value_V = statistic(*totals)[0]
        drawn = [counts_BP @ column for column in data]
        error_V = _jackknife_error(statistic, data, totals)
        error_BV = np.sqrt(np.maximum(_delta_variance(statistic, data, drawn, counts_BP), 0))
        # A resample that missed the only prompts that differ has no error of its own: its t would be without bound.
        t_BV = (statistic(*drawn) - value_V) / np.maximum(error_BV, LEAST_ERROR * error_V)
        t_BV[~np.isfinite(t_BV)] = np.nan
        low_t, high_t = _quantiles(t_BV, (1 - level) / 2, (1 + level) / 2)
        student = sps.t.ppf((1 + level) / 2, num_prompts - 1)
        low_V = value_V - np.fmax(high_t, student) * error_V
        high_V = value_V - np.fmin(low_t, -student) * error_V
    return Intervals(value_V, low_V, high_V)


def _quantiles(t_BV: Floats, low: float, high: float) -> tuple[Floats, Floats]:
    """Order statistics per column, NaN left out, by one sort (NaN sorts last); NaN where fewer than 20 are left."""
    ordered_BV = np.sort(t_BV, axis=0)
    count_V = np.isfinite(ordered_BV).sum(0)
    picks = []
    for share in (low, high):
        place_V = np.clip(np.rint(share * (count_V + 1)).astype(int) - 1, 0, np.maximum(count_V - 1, 0))
        chosen_V = np.take_along_axis(ordered_BV, place_V[None, :], axis=0)[0]
        picks.append(np.where(count_V >= 20, chosen_V, np.nan))
    return picks[0], picks[1]


def bootstrap_estimate(
    statistic: Callable[..., Floats],
    columns: Sequence[ArrayLike],
    *,
    rng: np.random.Generator,
    resamples: int = 2000,
    level: float = 0.95,
) -> Estimate:
    """One function of per-prompt sums with its bootstrap-t interval, e.g. `lambda s, n: s / n` for a ratio."""
    num_prompts = len(np.asarray(columns[0]))
    data = [np.asarray(column, float).reshape(-1, 1) for column in columns]
    if num_prompts > MAX_PROMPTS:  # groups of independent prompts are independent too, and the matrix stays small
        group_P = rng.permutation(num_prompts) % MAX_PROMPTS
        data = [np.bincount(group_P, weights=column[:, 0])[:, None] for column in data]
    found = bootstrap_sums(statistic, data, resample_counts(len(data[0]), resamples, rng), level=level)
    return Estimate(float(found.value_V[0]), float(found.low_V[0]), float(found.high_V[0]), num_prompts)


def benjamini_hochberg(p_V: ArrayLike) -> Floats:
    """Adjusted p values that keep the share of false rejections."""
    return np.asarray(sps.false_discovery_control(np.asarray(p_V, float), method="bh"))


def smallest_detectable_effect(
    difference_sd: float, num_prompts: int, *, power: float = 0.8, alpha: float = 0.05
) -> float:
    """The mean paired change that a two-sided test at `alpha` would find with the given power."""
    if num_prompts < 2 or difference_sd < 0:
        raise DataError(f"power needs at least 2 prompts and a spread >= 0, got {num_prompts} and {difference_sd}")
    return float((sps.norm.isf(alpha / 2) + sps.norm.ppf(power)) * difference_sd / np.sqrt(num_prompts))


def share_estimate(share_P: ArrayLike, *, level: float = 0.95) -> Estimate:
    """Accuracy: the mean of the prompts' shares of right rollouts, with Wilson's interval at the size they amount to.

    Rollouts of one prompt depend on each other, so their number does not count. The interval takes as many trials as
    give the variance that was seen between prompts; it stays inside [0, 1] and has a length where all prompts agree.
    """
    share = np.asarray(share_P, float)
    if not len(share):
        raise DataError("a share of no prompts has no value")
    mean, trials = float(share.mean()), float(len(share))
    spread = float(share.var(ddof=1)) if len(share) > 1 else 0.0
    if spread > 0:
        trials *= mean * (1 - mean) / spread
    z = float(sps.norm.isf((1 - level) / 2))
    middle = (mean + z * z / (2 * trials)) / (1 + z * z / trials)
    reach = z / (1 + z * z / trials) * math.sqrt(mean * (1 - mean) / trials + z * z / (4 * trials * trials))
    return Estimate(mean, max(0.0, middle - reach), min(1.0, middle + reach), len(share))


def wilson_interval(successes: int, trials: int, *, level: float = 0.95) -> Estimate:
    """Interval of a share of independent trials."""
    if trials < 1:
        raise DataError("a share of no trials has no value")
    found = sps.binomtest(successes, trials).proportion_ci(confidence_level=level, method="wilson")
    return Estimate(successes / trials, float(found.low), float(found.high), trials)


def right_shares(
    texts: Sequence[str], answers: Sequence[str], check: Callable[[str, str], bool], *, rollouts: int = 1
) -> NDArray[np.float64]:
    """Share of right rollouts of each prompt; `texts` holds the rollouts prompt by prompt, `rollouts` of each."""
    right = [bool(check(text, answers[at // rollouts])) for at, text in enumerate(texts)]
    return np.asarray(right, np.float64).reshape(len(answers), rollouts).mean(1)


def accuracy_estimate(
    share_P: ArrayLike, *, rng: np.random.Generator, resamples: int = 2000, level: float = 0.95
) -> Estimate:
    """Mean share of right rollouts with its interval over prompts.

    Bootstrap-t over prompts; Wilson's interval where every prompt has one outcome (0 or 1) or all prompts have the
    same share: a resample could then not show how far the accuracy may lie from 0, from 1 or from that share.
    """
    shares = np.asarray(share_P, float)
    if len(shares) == 0:
        raise DataError("no prompt has an answer that can be checked: accuracy cannot be measured")
    if np.isin(shares, (0.0, 1.0)).all() or np.ptp(shares) == 0:
        found = wilson_interval(round(float(shares.sum())), len(shares), level=level)
        return found._replace(value=float(shares.mean())).within(0.0, 1.0)
    columns = [shares, np.ones_like(shares)]
    found = bootstrap_estimate(lambda s, n: s / n, columns, rng=rng, resamples=resamples, level=level)
    return found.within(0.0, 1.0)
