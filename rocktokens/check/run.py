"""Checks of a run, ours or imported: truncation, repetition, the engine, the checker, and its course over training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rocktokens.check.findings import Finding, judge, unknown
from rocktokens.check.pair import sampling
from rocktokens.run import Run
from rocktokens.sample.settings import RolloutConfig
from rocktokens.settings import from_mapping
from rocktokens.stats import wilson_interval
from rocktokens.train.record import change, mismatch, repeated_share
from rocktokens.values import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What is too much: rollouts cut, growth of lengths, repeated 8-grams, nats between engine and trainer, unreadable.
CUT, GROWTH, REPEATED, MISMATCH, UNREADABLE, INVALID = 0.2, 2.0, 0.3, 0.01, 0.05, 0.001
ENTROPY_LEFT, ENTROPY = 0.1, 0.05


def run_findings(run: Run, tokenizer: PreTrainedTokenizerBase | None) -> list[Finding]:
    """Every check that the run's tables allow."""
    rollouts = run.read("rollouts").to_pylist() if run.has("rollouts") else []
    ends = {tokenizer.eos_token_id} - {None} if tokenizer is not None else set()
    found = [truncation(rollouts, ends), repetition(rollouts), engine(run), checker(run)]
    if "rollouts" in run.manifest["config"]:
        found.append(sampling(from_mapping(RolloutConfig, run.manifest["config"]["rollouts"])))
    return [*found, *over_training(run, rollouts)]


def truncation(rollouts: list[Row], ends: set[int]) -> Finding:
    """How many rollouts are cut at the length limit?"""
    known = [
        row["truncated"] if row["truncated"] is not None else row["token_ids"][-1] not in ends
        for row in rollouts
        if row["truncated"] is not None or (ends and row["token_ids"])
    ]
    if not known:
        return unknown("truncation", "No rollouts are recorded, or nothing says where they end.")
    found = wilson_interval(int(np.sum(known)), len(known))
    return judge(
        "truncation",
        found.value > CUT and found.low > CUT / 2,
        f"{found.value:.0%} [{found.low:.0%}, {found.high:.0%}] of {len(known)} rollouts",
        "Few rollouts are cut at the length limit.",
        "Many rollouts are cut at the length limit: the end is never learned from them.",
        "Raise the length limit, or check that student, teacher and template end with the same token.",
    )


def repetition(rollouts: list[Row]) -> Finding:
    """How many rollouts loop?"""
    shares = [repeated_share(row["token_ids"]) for row in rollouts]
    if not shares:
        return unknown("repetition", "No rollouts are recorded.")
    looping = float(np.mean(np.array(shares) > REPEATED))
    return judge(
        "repetition",
        looping > 0.1,
        f"{looping:.0%} of rollouts repeat more than {REPEATED:.0%} of their 8-grams",
        "Rollouts do not loop.",
        f"Rollouts loop, most of all {rollouts[int(np.argmax(shares))]['rollout_id']}.",
        "Look at them (`rocktokens view`); a lower learning rate or an earlier checkpoint is the usual cure.",
    )


def engine(run: Run) -> Finding:
    """Do the engine's log-probabilities agree with the trainer's forward pass?"""
    check = "engine and trainer"
    if not run.has("engine"):
        return unknown(check, "The run has no log-probabilities of the engine that sampled.")
    table = run.read("engine")
    found = mismatch(table["engine_logprob"].to_numpy(), table["student_logprob"].to_numpy())
    if found is None:
        return unknown(check, "No token has log-probabilities of both.")
    row = table.slice(found.at, 1).to_pylist()[0]
    return judge(
        check,
        found.kl > MISMATCH,
        f"KL {found.kl:.2g} nats, largest {found.largest:.2g}",
        "Engine and trainer give the same log-probabilities.",
        f"Engine and trainer disagree, most at position {row['position']} of {row['rollout_id']}.",
        "Check precision, quantisation, weights that are not synchronised, and temperature on both sides: rollouts "
        "come from another policy than the one that is trained.",
    )


def checker(run: Run) -> Finding:
    """How many rollouts could the checker not read?"""
    counts = (run.facts("sample") if run.done("sample") else {}).get("checked_by") or {}
    total = sum(counts.values())
    if not total:
        return unknown("readable rollouts", "No rollouts were checked by a checker that can fail to read one.")
    share = counts.get("unreadable", 0) / total
    return judge(
        "readable rollouts",
        share > UNREADABLE,
        f"{share:.1%} of {total} rollouts",
        "The checker reads nearly every rollout.",
        "The checker cannot read an answer in these rollouts and counts them as wrong.",
        "Ask for the answer in a fixed form (\\boxed{}), or use --prompts.checker regex.",
    )


def over_training(run: Run, rollouts: list[Row]) -> list[Finding]:
    """Length, entropy and invalid losses over training; from training.parquet, or from an imported dump."""
    lengths, cut, entropy = (np.zeros(0) for _ in range(3))
    invalid = unknown("invalid losses", "The run has no record of training steps.")
    if run.has("training"):
        columns = run.read("training").to_pydict()
        lengths, cut, entropy = (
            np.array(columns.get(name, []), float) for name in ("mean_length", "truncated_share", "entropy")
        )
        tokens, bad = (sum(value or 0 for value in columns[name]) for name in ("tokens", "invalid"))
        invalid = judge(
            "invalid losses",
            bool(tokens) and bad / tokens > INVALID,
            f"{bad} of {tokens} tokens",
            "Every divergence is a number.",
            "Divergences were not numbers: logits overflowed.",
            "Lower the learning rate, or use bfloat16 or float32 in place of float16.",
        )
    elif run.has("imported"):
        step_R = np.array(run.read("imported")["step"].to_pylist())
        length_R = np.array([len(row["token_ids"]) for row in rollouts], float)
        cut_R = np.array([np.nan if row["truncated"] is None else row["truncated"] for row in rollouts], float)
        lengths, cut = (
            np.array([of_R[step_R == step].mean() for step in np.unique(step_R)]) for of_R in (length_R, cut_R)
        )
        if run.steps():
            entropy = run.query(
                "select imported.step, avg(student_entropy) as entropy from occurrences join imported using "
                "(rollout_id) where isfinite(student_entropy) group by 1 order by 1"
            )["entropy"].to_numpy()
    window = max(1, min(10, len(lengths) // 2))
    grown, late_cut, fell = change(lengths, window), change(cut, window), change(entropy, window)
    growth = unknown("length growth", "Fewer than two training steps are recorded.")
    if grown is not None:
        growth = judge(
            "length growth",
            grown.ratio >= GROWTH and (late_cut is None or late_cut.late >= CUT),
            f"{grown.early:.0f} → {grown.late:.0f} tokens",
            "Lengths are steady over training.",
            "Rollouts grew until many were cut at the limit.",
            "Check end tokens and templates (`rocktokens check` on the pair), and that the end token is trained.",
        )
    explores = unknown("entropy", "The student's entropy over training is not recorded.")
    if fell is not None:
        explores = judge(
            "entropy",
            fell.late < ENTROPY and fell.ratio < ENTROPY_LEFT,
            f"{fell.early:.3f} → {fell.late:.3f} nats",
            "The student still explores.",
            "The student's entropy collapsed: it hardly explores.",
            "Lower the learning rate or stop earlier.",
        )
    return [growth, explores, invalid]
