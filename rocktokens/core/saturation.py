"""Has training stopped paying? A slope test on the recent loss.

This room knows one series of losses, one value an optimiser step; not where it comes from nor what is done about it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats as sps

from rocktokens.errors import ConfigError

# Means of blocks of steps are compared, so that a slow wave in the loss is not taken for many independent points.
BLOCKS = 12
MIN_STEPS = 2 * BLOCKS


class Saturation(NamedTuple):
    """How far the loss still falls over the window, as a share of its mean there."""

    saturated: bool
    """Even the upper bound of the fall is below the tolerance."""
    fall: float
    """Fall over the window divided by the mean loss in it; negative where the loss rises."""
    low: float
    high: float
    """95 % interval of `fall`."""
    p_value: float
    """One-sided p of "the loss does not fall"."""
    num_steps: int
    """Steps in the window."""


def saturation(loss_S: ArrayLike, *, share: float = 1 / 3, tolerance: float = 0.10) -> Saturation | None:
    """Slope test over the last `share` of a run; None where that is too short to tell.

    Saturated means: with 95 % confidence the loss falls by less than `tolerance` of its level over the whole window.
    A noisy loss is therefore not called saturated for its noise.
    """
    if not 0 < share <= 1 or not 0 < tolerance < 1:
        raise ConfigError(f"share must lie in (0, 1] and tolerance in (0, 1), got {share} and {tolerance}")
    loss = np.asarray(loss_S, float)
    loss = loss[np.isfinite(loss)]
    window = loss[len(loss) - round(share * len(loss)) :]
    if len(window) < MIN_STEPS:
        return None
    level = float(window.mean())
    blocks = np.array_split(window, BLOCKS)
    if level <= 0 or np.ptp(window) == 0:  # nothing left to fall, or nothing that moves
        return Saturation(True, 0.0, 0.0, 0.0, 1.0, len(window))
    middle = np.array([index.mean() for index in np.array_split(np.arange(len(window)), BLOCKS)])
    fit = sps.linregress(middle, [block.mean() for block in blocks])
    scale = -len(window) / level
    reach = sps.t.ppf(0.975, BLOCKS - 2) * fit.stderr * abs(scale)
    fall = fit.slope * scale
    statistic = fit.slope / fit.stderr if fit.stderr > 0 else np.sign(fit.slope) * np.inf
    p_value = float(sps.t.cdf(statistic, BLOCKS - 2)) if np.isfinite(statistic) else float(statistic > 0)
    return Saturation(
        bool(fall + reach < tolerance), float(fall), float(fall - reach), float(fall + reach), p_value, len(window)
    )
