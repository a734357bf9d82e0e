"""The verdict on a run, in one place: title, one line, four tiles and the accuracies.

The report's title and card, the terminal's last lines, the list of runs in `view` and the trackers all show this
object; nothing else decides what a run means. Every state is an answer of its own: skip, keep, no rocks, unstable,
cannot tell, not run, imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rocktokens.detect.figures import footprint_row
from rocktokens.facts import Facts
from rocktokens.report import evidence
from rocktokens.report.evidence import Comparison, Matter
from rocktokens.show import estimate, interval, percent, plural, points
from rocktokens.stats import Estimate

State = Literal["skip", "keep", "no rocks", "unstable", "cannot tell", "not run", "imported"]
Tone = Literal["good", "bad", "open", "none"]


@dataclass(frozen=True)
class Tile:
    """One of the four questions on the card."""

    name: str
    question: str
    chip: str
    """The answer in a word or two."""
    tone: Tone
    value: str
    """The number that the answer rests on, with its interval."""
    detail: str
    command: str | None = None
    """What to run where the question was not asked; None where it was, or where this run cannot."""


@dataclass(frozen=True)
class Accuracy:
    """One accuracy of a run and what it was measured on."""

    name: str
    value: Estimate
    measured_on: str


@dataclass(frozen=True)
class Verdict:
    """What a run says, ready to be shown."""

    state: State
    tone: Tone
    title: str
    line: str
    tiles: tuple[Tile, Tile, Tile, Tile]
    accuracies: tuple[Accuracy, ...]
    """Before distillation, after it, and the teacher's, as far as they were measured."""
    command: str | None
    """The next command that would tell more."""


TONES: dict[State, Tone] = {
    "skip": "good",
    "keep": "bad",
    "no rocks": "good",
    "unstable": "open",
    "cannot tell": "open",
    "not run": "none",
    "imported": "none",
}


def verdict(facts: Facts) -> Verdict:
    """Conclude from whatever the run holds."""
    return facts.memo("verdict", lambda: _verdict(facts))


def _verdict(facts: Facts) -> Verdict:
    matter, comparison = evidence.matter(facts), evidence.comparison(facts)
    state = _state(facts, matter, comparison)
    tiles = (_which(facts), _cost(facts), _matter(facts, matter), _without(facts, comparison))
    command = next((tile.command for tile in tiles if tile.command), None)
    return Verdict(
        state,
        TONES[state],
        _title(facts, state, matter, comparison),
        _line(facts, state, matter, comparison),
        tiles,
        tuple(Accuracy(*row) for row in evidence.accuracies(facts)),
        command,
    )


def _state(facts: Facts, matter: Matter, comparison: Comparison) -> State:
    if not facts.types:
        return "not run"
    if not facts.rocks:
        return "no rocks"
    if evidence.unstable(facts):
        return "unstable"
    if not facts.has_models and not comparison.ran:
        return "imported"
    if comparison.verdict is not None:
        return {"unchanged": "skip", "gains": "skip", "costs": "keep"}.get(comparison.verdict, "cannot tell")  # type: ignore[return-value]
    if matter.tested and matter.pillars == matter.tested == len(facts.rocks):
        return "keep"
    if matter.listed == 0 and matter.tested:
        return "keep" if matter.pillars else "cannot tell"
    return "not run"


def _title(facts: Facts, state: State, matter: Matter, comparison: Comparison) -> str:
    count, word = len(facts.rocks), facts.rock_word
    named = plural(count, f"{word} token")
    if state == "not run" and not facts.types:
        return "Rock tokens have not been looked for yet"
    if state == "no rocks":
        return f"No {word} tokens: no token type stays expensive"
    if state == "unstable":
        return f"{named}, but the set is not stable"
    if state == "imported":
        return f"{named} in imported data"
    if state == "skip":
        some = comparison.frozen if comparison.frozen is not None else count
        if some < count:
            return f"{some} of {named} can be skipped"
        return f"The {word} token can be skipped" if count == 1 else f"All {named} can be skipped"
    if state == "keep":
        if comparison.verdict == "costs":
            return f"Keep the {word} tokens: training without them costs accuracy"
        return f"Keep the {word} tokens: {matter.pillars} of {count} {_are(matter.pillars)} needed"
    if state == "cannot tell":
        return f"{named}; whether to skip them is not decided"
    return f"{named}; skipping them was not tried yet"


def _line(facts: Facts, state: State, matter: Matter, comparison: Comparison) -> str:
    """One sentence: how much, needed or not, what skipping does, what it saves."""
    if not facts.types:
        return "This run has no detection yet, so nothing can be said about rock tokens."
    if state == "no rocks":
        return evidence.no_rocks_sentence(facts)
    loss = estimate(footprint_row(facts), "share_loss")
    count = len(facts.rocks)
    share = percent(loss.value, 0) if loss else "an unknown share"
    parts = [f"{plural(count, 'token')} {'carries' if count == 1 else 'carry'} {share} of the loss"]
    if state == "unstable":
        parts.append(evidence.unstable_words(facts))
    parts.append(_needed(matter, count))
    if comparison.ran:
        parts.append(_skipping(comparison))
        if comparison.compute_saved is not None:
            parts.append(_saves(comparison.compute_saved))
    elif facts.has_models:
        parts.append("training without them was not tried")
    else:
        parts.append("this run holds no models, so skipping them cannot be tried here")
    return "; ".join(part for part in parts if part) + "."


