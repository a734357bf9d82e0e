"""Do rocks learn? Loss at every checkpoint on fixed contexts, by group, beside an A/A arm (docs/method.md §4).

Any group chosen for high loss looks better when it is measured again elsewhere, with no learning at all: regression
to the mean. So groups are chosen on one half, followed on the other, and the A/A arm shows what one and the same
checkpoint "changes" between two sets of texts. This module knows types, groups and losses, not how rocks were chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from rocktokens.detect.grouped import BLOCK_ROWS, threads_for
from rocktokens.detect.occurrences import Array, Occurrences
from rocktokens.errors import DataError
from rocktokens.parallel import for_each
from rocktokens.stats import Estimate, Floats, bootstrap_estimate, wilcoxon

# Shapes: N occurrences, V token types, U units of prompts.


class PersistenceRow(NamedTuple):
    """One group between two measurements."""

    group: str
    arm: str
    """`checkpoint`: same texts, later checkpoint. `aa_selected`: same checkpoint, the texts the group was chosen on
    against the others. `aa_fresh`: same checkpoint, two parts of the texts that had no say in the choice."""
    step: int | None
    """The later checkpoint; None in A/A arms."""
    num_types: int
    before: Estimate
    after: Estimate
    change: Estimate
    """Mean loss over occurrences, after − before."""
    type_before: float
    """Mean over types of their mean loss."""
    type_after: float
    share_fallen: float
    """Types whose mean loss fell; half of them by chance."""
    change_quartiles: tuple[float, float, float]
    """Of the types' change."""
    p_value: float
    """Wilcoxon signed-rank over types. It takes types as independent; in A/A arms they share prompts that may be
    harder or easier, so there the interval of the change, which resamples prompts, is the one to believe."""


