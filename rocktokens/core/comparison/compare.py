"""What a training regime costs and saves against the uniform one: every reading with its interval.

A regime is read at a few points of its training, on the same held-out problems as every other regime with the same
seed; so regimes are compared problem by problem and seed by seed. This module knows outcomes, seconds and FLOPs; it
does not know how a regime was trained, nor what a rock is. The words that follow from the numbers are in
report/conclusions.

Shapes: S seeds, E reading points (the first is the common start), P problems, B resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from rocktokens.core.comparison.intervals import MIN_SEEDS, crossed_estimate, seed_estimate
from rocktokens.core.stats import Estimate, resample_counts
from rocktokens.errors import DataError

Floats = NDArray[Any]
Verdict = Literal["costs", "gains", "unchanged", "undecided"]
AXES = ("steps", "seconds", "flops")
ESTIMATES = (
    "accuracy",
    "change_same_seconds",
    "area_steps",
    "area_steps_change",
    "area_seconds",
    "area_seconds_change",
    "seconds",
    "seconds_ratio",
    "step_ratio",
    "loss_rocks",
    "loss_rest",
)


@dataclass(frozen=True)
class Arm:
    """One regime trained with one seed. Steps, seconds and FLOPs are totals since the start."""

    regime: str
    seed: int
    step_E: Floats
    seconds_E: Floats
    flops_E: Floats
    correct_EP: Floats
    """Share of right answers to each problem at each reading point."""
    kept_share: float = 1.0
    """Share of the sampled positions that carried loss."""
    tokens: float = 1.0
    """Response positions sampled in the whole training."""
    samples_less: bool = False
    """Whether the regime saves by sampling less; then its ceiling counts positions that were never sampled."""
    loss_rocks: float | None = None
    loss_rest: float | None = None
    """Mean divergence of the trained student on contexts common to all regimes."""
    stages: Mapping[str, float] | None = None
    """Seconds by stage of a step."""

    def __post_init__(self) -> None:
        points = len(self.step_E)
        if points < 2 or not points == len(self.seconds_E) == len(self.flops_E) == len(self.correct_EP):
            raise DataError(f"regime {self.regime}: a curve needs the start and at least one more reading, all alike")


class Reach(NamedTuple):
    """When a curve came to a target, in steps, seconds or FLOPs; infinite where it did not."""

    value: float
    low: float
    high: float
    share_reached: float
    """Share of the resamples in which the target was reached at all."""


@dataclass(frozen=True)
class Reading:
    """One regime's results relative to uniform."""

    regime: str
    num_seeds: int
    num_problems: int
    accuracy: Estimate
    """Final accuracy over seeds and problems."""
    change: Estimate
    """Final accuracy minus uniform's, after the same number of optimiser steps."""
    change_same_seconds: Estimate
    """The same when the slower of the two curves is cut at uniform's seconds."""
    area_steps: Estimate
    area_steps_change: Estimate
    """Mean accuracy over uniform's steps, and its difference to uniform's."""
    area_seconds: Estimate
    area_seconds_change: Estimate
    """Likewise over uniform's seconds."""
    reach: Mapping[str, Reach]
    """By axis: when the regime comes within the margin of uniform's final accuracy."""
    seconds: Estimate
    """Seconds of training, over seeds."""
    seconds_ratio: Estimate
    """Those seconds as a share of uniform's, seed by seed."""
    step_ratio: Estimate
    """Seconds a step as a share of uniform's."""
    flops_ratio: float
    """Floating-point operations as a share of uniform's; NaN where the trainings recorded none."""
    kept_share: float
    tokens_ratio: float
    """Positions sampled as a share of uniform's."""
    ceiling: float
    """The speed-up that the dropped positions could give if all work were theirs: 1 / (1 - f)."""
    loss_rocks: Estimate | None
    loss_rest: Estimate | None
    stages: Mapping[str, float]
    """Mean seconds by stage."""
    verdict: Verdict

    @property
    def over_seeds(self) -> bool:
        """Whether intervals speak of seeds, too; else of problems only."""
        return self.num_seeds >= MIN_SEEDS

    def row(self) -> dict[str, Any]:
        """All of it as one flat row; an interval as NAME, NAME_low, NAME_high; "not reached" is empty."""
        found: dict[str, Any] = {"regime": self.regime, "verdict": self.verdict}
        found |= {"num_seeds": self.num_seeds, "num_problems": self.num_problems, "delta": self.change.value}
        found["over_seeds"] = self.over_seeds
        found |= {"delta_low": _finite(self.change.low), "delta_high": _finite(self.change.high)}
        for name in ESTIMATES:
            estimate = getattr(self, name) or (None, None, None)
            found |= {name: _finite(estimate[0])}
            found |= {f"{name}_low": _finite(estimate[1]), f"{name}_high": _finite(estimate[2])}
        for axis in AXES:
            reach = self.reach[axis]
            found |= {f"{axis}_to": _finite(reach.value)}
            found |= {f"{axis}_to_low": _finite(reach.low), f"{axis}_to_high": _finite(reach.high)}
        found["share_reached"] = self.reach["steps"].share_reached
        shares = ("flops_ratio", "kept_share", "tokens_ratio", "ceiling")
        found |= {name: _finite(getattr(self, name)) for name in shares}
        return found | {f"seconds_{stage}": value for stage, value in self.stages.items()}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


