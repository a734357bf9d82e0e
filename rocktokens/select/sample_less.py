"""Where along a rollout the loss outside the rocks ends."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from rocktokens.errors import DataError


class Cut(NamedTuple):
    """Where sampling may stop, and what lies beyond."""

    length: int
    """Positions kept of a response."""
    covered: float
    """Share of the non-rock loss that lies within them."""
    positions: float
    """Share of the positions that lie within them."""


def prefix_cut(
    position_N: ArrayLike, loss_N: ArrayLike, rest_N: ArrayLike, *, limit: int, coverage: float = 0.95
) -> Cut:
    """The shortest prefix that holds `coverage` of the loss outside the rocks; `rest_N` marks what is no rock."""
    position, rest = np.asarray(position_N, np.int64), np.asarray(rest_N, bool)
    loss = np.nan_to_num(np.asarray(loss_N, float)).clip(min=0) * rest
    if not len(position) or not 0 < coverage <= 1 or limit < 1:
        raise DataError(f"a cut needs occurrences, a coverage in (0, 1] and a limit, got {coverage} and {limit}")
    loss_L = np.bincount(position, weights=loss, minlength=limit)
    count_L = np.bincount(position, minlength=limit)
    if not loss_L.sum() > 0:
        raise DataError("there is no loss outside the rocks: nothing tells where to cut")
    reached_L = np.cumsum(loss_L) / loss_L.sum()
    length = min(int(np.argmax(reached_L >= coverage - 1e-12)) + 1, limit)
    return Cut(length, float(reached_L[length - 1]), float(count_L[:length].sum() / count_L.sum()))
