"""From paired differences to a verdict: does banning a token change accuracy, provably not, or is it open?

Given per-prompt differences and error rates; knows nothing of tokens, rollouts or looks. Tokens that few rollouts use
give differences that are almost all exactly 0, and there a percentile bootstrap rejects far too often (five changed
prompts, all one way: p = 0.01 where the exact answer is 0.06) and sees no width at all where nothing changed. So

- the bootstrap is studentised, a resample that drew no changed prompt counts as infinitely far out, not as absent, and
  an interval is never narrower than Student's;
- an interval ends no nearer than ln(1/tail)/n to the estimate: n prompts may all have missed that share of prompts,
  each changed by as much as can be (the rule of three);
- where few prompts changed and resamples without any are common, the exact binomial bound on the share of changed
  prompts takes over: an effect is never larger than the share of prompts it shows in;
- "no effect" must also be rejected by flipping the signs of whole prompts; where the flips do not reject it, the
  interval is extended to 0.

Interval, p value and verdict are one inversion: p is the smallest α at which the interval leaves out 0 (p_neutral: at
which the 1 − 2α interval lies inside ±ε), and verdicts are read off the intervals. A Strong verdict therefore never
comes with an interval that holds 0, and Proven Neutral never with one that leaves ±ε.
`benchmarks/census_calibration.py` measures the error rates that result.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from scipy import stats as sps

from rocktokens.errors import DataError
from rocktokens.stats import Estimate, Floats, resample_counts

# Shapes: P prompts, V sets of token types, B resamples.
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
    sd_V: Floats
    """Standard deviation of the difference between prompts."""


def find(difference_PV: Floats, *, epsilon: float, alpha: float, resamples: int, rng: np.random.Generator) -> Findings:
    """Estimates, intervals and p values of the mean differences of V sets measured on the same P prompts."""
    difference_PV = np.asarray(difference_PV, float)
    if len(difference_PV) < 2:
        raise DataError(f"a census needs at least 2 prompts, got {len(difference_PV)}")
    sample = _Sample.of(difference_PV, resamples, rng)
    flip_p_V = _flip_p(difference_PV, resamples, rng)
    p_V = np.maximum(sample.p_of_zero(), flip_p_V)

    low_V, high_V = sample.interval(alpha / 2)
    open_V = (flip_p_V > alpha) | (sample.value_V == 0)  # the flips do not reject 0: it belongs inside
    low_V, high_V = np.where(open_V, np.minimum(low_V, 0.0), low_V), np.where(open_V, np.maximum(high_V, 0.0), high_V)
    inner_low_V, inner_high_V = sample.interval(alpha)
    p_neutral_V = np.maximum(sample.p_not_below(epsilon), sample.mirrored().p_not_below(epsilon))
    return Findings(sample.value_V, low_V, high_V, inner_low_V, inner_high_V, p_V, p_neutral_V, sample.sd_V)


def change(
    after_P: Floats, before_P: Floats, *, level: float = 0.95, resamples: int, rng: np.random.Generator
) -> Estimate:
    """Mean change of paired outcomes with the interval of the census: honest where few prompts changed, or none."""
    difference_P = np.asarray(after_P, float) - np.asarray(before_P, float)
    found = find(difference_P[:, None], epsilon=0.0, alpha=1 - level, resamples=resamples, rng=rng)
    return Estimate(float(found.value_V[0]), float(found.low_V[0]), float(found.high_V[0]), len(difference_P))


def verdicts(found: Findings, *, epsilon: float) -> list[Verdict]:
    """Strong where the effect is at least ε and its interval leaves out 0; neutral where the inner one is inside ±ε."""
    named: list[Verdict] = []
    for value, low, high, inner_low, inner_high in zip(*found[:5]):
        if abs(value) >= epsilon and (low > 0 or high < 0):
            named.append(PILLAR if value < 0 else STUMBLING_BLOCK)
        else:
            named.append(NEUTRAL if -epsilon < inner_low and inner_high < epsilon else UNDECIDED)
    return named


def problems_to_decide(
    value: float, sd: float, num_problems: int, *, epsilon: float, alpha: float, power: float = 0.8
) -> int:
    """How many prompts in all would decide a set of this effect and spread, with the given power."""
    reach = epsilon - abs(value)
    quantile = sps.norm.isf(alpha) if reach > 0 else sps.norm.isf(alpha / 2)
    goal = reach if reach > 0 else abs(value)
    for_spread = ((quantile + sps.norm.ppf(power)) * sd / goal) ** 2 if goal > 0 else np.inf
    for_unseen = np.log(1 / alpha) / goal if reach > 0 else 0
    return int(min(max(np.ceil(max(for_spread, for_unseen)), num_problems + 1), 10**9))


def _studentised(difference_PV: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """t of every resample around the estimate; a resample without spread is infinitely far from it, or on it."""
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


class _Sample(NamedTuple):
    """What intervals and p values are both made of, so that one is the inversion of the other."""

    value_V: Floats
    error_V: Floats
    sd_V: Floats
    t_BV: Floats
    """Studentised resamples, sorted."""
    ups_V: Floats
    downs_V: Floats
    """Prompts whose outcome the ban raised, and lowered."""
    num_prompts: int

    @classmethod
    def of(cls, difference_PV: Floats, resamples: int, rng: np.random.Generator) -> _Sample:
        num_prompts, sd_V = len(difference_PV), difference_PV.std(0, ddof=1)
        return cls(
            value_V=difference_PV.mean(0),
            error_V=np.where(sd_V > 1e-12, sd_V / np.sqrt(num_prompts), 0.0),
            sd_V=sd_V,
            t_BV=_studentised(difference_PV, resamples, rng),
            ups_V=(difference_PV > 0).sum(0),
            downs_V=(difference_PV < 0).sum(0),
            num_prompts=num_prompts,
        )

    def mirrored(self) -> _Sample:
        """The same sample with every sign changed."""
        return self._replace(value_V=-self.value_V, t_BV=-self.t_BV[::-1], ups_V=self.downs_V, downs_V=self.ups_V)

    def interval(self, tail: float) -> tuple[Floats, Floats]:
        """Ends that leave `tail` outside on either side."""
        return -self.mirrored()._upper_end(tail), self._upper_end(tail)

    def _upper_end(self, tail: float) -> Floats:
        """The smallest value that `p_not_below` rejects at `tail`."""
        place = max(int(tail * (len(self.t_BV) + 1) + 1e-9), 1) - 1
        least = sps.t.isf(
            tail, self.num_prompts - 1
        )  # with few changed prompts, resamples make too little of the spread
        with np.errstate(invalid="ignore"):
            reach_V = np.where(self.error_V > 0, np.maximum(-self.t_BV[place], least) * self.error_V, 0.0)
        end_V = self.value_V + np.maximum(reach_V, np.log(1 / tail) / self.num_prompts)
        most_V = sps.beta.isf(tail, self.ups_V + 1, self.num_prompts - self.ups_V)
        # All prompts went up: the beta's second parameter is 0 and there is no bound but 1.
        return np.fmin(end_V, np.nan_to_num(most_V, nan=1.0))

    def p_not_below(self, bound: float) -> Floats:
        """One-sided p of "the mean is `bound` or more"."""
        exact_V = sps.binom.cdf(self.ups_V, self.num_prompts, bound)  # such a mean takes a share of `bound` that go up
        return np.minimum(self._p_above(bound), exact_V)

    def p_of_zero(self) -> Floats:
        """Two-sided p of a mean of 0, equal tails. The binomial bound on a share is above 0: it never leaves 0 out."""
        below_V, above_V = self._p_above(0.0), self.mirrored()._p_above(0.0)
        return np.minimum(2 * np.minimum(below_V, above_V), 1.0)

    def _p_above(self, bound: float) -> Floats:
        p_V, resamples = np.ones(len(self.value_V)), len(self.t_BV)
        for v in np.flatnonzero(self.value_V < bound):
            short = self.value_V[v] - bound
            p_V[v] = np.exp(self.num_prompts * short)
            if self.error_V[v] > 0:
                t = short / self.error_V[v]
                beyond = int(np.searchsorted(self.t_BV[:, v], t, side="right"))
                # Beyond the resamples' reach only Student's tail is left.
                p_V[v] = max(
                    p_V[v], (1 + beyond) / (1 + resamples) if beyond else 0.0, sps.t.cdf(t, self.num_prompts - 1)
                )
        return p_V


def _flip_p(difference_PV: Floats, resamples: int, rng: np.random.Generator) -> Floats:
    """Two-sided p of a mean of 0, by flipping the signs of whole prompts; all sets see the same flips."""
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