# ---------------------------------------------------------------- linear readings of a curve


def weights_at(x_E: Floats, at: float) -> Floats:
    """Weights of the reading points in the curve's value at `at`: linear between points, held after the last."""
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
    """Weights of the reading points in the mean of the curve from 0 to `until`."""
    inside = x_E[x_E < until]
    points = np.append(inside if len(inside) else x_E[:1], until)
    value_XE = np.stack([weights_at(x_E, x) for x in points])
    width = np.diff(points)
    return ((value_XE[1:] + value_XE[:-1]) / 2 * width[:, None]).sum(0) / width.sum()


# ---------------------------------------------------------------- when a target is reached


def first_reach(accuracy_E: Floats, target: float) -> float | None:
    """Reading point, with its fraction, at which the curve comes to the target; None where it does not.

    The curve is made monotone first (isotonic regression): the first lucky reading of a noisy curve is no arrival.
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
    """A regime's seeds on one grid of reading points; what stopped early holds its last value."""

    correct_SEP: Floats
    x_AS_E: dict[str, Floats]
    """By axis, (S, E)."""


def _on_one_grid(arms: Sequence[Arm]) -> _Curves:
    grid = np.unique(np.concatenate([arm.step_E for arm in arms]))
    correct, axes = [], {axis: [] for axis in AXES}  # type: ignore[var-annotated]
    for arm in arms:
        weight_GE = np.stack([weights_at(arm.step_E, step) for step in grid])
        correct.append(weight_GE @ arm.correct_EP)
        for axis, x_E in zip(AXES, (arm.step_E, arm.seconds_E, arm.flops_E)):
            axes[axis].append(weight_GE @ x_E)
    return _Curves(np.stack(correct), {axis: np.stack(rows) for axis, rows in axes.items()})


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
    return {axis: _reach(np.array(values), level) for axis, values in found.items()}


def _reach(value_B: Floats, level: float) -> Reach:
    own, resampled = float(value_B[0]), np.sort(value_B[1:])
    if not len(resampled):
        return Reach(own, own, own, float(np.isfinite(own)))
    last = len(resampled) - 1  # order statistics: an infinite bound is an answer, not an average
    low = float(resampled[math.floor((1 - level) / 2 * last)])
    high = float(resampled[math.ceil((1 + level) / 2 * last)])
    return Reach(own, low, high, float(np.isfinite(resampled).mean()))


# ---------------------------------------------------------------- all readings


