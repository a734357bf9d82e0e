"""What a training regime costs and saves against the uniform one: every number with its interval.

A regime is evaluated at a few points of its training, on the same held-out prompts as every other regime with the same
seed; so regimes are compared prompt by prompt and seed by seed. This module knows outcomes, seconds and FLOPs; it
does not know how a regime was trained, nor what a rock is. The words that follow from the numbers are in
report/conclusions.

Shapes: S seeds, E evaluations (the first is the common start), P prompts, B resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rocktokens.compare.curves import (  # noqa: F401 - others import them from here
    AXES,
    Arm,
    Audit,
    Floats,
    Reach,
    area_weights,
    first_reach,
    reach_target,
    weights_at,
)
from rocktokens.compare.intervals import MIN_SEEDS, crossed_estimate, seed_estimate, skewed_estimate
from rocktokens.errors import DataError
from rocktokens.stats import Estimate
from rocktokens.values import Row

Verdict = Literal["costs", "gains", "unchanged", "undecided"]
ESTIMATES = (
    "accuracy",
    "change_same_seconds",
    "accuracy_same_tokens",
    "change_same_tokens",
    "area_steps",
    "area_steps_change",
    "area_seconds",
    "area_seconds_change",
    "seconds",
    "seconds_ratio",
    "step_ratio",
    "loss_rocks",
    "loss_rest",
    "loss_rocks_change",
    "loss_rest_change",
    "length_ratio",
    "truncated_change",
)


@dataclass(frozen=True)
class Reading:
    """One regime's results relative to uniform."""

    regime: str
    num_seeds: int
    num_problems: int
    accuracy: Estimate
    """Final accuracy over seeds and prompts."""
    change: Estimate
    """Final accuracy minus uniform's, after the same number of optimiser steps."""
    change_same_seconds: Estimate
    """The same when the slower of the two curves is cut at uniform's seconds."""
    accuracy_same_tokens: Estimate
    change_same_tokens: Estimate
    """Accuracy, and its change against uniform, when both have spent the same tokens (sampled, and scored)."""
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
    spent_ratio: float
    """Tokens sampled, and scored by the teacher, as a share of uniform's, after the same number of steps."""
    bite_tokens: float | None
    """Share of the tokens that the regime changed: given another weight, or not sampled at all."""
    bite_loss: float | None
    """Share of the loss at sampled tokens whose weight it changed."""
    end_dropped: float | None
    """Share of end tokens that carried no loss."""
    length_ratio: Estimate | None
    """Mean length of the held-out rollouts at the end as a share of uniform's."""
    truncated_change: Estimate | None
    """Share of them without an end token, minus uniform's."""
    ceiling: float
    """The speed-up that the dropped positions could give if all work were theirs: 1 / (1 - f)."""
    loss_rocks: Estimate | None
    loss_rest: Estimate | None
    """Mean loss on rollouts common to all regimes; the interval is over their prompts and, from three on, seeds."""
    loss_rocks_change: Estimate | None
    loss_rest_change: Estimate | None
    """That loss minus uniform's, paired by seed and prompt; None for uniform itself and where it is not known."""
    stages: Mapping[str, float]
    """Mean seconds by stage."""
    verdict: Verdict

    @property
    def over_seeds(self) -> bool:
        """Whether intervals account for seeds as well as prompts; else for prompts only."""
        return self.num_seeds >= MIN_SEEDS

    @property
    def grew(self) -> bool | None:
        """Whether rollouts became longer, or more of them truncated, beyond chance; None: not known."""
        if self.length_ratio is None or self.truncated_change is None or math.isnan(self.length_ratio.low):
            return None
        return self.length_ratio.low > 1 or self.truncated_change.low > 0

    def row(self) -> dict[str, object]:
        """All of it as one flat row; an interval as NAME, NAME_low, NAME_high; "not reached" is empty."""
        found: dict[str, object] = {"regime": self.regime, "verdict": self.verdict}
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
        names = ("flops_ratio", "kept_share", "tokens_ratio", "ceiling", "spent_ratio", "bite_tokens", "bite_loss")
        found |= {name: _finite(getattr(self, name)) for name in (*names, "end_dropped")}
        found["grew"] = self.grew
        return found | {f"seconds_{stage}": value for stage, value in self.stages.items()}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def read_regime(
    arms: Sequence[Arm],
    uniform: Sequence[Arm],
    *,
    margin: float = 0.01,
    level: float = 0.95,
    resamples: int = 1000,
    rng: np.random.Generator,
    tokens: float | None = None,
) -> Reading:
    """Compare one regime with uniform, paired by seed and by prompt.

    Args:
        arms: its trainings.
        uniform: uniform's.
        margin: the change of accuracy that does not matter.
        level: coverage of intervals.
        resamples: bootstrap resamples for when a target is reached.
        rng: source of the resamples.
        tokens: tokens at which they are compared; unset: what the one that spent less has spent.
    """
    arms, uniform = paired(arms, uniform)
    ends, seconds = [float(arm.step_E[-1]) for arm in uniform], [float(arm.seconds_E[-1]) for arm in uniform]

    def both(ours: list[Floats], theirs: list[Floats]) -> tuple[Estimate, Estimate]:
        value_SP = np.stack([w @ arm.correct_EP for w, arm in zip(theirs, arms)])
        base_SP = np.stack([w @ arm.correct_EP for w, arm in zip(ours, uniform)])
        return crossed_estimate(value_SP, level=level), crossed_estimate(value_SP - base_SP, level=level)

    last = [weights_at(arm.step_E, step) for arm, step in zip(uniform, ends)]
    accuracy, change = both(last, [weights_at(arm.step_E, step) for arm, step in zip(arms, ends)])
    _, same_seconds = both(last, [weights_at(arm.seconds_E, limit) for arm, limit in zip(arms, seconds)])
    area_steps = both(*([area_weights(arm.step_E, x) for arm, x in zip(side, ends)] for side in (uniform, arms)))
    area_seconds = both(
        *([area_weights(arm.seconds_E, x) for arm, x in zip(side, seconds)] for side in (uniform, arms))
    )
    same_tokens = at_tokens(arms, uniform, tokens, level=level)

    own = np.array([arm.seconds_E[-1] for arm in arms])
    own_steps = np.array([arm.step_E[-1] for arm in arms])
    kept = float(np.average([arm.kept_share for arm in arms], weights=[arm.tokens for arm in arms]))
    ratio = sum(arm.tokens for arm in arms) / sum(arm.tokens for arm in uniform)
    left = kept * ratio if arms[0].samples_less else kept
    names = sorted({stage for arm in arms for stage in arm.stages or {}})
    return Reading(
        regime=arms[0].regime,
        num_seeds=len(arms),
        num_problems=arms[0].correct_EP.shape[1],
        accuracy=accuracy,
        change=change,
        change_same_seconds=same_seconds,
        accuracy_same_tokens=same_tokens[0],
        change_same_tokens=same_tokens[1],
        area_steps=area_steps[0],
        area_steps_change=area_steps[1],
        area_seconds=area_seconds[0],
        area_seconds_change=area_seconds[1],
        reach=reach_target(arms, uniform, margin=margin, rng=rng, resamples=resamples, level=level),
        seconds=seed_estimate(own, level=level),
        seconds_ratio=seed_estimate(own / seconds, level=level, ratio=True),
        step_ratio=seed_estimate(own / own_steps / (np.array(seconds) / ends), level=level, ratio=True),
        flops_ratio=_ratio(sum(arm.flops_E[-1] for arm in arms), sum(arm.flops_E[-1] for arm in uniform)),
        kept_share=kept,
        tokens_ratio=ratio,
        spent_ratio=float(sum(a.axis("tokens")[-1] for a in arms) / sum(a.axis("tokens")[-1] for a in uniform)),
        ceiling=1.0 / max(min(left, 1.0), np.finfo(float).tiny),
        loss_rocks=_losses(arms, "loss_rocks", level),
        loss_rest=_losses(arms, "loss_rest", level),
        loss_rocks_change=_loss_change(arms, uniform, "loss_rocks", level),
        loss_rest_change=_loss_change(arms, uniform, "loss_rest", level),
        stages={name: float(np.mean([(arm.stages or {}).get(name, 0.0) for arm in arms])) for name in names},
        verdict=judge(change, margin, seeds=len(arms)),
        **_audited(arms, uniform, ratio, level),
    )