def _needed(matter: Matter, count: int) -> str:
    if not matter.tested:
        return "whether the student needs them was not tested"
    if matter.pillars:
        return f"{matter.pillars} of {matter.tested} {_are(matter.pillars)} needed at inference"
    if matter.undecided:
        return f"whether the student needs {matter.undecided} of them is undecided"
    return "it is not needed" if count == 1 else "none is needed"


def _skipping(comparison: Comparison) -> str:
    change = interval(comparison.change, points)
    if comparison.verdict is None:
        return comparison.why or "the comparison did not freeze them"
    return {
        "unchanged": f"skipping them changes nothing: {change} points",
        "gains": f"skipping them raises accuracy: {change} points",
        "costs": f"skipping them costs accuracy: {change} points",
    }.get(comparison.verdict, f"what skipping them does is not decided: {change} points")


def _saves(saved: float) -> str:
    if saved < 0.0005:
        return "saves no compute" if saved > -0.0005 else f"takes {percent(-saved)} more compute"
    return f"saves {percent(saved)} of the compute"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


# The four tiles


def _which(facts: Facts) -> Tile:
    question = f"Which tokens are {facts.rock_word}s?" if facts.rock_word == "rock" else "Which tokens are costly?"
    if not facts.types:
        detail = "No detection has run."
        return Tile("which", question, "not looked for", "none", "–", detail, facts.command("detect"))
    chip, tone = ("none", "good") if not facts.rocks else (f"{len(facts.rocks)} found", "open")
    if facts.rocks and evidence.unstable(facts):
        chip = "unstable"
    value = f"{len(facts.rocks)} of {plural(len(facts.types), 'type')}"
    return Tile("which", question, chip, tone, value, evidence.which_sentence(facts), None)  # type: ignore[arg-type]


def _cost(facts: Facts) -> Tile:
    question = "What do they cost?"
    row = footprint_row(facts) if facts.rocks else {}
    loss, places, enrichment = (estimate(row, key) for key in ("share_loss", "share_positions", "enrichment"))
    if loss is None or enrichment is None:
        chip = "nothing" if facts.types else "not measured"
        detail = "There is no set of tokens to measure." if facts.types else "No detection has run."
        return Tile("cost", question, chip, "none", "–", detail, None)
    low = enrichment.low if enrichment.low == enrichment.low else enrichment.value
    chip, tone = ("more than their share", "bad") if low > 1 else ("merely frequent", "open")
    grad = estimate(row, "share_grad")
    norm = f", and {interval(grad, percent)} of the gradient norm" if grad else ""
    detail = (
        f"They fill {interval(places, percent)} of the positions{norm}. Enrichment {interval(enrichment)} "
        "(1 would be merely frequent)."
    )
    return Tile("cost", question, chip, tone, f"{interval(loss, percent)} of the loss", detail, None)  # type: ignore[arg-type]


def _matter(facts: Facts, matter: Matter) -> Tile:
    question = "Does the student need them?"
    if not facts.rocks:
        said = "No token is called a rock; the census of the costliest candidates stands below."
        return Tile("matter", question, "no rocks", "none", "–", said if matter.ran else "Nothing to test.", None)
    if not matter.tested:
        why = "None of them was among the census' candidates." if matter.ran else "They were not banned at inference."
        command = None if matter.ran else facts.command("knockout")
        why += "" if command or facts.has_models else " This run holds no models."
        return Tile("matter", question, "not tested", "none", "–", why, command)
    if matter.pillars:
        chip, tone = "needed", "bad"
    else:
        chip, tone = ("undecided", "open") if matter.undecided else ("not needed", "good")
    value = f"{matter.pillars} of {matter.tested} needed" if matter.pillars else f"none of {matter.tested} needed"
    if matter.undecided and not matter.pillars:
        value = f"{matter.undecided} of {matter.tested} undecided"
    return Tile("matter", question, chip, tone, value, matter.sentence, None)  # type: ignore[arg-type]


def _without(facts: Facts, comparison: Comparison) -> Tile:
    question = "What does training without them do?"
    if not facts.rocks and not comparison.ran:
        return Tile("without", question, "no rocks", "none", "–", "There is nothing to leave out.", None)
    if not comparison.ran:
        command = facts.command("compare")
        why = "No regime was trained without them." + ("" if facts.has_models else " This run holds no models.")
        return Tile("without", question, "not tried", "none", "–", why, command)
    if comparison.verdict is None:
        return Tile("without", question, "not frozen", "none", "–", comparison.sentence, None)
    chip, tone = {
        "unchanged": ("no change", "good"),
        "gains": ("gains", "good"),
        "costs": ("costs accuracy", "bad"),
    }.get(comparison.verdict, ("undecided", "open"))
    value = f"{interval(comparison.change, points)} points"
    return Tile("without", question, chip, tone, value, comparison.sentence, None)  # type: ignore[arg-type]
