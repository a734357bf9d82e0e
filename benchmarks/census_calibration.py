"""How often is the census wrong? Simulated censuses with known truth; writes docs/results/census_calibration.json.

    python benchmarks/census_calibration.py            # two minutes; --quick for less

Null: sets without an effect, and A/A (the placebo taken for a knock-out): share of strong verdicts, to stay <= 5 %.
Neutral: sets whose true effect is twice ε: share called neutral, to stay <= 5 %. Beside it the same for an effect of ε,
coverage of the intervals, and what a percentile bootstrap would have done. Each of 200 sets, many censuses.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import markov
from common import save

from rocktokens.causal.census import BannedSet, Effects, Outcomes, make_schedule, run_looks
from rocktokens.causal.knockout import knockout_census
from rocktokens.causal.settings import BaselineConfig, KnockoutConfig
from rocktokens.stats import resample_counts, wilson_interval

NUM_SETS = 200
EPSILON, ALPHA = 0.01, 0.05


def outcomes(rng, problems, rollouts, used, effect, changed):
    """Rollouts (P, R, V): who uses the set, and by how much its outcome changes; problems differ in difficulty."""
    share = effect / used
    changed = max(changed, abs(share))
    up, down = (changed + share) / 2, (changed - share) / 2
    shape = (problems, rollouts, NUM_SETS)
    # A set is used by all rollouts of some problems more than of others: rollouts of a problem are not independent.
    rate_P = rng.beta(2 * used, 2 * (1 - used), problems)
    use = rng.random(shape) < rate_P[:, None, None]
    number = rng.random(shape)
    return use, use * ((number < up).astype(float) - (number > 1 - down))


def census(difference, used, config, seed):
    """A census of given rollouts, by the code that judges real ones."""
    problems, rollouts, _ = difference.shape
    sets = [BannedSet(f"token:{v}", "token", v, str(v), (v,)) for v in range(NUM_SETS)]

    def measure(look, begin, end, active):
        problem_J, rollout_J, column_J = np.nonzero(used[begin:end])
        keep = np.isin(column_J, active)
        problem_J, rollout_J, column_J = problem_J[keep] + begin, rollout_J[keep], column_J[keep]
        return Outcomes(
            problem_N=np.repeat(np.arange(begin, end), rollouts),
            correct_N=np.full((end - begin) * rollouts, 0.5),
            used_V=used[begin:end].sum((0, 1)) * np.isin(np.arange(NUM_SETS), active),
            problem_J=problem_J,
            before_J=np.zeros(len(problem_J)),
            column_J=column_J,
            is_knockout_J=np.ones(len(problem_J), bool),
            after_J=difference[problem_J, rollout_J, column_J],
            placebo_problems=0,
        )

    effects = Effects(sets, problems, rollouts)
    schedule = make_schedule(problems, config.rounds if config.until == "decided" else 1)
    return run_looks(effects, schedule, measure, config, seed=seed)


def percentile_rejects(difference_PV, rng, resamples=1000):
    """What a percentile bootstrap over problems rejects at α, for comparison."""
    means = resample_counts(len(difference_PV), resamples, rng) @ difference_PV / len(difference_PV)
    low, high = np.quantile(means, [ALPHA / 2, 1 - ALPHA / 2], axis=0)
    return (low > 0) | (high < 0)


def simulate(name, *, problems, rollouts, used, effect, until, times, resamples, seed=0):
    """One line of the result: shares over `times` censuses of 200 sets."""
    rng = np.random.default_rng([seed, *name.encode()])
    config = KnockoutConfig(until=until, resamples=resamples, epsilon=EPSILON, alpha=ALPHA)
    strong = neutral = covered = naive = wrong_sign = 0
    for number in range(times):
        use, difference = outcomes(rng, problems, rollouts, used, effect, changed=0.4)
        for r in census(difference, use, config, seed=number).results:
            strong += r.verdict.startswith("Strong")
            wrong_sign += r.verdict.startswith("Strong") and r.delta * effect <= 0
            neutral += r.verdict == "Proven Neutral"
            covered += r.outer_low <= effect <= r.outer_high
        naive += int(percentile_rejects(difference.mean(1), rng).sum())
    total = times * NUM_SETS
    row = {
        "name": name,
        "problems": problems,
        "rollouts": rollouts,
        "used_share": used,
        "true_effect": effect,
        "until": until,
        "sets": total,
        "strong": wilson_interval(strong, total)[:3],
        "strong_of_wrong_sign": wrong_sign / total,
        "neutral": wilson_interval(neutral, total)[:3],
        "coverage": wilson_interval(covered, total)[:3],
        "percentile_bootstrap_rejects": naive / total,
    }
    print(
        f"{name:34} n {problems:5} used {used:5.3f} Δ {effect:5.3f} {until:8}: strong {strong / total:.3f}, neutral "
        f"{neutral / total:.3f}, coverage {covered / total:.3f}, percentile bootstrap rejects {naive / total:.3f}",
        flush=True,
    )
    return row


def placebo_census(times, problems):
    """The placebo arm of real resumptions (a Markov chain) as if it were a knock-out; and a token never used."""
    strong = total = never = 0
    size = 41
    for seed in range(times):
        matrix = markov.chain(seed, size=size)
        matrix[:, size - 1] = 0.0  # never used
        matrix /= matrix.sum(1, keepdims=True)
        sets = [BannedSet(f"token:{v}", "token", v, str(v), (v,)) for v in range(1, size)]
        found = knockout_census(
            markov.MarkovEngine(matrix),
            markov.prompts(problems),
            sets,
            decode=lambda ids: " ".join(map(str, ids)),
            checker=lambda text, answer: sum(map(int, text.split())) % 3 == 0,
            eos_ids=(0,),
            config=KnockoutConfig(until="budget", resamples=1000, placebo_share=1.0),
            baseline=BaselineConfig(problems=problems, rollouts=2, max_new_tokens=20, seed=seed),
        ).census
        strong, total = strong + found.placebo_strong[0], total + found.placebo_strong[1]
        never += found.results[-1].verdict == "Never Used"
    print(f"placebo as knock-out: {strong} of {total} strong; a token never used was said to be so {never} of {times}")
    return {"strong": wilson_interval(strong, total)[:3], "sets": total, "never_used": [never, times]}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--quick", action="store_true", help="fewer censuses; results are not saved")
    options = flags.parse_args()
    times, resamples = (1, 1000) if options.quick else (2, 1000)
    start, rows = time.perf_counter(), []
    for until in ("budget", "decided"):
        for problems in (100, 400, 1000) if until == "budget" else (400, 1000):
            for used in (0.6, 0.1, 0.03):
                for name, effect in (("null", 0.0), ("effect of ε", EPSILON), ("effect of 2ε", 2 * EPSILON)):
                    rows.append(
                        simulate(
                            name,
                            problems=problems,
                            rollouts=2,
                            used=used,
                            effect=effect,
                            until=until,
                            times=times,
                            resamples=resamples,
                        )
                    )
    placebo = placebo_census(1 if options.quick else 5, 300)
    null = [row for row in rows if row["true_effect"] == 0]
    twice = [row for row in rows if row["true_effect"] == 2 * EPSILON]
    worst = {
        "strong_under_null_mean": float(np.mean([row["strong"][0] for row in null])),
        "strong_under_null_worst": max(row["strong"][0] for row in null),
        "neutral_at_2_epsilon_worst": max(row["neutral"][0] for row in twice),
        "percentile_bootstrap_under_null_worst": max(row["percentile_bootstrap_rejects"] for row in null),
        "coverage_worst": min(row["coverage"][0] for row in rows),
    }
    print({**worst, "seconds": round(time.perf_counter() - start)})
    if not options.quick:
        save("census_calibration", {"summary": worst, "placebo": placebo, "rows": rows})


if __name__ == "__main__":
    main()
