"""Curves of accuracy: a training with its evaluations, the value anywhere between them, and when a target is reached.

Shapes: S seeds, E evaluations (the first is the common start), P prompts, B resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from rocktokens.errors import DataError
from rocktokens.stats import resample_counts

Floats = NDArray[Any]
AXES = ("steps", "seconds", "flops", "tokens")


class Audit(NamedTuple):
    """What a training's record says of how much its regime changed; None where it was not recorded."""

    changed_share: float | None = None
    """Share of the sampled tokens whose weight is not 1."""
    changed_loss_share: float | None = None
    """Share of the loss at those tokens."""
    end_dropped: float | None = None
    """Share of end tokens whose weight is 0."""
    length: float | None = None
    """Mean length of the held-out rollouts at the end."""
    truncated: float | None = None
    """Share of them that reached the limit without an end token."""


UNAUDITED = Audit()


@dataclass(frozen=True)
class Arm:
    """One regime trained with one seed. Steps, seconds and FLOPs are totals since the start."""

    regime: str
    seed: int
    step_E: Floats
    seconds_E: Floats
    flops_E: Floats
    correct_EP: Floats
    """Share of right rollouts of each prompt at each evaluation."""
    spent_E: Floats | None = None
    """Tokens sampled, and scored by the teacher, up to each evaluation; unset: two for every sampled one, evenly."""
    kept_share: float = 1.0
    """Share of the sampled positions that carried loss."""
    tokens: float = 1.0
    """Response positions sampled in the whole training."""
    samples_less: bool = False
    """Whether the regime saves by sampling less; then its ceiling counts positions that were never sampled."""
    loss_rocks: float | None = None
    loss_rest: float | None = None
    """Mean divergence of the trained student on contexts common to all regimes."""
    loss_rocks_C: Floats | None = None
    loss_rest_C: Floats | None = None
    """The same by prompt (`intervals.values_by_prompt`); unset where only the mean is on record."""
    length_P: Floats | None = None
    truncated_P: Floats | None = None
    """Mean length of each prompt's rollouts at the last evaluation, and the share that was cut; unset likewise."""
    stages: Mapping[str, float] | None = None
    """Seconds by stage of a step."""
    audit: Audit = UNAUDITED

    def __post_init__(self) -> None:
        points = len(self.step_E)
        if points < 2 or not points == len(self.seconds_E) == len(self.flops_E) == len(self.correct_EP):
            raise DataError(f"regime {self.regime}: a curve needs the start and at least one more evaluation")
        if self.spent_E is None:
            object.__setattr__(self, "spent_E", 2 * self.tokens * self.step_E / self.step_E[-1])

    def axis(self, name: str) -> Floats:
        """Steps, seconds, FLOPs or tokens at each evaluation."""
        axes = {"steps": self.step_E, "seconds": self.seconds_E, "flops": self.flops_E, "tokens": self.spent_E}
        found = axes[name]
        assert found is not None
        return found


class Reach(NamedTuple):
    """When a curve came to a target, in steps, seconds or FLOPs; infinite where it did not."""

    value: float
    low: float
    high: float
    share_reached: float
    """Share of the resamples in which the target was reached at all."""


# ---------------------------------------------------------------- values of a curve that are linear in its points


def weights_at(x_E: Floats, at: float) -> Floats:
    """Weights of the evaluations in the curve's value at `at`: linear between points, held after the last."""
    weight_E = np.zeros(len(x_E))
    right = int(np.searchsorted(x_E, at))
    if right == 0 or right == len(x_E):
        weight_E[min(right, len(x_E) - 1)] = 1.0
        return weight_E
    width = x_E[right] - x_E[right - 1]
    share = (at - x_E[right - 1]) / width
    weight_E[right - 1], weight_E[right] = 1.0 - share, share
    return weight_E


def area_weights(x_E: Floats, until: float) -> Floats:
    """Weights of the evaluations in the mean of the curve from 0 to `until`."""
    inside = x_E[x_E < until]
    points = np.append(inside if len(inside) else x_E[:1], until)
    value_XE = np.stack([weights_at(x_E, x) for x in points])
    width = np.diff(points)
    return ((value_XE[1:] + value_XE[:-1]) / 2 * width[:, None]).sum(0) / width.sum()


