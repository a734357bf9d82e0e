"""How far does the answer hang on the thresholds? Each moved by one step, and the overlaps of the rock sets.

Sets are chosen again on the selection half; their footprints are measured on the other half, as ever.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from rocktokens.detect.certified import TypeTests, declare, moved_kappa
from rocktokens.detect.context import Floats
from rocktokens.detect.grouped import threads_for
from rocktokens.detect.halves import Choice, certified_rocks
from rocktokens.detect.occurrences import Array, Occurrences
from rocktokens.detect.pair_sums import PairSums
from rocktokens.detect.scores import (
    DEFINITIONS,
    RANKED,
    TAU_STEP,
    Scores,
    base_sums,
    excess_test,
    loss_thresholds,
    rankings,
    score,
)
from rocktokens.detect.settings import DetectConfig
from rocktokens.detect.sweep import jaccard
from rocktokens.parallel import for_each


class SensitivityRow(NamedTuple):
    """The rock set and its footprint with one threshold moved by one step."""

    parameter: str
    """kappa, q, tau, gamma, eta, window or k; base for no step."""
    step: int
    value: float
    definition: str
    k: int
    num_rocks: int
    jaccard: float
    """Overlap with the set at the base thresholds."""
    share_positions: float
    share_loss: float
    enrichment: float


class Overlap(NamedTuple):
    """Jaccard of two rock sets: two definitions, or one definition on the two signals."""

    first: str
    second: str
    jaccard: float


def shares(types: Array, measured: Scores) -> tuple[float, float, float]:
    """(positions, loss, enrichment) of a set of types on the measured half; NaN where there is nothing to share."""
    with np.errstate(divide="ignore", invalid="ignore"):
        positions = measured.count_V[types].sum() / np.float64(measured.count_V.sum())
        loss = measured.r_V[types].sum() / np.float64(measured.r_V.sum())
        return float(positions), float(loss), float(loss / positions)


Q_STEP = 2.0  # q is halved and doubled


def sensitivity(
    selection: Occurrences, config: DetectConfig, vector_VH: Floats, choice: Choice, measured: Scores
) -> list[SensitivityRow]:
    """Every definition's set with κ, q, τ, γ, η, w or K moved by one step; footprints on the measured half."""
    moved: dict[tuple[str, int], DetectConfig] = {}
    for step in (-1, 1):
        pre, post = loss_thresholds(selection, config, step * TAU_STEP)
        moved["tau", step] = replace(config, tau_pre=pre, tau_post=post)
        if config.window + step >= 1:
            moved["window", step] = replace(config, window=config.window + step)
    found: dict[tuple[str, int], Scores] = {}

    def work(name: tuple[str, int]) -> None:
        found[name] = score(selection, moved[name], vector_VH, sums=choice.scores.sums)[0]

    for_each(work, moved, threads=threads_for(2 * len(selection)))
    variants = choice.variants | {name: found[name] for name in moved}
    rows = []
    for (parameter, step), scores in {("base", 0): choice.scores, **variants}.items():
        ranked = rankings(scores, choice.excess) | {"certified": certified_rocks(choice.certified, scores, config)}
        for definition in DEFINITIONS:
            value, k = _value(parameter, scores), choice.ks[definition]
            rows.append(
                _sensitivity_row(parameter, step, value, definition, choice, ranked[definition][:k], k, measured)
            )
    return rows + _certified_rows(config, choice, measured) + _k_rows(choice, measured)


def _certified_rows(config: DetectConfig, choice: Choice, measured: Scores) -> list[SensitivityRow]:
    """The declared rocks at one step either way of κ and of q."""
    q = config.q
    rows = []
    for step in (-1, 1):
        kappa = moved_kappa(config.kappa, step)
        declared = declare(replace(choice.certified.tests, stagnant_V=choice.stagnant[step]), q)
        moved = min(q * Q_STEP**step, 0.99)
        looser = declare(choice.certified.tests, moved)
        for parameter, value, found in (("kappa", kappa, declared), ("q", moved, looser)):
            own = certified_rocks(found, choice.scores, config)
            rows.append(_sensitivity_row(parameter, step, value, "certified", choice, own, len(own), measured))
    return rows


def _k_rows(choice: Choice, measured: Scores) -> list[SensitivityRow]:
    """Each definition's own K, one place on the grid either way."""
    rows = []
    for name in RANKED:
        grid = [row.k for row in choice.sweep if row.definition == name]
        smaller, larger = [k for k in grid if k < choice.ks[name]], [k for k in grid if k > choice.ks[name]]
        for step, near in ((-1, smaller[-1:]), (1, larger[:1])):
            rows += [_sensitivity_row("k", step, k, name, choice, choice.ranked[name][:k], k, measured) for k in near]
    return rows


def _value(parameter: str, scores: Scores) -> float:
    at = scores.thresholds
    return {"tau": at.tau_post, "gamma": at.gamma, "eta": at.eta, "window": float(at.window)}.get(parameter, np.nan)


def _sensitivity_row(
    parameter: str, step: int, value: float, name: str, choice: Choice, own: Array, k: int, measured: Scores
) -> SensitivityRow:
    return SensitivityRow(
        parameter, step, float(value), name, k, len(own), jaccard(own, choice.rocks(name)), *shares(own, measured)
    )


def overlaps(selection: Occurrences, config: DetectConfig, vector_VH: Floats, choice: Choice) -> list[Overlap]:
    """Jaccard of every two definitions, and of each definition on the two signals where both were recorded."""
    found = [Overlap(a, b, jaccard(choice.rocks(a), choice.rocks(b))) for a, b in combinations(DEFINITIONS, 2)]
    other = selection.other_signal()
    if other is not None:
        name = "log_ratio" if config.signal == "kl" else "kl"
        settled = replace(config, tau_pre=None, tau_post=None)
        declared = declare(TypeTests.of(PairSums.of(other), config.kappa), config.q)
        sums = base_sums(other, config, ranks=True)
        scores = score(other, settled, vector_VH, gamma=choice.scores.thresholds.gamma, sums=sums)[0]
        ranked = rankings(scores, excess_test(scores, config))
        ranked["certified"] = certified_rocks(declared, scores, config)
        ks = choice.ks | {"certified": len(ranked["certified"])}
        found += [
            Overlap(f"{d} on {config.signal}", f"{d} on {name}", jaccard(choice.rocks(d), ranked[d][: ks[d]]))
            for d in DEFINITIONS
        ]
    return found
