"""What goes with an effect: Pearson's r of Δ with the nine predictors of docs/method.md §5, as far as a run has them.

Knows results and one number per token type; does not know where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import stats as sps

from rocktokens.causal.census import Census
from rocktokens.causal.inference import NEVER_USED

PREDICTORS = (
    "frequency",
    "rock_count",
    "rock_rate",
    "loss_pre",
    "loss_post",
    "improvement",
    "teacher_entropy",
    "student_entropy_pre",
    "student_entropy_post",
)


class Correlation(NamedTuple):
    """Pearson's r of the effect with one predictor over the candidates."""

    predictor: str
    r: float
    p: float
    num_sets: int


def correlate(census: Census, predictors: Mapping[str, Mapping[int, float]]) -> tuple[Correlation, ...]:
    """Pearson's r of Δ with each predictor (token id to value), over the candidates that are used."""
    rows = []
    used = [r for r in census.results if r.banned.role == "candidate" and r.verdict != NEVER_USED]
    for name in PREDICTORS:
        known = predictors.get(name)
        if known is None:
            continue
        named = [(r.banned.token_id, r.delta) for r in used if r.banned.token_id is not None]
        pairs = [(known[token], delta) for token, delta in named if token in known and np.isfinite(known[token])]
        x, y = np.array(pairs, float).reshape(-1, 2).T
        if len(pairs) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
            rows.append(Correlation(name, float("nan"), float("nan"), len(pairs)))
        else:
            found = sps.pearsonr(x, y)
            rows.append(Correlation(name, float(found.statistic), float(found.pvalue), len(pairs)))
    return tuple(rows)
