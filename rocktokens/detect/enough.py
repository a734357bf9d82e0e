"""Enough data? How many prompts would settle what is costly but unclear (docs/method.md §3).

From the variances that were observed: a plan, not a promise. This module knows sums per type and prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats as sps

from rocktokens.detect.certified import LEARNING, LEVELLED, MIN_PROMPTS, Certified
from rocktokens.detect.occurrences import Array
from rocktokens.detect.pair_sums import PairSums
from rocktokens.stats import Floats

# Shapes: V token types.
POWER = 0.8
OUT_OF_REACH = 20  # times the prompts there are; a fall that close to 1 − κ is at the limit, not undecided


class EnoughData(NamedTuple):
    """What it would take to settle the unclear types."""

    num_prompts: int
    """Prompts there are, both halves."""
    num_unclear: int
    num_in_reach: int
    """Unclear types that `prompts_needed` would settle; the others have fallen by almost exactly 1 − κ."""
    prompts_needed: int | None
    """Prompts in all, both halves; None where nothing is unclear or nothing is in reach."""
    needed_V: Floats
    """The same for each unclear type; NaN for every other."""


def enough_data(chosen: PairSums, other: PairSums, certified: Certified, *, kappa: float, q: float) -> EnoughData:
    """Prompts at which the stagnation test of each unclear type, at the level it now faces, has a power of 0.8.

    Of the pairs of types and prompts, those of unclear types are enough.
    """
    unclear = certified.unclear
    num_prompts = chosen.num_prompts + other.num_prompts
    needed_V = np.full(chosen.num_types, np.nan)
    if len(unclear) and chosen.pre_S is not None and other.pre_S is not None:
        number_V, mean_V, sd_V = _both_halves(chosen.of_types(unclear), other.of_types(unclear), kappa)
        level = np.where(mean_V > 0, *(_level(certified, q, rocks) for rocks in (True, False)))
        with np.errstate(divide="ignore", invalid="ignore"):
            prompts_V = np.ceil(((sps.norm.isf(level) + sps.norm.ppf(POWER)) * sd_V / mean_V) ** 2)
            # As many prompts must hold the type in the half that chooses.
            all_V = 2 * np.maximum(prompts_V, MIN_PROMPTS) * num_prompts / number_V
        needed_V[unclear] = np.maximum(np.ceil(all_V[unclear]), num_prompts + 1)
    in_reach = needed_V[np.isfinite(needed_V) & (needed_V <= OUT_OF_REACH * num_prompts)]
    most = int(in_reach.max()) if len(in_reach) else None
    return EnoughData(num_prompts, len(unclear), len(in_reach), most, needed_V)


def _both_halves(chosen: PairSums, other: PairSums, kappa: float) -> tuple[Array, Floats, Floats]:
    """Prompts, mean and standard deviation of loss after − κ · loss before per type, over both halves."""
    type_S = np.concatenate([chosen.type_S, other.type_S])
    value_S = np.concatenate([half.loss_S - kappa * half.pre_S for half in (chosen, other) if half.pre_S is not None])
    number_V = np.bincount(type_S, minlength=chosen.num_types)
    mean_V = np.bincount(type_S, weights=value_S, minlength=chosen.num_types) / np.maximum(number_V, 1)
    square_V = np.bincount(type_S, weights=(value_S - mean_V[type_S]) ** 2, minlength=chosen.num_types)
    return number_V, mean_V, np.sqrt(square_V / np.maximum(number_V - 1, 1))


def _level(certified: Certified, q: float, rocks: bool) -> float:
    """The level at which Benjamini-Hochberg would admit one more rock, or one more learning type."""
    class_V = certified.class_V
    admitted = len(certified.rocks) if rocks else int(np.isin(class_V, (LEARNING, LEVELLED)).sum())
    return q * (admitted + 1) / max(int(certified.tests.observed_V.sum()), 1)
