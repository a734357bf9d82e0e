"""The census: outcomes with and without a ban in, a verdict with its interval for every banned set out.

Knows prompts, rollouts and sets by number only. Who generates the rollouts, and what the sets mean, is not known here;
how a verdict is reached from differences is inference.py.

Looking more than once does not raise the error rate: look k may spend the share f_k of α, and the shares sum to 1. The
chance of a wrong verdict at any look is then at most Σ f_k·α = α, whatever the looks have in common; and the smallest
p_k / f_k over the looks is itself a p value, which Benjamini–Hochberg continues with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
from scipy import stats as sps

from rocktokens.causal.inference import (
    NEUTRAL,
    NEVER_USED,
    UNDECIDED,
    Findings,
    Verdict,
    find,
    problems_to_decide,
    verdicts,
)
from rocktokens.causal.settings import KnockoutConfig
from rocktokens.show import percent
from rocktokens.stats import (
    Estimate,
    Floats,
    accuracy_estimate,
    benjamini_hochberg,
    smallest_detectable_effect,
)
from rocktokens.tables import TABLES
from rocktokens.values import Json

# Shapes: P prompts, V sets, N baseline rollouts, J jobs (continuations), A sets still open.


@dataclass(frozen=True)
class BannedSet:
    """Token types that are banned together."""

    set_id: str
    kind: Literal["token", "window", "family"]
    token_id: int
    """The type the set belongs to."""
    token: str
    members: tuple[int, ...]
    role: Literal["candidate", "control"] = "candidate"
    control_of: str | None = None
    """For a control: the set it is as frequent as."""


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of the prompts that one look adds."""

    problem_N: Floats
    correct_N: Floats
    used_V: Floats
    """Baseline rollouts that use each set; 0 for sets no longer open."""
    problem_J: Floats
    before_J: Floats
    """Outcome of the baseline rollout that each continuation belongs to."""
    column_J: Floats
    is_knockout_J: Floats
    """Else it is a placebo."""
    after_J: Floats
    placebo_problems: int


class Effects:
    """Differences per prompt and set, extended look by look."""

    def __init__(self, sets: Sequence[BannedSet], num_problems: int, rollouts: int) -> None:
        self.sets, self.rollouts = list(sets), rollouts
        self.difference_PV = np.zeros((num_problems, len(sets)))
        self.placebo_PV = np.zeros((num_problems, len(sets)))
        self.accuracy_P = np.zeros(num_problems)
        self.used_V = np.zeros(len(sets), int)
        self.tested_V = np.zeros(len(sets), int)  # baseline rollouts looked at for each set
        self.placebo_problems = self.baseline_rollouts = 0

    def add(self, seen: Outcomes, active: Sequence[int]) -> None:
        """Add the outcomes of a look."""
        np.add.at(self.accuracy_P, seen.problem_N, seen.correct_N / self.rollouts)
        change_J = (seen.after_J - seen.before_J) / self.rollouts
        for sums_PV, own_J in ((self.difference_PV, seen.is_knockout_J), (self.placebo_PV, ~seen.is_knockout_J)):
            np.add.at(sums_PV, (seen.problem_J[own_J], seen.column_J[own_J]), change_J[own_J])
        self.placebo_problems = min(int(seen.problem_N.max()) + 1, seen.placebo_problems)
        self.used_V += seen.used_V
        self.tested_V[list(active)] += len(seen.problem_N)
        self.baseline_rollouts += len(seen.problem_N)


class SetResult(NamedTuple):
    """One set's row of the census. Effects are changes of accuracy: 0.01 is one point."""

    banned: BannedSet
    verdict: Verdict
    num_used: int
    """Baseline rollouts that use the set."""
    used_share: float
    num_problems: int
    num_changed: int
    """Prompts whose outcome the ban changed."""
    delta: float
    low: float
    high: float
    """The interval that the verdict inverts: the inner one for Proven Neutral, else the outer one."""
    outer_low: float
    outer_high: float
    """1 − α interval, α shared among the looks: a Strong verdict needs it to leave out 0."""
    inner_low: float
    inner_high: float
    """1 − 2α interval of the equivalence test: Proven Neutral needs it to lie inside ±ε."""
    accuracy_with: float
    """Accuracy of the baseline on the same prompts as Δ."""
    p: float
    p_neutral: float
    sd: float
    detectable: float
    """Smallest effect that the set's own spread and number of prompts show at the power asked for."""
    placebo_floor: float
    """Noise floor: difference between two identical arms, each with its own numbers, on this many prompts."""
    round: int
    more_problems: int
    """Prompts beyond these that would decide it, where it is undecided; else 0."""
    p_bh: float = float("nan")


