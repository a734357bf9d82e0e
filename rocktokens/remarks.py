"""What a reader of a result must know beside its numbers, as a code with values.

Core finds it; the sentences are report/conclusions/remarks.py's, one per code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Literal, NamedTuple

Code = Literal[
    "losses_not_finite",
    "no_prompt_id",
    "intervals_too_short",
    "few_prompts",
    "loss_not_positive",
    "losses_equal",
    "no_loss_before",
    "no_testable_type",
    "k_beyond_types",
    "no_stable_k",
    "fewer_than_k",
    "two_checkpoints",
    "one_checkpoint",
    "control_short",
    "control_loss_short",
    "baseline_at_bound",
]


class Remark(NamedTuple):
    """One thing to know: which, and its numbers by name."""

    code: Code
    values: Mapping[str, float | int | str] = MappingProxyType({})


def in_words(remarks: Iterable[Remark]) -> tuple[str, ...]:
    """The remarks as sentences, each once; made by report/conclusions/remarks.py, found by its name."""
    sentence = import_module("rocktokens.report.remarks").sentence
    return tuple(dict.fromkeys(str(sentence(remark)) for remark in remarks))
