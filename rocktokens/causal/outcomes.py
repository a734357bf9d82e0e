"""A census of outcomes that somebody else measured: per candidate and prompt, accuracy with and without the candidate.

The tests are those of our own census (inference.py), in one look. What outcomes do not tell stays unknown: how many
rollouts used a candidate, and what two runs without any ban differ by (no placebo, so no noise floor).

Shapes: P prompts, V candidates, N rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rocktokens.accuracy import accuracy_estimate
from rocktokens.causal.census import FLIPS, BannedSet, Census, SetResult
from rocktokens.causal.inference import UNDECIDED, Findings, find, problems_to_decide, verdicts
from rocktokens.causal.settings import KnockoutConfig
from rocktokens.errors import DataError
from rocktokens.remarks import Remark
from rocktokens.stats import (
    Floats,
    benjamini_hochberg,
    bonferroni,
    max_t,
    smallest_detectable_effect,
)

UNKNOWN = float("nan")
MOST_TYPES, LONG_ID = 2**31, 12  # a longer number is a name: tables keep token ids in 32 bits


@dataclass(frozen=True)
class KnockoutOutcomes:
    """Accuracy per prompt with nothing banned and with each candidate banned; NaN where a pair was not tested."""

    candidates: tuple[str, ...]
    tokens: tuple[str, ...]
    baseline_PV: Floats
    knocked_out_PV: Floats
    num_rollouts: int = 0
    """Rollouts of the baseline; 0: not known."""

    @classmethod
    def from_rows(
        cls,
        candidate_N: Sequence[str],
        prompt_N: Sequence[str],
        baseline_N: Floats,
        knocked_out_N: Floats,
        tokens: Mapping[str, str],
        rollout_N: Sequence[str] | None = None,
    ) -> KnockoutOutcomes:
        """From one row per candidate and prompt, or per rollout of them; rows of the same pair are averaged."""
        names, prompts = list(dict.fromkeys(candidate_N)), list(dict.fromkeys(prompt_N))
        column = {name: place for place, name in enumerate(names)}
        row = {name: place for place, name in enumerate(prompts)}
        at = ([row[name] for name in prompt_N], [column[name] for name in candidate_N])
        count_PV = np.zeros((len(prompts), len(names)))
        np.add.at(count_PV, at, 1)
        sums = []
        for value_N in (baseline_N, knocked_out_N):
            sum_PV = np.zeros_like(count_PV)
            np.add.at(sum_PV, at, value_N)
            sums.append(np.divide(sum_PV, count_PV, out=np.full_like(sum_PV, np.nan), where=count_PV > 0))
        texts = tuple(tokens.get(name) or name for name in names)
        return cls(tuple(names), texts, sums[0], sums[1], _rollouts(prompt_N, rollout_N, baseline_N))


def _rollouts(prompt_N: Sequence[str], rollout_N: Sequence[str] | None, baseline_N: Floats) -> int:
    """Rollouts of the baseline, which candidates share; 0 where outcomes are shares of nobody knows how many."""
    if rollout_N is not None:
        return len(set(zip(prompt_N, rollout_N)))
    return len(set(prompt_N)) if np.isin(baseline_N, (0.0, 1.0)).all() else 0


def census_of_outcomes(outcomes: KnockoutOutcomes, config: KnockoutConfig, *, seed: int = 0) -> Census:
    """Δ, interval, verdict and power of every candidate.

    Args:
        outcomes: what was measured.
        config: epsilon, alpha, power and resamples; the settings of banning are not used.
        seed: of the resamples.
    """
    difference_PV = outcomes.knocked_out_PV - outcomes.baseline_PV
    results: list[SetResult | None] = [None] * len(outcomes.candidates)
    for number, (tested_P, columns) in enumerate(_alike(difference_PV, outcomes.candidates)):
        found = find(
            difference_PV[tested_P][:, columns],
            epsilon=config.epsilon,
            alpha=config.alpha,
            resamples=config.resamples,
            rng=np.random.default_rng([seed, number]),
        )
        named = verdicts(found, epsilon=config.epsilon)
        for place, column in enumerate(columns):
            before = float(outcomes.baseline_PV[tested_P, column].mean())
            one = _result(found, place, len(tested_P), before, _banned(outcomes, column), config)
            changed = int((difference_PV[tested_P, column] != 0).sum())
            results[column] = one._replace(verdict=named[place], num_changed=changed)
    done = [_more(result, config) for result in results if result is not None]
    accuracy_P = _mean_over_candidates(outcomes.baseline_PV)
    rng = np.random.default_rng([seed, 1_000_000])
    accuracy = accuracy_estimate(accuracy_P, rng=np.random.default_rng([seed, 1_000_001]))
    return Census(
        results=tuple(_adjusted(done, np.nan_to_num(difference_PV), rng)),
        accuracy=accuracy,
        epsilon=config.epsilon,
        alpha=config.alpha,
        num_rounds=1,
        placebo_strong=(0, 0),
        placebo_problems=0,
        baseline_tokens=0,
        baseline_rollouts=outcomes.num_rollouts,
        remarks=_remarks(outcomes, accuracy.value),
        exact_resume=False,
        power=config.power,
    )


def _alike(difference_PV: Floats, names: Sequence[str]) -> list[tuple[np.ndarray, list[int]]]:
    """Candidates that were tested on the same prompts, together: (places of the prompts, places of the candidates)."""
    groups: dict[bytes, list[int]] = {}
    tested_PV = ~np.isnan(difference_PV)
    for column in range(difference_PV.shape[1]):
        groups.setdefault(tested_PV[:, column].tobytes(), []).append(column)
    found = [(np.flatnonzero(tested_PV[:, columns[0]]), columns) for columns in groups.values()]
    for tested_P, columns in found:
        if len(tested_P) < 2:
            raise DataError(
                f"candidate {names[columns[0]]} was tested on {len(tested_P)} prompt; a verdict needs at least 2, "
                "better hundreds: leave it out, or test it on more"
            )
    return found


def _banned(outcomes: KnockoutOutcomes, column: int) -> BannedSet:
    name = outcomes.candidates[column]
    is_id = name.isascii() and name.isdigit() and len(name) < LONG_ID
    token_id = int(name) if is_id and int(name) < MOST_TYPES else None
    members = () if token_id is None else (token_id,)
    return BannedSet(name, "token", token_id, outcomes.tokens[column], members)


def _result(
    found: Findings, place: int, num_prompts: int, before: float, banned: BannedSet, config: KnockoutConfig
) -> SetResult:
    """One candidate; its verdict and the interval shown are set afterwards."""
    sd = float(found.sd_V[place])
    smallest = smallest_detectable_effect(sd, num_prompts, power=config.power, alpha=config.alpha)
    return SetResult(
        banned=banned,
        verdict=UNDECIDED,
        num_used=None,
        used_share=UNKNOWN,
        num_problems=num_prompts,
        num_changed=0,
        delta=float(found.value_V[place]),
        low=float(found.low_V[place]),
        high=float(found.high_V[place]),
        outer_low=float(found.low_V[place]),
        outer_high=float(found.high_V[place]),
        inner_low=float(found.inner_low_V[place]),
        inner_high=float(found.inner_high_V[place]),
        accuracy_with=before,
        p=float(found.p_V[place]),
        p_neutral=float(found.p_neutral_V[place]),
        p_sign=float(found.p_sign_V[place]),
        sd=sd,
        detectable=max(smallest, float(np.log(1 / config.alpha)) / num_prompts),
        placebo_delta=UNKNOWN,
        placebo_floor=UNKNOWN,
        round=1,
        alpha_share=1.0,
        more_problems=0,
        num_resumed=0,
        num_tokens=0,
    )


def _more(result: SetResult, config: KnockoutConfig) -> SetResult:
    """With the interval that the verdict inverts, and the prompts that would decide an undecided candidate."""
    if result.verdict == "Proven Neutral":
        return result._replace(low=result.inner_low, high=result.inner_high)
    if result.verdict != UNDECIDED:
        return result
    needed = problems_to_decide(
        result.delta, result.sd, result.num_problems, epsilon=config.epsilon, alpha=config.alpha, power=config.power
    )
    return result._replace(more_problems=needed - result.num_problems)


def _adjusted(results: list[SetResult], difference_PV: Floats, rng: np.random.Generator) -> list[SetResult]:
    """Multiple testing over all candidates; rows that a candidate was not tested on are 0 and change nothing."""
    p_V = [result.p for result in results]
    together_V = max_t(difference_PV, rng=rng, resamples=FLIPS)
    return [
        result._replace(p_bonferroni=float(single), p_bh=float(bh), p_max_t=float(together))
        for result, single, bh, together in zip(results, bonferroni(p_V), benjamini_hochberg(p_V), together_V)
    ]


def _mean_over_candidates(baseline_PV: Floats) -> Floats:
    return np.asarray(np.nanmean(baseline_PV, axis=1))


def _remarks(outcomes: KnockoutOutcomes, accuracy: float) -> tuple[Remark, ...]:
    remarks = [Remark("uses_unknown")]
    spread_P = np.nanmax(outcomes.baseline_PV, axis=1) - np.nanmin(outcomes.baseline_PV, axis=1)
    if (spread_P > 0).any():
        remarks.append(Remark("baseline_differs", {"prompts": int((spread_P > 0).sum()), "of": len(spread_P)}))
    tested_V = (~np.isnan(outcomes.baseline_PV)).sum(axis=0)
    if tested_V.min() < tested_V.max():
        remarks.append(Remark("prompts_differ", {"fewest": int(tested_V.min()), "most": int(tested_V.max())}))
    if accuracy in (0.0, 1.0):
        remarks.append(Remark("baseline_at_bound", {"accuracy": accuracy}))
    return tuple(remarks)