@dataclass(frozen=True)
class Census:
    """Every set's result and what they have in common."""

    results: tuple[SetResult, ...]
    accuracy: Estimate
    """Of the baseline."""
    config: KnockoutConfig
    num_rounds: int
    placebo_strong: tuple[int, int]
    """(Placebos with a strong verdict when treated as knock-outs, placebos tested)."""
    placebo_problems: int
    baseline_rollouts: int
    notes: tuple[str, ...] = ()

    def _repr_html_(self) -> str:
        """The verdicts as a table, for notebooks; figures.py imports this module, so it is found by its name."""
        return str(import_module("rocktokens.causal.figures").census_terminal(self).html(tools=False))

    def counts(self, role: str = "candidate") -> dict[str, int]:
        """How many sets got each verdict."""
        return dict(Counter(result.verdict for result in self.results if result.banned.role == role))

    def of(self, set_id: str) -> SetResult:
        """One set's result."""
        return next(result for result in self.results if result.banned.set_id == set_id)


GROWTH = 2.0  # every look spends this many times the α of the one before it: late looks decide the close calls


def make_schedule(num_problems: int, rounds: int) -> list[tuple[int, float]]:
    """Looks at doubling numbers of prompts, the last at all of them: after how many, and the share of α to spend."""
    ends = sorted({max(2, num_problems >> back) for back in range(rounds)})
    spends = [GROWTH**look for look in range(len(ends))]
    return [(end, spend / sum(spends)) for end, spend in zip(ends, spends)]


Measure = Callable[[int, int, int, Sequence[int]], Outcomes]


def run_looks(
    effects: Effects, schedule: Sequence[tuple[int, float]], measure: Measure, config: KnockoutConfig, *, seed: int
) -> Census:
    """Measure look by look; a set stops when its verdict is in. `measure(look, begin, end, open sets)`."""
    results: dict[int, SetResult] = {}
    active, begin, look = list(range(len(effects.sets))), 0, 0
    for look, (end, share) in enumerate(schedule):
        effects.add(measure(look, begin, end, active), active)
        rng, alpha = np.random.default_rng([seed, look]), config.alpha * share
        difference_PA = effects.difference_PV[:end, active]
        found = find(difference_PA, epsilon=config.epsilon, alpha=alpha, resamples=config.resamples, rng=rng)
        for position, (column, verdict) in enumerate(zip(active, verdicts(found, epsilon=config.epsilon))):
            fresh = _result(effects, column, found, position, verdict, end, share, look, config)
            before = results.get(column)
            if before is not None:  # the smallest p over the looks is a p value: each was divided by its share
                fresh = fresh._replace(p=min(before.p, fresh.p), p_neutral=min(before.p_neutral, fresh.p_neutral))
            results[column] = fresh
        # A set that no rollout used yet may still be used by later prompts.
        active = [column for column in active if results[column].verdict == UNDECIDED or not effects.used_V[column]]
        begin = end
        if not active:
            break
    # Multiple testing over the candidates that are used; controls are no hypotheses of the census.
    family = [v for v, r in results.items() if r.banned.role == "candidate" and r.verdict != NEVER_USED]
    p_V = [results[column].p for column in family]
    for column, p_bh in zip(family, benjamini_hochberg(p_V)) if family else ():
        results[column] = results[column]._replace(p_bh=float(p_bh))
    rng = np.random.default_rng([seed, 1_000_000])
    accuracy = accuracy_estimate(effects.accuracy_P[:begin], rng=rng)
    # The A/A check: placebos that would have got a strong verdict.
    used, named = np.flatnonzero(effects.used_V > 0), []
    if effects.placebo_problems >= 2 and len(used):
        placebo_PV, fewer = effects.placebo_PV[: effects.placebo_problems][:, used], min(config.resamples, 2000)
        found = find(placebo_PV, epsilon=config.epsilon, alpha=config.alpha, resamples=fewer, rng=rng)
        named = verdicts(found, epsilon=config.epsilon)
    bound = (
        f"warning: the baseline is right in {percent(accuracy.value, 0)} of the rollouts, which leaves no room for an "
        f"effect to {'help' if accuracy.value else 'harm'}; take prompts that the student solves sometimes"
    )
    return Census(
        results=tuple(results[column] for column in range(len(effects.sets))),
        accuracy=accuracy,
        config=config,
        num_rounds=look + 1,
        placebo_strong=(sum(verdict.startswith("Strong") for verdict in named), len(named)),
        placebo_problems=effects.placebo_problems,
        baseline_rollouts=effects.baseline_rollouts,
        notes=(bound,) if accuracy.value in (0.0, 1.0) else (),
    )