def at_tokens(
    arms: Sequence[Arm], others: Sequence[Arm], tokens: float | None = None, *, level: float = 0.95
) -> tuple[Estimate, Estimate]:
    """Accuracy after so many tokens, and its difference to other trainings of the same seeds after as many.

    Without a number: what both of a pair have spent. A training that ended before holds its last value.
    """
    value, base = [], []
    for arm, other in zip(arms, others):
        limit = min(arm.axis("tokens")[-1], other.axis("tokens")[-1]) if tokens is None else tokens
        value.append(weights_at(arm.axis("tokens"), limit) @ arm.correct_EP)
        base.append(weights_at(other.axis("tokens"), limit) @ other.correct_EP)
    value_SP = np.stack(value)
    return crossed_estimate(value_SP, level=level), crossed_estimate(value_SP - np.stack(base), level=level)


def _audited(arms: Sequence[Arm], uniform: Sequence[Arm], sampled: float, level: float) -> Row:
    """How much the regime changed, whether it dropped end tokens, and whether rollouts grew."""

    def mean(name: str) -> float | None:
        values = [getattr(arm.audit, name) for arm in arms]
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    changed = mean("changed_share")
    if changed is not None and arms[0].samples_less:
        changed = 1 - (1 - changed) * min(sampled, 1.0)
    lengths, truncated = _growth(arms, uniform, level)
    return {
        "bite_tokens": changed,
        "bite_loss": mean("changed_loss_share"),
        "end_dropped": mean("end_dropped"),
        "length_ratio": lengths,
        "truncated_change": truncated,
    }


