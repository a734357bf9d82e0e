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

from rocktokens.core.detection.grouped import BLOCK_ROWS, blocks, run_bounds, threads_for
from rocktokens.core.detection.occurrences import Array, Occurrences
from rocktokens.core.parallel import for_each
from rocktokens.core.stats import Floats, Intervals, benjamini_hochberg

# Shapes: N occurrences, V token types, P prompts, S pairs of a type and a prompt that it occurs in.
ROCK, LEARNING, LEVELLED, UNCLEAR, COSTLY = "rock", "learning", "learning, levelled off", "unclear", "costly"
CLASSES = (ROCK, LEARNING, LEVELLED, UNCLEAR, COSTLY)
MIN_PROMPTS = 5
MAX_CELLS = 5_000_000  # type-prompt pairs that are counted in one dense table
DENSE = 4  # cells of such a table for each occurrence; beyond, pairs are sorted
ROUNDING = 1e-6  # differences below this share of the prompt's mean loss are float32 rounding


@dataclass(frozen=True)
class PairSums:
    """Sums over the occurrences of each type within each prompt; only pairs that occur are held."""

    num_types: int
    num_prompts: int
    type_S: Array
    prompt_S: Array
    n_S: Floats
    loss_S: Floats
    pre_S: Floats | None
    """Loss before OPD; None where it was not recorded."""
    late_S: Floats | None
    """Loss at the checkpoint that begins the last third of training; None where no checkpoint lies between."""
    late_share: float | None
    """Share of training after that checkpoint."""

    @classmethod
    def of(cls, occurrences: Occurrences) -> PairSums:
        """Sums of the losses after OPD, before it, and at the start of the last third where they are known."""
        step, late_share = last_third(occurrences)
        columns: dict[str, Array | None] = {"n_S": None, "loss_S": occurrences.loss_post_N}
        columns |= {} if occurrences.loss_pre_N is None else {"pre_S": occurrences.loss_pre_N}
        columns |= {} if step is None else {"late_S": occurrences.loss_by_step[step]}
        bound_P = run_bounds(occurrences.prompt_N)
        num_types, type_N = len(occurrences.token_ids_V), occurrences.type_N
        parts = [
            _pairs(type_N, bound_P[prompts.start : prompts.stop + 1], columns, num_types, prompts.start)
            for prompts in blocks(bound_P, most_runs=max(1, MAX_CELLS // num_types))
        ]
        found = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
        return cls(
            num_types=num_types,
            num_prompts=len(bound_P) - 1,
            type_S=found["type_S"],
            prompt_S=found["prompt_S"],
            n_S=found["n_S"],
            loss_S=found["loss_S"],
            pre_S=found.get("pre_S"),
            late_S=found.get("late_S"),
            late_share=late_share,
        )

    @property
    def prompts_V(self) -> Array:
        """Number of prompts that each type occurs in."""
        return np.bincount(self.type_S, minlength=self.num_types)

    def by_type(self, value_S: Floats) -> Floats:
        """Sums over prompts."""
        return _sums(self.type_S, value_S, self.num_types)

    def by_prompt(self, value_S: Floats) -> Floats:
        """Sums over types."""
        return _sums(self.prompt_S, value_S, self.num_prompts)


def _sums(code_S: Array, value_S: Floats, size: int) -> Floats:
    """Sum of the values of each code, a block of pairs at a time: bincount widens what it is given."""
    total = np.zeros(size)
    for start in range(0, len(code_S), BLOCK_ROWS):
        pairs = slice(start, start + BLOCK_ROWS)
        total += np.bincount(code_S[pairs], weights=value_S[pairs], minlength=size)
    return total


def _pairs(
    type_N: Array, bound_P: Array, columns: dict[str, Array | None], num_types: int, first: int
) -> dict[str, Array]:
    """Sums of columns over the pairs of some prompts, whose rows lie together; `first` is the first of them."""
    rows = slice(int(bound_P[0]), int(bound_P[-1]))
    num_prompts = len(bound_P) - 1
    key_n = np.repeat(np.arange(num_prompts, dtype=np.int64) * num_types, np.diff(bound_P))
    key_n += type_N[rows]
    cells = num_prompts * num_types
    if cells <= DENSE * len(key_n):
        pair_n, key_S = key_n, np.flatnonzero(np.bincount(key_n, minlength=cells))
        size, chosen = cells, key_S
    else:
        key_S, pair_n = np.unique(key_n, return_inverse=True)
        size, chosen = len(key_S), np.arange(len(key_S))
    found: dict[str, Array] = {"type_S": (key_S % num_types).astype(np.int32)}
    found["prompt_S"] = (key_S // num_types + first).astype(np.int32)
    for name, column_N in columns.items():
        weight_n = None if column_N is None else column_N[rows]
        found[name] = np.bincount(pair_n, weights=weight_n, minlength=size)[chosen].astype(float)
    return found


def last_third(occurrences: Occurrences) -> tuple[int | None, float | None]:
    """The last checkpoint that leaves at least a third of training, and the share it leaves; (None, None) if none."""
    steps = sorted(occurrences.loss_by_step)
    if len(steps) < 3:
        return None, None
    first, last = steps[0], steps[-1]
    # Steps are whole numbers, so two thirds of the way may fall one step beyond a checkpoint meant to stand there.
    early = [step for step in steps[1:-1] if step - first <= 2 / 3 * (last - first) + 1]
    return (early[-1], (last - early[-1]) / (last - first)) if early else (None, None)


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


def _p_of_pairs(sums: PairSums, value_S: Floats) -> Floats:
    """p of "mean over a type's prompts is not above 0" for one value per pair."""
    number_V = sums.prompts_V
    safe_V = np.maximum(number_V, 2)
    mean_V = sums.by_type(value_S) / np.maximum(number_V, 1)
    centred_S = mean_V[sums.type_S]
    np.subtract(value_S, centred_S, out=centred_S)
    power_S = centred_S**2
    variance_V = sums.by_type(power_S) / (safe_V - 1)
    power_S *= centred_S
    return p_mean_positive(mean_V, variance_V, sums.by_type(power_S) / safe_V, number_V)


def p_above_neighbours(sums: PairSums) -> Floats:
    """H1: mean over prompts of (the type's mean loss − the mean loss of the other tokens of that prompt) > 0."""
    n_P, loss_P = sums.by_prompt(sums.n_S), sums.by_prompt(sums.loss_S)
    other_n_S = n_P[sums.prompt_S] - sums.n_S
    other_S = (loss_P[sums.prompt_S] - sums.loss_S) / np.maximum(other_n_S, 1)
    contrast_S = sums.loss_S / sums.n_S - other_S
    scale_S = np.abs(loss_P / n_P)[sums.prompt_S]
    alone_S = other_n_S == 0
    contrast_S = np.where(alone_S | (np.abs(contrast_S) <= ROUNDING * scale_S), 0.0, contrast_S)
    return _p_of_pairs(sums, contrast_S)


def p_above_mean(sums: PairSums) -> Floats:
    """H2: the type's mean loss > the mean loss of all occurrences, both means estimated on the same prompts."""
    number_V = sums.prompts_V
    n_V = np.maximum(sums.by_type(sums.n_S), 1)
    mean_V, mean = sums.by_type(sums.loss_S) / n_V, sums.loss_S.sum() / sums.n_S.sum()
    rounding = ROUNDING * abs(mean)
    # Influence of each prompt on the difference; prompts without the type act through the mean of all alone.
    all_P = (sums.by_prompt(sums.loss_S) - mean * sums.by_prompt(sums.n_S)) * sums.num_prompts / sums.n_S.sum()
    own_S = (sums.loss_S - mean_V[sums.type_S] * sums.n_S) * sums.num_prompts / n_V[sums.type_S]
    all_S = all_P[sums.prompt_S]
    square_V = sums.by_type((own_S - all_S) ** 2 - all_S**2) + (all_P**2).sum()
    cube_V = sums.by_type((own_S - all_S) ** 3 + all_S**3) - (all_P**3).sum()
    few_V = number_V / np.maximum(number_V - 1, 1)
    variance_V, third_V = few_V * np.maximum(square_V, 0) / sums.num_prompts, cube_V / sums.num_prompts
    above_V = np.where(np.abs(mean_V - mean) <= rounding, 0.0, mean_V - mean)
    # The t statistic grows with the root of all prompts; its degrees of freedom with the prompts the type occurs in.
    scale = np.sqrt(sums.num_prompts / np.maximum(number_V, 1))
    return p_mean_positive(above_V * scale, variance_V, third_V / scale, number_V)


def p_stagnant(sums: PairSums, kappa: float) -> Floats:
    """H3: loss after OPD > κ · loss before it, on the same occurrences; 1 where the loss before is unknown."""
    if sums.pre_S is None:
        return np.ones(sums.num_types)
    return _p_of_pairs(sums, _rounded(sums.loss_S - kappa * sums.pre_S, sums.pre_S))


def p_fallen(sums: PairSums, kappa: float) -> Floats:
    """The other side of H3: loss after OPD < κ · loss before it."""
    if sums.pre_S is None:
        return np.ones(sums.num_types)
    return _p_of_pairs(sums, _rounded(kappa * sums.pre_S - sums.loss_S, sums.pre_S))


def p_level(sums: PairSums, kappa: float) -> Floats:
    """Has it stopped falling? At the pace of the last third a whole run would fall by less than 1 − κ."""
    if sums.late_S is None or sums.late_share is None:
        return np.ones(sums.num_types)
    return _p_of_pairs(sums, _rounded(sums.loss_S - kappa**sums.late_share * sums.late_S, sums.late_S))


def _rounded(value_S: Floats, scale_S: Floats) -> Floats:
    return np.where(np.abs(value_S) <= ROUNDING * np.abs(scale_S), 0.0, value_S)


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
    number_V = sums.prompts_V
    if sums.pre_S is None:
        nothing = np.full(sums.num_types, np.nan)
        return Intervals(nothing, nothing, nothing)
    safe_V = np.maximum(number_V, 1)
    post_V, pre_V = sums.by_type(sums.loss_S) / safe_V, sums.by_type(sums.pre_S) / safe_V
    post_S, pre_S = sums.loss_S - post_V[sums.type_S], sums.pre_S - pre_V[sums.type_S]
    freedom_V = np.maximum(number_V - 1, 1)
    squared_V = sps.t.ppf((1 + level) / 2, freedom_V) ** 2 / safe_V
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio_V = post_V / pre_V
        a_V = pre_V**2 - squared_V * sums.by_type(pre_S**2) / freedom_V
        b_V = post_V * pre_V - squared_V * sums.by_type(post_S * pre_S) / freedom_V
        c_V = post_V**2 - squared_V * sums.by_type(post_S**2) / freedom_V
        root_V = np.sqrt(np.maximum(b_V**2 - a_V * c_V, 0))
        bounded_V = (a_V > 0) & (number_V >= 2)
        low_V = np.where(bounded_V, (b_V - root_V) / a_V, -np.inf)
        high_V = np.where(bounded_V, (b_V + root_V) / a_V, np.inf)
    low_V = np.maximum(low_V, 0.0) if non_negative else low_V
    known_V = (number_V > 0) & (pre_V > 0)
    parts = (1 - ratio_V, 1 - high_V, 1 - np.minimum(low_V, ratio_V))
    return Intervals(*(np.where(known_V, part_V, np.nan) for part_V in parts))