# ---------------------------------------------------------------- when a target is reached


def first_reach(accuracy_E: Floats, target: float) -> float | None:
    """Evaluation, with a fraction between two, at which the curve comes to the target; None where it does not.

    The curve is made monotone first (isotonic regression): one lucky evaluation of a noisy curve does not count.
    """
    fitted_E = isotonic_regression(accuracy_E).x
    return _cross(fitted_E, target)


def _cross(fitted_E: Floats, target: float) -> float | None:
    above = np.flatnonzero(fitted_E >= target - 1e-12)
    if not len(above):
        return None
    index = int(above[0])
    if index == 0:
        return 0.0
    below = fitted_E[index - 1]
    return index - 1 + float((target - below) / (fitted_E[index] - below))


class _Curves(NamedTuple):
    """A regime's seeds on one grid of evaluations; what stopped early holds its last value."""

    correct_SEP: Floats
    x_AS_E: dict[str, Floats]
    """By axis, (S, E)."""


def _on_one_grid(arms: Sequence[Arm]) -> _Curves:
    grid = np.unique(np.concatenate([arm.step_E for arm in arms]))
    weights = [np.stack([weights_at(arm.step_E, step) for step in grid]) for arm in arms]
    correct_SEP = np.stack([weight_GE @ arm.correct_EP for weight_GE, arm in zip(weights, arms)])
    axes = {name: np.stack([w_GE @ arm.axis(name) for w_GE, arm in zip(weights, arms)]) for name in AXES}
    return _Curves(correct_SEP, axes)


def reach_target(
    arms: Sequence[Arm],
    uniform: Sequence[Arm],
    *,
    margin: float,
    rng: np.random.Generator,
    resamples: int = 1000,
    level: float = 0.95,
) -> dict[str, Reach]:
    """Steps, seconds and FLOPs at which the regime's mean curve comes within `margin` of uniform's final accuracy.

    Uniform's final accuracy is the end of its own monotone curve. The interval resamples seeds and problems, the same
    ones for both regimes; a bound may be infinite: not reached.
    """
    found = reach_samples(arms, uniform, margin=margin, rng=rng, resamples=resamples)
    return {axis: _reach(values, level) for axis, values in found.items()}


def reach_samples(
    arms: Sequence[Arm], uniform: Sequence[Arm], *, margin: float, rng: np.random.Generator, resamples: int
) -> dict[str, Floats]:
    """By axis: when the target is reached, as observed (first) and in every resample of seeds and prompts (the rest).

    Two regimes given generators of the same state are resampled alike.
    """
    theirs, ours = _on_one_grid(arms), _on_one_grid(uniform)
    seeds, _, problems = ours.correct_SEP.shape
    counts_BP = np.vstack([np.ones(problems), resample_counts(problems, resamples, rng)]) / problems
    drawn_BS = np.vstack([np.arange(seeds), rng.integers(0, seeds, size=(resamples, seeds))])
    their_SEB, our_SEB = theirs.correct_SEP @ counts_BP.T, ours.correct_SEP @ counts_BP.T
    found: dict[str, list[float]] = {axis: [] for axis in AXES}
    for b, drawn in enumerate(drawn_BS):
        target = float(isotonic_regression(our_SEB[drawn, :, b].mean(0)).x[-1]) - margin
        place = first_reach(their_SEB[drawn, :, b].mean(0), target)
        for axis in AXES:
            x_E = theirs.x_AS_E[axis][drawn].mean(0)
            found[axis].append(math.inf if place is None else float(np.interp(place, np.arange(len(x_E)), x_E)))
    return {axis: np.array(values) for axis, values in found.items()}


def _reach(value_B: Floats, level: float) -> Reach:
    own, resampled = float(value_B[0]), np.sort(value_B[1:])
    if not len(resampled):
        return Reach(own, own, own, float(np.isfinite(own)))
    last = len(resampled) - 1  # order statistics: an infinite bound is an answer, not an average
    low = float(resampled[math.floor((1 - level) / 2 * last)])
    high = float(resampled[math.ceil((1 + level) / 2 * last)])
    return Reach(own, low, high, float(np.isfinite(resampled).mean()))
