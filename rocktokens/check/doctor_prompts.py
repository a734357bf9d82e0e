"""The doctor's checks of prompts: answers inside them, duplicates between splits, unreadable answers, their number."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from rocktokens.check.doctor_findings import Finding, fine, note, unknown, wrong
from rocktokens.errors import ConfigError, DataError
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.stats import smallest_detectable_effect

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rocktokens.prompts.tasks import Prompt

PARTS = ("train", "detection", "causal")
# Prompts that are read of each part, and the share of answers beyond chance that counts as a leak.
MOST, LEAK = 2000, 0.2
# Below so many prompts intervals over prompts are too short (docs/method.md).
FEW = 50


def prompt_findings(config: PromptsConfig, tokenizer: PreTrainedTokenizerBase) -> list[Finding]:
    """Every check of the prompts."""
    from rocktokens.prompts.tasks import load_prompts

    parts: dict[str, list[Any]] = {}
    for part in PARTS:
        limit = min(config.limit or MOST, MOST)
        try:
            parts[part] = load_prompts(dataclasses.replace(config, limit=limit), tokenizer, part=part)  # type: ignore[arg-type]
        except DataError as error:
            if "neither a number nor a formula" in str(error):
                return [unreadable(str(error))]
            if "has no prompts" not in str(error):
                raise
            parts[part] = []
        except ConfigError:
            raise
    prompts = [prompt for own in parts.values() for prompt in own]
    return [
        fine("readable answers", f"{sum(prompt.answer is not None for prompt in prompts)} answers", READABLE),
        answers_in_prompts(prompts),
        duplicates({part: [prompt.text for prompt in own] for part, own in parts.items()}),
        enough(len(parts["detection"]), len(parts["causal"])),
    ]


READABLE = "The checker can read every reference answer."


def unreadable(message: str) -> Finding:
    """Reference answers that the checker cannot read."""
    return wrong(
        "readable answers",
        message.partition(" are neither")[0],
        message.partition(" Use checker")[0],
        "Use --prompts.checker exact, regex or a function of your own; unreadable answers count as wrong.",
    )


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
    number = f"{own.mean():.1%} (by chance {other.mean():.1%})"
    if low <= LEAK:
        return fine(check, number, "Prompts hold their answer about as often as another prompt's.")
    example = next(prompt for prompt in known if _holds(prompt.text, prompt.answer))
    return wrong(
        check,
        number,
        f"Prompts hold their own answer, e.g. {example.prompt_id}: {example.answer!r} in {example.text[-80:]!r}.",
        "Remove the answer from the prompt; accuracy measures copying.",
    )


def _holds(text: str, answer: str | None) -> bool:
    stated = (answer or "").rpartition("####")[2].strip()
    return bool(stated) and re.search(rf"(?<!\w){re.escape(stated)}(?!\w)", text) is not None


def duplicates(texts: dict[str, list[str]]) -> Finding:
    """Do two splits share a prompt, up to case and spaces?"""
    check = "duplicates"
    seen = {part: {" ".join(text.lower().split()) for text in own} for part, own in texts.items()}
    parts = list(seen)
    shared = {
        f"{first} and {second}": seen[first] & seen[second]
        for i, first in enumerate(parts)
        for second in parts[i + 1 :]
        if seen[first] & seen[second]
    }
    total = sum(len(own) for own in texts.values())
    if shared:
        where, example = next(iter(shared.items()))
        return wrong(
            check,
            f"{sum(len(both) for both in shared.values())} shared",
            f"{where} share prompts, e.g. {min(example)[:60]!r}.",
            "Remove one of each: what is measured on the second was trained on in the first.",
        )
    repeated = total - sum(len(own) for own in seen.values())
    if repeated > 0.01 * max(total, 1):
        return note(
            check,
            f"{repeated} of {total}",
            "Prompts occur several times within a split.",
            "Intervals over prompts treat them as independent; remove duplicates.",
        )
    return fine(check, f"0 shared, {repeated} repeated", "No prompt stands in two splits.")


def enough(detection: int, causal: int) -> Finding:
    """Are there enough prompts for detection and for the causal tests?"""
    check = "enough prompts"
    seen = smallest_detectable_effect(0.5, causal) if causal >= 2 else None
    effect = "" if seen is None else f"; {causal} for causal tests show effects of {100 * seen:.1f} points or more"
    number = f"{detection} for detection{effect}"
    if detection < FEW or causal < FEW:
        return wrong(
            check,
            number,
            f"Fewer than {FEW} prompts for a stage: its intervals are too short and little can be declared.",
            "Give more prompts: of a file, 2 of 10 go to detection and 2 of 10 to causal tests.",
        )
    return fine(check, number, "Every stage has prompts enough for honest intervals.")
