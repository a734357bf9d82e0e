"""Looking at a comparison after some of its seeds without raising its error rate.

Alpha spending by the union bound, as in core/census/looks.py: look k may spend the share f_k of the error rate, the
shares sum to 1, and so the chance of a wrong verdict at any look is at most the whole of it. A regime whose verdict is
settled at a look gets no further seeds, and keeps the interval of that look.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from rocktokens.compare.intervals import MIN_SEEDS
from rocktokens.errors import ConfigError

GROWTH = 2.0  # every look spends this many times the error of the one before it: late looks decide the close calls
STEP = 1.5  # every look has this many times the seeds of the one before it, at least one more


class Look(NamedTuple):
    """After how many seeds regimes are looked at, and at which coverage."""

    seeds: int
    level: float


def seed_looks(seeds: int, level: float, *, until_decided: bool) -> list[Look]:
    """The looks of a comparison of at most so many seeds; the last has all of them.

    Without `until_decided` there is one look, at the whole level.
    """
    if not until_decided:
        return [Look(seeds, level)]
    if seeds < MIN_SEEDS:
        raise ConfigError(f"until=decided needs at least {MIN_SEEDS} seeds to look at, got {seeds}")
    ends = [MIN_SEEDS]
    while ends[-1] < seeds:
        ends.append(min(seeds, max(ends[-1] + 1, math.floor(STEP * ends[-1]))))
    spends = [GROWTH**number for number in range(len(ends))]
    return [Look(end, 1 - (1 - level) * spend / sum(spends)) for end, spend in zip(ends, spends)]
