"""Checks of prompts: unreadable answers, answers inside them, duplicates between splits, their number."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from rocktokens.check.findings import Finding, judge, unknown
from rocktokens.errors import DataError
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.stats import smallest_detectable_effect

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rocktokens.prompts.tasks import Prompt

MOST = 2000  # prompts that are read of each part
LEAK = 0.2  # share of answers beyond chance that counts as a leak
FEW = 50  # below this many prompts intervals over prompts are too short (docs/method.md)


def prompt_findings(config: PromptsConfig, tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    """Every check of the prompts."""
    from rocktokens.prompts.tasks import Part, load_prompts

    parts: dict[str, list[Any]] = {}
    unreadable = ""
    for part in get_args(Part):
        try:
            parts[part] = load_prompts(replace(config, limit=min(config.limit or MOST, MOST)), tokenizer, part=part)
        except DataError as error:
            parts[part] = []
            if "neither a number nor a formula" in str(error):
                unreadable = str(error)
            elif "has no prompts" not in str(error):
                raise
    prompts = [prompt for own in parts.values() for prompt in own]
    readable = judge(
        "readable answers",
        bool(unreadable),
        unreadable.partition(" are neither")[0] or f"{sum(prompt.answer is not None for prompt in prompts)} answers",
        "The checker can read every reference answer.",
        unreadable,
        "Use --prompts.checker exact, regex or a function of your own; unreadable answers are wrong.",
    )
    if unreadable:
        return [readable]
    texts = {part: [prompt.text for prompt in own] for part, own in parts.items()}
    parted = enough(len(texts["detection"]), len(texts["causal"]))
    return [readable, answers_in_prompts(prompts), duplicates(texts), parted]


def answers_in_prompts(prompts: list[Prompt], seed: int = 0) -> Finding:
    """Does the prompt give its answer away, more often than another prompt's answer would stand in it by chance?"""
    check = "answers in prompts"
    known = [prompt for prompt in prompts if prompt.answer and prompt.answer.strip()]
    if len(known) < 20:
        return unknown(check, f"Only {len(known)} prompts have an answer.")
    order = np.random.default_rng(seed).permutation(len(known))
    own = np.array([float(_holds(prompt.text, prompt.answer)) for prompt in known])
    other = np.array([float(_holds(prompt.text, known[at].answer)) for prompt, at in zip(known, order)])
    excess = own - other
    low = excess.mean() - 1.96 * excess.std(ddof=1) / np.sqrt(len(excess))
    example = known[int(own.argmax())]
    return judge(
        check,
        low > LEAK,
        f"{own.mean():.1%} (by chance {other.mean():.1%})",
        "Prompts hold their answer about as often as another prompt's.",
        f"Prompts hold their own answer, e.g. {example.prompt_id}: {example.answer!r} in {example.text[-80:]!r}.",
        "Remove the answer from the prompt; accuracy measures copying.",
    )


def _holds(text: str, answer: str | None) -> bool:
    stated = (answer or "").rpartition("####")[2].strip()
    return bool(stated) and re.search(rf"(?<!\w){re.escape(stated)}(?!\w)", text) is not None


def duplicates(texts: dict[str, list[str]]) -> Finding:
    """Do two splits share a prompt, up to case and spaces?"""
    seen = {part: {" ".join(text.lower().split()) for text in own} for part, own in texts.items()}
    shared = {f"{a} and {b}": seen[a] & seen[b] for a, b in combinations(seen, 2) if seen[a] & seen[b]}
    total = sum(len(own) for own in texts.values())
    repeated = total - sum(len(own) for own in seen.values())
    if not shared and repeated > 0.01 * total:
        remedy = "Intervals over prompts treat them as independent; remove duplicates."
        said = "Prompts occur several times within a split."
        return Finding("duplicates", "note", f"{repeated} of {total}", said, remedy)
    where, example = next(iter(shared.items()), ("", {""}))
    return judge(
        "duplicates",
        bool(shared),
        f"{sum(len(both) for both in shared.values())} shared, {repeated} repeated",
        "No prompt stands in two splits.",
        f"{where} share prompts, e.g. {min(example)[:60]!r}.",
        "Remove one of each: what is measured on the second was trained on in the first.",
    )


def enough(detection: int, causal: int) -> Finding:
    """Are there enough prompts for detection and for the causal tests?"""
    number = f"{detection} for detection"
    if causal >= 2:
        effect = 100 * smallest_detectable_effect(0.5, causal)
        number += f"; {causal} for causal tests show effects of {effect:.1f} points or more"
    return judge(
        "enough prompts",
        detection < FEW or causal < FEW,
        number,
        "Every stage has enough prompts for honest intervals.",
        f"Fewer than {FEW} prompts for a stage: its intervals are too short and little can be declared.",
        "Give more prompts: of a file, 2 of 10 go to detection and 2 of 10 to causal tests.",
    )