def read_regime(
    arms: Sequence[Arm],
    uniform: Sequence[Arm],
    *,
    margin: float = 0.01,
    level: float = 0.95,
    resamples: int = 1000,
    rng: np.random.Generator,
) -> Reading:
    """Read one regime against uniform, paired by seed and by problem."""
    arms, uniform = _paired(arms, uniform)
    steps, seconds = [float(arm.step_E[-1]) for arm in uniform], [float(arm.seconds_E[-1]) for arm in uniform]

    def both(ours: list[Floats], theirs: list[Floats]) -> tuple[Estimate, Estimate]:
        value_SP = np.stack([w @ arm.correct_EP for w, arm in zip(theirs, arms)])
        base_SP = np.stack([w @ arm.correct_EP for w, arm in zip(ours, uniform)])
        return crossed_estimate(value_SP, level=level), crossed_estimate(value_SP - base_SP, level=level)

    last = [weights_at(arm.step_E, step) for arm, step in zip(uniform, steps)]
    accuracy, change = both(last, [weights_at(arm.step_E, step) for arm, step in zip(arms, steps)])
    _, same_seconds = both(last, [weights_at(arm.seconds_E, limit) for arm, limit in zip(arms, seconds)])
    area_steps = both(*([area_weights(arm.step_E, x) for arm, x in zip(side, steps)] for side in (uniform, arms)))
    area_seconds = both(
        *([area_weights(arm.seconds_E, x) for arm, x in zip(side, seconds)] for side in (uniform, arms))
    )

    own = np.array([arm.seconds_E[-1] for arm in arms])
    own_steps = np.array([arm.step_E[-1] for arm in arms])
    kept = float(np.average([arm.kept_share for arm in arms], weights=[arm.tokens for arm in arms]))
    tokens = sum(arm.tokens for arm in arms) / sum(arm.tokens for arm in uniform)
    left = kept * tokens if arms[0].samples_less else kept
    names = sorted({stage for arm in arms for stage in arm.stages or {}})
    return Reading(
        regime=arms[0].regime,
        num_seeds=len(arms),
        num_problems=arms[0].correct_EP.shape[1],
        accuracy=accuracy,
        change=change,
        change_same_seconds=same_seconds,
        area_steps=area_steps[0],
        area_steps_change=area_steps[1],
        area_seconds=area_seconds[0],
        area_seconds_change=area_seconds[1],
        reach=reach_target(arms, uniform, margin=margin, rng=rng, resamples=resamples, level=level),
        seconds=seed_estimate(own, level=level),
        seconds_ratio=seed_estimate(own / seconds, level=level, ratio=True),
        step_ratio=seed_estimate(own / own_steps / (np.array(seconds) / steps), level=level, ratio=True),
        flops_ratio=_ratio(sum(arm.flops_E[-1] for arm in arms), sum(arm.flops_E[-1] for arm in uniform)),
        kept_share=kept,
        tokens_ratio=tokens,
        ceiling=1.0 / max(min(left, 1.0), np.finfo(float).tiny),
        loss_rocks=_losses(arms, "loss_rocks", level),
        loss_rest=_losses(arms, "loss_rest", level),
        stages={name: float(np.mean([(arm.stages or {}).get(name, 0.0) for arm in arms])) for name in names},
        verdict=judge(change, margin),
    )


def _paired(arms: Sequence[Arm], uniform: Sequence[Arm]) -> tuple[list[Arm], list[Arm]]:
    """Arms of the seeds that both have, in the same order, on the same problems."""
    base = {arm.seed: arm for arm in uniform}
    matched = sorted((arm for arm in arms if arm.seed in base), key=lambda arm: arm.seed)
    if not matched:
        raise DataError("a regime is read against uniform with the same seeds; there is none")
    if len({arm.correct_EP.shape[1] for arm in [*matched, *uniform]}) > 1:
        raise DataError(f"regime {matched[0].regime} was evaluated on other problems than uniform")
    return matched, [base[arm.seed] for arm in matched]


def _ratio(value: float, base: float) -> float:
    return float(value / base) if base > 0 else math.nan


def _losses(arms: Sequence[Arm], name: str, level: float) -> Estimate | None:
    values = [getattr(arm, name) for arm in arms]
    return None if any(value is None for value in values) else seed_estimate(values, level=level)


def judge(change: Estimate, margin: float) -> Verdict:
    """What an interval of a change of accuracy says: proven inside ±margin, below 0, above 0, or none of these."""
    if change.low > -margin and change.high < margin:
        return "unchanged"
    if change.high < 0:
        return "costs"
    return "gains" if change.low > 0 else "undecided"


def frontier(readings: Sequence[Reading]) -> list[str]:
    """Regimes that no other beats in both accuracy and seconds, quickest first."""
    best, found = -math.inf, []
    for reading in sorted(readings, key=lambda r: (r.seconds.value, -r.accuracy.value)):
        if reading.accuracy.value > best:
            best = reading.accuracy.value
            found.append(reading.regime)
    return found
