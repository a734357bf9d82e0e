"""Remarks of detection and census in words: one sentence per code of core/remarks.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rocktokens.remarks import Code, Remark
from rocktokens.show import percent, plural

Values = Mapping[str, float | int | str]
CANNOT = "no rock can be declared"


def _share(values: Values, name: str, digits: int = 1) -> str:
    return percent(float(values[name]), digits)


def _types(values: Values) -> str:
    qualify = "qualifies" if values["found"] == 1 else "qualify"
    return f"{plural(int(values['found']), 'token type')} {qualify}"


def _bound(values: Values) -> str:
    return (
        f"warning: the baseline is right in {_share(values, 'accuracy', 0)} of the rollouts, which leaves no room for "
        f"an effect to {'harm' if values['accuracy'] == 0 else 'help'}; take prompts that the student solves sometimes"
    )


SENTENCES: dict[Code, Callable[[Values], str]] = {
    "losses_not_finite": lambda v: f"{v['count']} of {v['of']} occurrences have no finite loss and are left out",
    "no_prompt_id": lambda v: (
        "no prompt_id: every rollout counts as a prompt of its own, so intervals may be too narrow"
    ),
    "intervals_too_short": lambda v: (
        f"only {plural(int(v['prompts']), 'prompt')} were measured and {_share(v, 'positions_80')} of the positions "
        f"carry 80 % of the loss: below {v['enough']} such prompts intervals are too short"
    ),
    "few_prompts": lambda v: f"only {plural(int(v['prompts']), 'prompt')} were measured: intervals are rough",
    "loss_not_positive": lambda v: (
        f"{CANNOT}: the total loss is not positive, and shares of the loss mean nothing here"
    ),
    "losses_equal": lambda v: f"{CANNOT}: all losses are equal, so no type costs more than another",
    "no_loss_before": lambda v: (
        f"{CANNOT}: without the loss before OPD (loss_pre, or a second scored checkpoint) types are "
        "called costly at most, and an occurrence persists by its loss after OPD alone"
    ),
    "no_testable_type": lambda v: (
        f"{CANNOT}: no token type occurs in {v['least']} of the {v['prompts']} prompts "
        "that rocks are chosen on; score more prompts"
    ),
    "k_beyond_types": lambda v: f"k = {v['k']} is more than the {v['types']} token types observed; all are ranked",
    "no_stable_k": lambda v: (
        f"`{v['definition']}`: no K is stable at {v['stability']}, so it names no rocks; score more prompts"
    ),
    "fewer_than_k": lambda v: f"`{v['definition']}`: {_types(v)}, fewer than K = {v['k']}",
    "two_checkpoints": lambda v: "only two checkpoints: whether a learning type has levelled off cannot be said",
    "one_checkpoint": lambda v: "persistence is skipped: only one checkpoint was scored",
    "control_short": lambda v: f"{v['control']}: only {v['placed']} of {v['wanted']} occurrences could be matched",
    "control_loss_short": lambda v: (
        f"{v['control']}: the costliest non-rocks carry only {_share(v, 'share', 0)} of the rocks' loss, so the "
        "control is matched to that much"
    ),
    "baseline_at_bound": _bound,
}


def sentence(remark: Remark) -> str:
    """A remark in words."""
    return SENTENCES[remark.code](remark.values)
