"""Sums of losses over the occurrences of each token type within each prompt: what the tests over prompts rest on.

There are tens of millions of such pairs where there are a hundred million occurrences. So counts and codes have as
few bits as hold them, and whatever is computed from the pairs is computed a block at a time. This module knows types,
prompts and losses; it does not know tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rocktokens.detect.grouped import BLOCK_ROWS, blocks, run_bounds
from rocktokens.detect.occurrences import Array, Occurrences
from rocktokens.stats import Floats

# Shapes: N occurrences, V token types, P prompts, S pairs of a type and a prompt that it occurs in.
MAX_CELLS = 5_000_000  # type-prompt pairs that are counted in one dense table
DENSE = 4  # cells of such a table for each occurrence; beyond, pairs are sorted
Columns = Callable[[slice], tuple[Array, ...]]
"""Columns of the pairs of one block."""


@dataclass(frozen=True)
class PairSums:
    """Sums over the occurrences of each type within each prompt; only pairs that occur are held."""

    num_types: int
    num_prompts: int
    prompts_V: Array
    """Number of prompts that each type occurs in."""
    type_S: Array
    prompt_S: Array
    n_S: Array
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
        prompts_V = sum(np.bincount(part["type_S"], minlength=num_types) for part in parts)
        found = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
        return cls(
            num_types=num_types,
            num_prompts=len(bound_P) - 1,
            prompts_V=np.asarray(prompts_V),
            type_S=found["type_S"],
            prompt_S=found["prompt_S"],
            n_S=found["n_S"],
            loss_S=found["loss_S"],
            pre_S=found.get("pre_S"),
            late_S=found.get("late_S"),
            late_share=late_share,
        )

    def of_types(self, types: Array) -> PairSums:
        """The pairs of some types alone; how many prompts there are, and hold each type, stays known of all."""
        wanted_V = np.zeros(self.num_types, bool)
        wanted_V[types] = True
        kept_S = wanted_V[self.type_S]
        return replace(
            self,
            type_S=self.type_S[kept_S],
            prompt_S=self.prompt_S[kept_S],
            n_S=self.n_S[kept_S],
            loss_S=self.loss_S[kept_S],
            pre_S=None if self.pre_S is None else self.pre_S[kept_S],
            late_S=None if self.late_S is None else self.late_S[kept_S],
        )

    def by_type(self, columns: Columns) -> list[Floats]:
        """Sums over prompts of one or more columns."""
        return _sums(self.type_S, columns, self.num_types)

    def by_prompt(self, columns: Columns) -> list[Floats]:
        """Sums over types of one or more columns."""
        return _sums(self.prompt_S, columns, self.num_prompts)


def _sums(code_S: Array, columns: Columns, size: int) -> list[Floats]:
    """Sums of the columns over each code, a block of pairs at a time: bincount widens what it is given."""
    totals: list[Floats] = []
    for start in range(0, max(len(code_S), 1), BLOCK_ROWS):
        pairs = slice(start, start + BLOCK_ROWS)
        code_s, found = code_S[pairs].astype(np.intp), columns(pairs)
        totals = totals or [np.zeros(size) for _ in found]
        for total, value_s in zip(totals, found):
            total += np.bincount(code_s, weights=value_s, minlength=size)
    return totals


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
    found: dict[str, Array] = {"type_S": (key_S % num_types).astype(np.min_scalar_type(num_types))}
    found["prompt_S"] = (key_S // num_types + first).astype(np.int32)
    for name, column_N in columns.items():
        weight_n = None if column_N is None else column_N[rows]
        total = np.bincount(pair_n, weights=weight_n, minlength=size)[chosen]
        found[name] = total.astype(np.min_scalar_type(total.max())) if column_N is None else total
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
