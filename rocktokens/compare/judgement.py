"""What a training regime costs and saves against uniform: every number with its interval, and the verdict.

Trainings of one seed are evaluated at the same steps on the same held-out prompts, so regimes are compared prompt by
prompt and seed by seed. This module knows outcomes, seconds, FLOPs and tokens; it does not know how a regime was
trained or what a rock is.

Shapes: S seeds, E evaluations (the first is the common start), P prompts, C prompts of rollouts that are common to all
regimes, B resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats as sps
from scipy.optimize import isotonic_regression

from rocktokens.compare.regimes import CONTROLS_OF_SAVING, SAMPLE_LESS, SAVERS
from rocktokens.compare.settings import CompareConfig
from rocktokens.errors import DataError
from rocktokens.seeds import derive_seed
from rocktokens.stats import MIN_SEEDS, Estimate, Floats, resample_counts
from rocktokens.values import Row

AXES = ("steps", "seconds", "flops", "tokens")
Verdict = Literal["costs", "gains", "unchanged", "undecided"]


# ---------------------------------------------------------------- intervals over seeds and prompts


def crossed_estimate(value_SP: ArrayLike, *, level: float = 0.95) -> Estimate:
    """Mean over seeds and prompts, both taken as drawn at random, with an interval for either source of chance.

    Every seed is tried on every prompt, so the variance of the mean has a part for seeds, one for prompts and one
    for the rest (two-way layout); t with Satterthwaite's degrees of freedom, few where the seeds' part is the large
    one. With fewer than three seeds the interval accounts for prompts only, and every display of it must say so.
    """
    values = np.atleast_2d(np.asarray(value_SP, float))
    seeds, prompts = values.shape
    if prompts < 2 or not np.isfinite(values).all():
        raise DataError(f"outcomes of {seeds} seeds on {prompts} prompts: an interval needs at least 2, all known")
    mean = float(values.mean())
    if np.ptp(values) == 0:  # all alike: a share of others this large could still have been missed ("rule of three")
        half = 1.0 - (1.0 - level) ** (1.0 / prompts)
    else:
        error, degrees = _error(values)
        half = float(sps.t.ppf((1 + level) / 2, degrees)) * error
    return Estimate(mean, mean - half, mean + half, prompts)


def _error(values: Floats) -> tuple[float, float]:
    """Standard error of the mean of seeds × prompts, and its degrees of freedom."""
    seeds, prompts = values.shape
    by_prompt = float(values.mean(0).var(ddof=1)) / prompts
    if seeds < MIN_SEEDS:
        return math.sqrt(by_prompt), prompts - 1
    by_seed = float(values.mean(1).var(ddof=1)) / seeds
    rest_SP = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
    degrees = (seeds - 1) * (prompts - 1)
    rest = float((rest_SP**2).sum()) / degrees / (seeds * prompts)  # counted once in each of the other two
    # Three seeds that look alike prove nothing: their part is never taken to be 0, whatever it looks like.
    variance = by_prompt + max(by_seed - rest, by_seed / 2)
    spread = by_prompt**2 / (prompts - 1) + by_seed**2 / (seeds - 1) + rest**2 / degrees
    return math.sqrt(variance), variance**2 / spread


def skewed_estimate(value_SC: ArrayLike, *, level: float = 0.95) -> Estimate:
    """As `crossed_estimate`, for values that are skewed: a few prompts carry much of a loss.

    Student's interval around such a mean is too short on one side. Hall's (1992) cubic transformation of t takes the
    skewness out; it is monotone, so the interval is its inverse. No interval where there are fewer than three prompts,
    or no spread.
    """
    values = np.atleast_2d(np.asarray(value_SC, float))
    mean, number = float(values.mean()), values.shape[1]
    if number < 3 or np.ptp(values.mean(0)) <= 1e-9 * np.abs(values).max():
        return Estimate(mean, math.nan, math.nan, number)
    error, degrees = _error(values)
    spread, skew = error * math.sqrt(number), float(sps.skew(values.mean(0), bias=False))
    ratio = float(sps.t.ppf((1 + level) / 2, degrees)) / math.sqrt(number) * np.array([1.0, -1.0])
    if abs(skew) >= 1e-6:  # (mean - truth) / spread whose image under the transformation is Student's quantile
        ratio = 3 / skew * (np.cbrt(1 + skew * (ratio - skew / (6 * number))) - 1)
    low, high = (mean - spread * ratio).tolist()
    return Estimate(mean, low, high, number)


def values_by_prompt(loss_C: ArrayLike, positions_C: ArrayLike) -> Floats:
    """One value per prompt; their mean is the mean loss per position, and their spread gives its standard error.

    Prompts have different numbers of positions, so the mean loss is a ratio of two sums. Each value is the mean loss
    plus the prompt's part in it, (summed loss - mean loss x positions) / mean number of positions, which is the usual
    linearisation of a ratio.
    """
    loss, positions = np.asarray(loss_C, float), np.asarray(positions_C, float)
    mean = loss.sum() / positions.sum()
    return mean + (loss - mean * positions) / positions.mean()


def seed_estimate(value_S: ArrayLike, *, ratio: bool = False) -> Estimate:
    """Mean over seeds with a 95 % t interval (a ratio's is taken on logarithms); fewer than three seeds have none."""
    values = np.log(np.asarray(value_S, float)) if ratio else np.asarray(value_S, float)
    number, half = len(values), math.nan
    if number >= MIN_SEEDS:
        half = float(sps.t.ppf(0.975, number - 1)) * float(values.std(ddof=1)) / math.sqrt(number)
    value, low, high = values.mean() + np.array([0.0, -half, half])
    found = Estimate(float(value), float(low), float(high), number)
    if ratio:
        return Estimate(math.exp(found.value), math.exp(found.low), math.exp(found.high), number)
    return found


# ---------------------------------------------------------------- curves of accuracy


@dataclass(frozen=True)
class Trained:
    """One regime trained with one seed."""

    regime: str
    seed: int
    x: Mapping[str, Floats]
    """By axis (steps, seconds, FLOPs, tokens sampled and scored): the total since the start, at each evaluation."""
    correct_EP: Floats
    """Share of right rollouts of each prompt at each evaluation."""
    length_P: Floats
    truncated_P: Floats
    """Mean length of each prompt's rollouts at the last evaluation, and the share that was cut."""
    kept_share: float = 1.0
    """Share of the sampled positions that carried loss."""
    tokens: float = 1.0
    """Response positions sampled in the whole training."""
    loss_C: Mapping[str, Floats] = field(default_factory=dict)
    """At "rocks" and at the "rest": the final student's loss on common rollouts, by prompt (`values_by_prompt`)."""
    audit: Mapping[str, float | None] = field(default_factory=dict)
    """What the record says of how much the regime changed: shares of tokens, of loss, and of end tokens dropped."""


def weights_at(x_E: Floats, at: float) -> Floats:
    """Weights of the evaluations in the curve's value at `at`: linear between points, held after the last."""
    place_E = np.arange(len(x_E))
    return np.maximum(0.0, 1.0 - np.abs(place_E - np.interp(at, x_E, place_E)))


def first_reach(accuracy_E: Floats, target: float) -> float | None:
    """Evaluation, with a fraction between two, at which the curve comes to the target; None where it does not.

    The curve is made monotone first (isotonic regression): one lucky evaluation of a noisy curve does not count.
    """
    fitted_E = isotonic_regression(accuracy_E).x
    index = int(np.searchsorted(fitted_E, target - 1e-12))
    if index == len(fitted_E):
        return None
    below = fitted_E[index - 1]
    return index - 1 + float((target - below) / (fitted_E[index] - below)) if index else 0.0


def reach_target(
    own: Sequence[Trained], uniform: Sequence[Trained], config: CompareConfig, rng: np.random.Generator
) -> Row:
    """By axis, where the regime's mean curve comes within the margin of uniform's final accuracy.

    Columns AXIS_to with the ends of a 95 % interval; None where it is not reached. Uniform's final accuracy is the end
    of its own monotone curve. Seeds and prompts are resampled, the same ones for both regimes.
    """
    own_SEP, uniform_SEP = (np.stack([t.correct_EP for t in side]) for side in (own, uniform))
    seeds, _, prompts = uniform_SEP.shape
    counts_BP = np.vstack([np.ones(prompts), resample_counts(prompts, config.resamples, rng)]) / prompts
    drawn_BS = np.vstack([np.arange(seeds), rng.integers(0, seeds, size=(config.resamples, seeds))])
    own_SEB, uniform_SEB = own_SEP @ counts_BP.T, uniform_SEP @ counts_BP.T
    x_SE = {axis: np.stack([t.x[axis] for t in own]) for axis in AXES}
    found: dict[str, list[float]] = {axis: [] for axis in AXES}
    for b, drawn in enumerate(drawn_BS):  # the first is what was observed
        target = float(isotonic_regression(uniform_SEB[drawn, :, b].mean(0)).x[-1]) - config.margin
        place = first_reach(own_SEB[drawn, :, b].mean(0), target)
        for axis in AXES:
            x_E = x_SE[axis][drawn].mean(0)
            found[axis].append(math.inf if place is None else float(np.interp(place, np.arange(len(x_E)), x_E)))
    row: Row = {}
    for axis, (value, *rest) in found.items():
        resampled, last = np.sort(rest), len(rest) - 1
        # Order statistics, not interpolated quantiles: an infinite bound is an answer, not an average.
        ends = (value, resampled[math.floor(0.025 * last)], resampled[math.ceil(0.975 * last)])
        row |= dict(zip((f"{axis}_to", f"{axis}_to_low", f"{axis}_to_high"), map(finite, ends)))
    return row


# ---------------------------------------------------------------- one regime against uniform


def at_tokens(own: Sequence[Trained], others: Sequence[Trained], tokens: float) -> tuple[Estimate, Estimate]:
    """Accuracy after this many tokens, and its difference to other trainings of the same seeds after as many."""
    value_SP, base_SP = (
        np.stack([weights_at(t.x["tokens"], tokens) @ t.correct_EP for t in side]) for side in (own, others)
    )
    return crossed_estimate(value_SP), crossed_estimate(value_SP - base_SP)


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


def summary_row(own: Sequence[Trained], uniform: Sequence[Trained], config: CompareConfig, *, tokens: float) -> Row:
    """One regime against uniform, paired by seed and by prompt: a row of compare_summary.

    An interval stands as NAME, NAME_low, NAME_high; what is infinite (never reached) or not known is None. `tokens` is
    where accuracies are compared at equal tokens.
    """
    regime = own[0].regime
    last_SP, base_SP = (np.stack([t.correct_EP[-1] for t in side]) for side in (own, uniform))
    limits = [float(t.x["seconds"][-1]) for t in uniform]
    timed_SP = np.stack([weights_at(t.x["seconds"], limit) @ t.correct_EP for t, limit in zip(own, limits)])
    accuracy_same_tokens, change_same_tokens = at_tokens(own, uniform, tokens)
    seconds = np.array([t.x["seconds"][-1] for t in own])
    change = crossed_estimate(last_SP - base_SP)
    estimates: dict[str, Estimate | None] = {
        "delta": change,
        "accuracy": crossed_estimate(last_SP),
        "change_same_seconds": crossed_estimate(timed_SP - base_SP),
        "accuracy_same_tokens": accuracy_same_tokens,
        "change_same_tokens": change_same_tokens,
        "seconds": seed_estimate(seconds),
        "seconds_ratio": seed_estimate(seconds / limits, ratio=True),
        **_losses(own, uniform),
        **_growth(own, uniform),
    }
    row: Row = {"regime": regime, "verdict": judge(change, config.margin, seeds=len(own)), "num_seeds": len(own)}
    row |= {"num_problems": last_SP.shape[1], "over_seeds": len(own) >= MIN_SEEDS}
    for name, found in estimates.items():
        ends = (None, None, None) if found is None else found[:3]
        row |= dict(zip((name, f"{name}_low", f"{name}_high"), map(finite, ends)))
    longer, more_cut = row["length_ratio_low"], row["truncated_change_low"]
    row["grew"] = None if longer is None else longer > 1 or (more_cut or 0.0) > 0
    rng = np.random.default_rng(derive_seed("compare", regime))
    row |= reach_target(own, uniform, config, rng)

    kept = float(np.average([t.kept_share for t in own], weights=[t.tokens for t in own]))
    sampled = sum(t.tokens for t in own) / sum(t.tokens for t in uniform)
    left = kept * sampled if regime in SAMPLE_LESS else kept
    bite: Row = {}
    for name in own[0].audit:
        values = [value for t in own if (value := t.audit.get(name)) is not None]
        bite[name] = float(np.mean(values)) if values else None
    if bite.get("bite_tokens") is not None and regime in SAMPLE_LESS:  # what was never sampled is changed, too
        bite["bite_tokens"] = 1 - (1 - bite["bite_tokens"]) * min(sampled, 1.0)
    flops, base_flops, spent, base_spent = (
        sum(float(t.x[axis][-1]) for t in side) for axis in ("flops", "tokens") for side in (own, uniform)
    )
    return row | {
        "flops_ratio": flops / base_flops if base_flops > 0 else None,
        "kept_share": kept,
        "tokens_ratio": sampled,
        "spent_ratio": spent / base_spent,
        "ceiling": 1.0 / max(min(left, 1.0), float(np.finfo(float).tiny)),  # dropping f saves at most 1 / (1 - f)
        **bite,
    }


def finite(value: Any) -> float | None:
    """A number that JSON can hold, or None."""
    return None if value is None or not math.isfinite(value) else float(value)


def _losses(own: Sequence[Trained], uniform: Sequence[Trained]) -> dict[str, Estimate | None]:
    """Losses on common rollouts, and their changes; None where there are no such positions."""
    found: dict[str, Estimate | None] = {}
    for name in ("rocks", "rest"):
        found[f"loss_{name}"] = found[f"loss_{name}_change"] = None
        if all(name in t.loss_C for t in (*own, *uniform)):
            own_SC, base_SC = (np.stack([t.loss_C[name] for t in side]) for side in (own, uniform))
            loss = skewed_estimate(own_SC)
            found[f"loss_{name}"] = loss._replace(low=max(loss.low, 0.0) if math.isfinite(loss.low) else loss.low)
            if own[0].regime != "uniform":
                found[f"loss_{name}_change"] = skewed_estimate(own_SC - base_SC)
    return found


def _growth(own: Sequence[Trained], uniform: Sequence[Trained]) -> dict[str, Estimate]:
    """Length of held-out rollouts as a share of uniform's, and the change of the share that was cut."""
    found: dict[str, Estimate] = {}
    length_SP, base_SP, cut_SP, base_cut_SP = (
        np.stack([getattr(t, name) for t in side]) for name in ("length_P", "truncated_P") for side in (own, uniform)
    )
    ratio = length_SP.mean() / base_SP.mean()
    share_SP = ratio + (length_SP - ratio * base_SP) / base_SP.mean()  # a ratio of sums, linearised
    for name, value_SP in (("length_ratio", share_SP), ("truncated_change", cut_SP - base_cut_SP)):
        found[name] = skewed_estimate(value_SP)
        if np.ptp(value_SP) == 0:  # certain: uniform against itself, or nothing that was ever cut
            found[name] = Estimate(*3 * (float(value_SP.mean()),), value_SP.shape[1])
    return found


# ---------------------------------------------------------------- all regimes


def savings(trained: Mapping[str, Sequence[Trained]], *, tokens: float) -> list[Row]:
    """Every regime that samples less, at equal tokens, against the best control that simply samples less, too."""
    found = []
    for name in (name for name in SAVERS if name in trained):
        controls = [control for control in CONTROLS_OF_SAVING if control in trained]
        over = {control: at_tokens(trained[name], trained[control], tokens)[1] for control in controls}
        control = min(over, key=lambda own: over[own].value)
        value, low, high, _ = over[control]
        row: Row = {"regime": name, "control": control, "answer": "yes" if low > 0 else "no"}
        found.append(row | {"over_control": value, "over_control_low": low, "over_control_high": high})
    return found
