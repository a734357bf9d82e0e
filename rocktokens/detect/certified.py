"""Which token types are declared rocks, by tests over prompts (docs/method.md §3).

Four one-sided tests per type, each over the prompts (or groups of them) that it occurs in: H1, it costs more than the
other tokens of its prompts at like positions; H2, it costs more than the mean occurrence; H3, it has fallen by less
than 1 − κ; H4, at the pace of the last third of training three more runs would not take away 1 − κ either. A type's p
value is the largest of those that count; Benjamini-Hochberg over all observed types bounds the share of false rocks.
This module knows losses per type and prompt; it does not know contexts, halves, token texts or reports.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats as sps

from rocktokens.detect.occurrences import Array, Pairs
from rocktokens.stats import Floats, Intervals, benjamini_hochberg
from rocktokens.values import Json

# Shapes: V token types, P prompts, S pairs of a type and a prompt that it occurs in.
ROCK, SO_FAR, NOT_YET = "rock", "rock so far", "not yet"
LEARNING, LEVELLED, UNCLEAR, COSTLY = "learning", "learning, levelled off", "unclear", "costly"
CLASSES = (ROCK, SO_FAR, NOT_YET, LEARNING, LEVELLED, UNCLEAR, COSTLY)
DECLARED = (ROCK, SO_FAR)
MIN_PROMPTS = 5
MORE_RUNS = 3  # a rock would keep its loss for as many more runs as long as this one
POOL_Q = 0.10  # types that are costly at this rate of false ones say how far the tails of contrasts reach
UNSEEN = 3  # what has been seen in none of n prompts has a rate of at most 3 / n (95 %)
ROUNDING = 1e-6  # differences below this share of the prompt's mean loss are float32 rounding
POWER = 0.8
OUT_OF_REACH = 20  # times the prompts there are; a fall that close to 1 − κ is at the limit, not undecided


def p_mean_positive(mean_V: Floats, variance_V: Floats, third_V: Floats, number_V: Array) -> Floats:
    """One-sided p of "the mean is not above 0" from a mean, a variance and a third central moment per type.

    Student's t after Hall's (1992) transformation, which takes the sample's skewness out of it: t alone is up to a
    hundred times too small where rare large values pull the mean down, and far too cautious where they push it up, as
    losses do. No p is below 2**-number, what flipping signs could reach. Fewer than MIN_PROMPTS values: p = 1.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio_V = np.where(variance_V > 0, mean_V / np.sqrt(variance_V), np.sign(mean_V) * np.inf)
        skew_V = np.where(variance_V > 0, third_V / variance_V**1.5, 0.0)
        hall_V = ratio_V + skew_V * ratio_V**2 / 3 + skew_V**2 * ratio_V**3 / 27 + skew_V / (6 * number_V)
        t_V = np.where(np.isfinite(ratio_V), hall_V, ratio_V) * np.sqrt(number_V)
        p_V = sps.t.sf(t_V, np.maximum(number_V - 1, 1))
    p_V = np.maximum(p_V, 0.5 ** np.minimum(number_V, 1000))
    return np.where((number_V >= MIN_PROMPTS) & (mean_V > 0), p_V, 1.0)


def _p_of_pairs(pairs: Pairs, value_S: Floats, scale_S: Floats, pool_V: Array | None = None) -> Floats:
    """p of "mean over a type's prompts is not above 0" for one value per pair; 0 where it is rounding of the scale."""
    value_S = np.where(np.abs(value_S) <= ROUNDING * np.abs(scale_S), 0.0, value_S)
    number_V = pairs.prompts_V
    if pool_V is not None:
        value_S = value_S - unseen_falls(pairs, value_S, pool_V)[pairs.type_S]
    mean_V = pairs.by_type(value_S) / np.maximum(number_V, 1)
    centred_S = value_S - mean_V[pairs.type_S]
    safe_V = np.maximum(number_V, 2)
    variance_V, third_V = pairs.by_type(centred_S**2) / (safe_V - 1), pairs.by_type(centred_S**3) / safe_V
    return p_mean_positive(mean_V, variance_V, third_V, number_V)


