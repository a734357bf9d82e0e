"""The bypass list in words: why a costly token type may be skipped, must be kept, or is not decided.

The decisions are core/bypass.py's; this module only says them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rocktokens.bypass.rules import Decision
from rocktokens.show import interval, percent, points
from rocktokens.stats import MIN_SEEDS, Estimate

NOT_COMPARED = "not compared"


def reason_sentence(decision: Decision, *, epsilon: float) -> str:
    """Why, in one sentence."""
    found, graft = decision.evidence, decision.graft
    margin = f"{points(epsilon, signed=False)} points"
    banned = f"banning it changes accuracy by {_points(found.delta)}"
    fell = f" by {interval(found.fall, percent)}" if found.fall is not None else ""
    gain = f"; grafting {len(graft.members)} types ({graft.name}) gains {_points(graft.gain)}" if graft else ""
    return {
        "neutral": f"a confirmed rock, proven neutral: {banned}{gain}, no more than {margin}",
        "stumbling block": f"a confirmed rock and a stumbling block: {banned}{gain}, no more than {margin}",
        "learning": f"it is learning: its loss fell{fell}",
        "learning, levelled off": f"it has learned: its loss fell{fell} and then stayed",
        "pillar": f"a rock, but a pillar: {banned}",
        "would gain": f"a rock that is not needed as it is, but learning it would pay{gain}, more than {margin}",
        "end token": "it ends rollouts, cannot be banned, and is never skipped",
        "unclear": "costly, but neither that it stays nor that it falls is proven",
        "no loss before": "costly, but no checkpoint before distillation was scored: whether it stays is not known",
        "not declared": "stagnant, but not in the declared set",
        "not confirmed": "declared a rock on one half of the prompts, and not confirmed on the other",
        "not tested": "a confirmed rock that no census has tested; run `rocktokens knockout`",
        "census undecided": f"a confirmed rock, but the census is undecided: {banned}",
        "never used": "a confirmed rock, but no rollout of the census used it",
        "no graft": "a confirmed rock, not needed at inference, but not grafted; run `rocktokens graft`",
        "graft undecided": f"a confirmed rock, not needed at inference, but what learning it would gain is not known "
        f"to {margin}{gain}",
    }[decision.reason]


def _points(estimate: Estimate | None) -> str:
    return "an unknown amount" if estimate is None else f"{interval(estimate, points)} points"


def list_sentence(decisions: Sequence[Decision]) -> str:
    """How many may be skipped, of what, and the share of the loss that goes with them."""
    skipped = [item for item in decisions if item.action == "skip"]
    rocks = [item for item in decisions if item.evidence.kind == "rock" and item.evidence.declared]
    if not rocks:
        return f"No rock is declared among {len(decisions)} costly token types: there is nothing to skip."
    share = percent(sum(item.evidence.cost_share for item in skipped))
    return (
        f"{len(skipped)} of {len(rocks)} declared rocks may be skipped ({share} of the loss); "
        f"{sum(item.action == 'keep' for item in rocks)} must be kept, "
        f"{sum(item.action == 'undecided' for item in rocks)} are undecided."
    )


def not_tested(run_stages: Sequence[str], num_untested: int) -> list[str]:
    """What the list does not rest on."""
    asked = {
        "detect": "which types are rocks: `rocktokens detect`",
        "knockout": "bans at inference: `rocktokens knockout`",
        "graft": "what learning the types would gain: `rocktokens graft`",
        "compare": "training without them: `rocktokens compare`",
    }
    found = [words for stage, words in asked.items() if stage not in run_stages]
    if num_untested:
        found.append(f"{num_untested} costly token types that the census did not test")
    return [*found, "other prompts, other checkpoints, other models and other sampling settings"]


def comparison_text(comparison: Mapping[str, Any] | None) -> str:
    """“compared: −0.1 [−0.8, 0.6]”, in points of accuracy, or “not compared”."""
    if not comparison:
        return NOT_COMPARED
    change = Estimate(comparison["change"], comparison["low"], comparison["high"], comparison["prompts"])
    said = f"compared: {interval(change, points, signed=False)}"
    if comparison["seeds"] < MIN_SEEDS:
        few = "1 seed" if comparison["seeds"] == 1 else f"{comparison['seeds']} seeds"
        said += f" (interval over prompts only: {few})"
    return said
