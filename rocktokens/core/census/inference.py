"""From paired differences to a verdict: does banning a token change accuracy, provably not, or is it open?

Given per-problem differences and error rates; knows nothing of tokens, rollouts or rounds. Tokens that few rollouts use
give differences that are almost all exactly 0, and there a percentile bootstrap rejects far too often (five changed
problems, all one way: p = 0.01 where the exact answer is 0.06) and sees no width at all where nothing changed. So

- the bootstrap is studentised, a resample that drew no changed problem counts as infinitely far out, not as absent, and
  an interval is never narrower than Student's;
- "no effect" must be rejected by the bootstrap AND by flipping the signs of whole problems; the larger p counts;
- an interval ends no nearer than ln(1/α)/n to the estimate: so large a share of problems, each changed by as much as
  can be, may have been missed in n problems (the rule of three);
- where so few problems changed that resamples without any are common, the exact binomial bound on the share of changed
  problems takes over: an effect is never larger than the share of problems it shows in.

`benchmarks/census_calibration.py` measures the error rates that result.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from scipy import stats as sps

from rocktokens.core.stats import Estimate, Floats, resample_counts
from rocktokens.errors import DataError

# Shapes: P problems, V sets of token types, B resamples.
Verdict = Literal["Strong Pillar", "Strong Stumbling Block", "Proven Neutral", "Undecided", "Never Used"]
PILLAR: Verdict = "Strong Pillar"
STUMBLING_BLOCK: Verdict = "Strong Stumbling Block"
NEUTRAL: Verdict = "Proven Neutral"
UNDECIDED: Verdict = "Undecided"
NEVER_USED: Verdict = "Never Used"
VERDICTS: tuple[Verdict, ...] = (PILLAR, STUMBLING_BLOCK, NEUTRAL, UNDECIDED, NEVER_USED)

BLOCK = 500  # resamples in memory at once


class Findings(NamedTuple):
    """What the differences of V sets say, at the error rate asked for."""

    value_V: Floats
    """Mean difference."""
    low_V: Floats
    high_V: Floats
    """Its 1 − α interval."""
    inner_low_V: Floats
    inner_high_V: Floats
    """Its 1 − 2α interval: inside ±ε, the set is neutral."""
    p_V: Floats
    """Two-sided p of "no effect"."""
    p_neutral_V: Floats
    """p of "the effect is ε or more", the larger of the two one-sided ones."""
    p_sign_V: Floats
    """Exact sign test over problems."""
    sd_V: Floats
    """Standard deviation of the difference between problems."""


def find(difference_PV: Floats, *, epsilon: float, alpha: float, resamples: int, rng: np.random.Generator) -> Findings:
    """Estimates, intervals and p values of the mean differences of V sets measured on the same P problems."""
    difference_PV = np.asarray(difference_PV, float)
    num_problems = len(difference_PV)
    if num_problems < 2:
        raise DataError(f"a census needs at least 2 problems, got {num_problems}")
    value_V, sd_V = difference_PV.mean(0), difference_PV.std(0, ddof=1)
    error_V = sd_V / np.sqrt(num_problems)
    t_BV = _studentised(difference_PV, resamples, rng)
    p_V = np.maximum(_bootstrap_p(value_V, error_V, t_BV, num_problems), _flip_p(difference_PV, resamples, rng))

    ups_V, downs_V = (difference_PV > 0).sum(0), (difference_PV < 0).sum(0)
    low_V, high_V = _interval(value_V, error_V, t_BV, alpha / 2, num_problems, ups_V, downs_V)
    inner_low_V, inner_high_V = _interval(value_V, error_V, t_BV, alpha, num_problems, ups_V, downs_V)
    p_neutral_V = np.maximum(
        _p_not_below(value_V, epsilon, error_V, t_BV, num_problems, ups_V),
        _p_not_below(-value_V, epsilon, error_V, -t_BV, num_problems, downs_V),
    )
    p_sign_V = np.array([_sign_p(int(up), int(down)) for up, down in zip(ups_V, downs_V)])
    return Findings(value_V, low_V, high_V, inner_low_V, inner_high_V, p_V, p_neutral_V, p_sign_V, sd_V)


def change(after_P: Floats, before_P: Floats, *, level: float, resamples: int, rng: np.random.Generator) -> Estimate:
    """Mean change of paired outcomes with the interval of the census: honest where few problems changed, or none."""
    difference_P = np.asarray(after_P, float) - np.asarray(before_P, float)
    found = find(difference_P[:, None], epsilon=0.0, alpha=1 - level, resamples=resamples, rng=rng)
    return Estimate(float(found.value_V[0]), float(found.low_V[0]), float(found.high_V[0]), len(difference_P))


def verdicts(found: Findings, *, epsilon: float, alpha: float) -> list[Verdict]:
    """Strong where the effect is at least ε and proven not to be 0; neutral where it is proven to be inside ±ε."""
    named: list[Verdict] = []
    for value, p, p_neutral in zip(found.value_V, found.p_V, found.p_neutral_V):
        if p <= alpha and abs(value) >= epsilon:
            named.append(PILLAR if value < 0 else STUMBLING_BLOCK)
        else:
            named.append(NEUTRAL if p_neutral <= alpha else UNDECIDED)
    return named


def problems_to_decide(
    value: float, sd: float, num_problems: int, *, epsilon: float, alpha: float, power: float = 0.8
) -> int:
    """How many problems in all would decide a set of this effect and spread, with the given power."""
    reach = epsilon - abs(value)
    quantile = sps.norm.isf(alpha) if reach > 0 else sps.norm.isf(alpha / 2)
    goal = reach if reach > 0 else abs(value)
    for_spread = ((quantile + sps.norm.ppf(power)) * sd / goal) ** 2 if goal > 0 else np.inf
    for_unseen = np.log(1 / alpha) / goal if reach > 0 else 0
    return int(min(max(np.ceil(max(for_spread, for_unseen)), num_problems + 1), 10**9))


def _studentised(difference_PV: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """t of every resample round the estimate; a resample without spread is infinitely far from it, or on it."""
    num_problems = len(difference_PV)
    value_V, square_PV = difference_PV.mean(0), difference_PV**2
    t_BV = np.empty((resamples, difference_PV.shape[1]))
    for start in range(0, resamples, BLOCK):
        counts_BP = resample_counts(num_problems, min(BLOCK, resamples - start), rng)
        mean_BV = counts_BP @ difference_PV / num_problems
        spread_BV = np.maximum(counts_BP @ square_PV / num_problems - mean_BV**2, 0.0)
        error_BV = np.sqrt(spread_BV / (num_problems - 1))
        far_BV = mean_BV - value_V
        far_BV[np.abs(far_BV) < 1e-12] = 0.0
        no_spread_BV = error_BV < 1e-12
        with np.errstate(divide="ignore", invalid="ignore"):
            t_BV[start : start + len(counts_BP)] = np.where(
                no_spread_BV, np.where(far_BV == 0, 0.0, np.sign(far_BV) * np.inf), far_BV / error_BV
            )
    return np.sort(t_BV, axis=0)


def _interval(
    value_V: Floats, error_V: Floats, t_BV: Floats, tail: float, num_problems: int, ups_V: Floats, downs_V: Floats
) -> tuple[Floats, Floats]:
    """Ends that leave `tail` outside on either side."""
    resamples = len(t_BV)
    rank = min(max(round(tail * (resamples + 1)) - 1, 0), resamples - 1)
    unseen = np.log(1 / tail) / num_problems
    least = sps.t.isf(tail, num_problems - 1)  # with few changed problems, resamples make too little of the spread
    with np.errstate(invalid="ignore"):
        below_V = np.where(error_V > 0, np.maximum(t_BV[resamples - 1 - rank], least) * error_V, 0.0)
        above_V = np.where(error_V > 0, np.maximum(-t_BV[rank], least) * error_V, 0.0)
    low_V, high_V = value_V - np.maximum(below_V, unseen), value_V + np.maximum(above_V, unseen)
    most_up_V, most_down_V = (sps.beta.isf(tail, k_V + 1, num_problems - k_V) for k_V in (ups_V, downs_V))
    # All problems changed the same way: the beta's second parameter is 0 and there is no bound but 1.
    return np.fmax(low_V, -np.nan_to_num(most_down_V, nan=1.0)), np.fmin(high_V, np.nan_to_num(most_up_V, nan=1.0))


def _bootstrap_p(value_V: Floats, error_V: Floats, t_BV: Floats, num_problems: int) -> Floats:
    """Two-sided p of a mean of 0, equal tails; beyond the resamples' reach, the t distribution's tail."""
    resamples = len(t_BV)
    p_V = np.ones(len(value_V))
    for v, (value, error) in enumerate(zip(value_V, error_V)):
        if value == 0:
            continue
        if error == 0:  # the same change at every problem: what is left is the flips' to say
            p_V[v] = 2 / (resamples + 1)
            continue
        t = value / error
        at = np.searchsorted(t_BV[:, v], t, side="left" if t > 0 else "right")
        beyond = resamples - at if t > 0 else at
        p_V[v] = _tail_p(int(beyond), resamples, abs(t), num_problems)
    return np.minimum(p_V, 1.0)


def _tail_p(beyond: int, resamples: int, t: float, num_problems: int) -> float:
    reach = 2 * (1 + beyond) / (1 + resamples)
    return reach if beyond else min(reach, 2 * float(sps.t.sf(t, num_problems - 1)))


def _flip_p(difference_PV: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Two-sided p of a mean of 0, by flipping the signs of whole problems; all sets see the same flips."""
    changed_P = (difference_PV != 0).any(1)
    some_PV = difference_PV[changed_P]
    seen_V = np.abs(some_PV.sum(0))
    beaten_V = np.zeros(difference_PV.shape[1], int)
    for start in range(0, resamples, BLOCK):
        flips_BP = rng.integers(0, 2, (min(BLOCK, resamples - start), len(some_PV)), dtype=np.int8) * 2.0 - 1.0
        beaten_V += (np.abs(flips_BP @ some_PV) >= seen_V - 1e-9).sum(0)
    p_V = (1.0 + beaten_V) / (1.0 + resamples)
    norm_V = np.sqrt((some_PV**2).sum(0))
    for v in np.flatnonzero((beaten_V == 0) & (norm_V > 0)):
        p_V[v] = min(p_V[v], 2 * float(sps.norm.sf(seen_V[v] / norm_V[v])))
    return p_V


def _p_not_below(
    value_V: Floats, epsilon: float, error_V: Floats, t_BV: Floats, num_problems: int, ups_V: Floats
) -> Floats:
    """One-sided p of "the mean is ε or more"; t may be sorted either way."""
    resamples = len(t_BV)
    exact_V = sps.binom.cdf(ups_V, num_problems, epsilon)  # a mean of ε takes a share of at least ε that go up
    p_V = np.ones(len(value_V))
    for v, (value, error) in enumerate(zip(value_V - epsilon, error_V)):
        if value >= 0:
            continue
        p_spread = 0.0
        if error > 0:
            beyond = int((t_BV[:, v] <= value / error).sum())
            p_spread = _tail_p(beyond, resamples, -value / error, num_problems) / 2
            p_spread = max(p_spread, float(sps.t.sf(-value / error, num_problems - 1)))
        p_V[v] = min(max(p_spread, np.exp(num_problems * value)), exact_V[v])
    return p_V


def _sign_p(ups: int, downs: int) -> float:
    return 1.0 if ups + downs == 0 else float(sps.binomtest(ups, ups + downs).pvalue)