def _growth(arms: Sequence[Arm], uniform: Sequence[Arm], level: float) -> tuple[Estimate, Estimate] | tuple[None, None]:
    """Length of the rollouts as a share of uniform's, and the change of the share that was cut.

    Intervals are over prompts, and seeds from three on; over seeds alone where only the means are on record.
    """
    known = [arm.length_P is not None and arm.truncated_P is not None for arm in (*arms, *uniform)]
    if all(known):
        own_SP, base_SP = (np.stack([arm.length_P for arm in side]) for side in (arms, uniform))  # type: ignore[misc]
        cut_SP, base_cut_SP = (np.stack([arm.truncated_P for arm in side]) for side in (arms, uniform))  # type: ignore[misc]
        ratio = own_SP.mean() / base_SP.mean()
        share_SP = ratio + (own_SP - ratio * base_SP) / base_SP.mean()
        return _certain_or(share_SP, level), _certain_or(cut_SP - base_cut_SP, level)
    pairs = [(arm.audit, other.audit) for arm, other in zip(arms, uniform)]
    if not all(own.length and other.length for own, other in pairs):
        return None, None
    ratios = [(own.length or 0.0) / (other.length or 1.0) for own, other in pairs]
    changes = [(own.truncated or 0.0) - (other.truncated or 0.0) for own, other in pairs]
    return seed_estimate(ratios, level=level, ratio=True), seed_estimate(changes, level=level)


def _certain_or(value_SP: Floats, level: float) -> Estimate:
    """An interval, of width 0 where all values are alike: uniform against itself, or nothing that was ever cut."""
    if np.ptp(value_SP) == 0:
        mean = float(value_SP.mean())
        return Estimate(mean, mean, mean, value_SP.shape[1])
    return skewed_estimate(value_SP, level=level)


def paired(arms: Sequence[Arm], uniform: Sequence[Arm]) -> tuple[list[Arm], list[Arm]]:
    """Trainings of the seeds that both have, in the same order, on the same prompts."""
    base = {arm.seed: arm for arm in uniform}
    matched = sorted((arm for arm in arms if arm.seed in base), key=lambda arm: arm.seed)
    if not matched:
        raise DataError("a regime is compared with uniform trained with the same seeds; there is no such training")
    if len({arm.correct_EP.shape[1] for arm in [*matched, *uniform]}) > 1:
        raise DataError(f"regime {matched[0].regime} was evaluated on other problems than uniform")
    return matched, [base[arm.seed] for arm in matched]


def _ratio(value: float, base: float) -> float:
    return float(value / base) if base > 0 else math.nan


def _losses(arms: Sequence[Arm], name: str, level: float) -> Estimate | None:
    values = [getattr(arm, name) for arm in arms]
    if any(value is None for value in values):
        return None
    by_prompt = [getattr(arm, f"{name}_C") for arm in arms]
    if any(value_C is None for value_C in by_prompt):
        return seed_estimate(values, level=level)
    found = skewed_estimate(np.stack(by_prompt), level=level)
    return found._replace(low=max(found.low, 0.0) if math.isfinite(found.low) else found.low)


def _loss_change(arms: Sequence[Arm], uniform: Sequence[Arm], name: str, level: float) -> Estimate | None:
    """A loss minus uniform's on the same rollouts."""
    own, base = ([getattr(arm, f"{name}_C") for arm in side] for side in (arms, uniform))
    if arms[0].regime == "uniform" or any(value_C is None for value_C in (*own, *base)):
        return None
    return skewed_estimate(np.stack(own) - np.stack(base), level=level)


def judge(change: Estimate, margin: float, *, seeds: int) -> Verdict:
    """What an interval of a change of accuracy says: proven inside ±margin, below 0, above 0, or none of these.

    Fewer than three seeds decide nothing: their interval is over prompts only, and two trainings of the same regime can
    differ by more than it is wide.
    """
    if seeds < MIN_SEEDS:
        return "undecided"
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
