"""The comparison in words: sentences that follow from the numbers of the regimes and from nothing else.

This module knows `Reading`s, a regime's numbers relative to uniform, and the names of regimes; it decides no verdict
and computes no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rocktokens.compare.judgement import Reach, Reading, frontier
from rocktokens.compare.savings import Saving
from rocktokens.show import percent, points
from rocktokens.stats import Estimate

# Regime → what was done to the loss or to the sampling, as the subject of a sentence; {} is the share of positions.
SUBJECTS = {
    "freeze": "freezing the bypass list, {} of positions,",
    "freeze_rocks": "freezing all rocks, {} of positions,",
    "random": "freezing control positions in runs as long, {} of all,",
    "soft": "giving the rocks a smaller weight",
    "adaptive": "freezing what adaptive found while training, {} of positions,",
    "entropy": "keeping only the positions where the student is least certain, dropping {},",
    "divergence": "keeping only the positions of largest loss, dropping {},",
    "tip": "keeping where the student is uncertain or far from the teacher, dropping {},",
    "teachable": "keeping where the models disagree and the teacher believes in the student's choices, dropping {},",
    "iw": "giving earlier positions more weight",
    "fire": "dropping unlikely rollouts and weighing by both entropies, dropping {},",
    "selectkd": "giving little weight where the student's first choice is not among the teacher's",
    "position": "giving later positions more weight",
    "adakd": "keeping an adaptive share of the positions of largest loss, dropping {},",
    "todi": "training both divergences, mixed token by token,",
    "srkl": "training the reverse divergence to a mixture of both models",
    "small": "sampling one rollout per prompt, {} fewer positions,",
    "prefix": "stopping every rollout at a fixed length, {} fewer positions,",
}


def _interval(estimate: Estimate) -> str:
    return f"[{points(estimate.low)}, {points(estimate.high)}]"


def subject(reading: Reading) -> str:
    """What the regime did, with the share of positions it left out."""
    return SUBJECTS.get(reading.regime, f"the regime {reading.regime}, leaving out {{}} of positions,").format(
        percent(_left_out(reading))
    )


def _left_out(reading: Reading) -> float:
    """Share of positions without loss, or not sampled."""
    return max(0.0, 1.0 - 1.0 / reading.ceiling)


def verdict_sentence(reading: Reading, *, margin: float, uniform: Reading | None = None) -> str:
    """One regime in one or two sentences: accuracy, time, ceiling, and when it came to uniform's accuracy."""
    judged = {
        "costs": "cost accuracy",
        "gains": "raised accuracy",
        "unchanged": f"left accuracy where it was (within ±{points(margin, signed=False)} points)",
        "undecided": "changed accuracy by nothing that could be measured",
    }[reading.verdict]
    changed = f"{judged}: {points(reading.change.value)} points {_interval(reading.change)}"
    if not reading.over_seeds:
        changed = (
            f"changed accuracy by {points(reading.change.value)} points {_interval(reading.change)} over problems only "
            f"with {_few(reading)}, which decides nothing"
        )
    ceiling = f"; its ceiling is {reading.ceiling:.2f}×" if reading.ceiling > 1.005 else ""
    start = subject(reading)
    return (
        f"{start[0].upper()}{start[1:]} {changed}, and {_saved(reading)}{ceiling}. {_reached(reading, margin, uniform)}"
    )


def _few(reading: Reading) -> str:
    return "one seed" if reading.num_seeds == 1 else f"{reading.num_seeds} seeds"


def _saved(reading: Reading) -> str:
    """What the clock says, of the step and, where the numbers of steps differ, of the whole."""
    if not math.isfinite(reading.step_ratio.low):  # no interval, no claim
        known = math.isfinite(reading.flops_ratio)
        flops = f" (floating-point operations: {reading.flops_ratio:.2f}×)" if known else ""
        return f"no saving of time can be told from {_few(reading)}{flops}"
    step = _time(reading.step_ratio, "of the step", "a step")
    whole = reading.seconds_ratio
    if abs(math.log(whole.value / reading.step_ratio.value)) < 0.02:
        return step
    return f"{step} and {_time(whole, 'of the whole training', 'in all')}"


def _time(ratio: Estimate, of: str, more: str) -> str:
    saved = Estimate(1 - ratio.value, 1 - ratio.high, 1 - ratio.low, ratio.num_prompts)
    if saved.low < 0 < saved.high:
        return f"saved no measurable part {of}: {points(saved.value)} % [{points(saved.low)}, {points(saved.high)}]"
    if saved.value >= 0:
        return f"saved {percent(saved.value)} {of} [{points(saved.low)}, {points(saved.high)}]"
    return f"took {percent(-saved.value)} more time {more} [{points(-saved.high)}, {points(-saved.low)}]"


def _reached(reading: Reading, margin: float, uniform: Reading | None) -> str:
    goal = "uniform's final accuracy"
    if margin:
        goal += f" less {points(margin, signed=False)} points"
    steps, seconds = reading.reach["steps"], reading.reach["seconds"]
    if math.isinf(steps.value):
        chance = "" if steps.share_reached == 0 else f" (it did in {percent(steps.share_reached)} of resamples)"
        return f"It did not reach {goal}{chance}."
    theirs = ""
    if uniform is not None and math.isfinite(uniform.reach["seconds"].value):
        theirs = f", uniform itself after {uniform.reach['seconds'].value:.0f} s"
    return f"It reached {goal} after {steps.value:.0f} steps {_bounds(steps)} and {seconds.value:.0f} s{theirs}."