def unseen_falls(pairs: Pairs, value_S: Floats, pool_V: Array) -> Floats:
    """What rare large falls that a type's prompts happen to miss could take from its mean, from those of other types.

    A type that learns at one position in fifty shows no fall at all in prompts without such a position, and no test on
    those prompts can know. Other costly types can: in units of each type's mean loss, the share of their prompts that
    lie below this type's worst one is how often it may have missed something, at most 3/n, since n prompts without it
    bound the rate, and their mean is how much. Types that mostly fall are no measure of rare falls: only those whose
    median is above 0 are asked.
    """
    allowed_V, kept = np.zeros(pairs.num_types), np.flatnonzero(pool_V[pairs.type_S])
    unit_V = pairs.by_type(pairs.loss_S) / np.maximum(pairs.prompts_V, 1)
    kept = kept[unit_V[pairs.type_S[kept]] > 0]
    type_s = pairs.type_S[kept]
    value_s = value_S[kept] / unit_V[type_s]
    order = np.lexsort((value_s, type_s))
    type_s, value_s = type_s[order], value_s[order]
    if not len(type_s):
        return allowed_V
    start_T = np.flatnonzero(np.append(True, type_s[1:] != type_s[:-1]))
    number_T = np.diff(start_T, append=len(type_s))
    types, least_T, median_T = type_s[start_T], value_s[start_T], value_s[start_T + number_T // 2]
    pool = np.sort(value_s[np.repeat(median_T > 0, number_T)])
    below_T = np.searchsorted(pool, least_T)
    total_T = np.append(0.0, np.cumsum(pool))[below_T]
    rate_T = np.minimum(below_T / max(len(pool), 1), UNSEEN / number_T)
    allowed_V[types] = -unit_V[types] * rate_T * total_T / np.maximum(below_T, 1)
    return np.maximum(allowed_V, 0.0)


def p_above_neighbours(pairs: Pairs) -> Floats:
    """H1: mean over prompts of (the type's loss − that of the other tokens of its prompt and fifth of the rollout)."""
    n_P, loss_P = pairs.by_prompt(pairs.n_S), pairs.by_prompt(pairs.loss_S)
    return _p_of_pairs(pairs, pairs.above_S / pairs.n_S, (loss_P / n_P)[pairs.prompt_S])


def p_above_mean(pairs: Pairs) -> Floats:
    """H2: the type's mean loss > the mean loss of all occurrences, both means estimated on the same prompts."""
    number_V, num_prompts, num_all = pairs.prompts_V, pairs.num_prompts, pairs.n_S.sum()
    n_V = np.maximum(pairs.by_type(pairs.n_S), 1)
    mean_V, mean = pairs.by_type(pairs.loss_S) / n_V, pairs.loss_S.sum() / num_all
    # Influence of each prompt on the difference; prompts without the type act through the mean of all alone.
    all_P = (pairs.by_prompt(pairs.loss_S) - mean * pairs.by_prompt(pairs.n_S)) * num_prompts / num_all
    all_S = all_P[pairs.prompt_S]
    own_S = (pairs.loss_S - mean_V[pairs.type_S] * pairs.n_S) * num_prompts / n_V[pairs.type_S] - all_S
    square_V = pairs.by_type(own_S**2 - all_S**2) + (all_P**2).sum()
    cube_V = pairs.by_type(own_S**3 + all_S**3) - (all_P**3).sum()
    few_V = number_V / np.maximum(number_V - 1, 1)
    variance_V, third_V = few_V * np.maximum(square_V, 0) / num_prompts, cube_V / num_prompts
    above_V = np.where(np.abs(mean_V - mean) <= ROUNDING * abs(mean), 0.0, mean_V - mean)
    # The t statistic grows with the root of all prompts; its degrees of freedom with the prompts the type occurs in.
    scale_V = np.sqrt(num_prompts / np.maximum(number_V, 1))
    return p_mean_positive(above_V * scale_V, variance_V, third_V / scale_V, number_V)


def p_stagnant(
    pairs: Pairs, before_S: Array | None, kappa: float, *, fallen: bool = False, pool_V: Array | None = None
) -> Floats:
    """H3: loss after OPD > κ · loss before it, on the same occurrences, or the other side, that it has fallen below.

    1 where the loss before is unknown. `pool_V`: the types that tell of falls which a type's own prompts may miss.
    """
    if before_S is None:
        return np.ones(pairs.num_types)
    left_S = pairs.loss_S - kappa * before_S
    return _p_of_pairs(pairs, -left_S if fallen else left_S, before_S, pool_V)


@dataclass(frozen=True)
class TypeTests:
    """Every type's p values on the occurrences given; 1 where a test could not be made."""

    prompts_V: Array
    """Prompts that each type occurs in; a test takes MIN_PROMPTS."""
    costly_V: Floats
    """The larger of H1's and H2's."""
    stagnant_V: Floats
    fallen_V: Floats
    level_V: Floats
    settled_V: Floats | None
    """H4's; None below three checkpoints, where it cannot be tested."""
    has_pre: bool

    @classmethod
    def of(cls, pairs: Pairs, kappa: float) -> TypeTests:
        """All tests of all types."""
        costly_V = np.maximum(p_above_neighbours(pairs), p_above_mean(pairs))
        pool_V, late = discoveries(costly_V, pairs.prompts_V > 0, POOL_Q), pairs.late_share
        return cls(
            prompts_V=pairs.prompts_V,
            costly_V=costly_V,
            stagnant_V=p_stagnant(pairs, pairs.pre_S, kappa, pool_V=pool_V),
            fallen_V=p_stagnant(pairs, pairs.pre_S, kappa, fallen=True),
            # Levelled off: at the pace of the last third a whole run would fall by less than 1 − κ.
            level_V=p_stagnant(pairs, pairs.late_S, kappa**late),
            # Settled: at that pace even three more runs would.
            settled_V=None
            if pairs.late_S is None
            else p_stagnant(pairs, pairs.late_S, kappa ** (late / MORE_RUNS), pool_V=pool_V),
            has_pre=pairs.pre_S is not None,
        )

    def p_of(self, name: str) -> Floats:
        """p of "not of this class" per type."""
        stagnant = (self.costly_V, self.stagnant_V)
        parts = {
            ROCK: stagnant if self.settled_V is None else (*stagnant, self.settled_V),
            SO_FAR: stagnant,
            NOT_YET: stagnant,
            LEARNING: (self.costly_V, self.fallen_V),
            LEVELLED: (self.costly_V, self.fallen_V, self.level_V),
        }
        return np.maximum.reduce(parts.get(name, (self.costly_V,)))


def discoveries(p_V: Floats, among_V: Array, q: float) -> Array:
    """Mask of the types that Benjamini-Hochberg rejects at q among some of them."""
    found_V = np.zeros(len(p_V), bool)
    if among_V.any():
        found_V[among_V] = benjamini_hochberg(p_V[among_V]) <= q
    return found_V


def declare(tests: TypeTests, q: float) -> Array:
    """The class of every costly type by Benjamini-Hochberg at q over all observed types; empty for every other."""
    observed_V = tests.prompts_V > 0
    class_V = np.full(len(observed_V), "", dtype=object)
    class_V[discoveries(tests.costly_V, observed_V, q)] = UNCLEAR if tests.has_pre else COSTLY
    if tests.has_pre:
        learning_V = discoveries(tests.p_of(LEARNING), observed_V, q)
        class_V[learning_V] = LEARNING
        class_V[discoveries(tests.level_V, learning_V, q)] = LEVELLED
        class_V[discoveries(tests.p_of(NOT_YET), observed_V, q)] = SO_FAR if tests.settled_V is None else NOT_YET
        if tests.settled_V is not None:
            class_V[discoveries(tests.p_of(ROCK), observed_V, q)] = ROCK
    return class_V


def confirm(class_V: Array, other: TypeTests, q: float) -> Array:
    """Mask of the types whose class the other half of the prompts finds too, by Benjamini-Hochberg within the class."""
    return np.logical_or.reduce([discoveries(other.p_of(name), class_V == name, q) for name in CLASSES])


def falls(pairs: Pairs, *, non_negative: bool, level: float = 0.95, before_S: Array | None = None) -> Intervals:
    """1 − Σ loss after ÷ Σ loss before per type, with Fieller's interval over prompts; NaN where it is unknown.

    The interval holds the falls that a two-sided t test over prompts does not reject. A fall of losses that are not
    negative never exceeds 1; an end that no data bound is infinite.
    """
    before_S = pairs.pre_S if before_S is None else before_S
    if before_S is None:
        nothing = np.full(pairs.num_types, np.nan)
        return Intervals(nothing, nothing, nothing)
    number_V = pairs.prompts_V
    safe_V, freedom_V = np.maximum(number_V, 1), np.maximum(number_V - 1, 1)
    post_V, pre_V = pairs.by_type(pairs.loss_S) / safe_V, pairs.by_type(before_S) / safe_V
    post_S, pre_S = pairs.loss_S - post_V[pairs.type_S], before_S - pre_V[pairs.type_S]
    squared_V = sps.t.ppf((1 + level) / 2, freedom_V) ** 2 / safe_V / freedom_V
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio_V = post_V / pre_V
        a_V = pre_V**2 - squared_V * pairs.by_type(pre_S**2)
        b_V = post_V * pre_V - squared_V * pairs.by_type(post_S * pre_S)
        c_V = post_V**2 - squared_V * pairs.by_type(post_S**2)
        root_V = np.sqrt(np.maximum(b_V**2 - a_V * c_V, 0))
        bounded_V = (a_V > 0) & (number_V >= 2)
        low_V = np.where(bounded_V, (b_V - root_V) / a_V, -np.inf)
        high_V = np.where(bounded_V, (b_V + root_V) / a_V, np.inf)
    low_V = np.maximum(low_V, 0.0) if non_negative else low_V
    known_V = (number_V > 0) & (pre_V > 0)
    parts = (1 - ratio_V, 1 - high_V, 1 - np.minimum(low_V, ratio_V))
    return Intervals(*(np.where(known_V, part_V, np.nan) for part_V in parts))


def steps_to_quarter(pairs: Pairs, steps: list[int], kappa: float, *, non_negative: bool) -> tuple[Floats, Floats]:
    """Steps until 1 − κ of a type's present loss is gone at the pace of the last third, and their lower bound.

    NaN where that is unknown, or where at that pace it never is.
    """
    if pairs.late_S is None:
        return np.full(pairs.num_types, np.nan), np.full(pairs.num_types, np.nan)
    fall = falls(pairs, non_negative=non_negative, before_S=pairs.late_S)
    late_steps = pairs.late_share * (steps[-1] - steps[0])
    with np.errstate(divide="ignore", invalid="ignore"):
        found = [late_steps * np.log(kappa) / np.log(1 - lost_V) for lost_V in (fall.value_V, fall.high_V)]
    value_V, low_V = (np.where(steps_V > 0, steps_V, np.nan) for steps_V in found)
    return value_V, np.where(fall.high_V >= 1, 0.0, low_V)


def enough_data(chosen: Pairs, other: Pairs, class_V: Array, *, kappa: float, q: float) -> tuple[Json, Floats]:
    """How many prompts would settle the unclear types, and the same for each type (NaN where it is not unclear).

    At that number the stagnation test of a type, at the level it now faces, has a power of 0.8. It comes from the
    variances observed, so it is a plan and not a promise.
    """
    num_prompts, unclear_V = chosen.num_prompts + other.num_prompts, class_V == UNCLEAR
    needed_V = np.full(chosen.num_types, np.nan)
    if chosen.pre_S is not None and other.pre_S is not None:
        both = ((chosen, chosen.pre_S), (other, other.pre_S))
        type_S = np.concatenate([half.type_S for half, _ in both])
        value_S = np.concatenate([half.loss_S - kappa * pre_S for half, pre_S in both])
        number_V = np.maximum(np.bincount(type_S, minlength=chosen.num_types), 1)
        mean_V = np.bincount(type_S, weights=value_S, minlength=chosen.num_types) / number_V
        square_V = np.bincount(type_S, weights=(value_S - mean_V[type_S]) ** 2, minlength=chosen.num_types)
        sd_V = np.sqrt(square_V / np.maximum(number_V - 1, 1))
        # The level at which Benjamini-Hochberg would admit one more rock, or one more learning type.
        observed = max(int((chosen.prompts_V > 0).sum()), 1)
        admitted = np.where(
            mean_V > 0, np.isin(class_V, (*DECLARED, NOT_YET)).sum(), np.isin(class_V, (LEARNING, LEVELLED)).sum()
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            reach_V = sps.norm.isf(q * (admitted + 1) / observed) + sps.norm.ppf(POWER)
            prompts_V = np.ceil((reach_V * sd_V / mean_V) ** 2)
            # As many prompts must hold the type in the half that chooses.
            all_V = 2 * np.maximum(prompts_V, MIN_PROMPTS) * num_prompts / number_V
        needed_V[unclear_V] = np.maximum(np.ceil(all_V[unclear_V]), num_prompts + 1)
    # The others have fallen by almost exactly 1 − κ.
    in_reach = needed_V[np.isfinite(needed_V) & (needed_V <= OUT_OF_REACH * num_prompts)]
    needed = int(in_reach.max()) if len(in_reach) else None
    return {"num_unclear": int(unclear_V.sum()), "num_in_reach": len(in_reach), "prompts_needed": needed}, needed_V
