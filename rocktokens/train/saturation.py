"""Has training stopped paying? A slope test on the recent loss, carried over the steps that remain.

This module knows one series of losses, one value per optimiser step; not where it comes from nor what is done about it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit

from rocktokens.errors import ConfigError

# A run is looked at many times while it goes on, and any look may stop it: each has a tenth of the usual 2.5 %.
STOP_TAIL = 0.0025
# Means of blocks of steps are compared, so that a slow wave in the loss is not taken for many independent points.
BLOCKS = 12
MIN_STEPS = 2 * BLOCKS
# Student's quantiles for a line through the blocks.
T_95, T_STOP = (float(stdtrit(BLOCKS - 2, 1 - tail)) for tail in (0.025, STOP_TAIL))


class Saturation(NamedTuple):
    """How far the loss falls over the window, and what its slope would still bring, as shares of its mean there."""

    saturated: bool
    """Even the upper bound of what the slope would still bring is below the tolerance, and so is the bound's distance
    from the estimate: a slope that is not known that well says nothing."""
    fall: float
    """Fall over the window divided by the mean loss in it; negative where the loss rises."""
    low: float
    high: float
    """95 % interval of `fall`."""
    p_value: float
    """One-sided p of "the loss does not fall"."""
    num_steps: int
    """Steps in the window."""
    horizon: int
    """Steps that the slope is carried over: those that remain, and no fewer than the window has."""
    still: float
    still_high: float
    """What the slope would bring over the horizon, and its 99.75 % upper bound."""


def saturation(
    loss_S: ArrayLike, *, warmup: int = 0, remaining: int = 0, share: float = 1 / 3, tolerance: float = 0.10
) -> Saturation | None:
    """Slope test over the last `share` of a run after its warm-up; None where that is too short to tell.

    Saturated means: the slope would lower the loss by less than `tolerance` of its level over all the steps that
    remain (and over as many as the window has), by a 99.75 % upper bound that is itself known to less than the
    tolerance. A noisy loss is therefore not called saturated for its noise, a slow fall not for its slowness while
    there is time left for it, and looking often does not stop a run by chance.

    Args:
        loss_S: the loss of every step so far.
        warmup: steps at the start in which the learning rate still rises; they say nothing and are left out.
        remaining: steps that may still be taken.
        share: length of the window, as a share of the steps after the warm-up.
        tolerance: fall that is not worth the remaining steps.
    """
    if not 0 < share <= 1 or not 0 < tolerance < 1:
        raise ConfigError(f"share must lie in (0, 1] and tolerance in (0, 1), got {share} and {tolerance}")
    if warmup < 0 or remaining < 0:
        raise ConfigError(f"warmup and remaining are numbers of steps, got {warmup} and {remaining}")
    loss = np.asarray(loss_S, float)[warmup:]
    loss = loss[np.isfinite(loss)]
    window = loss[len(loss) - round(share * len(loss)) :]
    if len(window) < MIN_STEPS:
        return None
    horizon = max(int(remaining), len(window))
    level = float(window.mean())
    if level <= 0 or np.ptp(window) == 0:  # nothing left to fall, or nothing that moves
        return Saturation(True, 0.0, 0.0, 0.0, 1.0, len(window), horizon, 0.0, 0.0)
    middle = np.array([index.mean() for index in np.array_split(np.arange(len(window)), BLOCKS)])
    slope, stderr = _line(middle, np.array([block.mean() for block in np.array_split(window, BLOCKS)]))
    fall, error = -slope * len(window) / level, stderr * len(window) / level
    reach, longer = T_95 * error, horizon / len(window)
    above = longer * T_STOP * error
    statistic = slope / stderr if stderr > 0 else np.sign(slope) * np.inf
    p_value = float(stdtr(BLOCKS - 2, statistic)) if np.isfinite(statistic) else float(statistic > 0)
    return Saturation(
        saturated=bool(longer * fall + above < tolerance and above < tolerance),
        fall=float(fall),
        low=float(fall - reach),
        high=float(fall + reach),
        p_value=p_value,
        num_steps=len(window),
        horizon=horizon,
        still=float(longer * fall),
        still_high=float(longer * fall + above),
    )


def _line(x_B: NDArray[Any], y_B: NDArray[Any]) -> tuple[float, float]:
    """Slope of the least-squares line, and its standard error."""
    x_B = x_B - x_B.mean()
    spread = float(x_B @ x_B)
    slope = float(x_B @ y_B) / spread
    rest_B = y_B - y_B.mean() - slope * x_B
    return slope, float(np.sqrt(rest_B @ rest_B / (len(x_B) - 2) / spread))
