"""Which rollouts a reader is shown: evenly over the run, right and wrong answers in turn, the same every time.

A run can hold millions of occurrences; a page holds some tens of thousands. The scoring pass keeps the most probable
tokens for exactly these rollouts, so the choice depends on nothing but the rollouts themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

MAX_ROLLOUTS = 120
MAX_TOKENS = 24_000
MAX_LENGTH = 2_000
"""Positions of one rollout that are shown, from its beginning."""


def shown_rollouts(correct: Sequence[bool | None], lengths: Sequence[int]) -> list[int]:
    """Places of the rollouts to show, in the order to show them, within the limits of this module."""
    groups = [[place for place, value in enumerate(correct) if value is wanted] for wanted in (True, False, None)]
    spread = [[group[int(i)] for i in _evenly(len(group), MAX_ROLLOUTS)] for group in groups]
    picked: list[int] = []
    tokens = 0
    for place in (place for turn in zip_longest(*spread) for place in turn if place is not None):
        size = min(lengths[place], MAX_LENGTH)
        if len(picked) == MAX_ROLLOUTS or (picked and tokens + size > MAX_TOKENS):
            break
        picked.append(place)
        tokens += size
    return picked


def _evenly(length: int, count: int) -> np.ndarray:
    """Places spread over a list so that any first few of them are spread too."""
    if length < 2:
        return np.zeros(length, int)
    # Golden-ratio steps: every prefix is nearly even, and no two places repeat before all were visited.
    order = np.argsort((np.arange(length) * 0.6180339887498949) % 1.0, kind="stable")
    return np.argsort(order, kind="stable")[: min(length, count)]