def _bounds(reach: Reach) -> str:
    high = "not reached" if math.isinf(reach.high) else f"{reach.high:.0f}"
    low = "not reached" if math.isinf(reach.low) else f"{reach.low:.0f}"
    return f"[{low}, {high}]"


def conclusion(readings: Mapping[str, Reading], *, margin: float) -> str:
    """Whether the bypass list, and all rocks, can be skipped in this pair; beside them their controls."""
    said = [_skipped(readings[name], what, margin) for name, what in FROZEN.items() if name in readings]
    if not said:
        return "Nothing was frozen in any regime compared here: nothing is said about skipping token types."
    if "freeze" not in readings:
        said.insert(0, "There was nothing on the bypass list to freeze.")
    random = readings.get("random")
    if random is not None:
        frozen = max(_left_out(readings[name]) for name in FROZEN if name in readings)
        which = "as many other positions"
        if _left_out(random) < ENOUGH * frozen:  # a set that is most of the text leaves too few others
            which = f"{percent(_left_out(random))} of positions where the frozen types are {percent(frozen)}"
        said.append(
            f"The control, {which}, changed it by {points(random.change.value)} points {_interval(random.change)}."
        )
    return " ".join(said)


# A control of fewer positions than this share of the frozen ones is not called as many.
ENOUGH = 0.9
# Regime that freezes token types → what it freezes.
FROZEN = {"freeze": "types on the bypass list", "freeze_rocks": "rocks"}


def _skipped(reading: Reading, what: str, margin: float) -> str:
    """One frozen set in one sentence."""
    change = f"{points(reading.change.value)} points {_interval(reading.change)}"
    inside = f"±{points(margin, signed=False)} points"
    if reading.verdict == "costs":
        return f"The {what} are cornerstones here: trained without them, accuracy changed by {change}."
    if reading.verdict == "gains":
        return f"The {what} are stumbling blocks here: trained without them, accuracy changed by {change}."
    if reading.verdict == "unchanged":
        return f"The {what} can be skipped here: trained without them, accuracy changed by {change}, inside {inside}."
    if not reading.over_seeds:
        return (
            f"Whether the {what} can be skipped is not decided: trained without them with {_few(reading)}, accuracy "
            f"changed by {change}, an interval over problems only. It takes three seeds at least."
        )
    return (
        f"Whether the {what} can be skipped is not decided to {inside}: trained without them, accuracy changed by "
        f"{change}. More seeds or problems would tell."
    )


def savings_sentence(readings: Sequence[Reading], *, margin: float, goal: float = 0.7) -> str:
    """The frontier of accuracy against seconds, and whether a regime matched uniform in `goal` × its time."""
    others = [reading for reading in readings if reading.regime != "uniform"]
    if not others:
        return "Only the uniform regime was trained: there is no frontier."
    if not all(math.isfinite(reading.seconds_ratio.low) for reading in others):
        return "Seconds are not compared: it takes three seeds to give them an interval."
    best = frontier(readings)
    start = f"No other regime is both quicker and better than: {', '.join(best)}."
    within = [r for r in others if r.change.value > -margin]
    if not within:
        return f"{start} None ended within {points(margin, signed=False)} points of uniform's accuracy."
    quickest = min(within, key=lambda r: r.seconds_ratio.value)
    proven = [r for r in within if r.verdict in ("unchanged", "gains") and r.seconds_ratio.high <= goal]
    met = "not met"
    if quickest.seconds_ratio.value <= goal:
        met = "met" if quickest in proven else "met by the estimate, not proven"
    said = (
        f"{start} Of those that ended within {points(margin, signed=False)} points of uniform, {quickest.regime} was "
        f"quickest: {_price(quickest)}; the goal of {goal:.2f}× is {met}."
    )
    if proven and quickest not in proven:
        said += f" It is met, both intervals inside it, by {'; '.join(f'{r.regime}: {_price(r)}' for r in proven)}."
    return said


def _price(reading: Reading) -> str:
    """What a regime cost in time and what it did to accuracy."""
    ratio = reading.seconds_ratio
    return (
        f"{ratio.value:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}] of uniform's seconds for "
        f"{points(reading.change.value)} points {_interval(reading.change)}"
    )


def beyond_sentence(saving: Saving) -> str:
    """Whether a regime that samples less does better than simply sampling less."""
    return (
        f"{saving.regime}: beats simply sampling less: {saving.answer}; at equal tokens its accuracy is "
        f"{points(saving.over_control.value)} points {_interval(saving.over_control)} from that of {saving.control}."
    )


def words(readings: Mapping[str, Reading], *, margin: float, savings: Sequence[Saving] = ()) -> list[str]:
    """The conclusion, one verdict per regime other than uniform, savings against controls, and the frontier."""
    own = [
        f"{name}: {verdict_sentence(reading, margin=margin, uniform=readings['uniform'])}"
        for name, reading in readings.items()
        if name != "uniform"
    ]
    beyond = [beyond_sentence(saving) for saving in savings]
    last = savings_sentence(list(readings.values()), margin=margin)
    return [conclusion(readings, margin=margin), *own, *beyond, last]