def make_groups(
    rocks: Array, count_V: Array, mean_V: Array, *, num_rare: int, rng: np.random.Generator
) -> dict[str, Array]:
    """Rocks; rare high-loss types (top by mean loss, at least 2 occurrences, not rocks); as many random others."""
    other_V = np.ones(len(count_V), bool)
    other_V[rocks] = False
    candidates = np.flatnonzero(other_V & (count_V >= 2))
    rare = candidates[np.argsort(-mean_V[candidates], kind="stable")][: min(num_rare, len(candidates) // 2)]
    rest = np.setdiff1d(candidates, rare)
    others = np.sort(rng.choice(rest, min(max(len(rocks), num_rare), len(rest)), replace=False))
    return {"rocks": np.asarray(rocks), "rare high-loss": rare, "random others": others}


def type_means(type_N: Array, loss_N: Array, num_types: int) -> Floats:
    """Mean loss per type; NaN for a type that does not occur."""
    count_V, total_V = np.zeros(num_types, np.int64), np.zeros(num_types)
    for start in range(0, len(type_N), BLOCK_ROWS):  # bincount widens what it is given
        rows = slice(start, start + BLOCK_ROWS)
        count_V += np.bincount(type_N[rows], minlength=num_types)
        total_V += np.bincount(type_N[rows], weights=loss_N[rows], minlength=num_types)
    return np.divide(total_V, count_V, out=np.full(num_types, np.nan), where=count_V > 0)


def persistence(
    selection: Occurrences,
    measurement: Occurrences,
    selection_unit_N: Array,
    unit_N: Array,
    groups: Mapping[str, Array],
    *,
    rng: np.random.Generator,
    resamples: int,
    level: float,
) -> list[PersistenceRow]:
    """Every checkpoint against the first on the measured half, and both A/A arms at the last checkpoint."""
    losses = measurement.loss_by_step
    if not losses and measurement.loss_pre_N is not None:
        losses = {0: measurement.loss_pre_N, 1: measurement.loss_post_N}
    steps = sorted(losses)
    if len(steps) < 2:
        raise DataError("persistence needs the loss at two checkpoints or more")
    fresh_U = rng.permutation(int(unit_N.max()) + 1) % 2 == 1
    second_N = fresh_U[unit_N]
    inside = {name: np.flatnonzero(measurement.among(types)) for name, types in groups.items()}
    loss_of: dict[int, dict[str, Array]] = {}
    for step in steps:  # one checkpoint at a time: it may have to be read
        loss_N = losses[step]
        loss_of[step] = {name: loss_N[index] for name, index in inside.items()}
    found: dict[str, list[PersistenceRow | None]] = {}
    filled = [name for name, types in groups.items() if len(types)]
    draws = dict(zip(filled, rng.spawn(len(filled)), strict=True))  # so that groups can be compared side by side

    def work(name: str) -> None:
        types, inside_n = groups[name], inside[name]
        compare = _Comparison(name, types, draws[name], resamples, level)
        own, unit = measurement.type_N[inside_n], unit_N[inside_n]
        rows = [
            compare.paired("checkpoint", step, own, unit, loss_of[steps[0]][name], loss_of[step][name])
            for step in steps[1:]
        ]
        post = measurement.loss_post_N[inside_n]
        chosen_N = selection.among(types)
        chosen = (selection.type_N[chosen_N], selection_unit_N[chosen_N], selection.loss_post_N[chosen_N])
        rows.append(compare.apart("aa_selected", chosen, (own, unit, post)))
        part = second_N[inside_n]
        halves = [(own[half], unit[half], post[half]) for half in (~part, part)]
        rows.append(compare.apart("aa_fresh", halves[0], halves[1]))
        found[name] = rows

    for_each(work, filled, threads=threads_for(2 * len(measurement)))
    return [row for name in filled for row in found[name] if row is not None]


class _Comparison:
    """Rows for one group."""

    def __init__(self, group: str, types: Array, rng: np.random.Generator, resamples: int, level: float) -> None:
        self.group, self.types, self.rng, self.resamples, self.level = group, types, rng, resamples, level

    def paired(
        self, arm: str, step: int, type_n: Array, unit_n: Array, before: Array, after: Array
    ) -> PersistenceRow | None:
        """The same occurrences under two checkpoints."""
        if len(np.unique(unit_n)) < 2:
            return None
        change = self._mean(unit_n, after.astype(float) - before)
        arms = ((type_n, unit_n, before), (type_n, unit_n, after))
        return self._row(arm, step, arms[0], arms[1], change)

    def apart(
        self, arm: str, before: tuple[Array, Array, Array], after: tuple[Array, Array, Array]
    ) -> PersistenceRow | None:
        """Different occurrences of the same types under one checkpoint: a difference of independent means."""
        if min(len(np.unique(before[1])), len(np.unique(after[1]))) < 2:
            return None
        first, second = self._mean(*before[1:]), self._mean(*after[1:])
        value = second.value - first.value
        low = value - np.hypot(second.value - second.low, first.high - first.value)
        high = value + np.hypot(second.high - second.value, first.value - first.low)
        change = Estimate(value, float(low), float(high), min(first.num_prompts, second.num_prompts))
        return self._row(arm, None, before, after, change)

    def _mean(self, unit_n: Array, loss_n: Array) -> Estimate:
        count_U = np.bincount(unit_n)
        columns = [column[count_U > 0].astype(float) for column in (np.bincount(unit_n, weights=loss_n), count_U)]
        return bootstrap_estimate(_ratio, columns, rng=self.rng, resamples=self.resamples, level=self.level)

    def _row(
        self,
        arm: str,
        step: int | None,
        before: tuple[Array, Array, Array],
        after: tuple[Array, Array, Array],
        change: Estimate,
    ) -> PersistenceRow:
        size = int(self.types.max()) + 1
        first_V, second_V = type_means(before[0], before[2], size), type_means(after[0], after[2], size)
        both = self.types[np.isfinite(first_V[self.types]) & np.isfinite(second_V[self.types])]
        first, second = first_V[both], second_V[both]
        shift = second - first
        quartiles = np.quantile(shift, [0.25, 0.5, 0.75]) if len(both) else np.full(3, np.nan)
        return PersistenceRow(
            group=self.group,
            arm=arm,
            step=step,
            num_types=len(both),
            before=self._mean(*before[1:]),
            after=self._mean(*after[1:]),
            change=change,
            type_before=float(first.mean()) if len(both) else float("nan"),
            type_after=float(second.mean()) if len(both) else float("nan"),
            share_fallen=float((shift < 0).mean()) if len(both) else float("nan"),
            change_quartiles=(float(quartiles[0]), float(quartiles[1]), float(quartiles[2])),
            p_value=wilcoxon(first, second) if len(both) else float("nan"),
        )


def _ratio(total: Floats, count: Floats) -> Floats:
    return total / count
