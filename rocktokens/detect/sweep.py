"""How many rocks? Stability and coverage against K, and K by itself from the sweep (docs/method.md §3).

Sums are additive over prompts, so the top K of a part of the prompts needs no new pass: which occurrences are rock
occurrences is taken as settled on all prompts, everything else is recomputed on the part.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from rocktokens.detect.occurrences import Array
from rocktokens.detect.scores import RANKED, ExcessTest, Scores, ordered
from rocktokens.remarks import Remark

# Shapes: V token types, U units of prompts, F random parts of the prompts.
FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
REPEATS = 5
GRID = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80, 100, 120, 150, 200, 250, 300, 400, 500, 700, 1000)
Z_LOWER = 1.96


class SweepRow(NamedTuple):
    """Stability and coverage of one definition's top K."""

    definition: str
    k: int
    num_rocks: int
    """Less than K where fewer types are eligible."""
    stability: float
    """Mean Jaccard of the top K of 10 to 80 % of the prompts with the top K of all."""
    stability_low: float
    """The same at 10 % of the prompts alone."""
    coverage: float
    """Share of the loss."""
    chance: float
    """Jaccard of two random sets of this size among the eligible types: what stability must be read against."""


def jaccard(first: Array, second: Array) -> float:
    """Overlap of two sets; two empty sets agree."""
    union = len(np.union1d(first, second))
    return 1.0 if union == 0 else len(np.intersect1d(first, second)) / union


def k_grid(num_types: int, *extra: int | Literal["auto"]) -> list[int]:
    """Values of K that are tried: a grid up to the number of types observed, and those asked for."""
    grid = {k for k in GRID if k <= num_types}
    grid |= {min(k, num_types) for k in extra if k != "auto" and k > 0}
    return sorted(grid)


def sweep(
    scores: Scores, excess: ExcessTest, rankings: dict[str, Array], grid: list[int], rng: np.random.Generator
) -> list[SweepRow]:
    """Stability and coverage of the top K by every definition that keeps a top K."""
    parts, fractions = _parts(scores.sums.num_units, rng)
    ranked_parts = _ranked_parts(scores, excess, parts)
    loss_V = scores.r_V
    rows = []
    for definition in RANKED:
        ranked = rankings[definition]
        for k in grid:
            top = ranked[:k]
            agreement_F = np.array([jaccard(top, part[:k]) for part in ranked_parts[definition]])
            by_fraction = [agreement_F[fractions == fraction].mean() for fraction in FRACTIONS]
            size = min(k, len(ranked))
            coverage = float(loss_V[top].sum() / loss_V.sum()) if loss_V.sum() > 0 else float("nan")
            chance = size / (2 * len(ranked) - size) if len(ranked) else 1.0
            rows.append(
                SweepRow(definition, k, len(top), float(np.mean(by_fraction)), float(by_fraction[0]), coverage, chance)
            )
    return rows


def _parts(num_units: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Random parts of the units as columns of 0 and 1, and the fraction each stands for."""
    fractions = np.repeat(FRACTIONS, REPEATS)
    rank_FU = np.argsort(np.argsort(rng.random((len(fractions), num_units)), axis=1), axis=1)
    size_F = np.maximum(1, np.rint(fractions * num_units))
    return (rank_FU < size_F[:, None]).T.astype(np.float32), fractions


def _ranked_parts(scores: Scores, excess: ExcessTest, part_UF: Array) -> dict[str, list[Array]]:
    """Rankings on every part by every definition; for excess, normal lower bounds among the types declared."""
    cells = scores.sums.cells
    n_VF, loss_VF, rock_VF = (cells[name] @ part_UF for name in ("n", "loss", "rock"))
    ctx_VF = loss_VF * rock_VF / np.maximum(n_VF, 1)
    eligible = np.flatnonzero(excess.declared_V & scores.consistent_V)
    low_VF = np.full(n_VF.shape, -np.inf, np.float32)
    above = cells["loss"][eligible] - np.float32(scores.r_V.sum() / scores.count_V.sum()) * cells["n"][eligible]
    size_F = part_UF.sum(0)
    sum_EF, square_EF = above @ part_UF, above**2 @ part_UF
    low_VF[eligible] = sum_EF - Z_LOWER * np.sqrt(np.maximum(square_EF - sum_EF**2 / size_F, 0))
    number = range(part_UF.shape[1])
    return {
        "burden": [ordered(loss_VF[:, f], loss_VF[:, f] > 0) for f in number],
        "context": [ordered(ctx_VF[:, f], ctx_VF[:, f] > 0) for f in number],
        "excess": [ordered(low_VF[:, f], low_VF[:, f] > 0) for f in number],
    }


def choose_k(
    rows: list[SweepRow],
    definition: str,
    wanted: int | Literal["auto"],
    stability: float,
    num_types: int,
    num_costly: int,
) -> tuple[int, Remark | None]:
    """(K, what a reader must know). Auto: the largest K that is stable beyond chance, 0 where none is.

    Looked for among eligible types, up to the number of types that cost more than the mean token: one that costs no
    more is merely frequent, however stable its rank. Two sets that hold all eligible types agree by necessity, so such
    a K says nothing. `excess` keeps every type that its own test declares.
    """
    if wanted != "auto":
        if wanted > num_types:
            return num_types, Remark("k_beyond_types", {"k": wanted, "types": num_types})
        return wanted, None
    own = [row for row in rows if row.definition == definition]
    if definition == "excess":
        return max((row.num_rocks for row in own), default=0), None
    own = [row for row in own if row.num_rocks == row.k <= num_costly and row.chance < 1]
    stable = [row.k for row in own if row.stability - row.chance >= stability * (1 - row.chance)]
    if stable:
        return max(stable), None
    return 0, Remark("no_stable_k", {"definition": definition, "stability": stability})
