"""Which token types are declared rocks, by tests over prompts (docs/method.md §3).

Three one-sided tests per type, each over the prompts that it occurs in: H1, it costs more than the other tokens of its
prompts; H2, it costs more than the mean occurrence; H3, it has fallen by less than 1 − κ. A type's p value is the
largest of those that count, and Benjamini-Hochberg over all observed types bounds the share of false declarations.
This module knows losses per type and prompt; it does not know contexts, halves, token texts or reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats as sps

from rocktokens.detect.grouped import threads_for
from rocktokens.detect.occurrences import Array
from rocktokens.detect.pair_sums import PairSums
from rocktokens.parallel import for_each
from rocktokens.stats import Floats, Intervals, benjamini_hochberg

# Shapes: V token types, P prompts, S pairs of a type and a prompt that it occurs in, s those of one block.
ROCK, LEARNING, LEVELLED, UNCLEAR, COSTLY = "rock", "learning", "learning, levelled off", "unclear", "costly"
CLASSES = (ROCK, LEARNING, LEVELLED, UNCLEAR, COSTLY)
MIN_PROMPTS = 5
KAPPA_STEP = 0.1  # how far sensitivity moves κ
ROUNDING = 1e-6  # differences below this share of the prompt's mean loss are float32 rounding


def p_mean_positive(mean_V: Floats, variance_V: Floats, third_V: Floats, number_V: Array) -> Floats:
    """One-sided p of "the mean is not above 0" from a mean, a variance and a third central moment per type.

    Student's t after Hall's (1992) transformation, which takes the sample's skewness out of it: t alone is up to a
    hundred times too small where rare large values pull the mean down, and far too cautious where they push it up, as
    losses do. No p is below 2**-number, what flipping signs could reach. Fewer than MIN_PROMPTS values: p = 1.
    """
    enough_V = number_V >= MIN_PROMPTS
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio_V = mean_V / np.sqrt(variance_V)
        skew_V = third_V / variance_V**1.5
        ratio_V = np.where(variance_V > 0, ratio_V, np.sign(mean_V) * np.inf)
        skew_V = np.where(variance_V > 0, skew_V, 0.0)
        hall_V = ratio_V + skew_V * ratio_V**2 / 3 + skew_V**2 * ratio_V**3 / 27 + skew_V / (6 * number_V)
        t_V = np.where(np.isfinite(ratio_V), hall_V, ratio_V) * np.sqrt(number_V)
        p_V = sps.t.sf(t_V, np.maximum(number_V - 1, 1))
    p_V = np.maximum(p_V, 0.5 ** np.minimum(number_V, 1000))
    return np.where(enough_V & (mean_V > 0), p_V, 1.0)


def _p_of_pairs(sums: PairSums, value: Callable[[slice], Floats]) -> Floats:
    """p of "mean over a type's prompts is not above 0" for one value per pair, given a block at a time."""
    number_V = sums.prompts_V
    safe_V = np.maximum(number_V, 2)
    (total_V,) = sums.by_type(lambda pairs: (value(pairs),))
    mean_V = total_V / np.maximum(number_V, 1)

    def powers(pairs: slice) -> tuple[Floats, Floats]:
        centred_s = value(pairs) - mean_V[sums.type_S[pairs]]
        square_s = centred_s**2
        return square_s, square_s * centred_s

    square_V, cube_V = sums.by_type(powers)
    return p_mean_positive(mean_V, square_V / (safe_V - 1), cube_V / safe_V, number_V)


def p_above_neighbours(sums: PairSums) -> Floats:
    """H1: mean over prompts of (the type's mean loss − the mean loss of the other tokens of that prompt) > 0."""
    n_P, loss_P = sums.by_prompt(lambda pairs: (sums.n_S[pairs], sums.loss_S[pairs]))
    scale_P = np.abs(loss_P / n_P)

    def contrast(pairs: slice) -> Floats:
        prompt_s, n_s, loss_s = sums.prompt_S[pairs], sums.n_S[pairs], sums.loss_S[pairs]
        other_n_s = n_P[prompt_s] - n_s
        other_s = (loss_P[prompt_s] - loss_s) / np.maximum(other_n_s, 1)
        contrast_s = loss_s / n_s - other_s
        alone_s = other_n_s == 0
        return np.where(alone_s | (np.abs(contrast_s) <= ROUNDING * scale_P[prompt_s]), 0.0, contrast_s)

    return _p_of_pairs(sums, contrast)


def p_above_mean(sums: PairSums) -> Floats:
    """H2: the type's mean loss > the mean loss of all occurrences, both means estimated on the same prompts."""
    number_V, num_prompts, num_all = sums.prompts_V, sums.num_prompts, sums.n_S.sum()
    n_V, loss_V = sums.by_type(lambda pairs: (sums.n_S[pairs], sums.loss_S[pairs]))
    n_P, loss_P = sums.by_prompt(lambda pairs: (sums.n_S[pairs], sums.loss_S[pairs]))
    n_V = np.maximum(n_V, 1)
    mean_V, mean = loss_V / n_V, sums.loss_S.sum() / num_all
    rounding = ROUNDING * abs(mean)
    # Influence of each prompt on the difference; prompts without the type act through the mean of all alone.
    all_P = (loss_P - mean * n_P) * num_prompts / num_all

    def powers(pairs: slice) -> tuple[Floats, Floats]:
        type_s, all_s = sums.type_S[pairs], all_P[sums.prompt_S[pairs]]
        own_s = (sums.loss_S[pairs] - mean_V[type_s] * sums.n_S[pairs]) * num_prompts / n_V[type_s]
        return (own_s - all_s) ** 2 - all_s**2, (own_s - all_s) ** 3 + all_s**3

    square_V, cube_V = sums.by_type(powers)
    square_V, cube_V = square_V + (all_P**2).sum(), cube_V - (all_P**3).sum()
    few_V = number_V / np.maximum(number_V - 1, 1)
    variance_V, third_V = few_V * np.maximum(square_V, 0) / num_prompts, cube_V / num_prompts
    above_V = np.where(np.abs(mean_V - mean) <= rounding, 0.0, mean_V - mean)
    # The t statistic grows with the root of all prompts; its degrees of freedom with the prompts the type occurs in.
    scale = np.sqrt(num_prompts / np.maximum(number_V, 1))
    return p_mean_positive(above_V * scale, variance_V, third_V / scale, number_V)


def p_stagnant(sums: PairSums, kappa: float) -> Floats:
    """H3: loss after OPD > κ · loss before it, on the same occurrences; 1 where the loss before is unknown."""
    pre_S = sums.pre_S
    if pre_S is None:
        return np.ones(sums.num_types)
    return _p_of_pairs(sums, lambda pairs: _rounded(sums.loss_S[pairs] - kappa * pre_S[pairs], pre_S[pairs]))


def p_fallen(sums: PairSums, kappa: float) -> Floats:
    """The other side of H3: loss after OPD < κ · loss before it."""
    pre_S = sums.pre_S
    if pre_S is None:
        return np.ones(sums.num_types)
    return _p_of_pairs(sums, lambda pairs: _rounded(kappa * pre_S[pairs] - sums.loss_S[pairs], pre_S[pairs]))


def p_level(sums: PairSums, kappa: float) -> Floats:
    """Has it stopped falling? At the pace of the last third a whole run would fall by less than 1 − κ."""
    late_S = sums.late_S
    if late_S is None or sums.late_share is None:
        return np.ones(sums.num_types)
    pace = kappa**sums.late_share
    return _p_of_pairs(sums, lambda pairs: _rounded(sums.loss_S[pairs] - pace * late_S[pairs], late_S[pairs]))


def _rounded(value_s: Floats, scale_s: Floats) -> Floats:
    return np.where(np.abs(value_s) <= ROUNDING * np.abs(scale_s), 0.0, value_s)


def moved_kappa(kappa: float, step: int) -> float:
    """κ, so many steps further, within what is possible."""
    return float(np.clip(kappa + step * KAPPA_STEP, 0.01, 0.99))


@dataclass(frozen=True)
class TypeTests:
    """Every type's p values on the occurrences given; 1 where a test could not be made."""

    observed_V: Array
    testable_V: Array
    """Types that occur in MIN_PROMPTS prompts or more."""
    costly_V: Floats
    """The larger of H1's and H2's."""
    stagnant_V: Floats
    fallen_V: Floats
    level_V: Floats
    has_pre: bool

    @classmethod
    def of(cls, sums: PairSums, kappa: float) -> TypeTests:
        """All tests of all types."""
        number_V = sums.prompts_V
        tests: dict[str, Callable[[], Floats]] = {
            "neighbours": lambda: p_above_neighbours(sums),
            "mean": lambda: p_above_mean(sums),
            "stagnant": lambda: p_stagnant(sums, kappa),
            "fallen": lambda: p_fallen(sums, kappa),
            "level": lambda: p_level(sums, kappa),
        }
        p: dict[str, Floats] = {}

        def work(name: str) -> None:
            p[name] = tests[name]()

        for_each(work, tests, threads=threads_for(len(sums.type_S)))
        return cls(
            observed_V=number_V > 0,
            testable_V=number_V >= MIN_PROMPTS,
            costly_V=np.maximum(p["neighbours"], p["mean"]),
            stagnant_V=p["stagnant"],
            fallen_V=p["fallen"],
            level_V=p["level"],
            has_pre=sums.pre_S is not None,
        )

    @property
    def rock_V(self) -> Floats:
        """p of "not a rock": the largest of the three."""
        return np.maximum(self.costly_V, self.stagnant_V)

    @property
    def learning_V(self) -> Floats:
        """p of "not costly, or not fallen beyond κ"."""
        return np.maximum(self.costly_V, self.fallen_V)


@dataclass(frozen=True)
class Certified:
    """Which types are declared, and the class of every costly one."""

    tests: TypeTests
    class_V: Array
    """One of CLASSES for a costly type, empty for every other."""
    confirmed_V: Array | None = None
    """Whether the other half of the prompts says the same; None before it was asked."""

    @property
    def rocks(self) -> Array:
        """Types declared rocks."""
        return np.flatnonzero(self.class_V == ROCK)

    @property
    def costly(self) -> Array:
        """Types declared costly, whatever their class."""
        return np.flatnonzero(self.class_V != "")

    @property
    def unclear(self) -> Array:
        """Costly types of which neither stagnation nor a fall is proven."""
        return np.flatnonzero(self.class_V == UNCLEAR)


def declare(tests: TypeTests, q: float) -> Certified:
    """Classes by Benjamini-Hochberg at q over all observed types."""
    class_V = np.full(len(tests.costly_V), "", dtype=object)
    costly_V = discoveries(tests.costly_V, tests.observed_V, q)
    class_V[costly_V] = UNCLEAR if tests.has_pre else COSTLY
    if tests.has_pre:
        learning_V = discoveries(tests.learning_V, tests.observed_V, q)
        level_V = discoveries(tests.level_V, learning_V, q)
        class_V[learning_V] = LEARNING
        class_V[level_V] = LEVELLED
        class_V[discoveries(tests.rock_V, tests.observed_V, q)] = ROCK
    return Certified(tests, class_V)


def discoveries(p_V: Floats, among_V: Array, q: float) -> Array:
    """Mask of the types that Benjamini-Hochberg rejects at q among some of them."""
    found_V = np.zeros(len(p_V), bool)
    index = np.flatnonzero(among_V)
    if len(index):
        found_V[index] = benjamini_hochberg(p_V[index]) <= q
    return found_V


def confirm(declared: Certified, other: TypeTests, q: float) -> Certified:
    """Ask the other half of the prompts of every declared class, by Benjamini-Hochberg among the types in it."""
    class_V = declared.class_V
    asked = {ROCK: other.rock_V, LEARNING: other.learning_V, LEVELLED: np.maximum(other.learning_V, other.level_V)}
    confirmed_V = np.zeros(len(class_V), bool)
    for name in CLASSES:
        confirmed_V |= discoveries(asked.get(name, other.costly_V), class_V == name, q)
    return Certified(declared.tests, class_V, confirmed_V)


def falls(sums: PairSums, level: float, *, non_negative: bool) -> Intervals:
    """1 − Σ loss after ÷ Σ loss before per type, with Fieller's interval over prompts; NaN where it is unknown.

    The interval holds the falls that a two-sided t test over prompts does not reject. A fall of losses that are not
    negative never exceeds 1; an end that no data bound is infinite.
    """
    number_V, whole_S = sums.prompts_V, sums.pre_S
    if whole_S is None:
        nothing = np.full(sums.num_types, np.nan)
        return Intervals(nothing, nothing, nothing)
    safe_V = np.maximum(number_V, 1)
    totals = sums.by_type(lambda pairs: (sums.loss_S[pairs], whole_S[pairs]))
    post_V, pre_V = (total_V / safe_V for total_V in totals)

    def products(pairs: slice) -> tuple[Floats, Floats, Floats]:
        type_s = sums.type_S[pairs]
        post_s, pre_s = sums.loss_S[pairs] - post_V[type_s], whole_S[pairs] - pre_V[type_s]
        return pre_s**2, post_s * pre_s, post_s**2

    pre_pre_V, post_pre_V, post_post_V = sums.by_type(products)
    freedom_V = np.maximum(number_V - 1, 1)
    squared_V = sps.t.ppf((1 + level) / 2, freedom_V) ** 2 / safe_V
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio_V = post_V / pre_V
        a_V = pre_V**2 - squared_V * pre_pre_V / freedom_V
        b_V = post_V * pre_V - squared_V * post_pre_V / freedom_V
        c_V = post_V**2 - squared_V * post_post_V / freedom_V
        root_V = np.sqrt(np.maximum(b_V**2 - a_V * c_V, 0))
        bounded_V = (a_V > 0) & (number_V >= 2)
        low_V = np.where(bounded_V, (b_V - root_V) / a_V, -np.inf)
        high_V = np.where(bounded_V, (b_V + root_V) / a_V, np.inf)
    low_V = np.maximum(low_V, 0.0) if non_negative else low_V
    known_V = (number_V > 0) & (pre_V > 0)
    parts = (1 - ratio_V, 1 - high_V, 1 - np.minimum(low_V, ratio_V))
    return Intervals(*(np.where(known_V, part_V, np.nan) for part_V in parts))
