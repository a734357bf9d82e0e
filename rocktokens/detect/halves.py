"""Choose on one half of the prompts, measure on the other (docs/method.md §3): the split, the choice, the second look.

This module knows occurrences and definitions; it does not know footprints, controls or reports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rocktokens.detect.certified import Certified, TypeTests, declare, moved_kappa, p_stagnant
from rocktokens.detect.context import Floats
from rocktokens.detect.grouped import run_bounds, threads_for
from rocktokens.detect.occurrences import Array, Occurrences
from rocktokens.detect.pair_sums import PairSums
from rocktokens.detect.scores import (
    RANKED,
    ExcessTest,
    Scores,
    base_sums,
    excess_test,
    ordered,
    rankings,
    rng_for,
    score,
)
from rocktokens.detect.settings import DetectConfig
from rocktokens.detect.sweep import SweepRow, choose_k, k_grid, sweep
from rocktokens.errors import DataError
from rocktokens.parallel import together
from rocktokens.remarks import Remark

# Shapes: N occurrences.
STEPS = (("gamma", -1), ("gamma", 1), ("eta", -1), ("eta", 1))


@dataclass(frozen=True)
class Halves:
    """The occurrences of the prompts that rocks are chosen on, and those of the other prompts."""

    selection: Occurrences
    measurement: Occurrences

    def __len__(self) -> int:
        return len(self.selection) + len(self.measurement)

    @property
    def both(self) -> tuple[Occurrences, Occurrences]:
        """Either half."""
        return self.selection, self.measurement

    @property
    def loss_range(self) -> tuple[float, float]:
        """The smallest and the largest loss after OPD."""
        losses = [half.loss_post_N for half in self.both]
        return float(min(loss_N.min() for loss_N in losses)), float(max(loss_N.max() for loss_N in losses))


@dataclass(frozen=True)
class Choice:
    """What was decided on the selection half."""

    scores: Scores
    variants: dict[tuple[str, int], Scores]
    """The same half at one step either way of γ and η."""
    excess: ExcessTest
    pairs: PairSums
    """Of the unclear types alone: those of all types would fill gigabytes."""
    stagnant: dict[int, Floats]
    """p of the stagnation test at one step either way of κ."""
    certified: Certified
    ranked: dict[str, Array]
    """Types in order by each definition; for `certified`, the declared rocks by burden."""
    sweep: list[SweepRow]
    ks: dict[str, int]
    """How many of the ranked types are rocks, by definition."""
    remarks: tuple[Remark, ...]

    def rocks(self, definition: str) -> Array:
        """Types that are rocks by the definition, best first."""
        return self.ranked[definition][: self.ks[definition]]


def split_halves(occurrences: Occurrences, config: DetectConfig) -> Halves:
    """Half of the prompts, with all their rollouts, on either side."""
    if occurrences.rollout_prompt_R is None:
        raise DataError("these occurrences do not say which prompt a rollout belongs to")
    prompts = occurrences.prompt_N[run_bounds(occurrences.prompt_N)[:-1]]
    chosen_P = selected_prompts(prompts, int(occurrences.rollout_prompt_R.max()) + 1, config)
    return Halves(occurrences.of_prompts(chosen_P), occurrences.of_prompts(~chosen_P))


def selected_prompts(prompts: Array, number: int, config: DetectConfig) -> Array:
    """Mask over so many prompt codes: half of the given ones, at random, on which rocks are chosen."""
    if len(prompts) < 4:
        raise DataError(
            f"detection needs at least 4 prompts, two to choose on and two to measure on; got {len(prompts)}. "
            "Give prompt_id, or score more prompts."
        )
    chosen_P = np.zeros(number, bool)
    chosen_P[rng_for(config.seed, "halves").permutation(prompts)[: len(prompts) // 2]] = True
    return chosen_P


def choose(selection: Occurrences, config: DetectConfig, vector_VH: Floats) -> Choice:
    """Declare rocks by tests; beside them, rank types by every other definition and settle its K."""

    def ranked_by_score() -> tuple[list[Scores], ExcessTest]:
        sums = base_sums(selection, config, ranks=True)
        found = score(selection, config, vector_VH, stepped=True, sums=sums)
        return found, excess_test(found[0], config)

    def declared_by_tests() -> tuple[PairSums, dict[int, Floats], Certified]:
        pairs = PairSums.of(selection)
        certified = declare(TypeTests.of(pairs, config.kappa), config.q)
        stagnant = {step: p_stagnant(pairs, moved_kappa(config.kappa, step)) for step in (-1, 1)}
        return pairs.of_types(certified.unclear), stagnant, certified

    ((base, *stepped), excess), (pairs, stagnant, certified) = together(
        ranked_by_score, declared_by_tests, threads=threads_for(2 * len(selection))
    )
    ranked = rankings(base, excess)
    num_types = int((base.count_V > 0).sum())
    grid = k_grid(num_types, config.k, *(len(ranked[name]) for name in RANKED))
    rows = sweep(base, excess, ranked, grid, rng_for(config.seed, "parts"))
    num_costly = int((base.excess_V > 0).sum())
    found = {name: choose_k(rows, name, config.k, config.stability, num_types, num_costly) for name in RANKED}
    ranked["certified"] = certified_rocks(certified, base, config)
    ks = {"certified": len(ranked["certified"]), **{name: k for name, (k, _) in found.items()}}
    remarks = tuple(remark for _, remark in found.values() if remark)
    return Choice(base, dict(zip(STEPS, stepped)), excess, pairs, stagnant, certified, ranked, rows, ks, remarks)


def certified_rocks(certified: Certified, scores: Scores, config: DetectConfig) -> Array:
    """The declared rocks by burden; those in recurring contexts alone where that is asked for."""
    rock_V = np.zeros(len(scores.r_V), bool)
    rock_V[certified.rocks] = True
    if config.consistent:
        rock_V &= scores.consistent_V
    return ordered(scores.r_V, rock_V)


def measure(measurement: Occurrences, config: DetectConfig, vector_VH: Floats, chosen: Scores) -> Scores:
    """Score the other half by the thresholds that the first half set."""
    at = chosen.thresholds
    fixed = replace(config, tau_pre=at.tau_pre, tau_post=at.tau_post)
    return score(measurement, fixed, vector_VH, gamma=at.gamma)[0]