def _result(
    effects: Effects,
    column: int,
    found: Findings,
    position: int,
    verdict: Verdict,
    end: int,
    share: float,
    look: int,
    config: KnockoutConfig,
) -> SetResult:
    """One set at one look, after `end` prompts."""
    value, low, high, inner_low, inner_high, p, p_neutral, sd = (float(own_V[position]) for own_V in found)
    used, alpha, needed = int(effects.used_V[column]), config.alpha * share, end
    verdict = NEVER_USED if used == 0 else verdict
    if verdict == UNDECIDED:
        needed = problems_to_decide(value, sd, end, epsilon=config.epsilon, alpha=alpha, power=config.power)
    placebo_P = effects.placebo_PV[: min(effects.placebo_problems, end), column]
    error = placebo_P.std(ddof=1) / np.sqrt(end) if len(placebo_P) > 1 else float("nan")
    seen = smallest_detectable_effect(sd, end, power=config.power, alpha=alpha)
    return SetResult(
        banned=effects.sets[column],
        verdict=verdict,
        num_used=used,
        used_share=used / max(int(effects.tested_V[column]), 1),
        num_problems=end,
        num_changed=int((effects.difference_PV[:end, column] != 0).sum()),
        delta=value,
        low=inner_low if verdict == NEUTRAL else low,
        high=inner_high if verdict == NEUTRAL else high,
        outer_low=low,
        outer_high=high,
        inner_low=inner_low,
        inner_high=inner_high,
        accuracy_with=float(effects.accuracy_P[:end].mean()),
        p=min(1.0, p / share),
        p_neutral=min(1.0, p_neutral / share),
        sd=sd,
        detectable=max(seen, float(np.log(1 / alpha)) / end),  # the rule of three: what no prompt may have shown
        placebo_floor=float(sps.norm.isf(config.alpha / 2) * error),
        round=look + 1,
        more_problems=needed - end,
    )


def power_of(
    correct_N: Floats, used_A: Floats, config: KnockoutConfig, rollouts: int, num_prompts: int
) -> dict[str, tuple[float, float]]:
    """What the census will be able to see, before anything is banned: share of rollouts and smallest effect.

    For the median and the most used candidate, from the outcomes of the first baseline rollouts and how many of them
    use each candidate; `rollouts` is per prompt, `num_prompts` the number planned.
    """
    accuracy = float(np.mean(correct_N))
    # A resumed rollout may have a different outcome: at worst its two outcomes are independent.
    per_rollout = 2 * accuracy * (1 - accuracy) / rollouts
    found = {}
    for name, used in (("median", np.median(used_A)), ("most used", np.max(used_A))):
        share = float(used) / len(correct_N)
        sd = np.sqrt(share * per_rollout)
        found[name] = share, smallest_detectable_effect(sd, num_prompts, power=config.power, alpha=config.alpha)
    return found


# ---------------------------------------------------------------- as a table and as facts


def census_table(census: Census) -> pa.Table:
    """census.parquet: one row per set; what is not known is null."""
    rows = []
    for r in census.results:
        named = {"delta_low" if k == "low" else "delta_high" if k == "high" else k: v for k, v in r._asdict().items()}
        row = {**vars(named.pop("banned")), **named, "accuracy_without": min(max(r.accuracy_with + r.delta, 0.0), 1.0)}
        rows.append({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()})
    return pa.Table.from_pylist(rows, schema=TABLES["census"].schema)


def census_facts(census: Census) -> Json:
    """The few numbers a manifest keeps."""
    floors = [r.placebo_floor for r in census.results if r.verdict != NEVER_USED and np.isfinite(r.placebo_floor)]
    return {
        "verdicts": census.counts(),
        **dict(zip(("accuracy", "accuracy_low", "accuracy_high", "num_problems"), census.accuracy)),
        "num_rollouts": census.baseline_rollouts,
        "rounds": census.num_rounds,
        "epsilon": census.config.epsilon,
        "alpha": census.config.alpha,
        "power": census.config.power,
        "smallest_detectable_effect": median_detectable(census),
        "noise_floor": max(floors, default=None),
        "placebo_strong": list(census.placebo_strong),
        "expected_false_strong": expected_false(census),
        "notes": list(census.notes),
    }


def expected_false(census: Census) -> float:
    """Strong verdicts to expect among the used candidates if none had an effect; rarer types have fewer of them."""
    used = sum(r.verdict != NEVER_USED for r in census.results if r.banned.role == "candidate")
    return used * census.config.alpha / 2


def median_detectable(census: Census) -> float | None:
    """Median of the smallest effects of the sets that were tested on every prompt; the others were decided before."""
    used = [r for r in census.results if r.verdict != NEVER_USED]
    full = [r.detectable for r in used if r.num_problems == census.accuracy.num_prompts]
    return float(np.median(full)) if full else None
