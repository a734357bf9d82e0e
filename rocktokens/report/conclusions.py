"""What a run means, in words: the verdict with its four tiles, the answer in five sentences, the end of a study.

The report's title and card, the last lines of `study`, the list of `view` and a run in a notebook all show the one
`Verdict`; nothing else decides what a run means. What a run does not hold is named with the command that would tell,
never guessed.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rocktokens.causal.figures import census_rows, counted, epsilon, graft_rows, noise_floor, verdicts_by_token
from rocktokens.compare.figures import finals
from rocktokens.detect.figures import footprint_row
from rocktokens.facts import Facts, once
from rocktokens.show import estimate, interval, listed, number, percent, plural, points, visible
from rocktokens.stats import MIN_SEEDS, Estimate
from rocktokens.train.figures import persistence_rows
from rocktokens.values import Json, Row

State = Literal["skip", "keep", "no rocks", "unstable", "cannot tell", "not run", "imported"]
Tone = Literal["good", "bad", "open", "none"]
# State → (label, tone).
STATES: dict[State, tuple[str, Tone]] = {
    "skip": ("Skip them", "good"),
    "keep": ("Keep them", "bad"),
    "no rocks": ("No rocks", "good"),
    "unstable": ("Unstable", "open"),
    "cannot tell": ("Cannot tell", "open"),
    "not run": ("Not tested", "none"),
    "imported": ("Imported run", "none"),
}
# Below this share of declared rocks confirmed on the held-out half of the prompts, the set is called unstable.
CONFIRMED_SHARE = 0.5
NAMED = 8
"""Rocks named at the end of a study."""


class Tile(NamedTuple):
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


class Accuracy(NamedTuple):
    """One accuracy of a run and what it was measured on."""

    name: str
    value: Estimate
    measured_on: str


@dataclass(frozen=True)
class Verdict:
    """What a run says, ready to be shown."""

    state: State
    title: str
    line: str
    tiles: tuple[Tile, Tile, Tile, Tile]
    accuracies: tuple[Accuracy, ...]
    """Before distillation, after it, and the teacher's, as far as they were measured."""

    @property
    def label(self) -> str:
        """The state in a word or two."""
        return STATES[self.state][0]

    @property
    def tone(self) -> Tone:
        """The colour of the state."""
        return STATES[self.state][1]

    @property
    def command(self) -> str | None:
        """The next command that would tell more."""
        return next((tile.command for tile in self.tiles if tile.command), None)


class Matter(NamedTuple):
    """What the census and the graft say about the rocks."""

    ran: bool
    tested: int
    pillars: int
    undecided: int
    listed: int | None
    """Rocks on the bypass list; None without a list."""
    sentence: str


class Comparison(NamedTuple):
    """What training without the rocks did."""

    ran: bool
    verdict: str | None = None
    """unchanged, gains, costs or undecided; None where no regime froze them."""
    change: Estimate | None = None
    compute_saved: float | None = None
    """1 − the ratio of FLOPs to those of uniform training."""
    frozen: int | None = None
    """Token types that were left out; None where that was not recorded."""
    said: str = ""


@once
def verdict(facts: Facts) -> Verdict:
    """Conclude from whatever the run holds."""
    needed, compared = matter(facts), comparison(facts)
    state = _state(facts, needed, compared)
    return Verdict(
        state,
        _title(facts, state, needed, compared),
        _line(facts, state, needed, compared),
        (_which_tile(facts), _cost_tile(facts), _matter_tile(facts, needed), _without_tile(facts, compared)),
        tuple(accuracies(facts)),
    )


def _state(facts: Facts, needed: Matter, compared: Comparison) -> State:
    if not facts.types:
        return "not run"
    if not facts.rocks:
        return "no rocks"
    if unstable(facts):
        return "unstable"
    if not facts.has_models and not compared.ran:
        return "imported"
    if compared.verdict is not None:
        states: dict[str, State] = {"unchanged": "skip", "gains": "skip", "costs": "keep"}
        return states.get(compared.verdict, "cannot tell")
    if needed.tested and needed.pillars == needed.tested == len(facts.rocks):
        return "keep"
    if needed.listed == 0 and needed.tested:
        return "keep" if needed.pillars else "cannot tell"
    return "not run"


def _title(facts: Facts, state: State, needed: Matter, compared: Comparison) -> str:
    count, word = len(facts.rocks), facts.rock_word
    named = plural(count, f"{word} token")
    if not facts.types:
        return "Rock tokens have not been looked for yet"
    if state == "skip":
        some = count if compared.frozen is None else compared.frozen
        if some < count:
            return f"{some} of {named} can be skipped"
        return f"The {word} token can be skipped" if count == 1 else f"All {named} can be skipped"
    if state == "keep":
        if compared.verdict == "costs":
            return f"Keep the {word} tokens: training without them costs accuracy"
        return f"Keep the {word} tokens: {needed.pillars} of {count} {_are(needed.pillars)} needed"
    return {
        "no rocks": f"No {word} tokens: no token type stays expensive",
        "unstable": f"{named}, but the set is not stable",
        "imported": f"{named} in imported data",
        "cannot tell": f"{named}; whether to skip them is not decided",
        "not run": f"{named}; skipping them was not tried yet",
    }[state]


def _line(facts: Facts, state: State, needed: Matter, compared: Comparison) -> str:
    """One sentence: how much, needed or not, what skipping does, what it saves."""
    if not facts.types:
        return "This run has no detection yet, so nothing can be said about rock tokens."
    if state == "no rocks":
        return _no_rocks(facts)
    loss = estimate(footprint_row(facts), "share_loss")
    count = len(facts.rocks)
    share = percent(loss.value, 0) if loss else "an unknown share"
    parts = [f"{plural(count, 'token')} {'carries' if count == 1 else 'carry'} {share} of the loss", unstable(facts)]
    if not needed.tested:
        parts.append("whether the student needs them was not tested")
    elif needed.pillars:
        parts.append(f"{needed.pillars} of {needed.tested} {_are(needed.pillars)} needed at inference")
    elif needed.undecided:
        parts.append(f"whether the student needs {needed.undecided} of them is undecided")
    else:
        parts.append("it is not needed" if count == 1 else "none is needed")
    change = f"{interval(compared.change, points)} points"
    if not compared.ran and facts.has_models:
        parts.append("training without them was not tried")
    elif not compared.ran:
        parts.append("this run holds no models, so skipping them cannot be tried here")
    elif compared.verdict is None:
        parts.append(compared.said)
    else:
        does = {"unchanged": "changes nothing", "gains": "raises accuracy", "costs": "costs accuracy"}
        known = does.get(compared.verdict)
        parts.append(
            f"skipping them {known}: {change}" if known else f"what skipping them does is not decided: {change}"
        )
    saved = compared.compute_saved
    if saved is not None and abs(saved) < 0.0005:
        parts.append("saves no compute")
    elif saved is not None:
        parts.append(f"saves {percent(saved)} of the compute" if saved > 0 else f"takes {percent(-saved)} more compute")
    return "; ".join(part for part in parts if part) + "."


def _no_rocks(facts: Facts) -> str:
    """What “none” rests on."""
    count = Counter(str(row["class"]) for row in facts.types if row.get("class"))
    learning = sum(some for name, some in count.items() if name.startswith("learning"))
    parts = [f"Of {plural(len(facts.types), 'token type')} none stays expensive by the `{facts.definition}` definition"]
    if learning:
        parts.append(f"{learning} {_are(learning)} costly and learning")
    if count["unclear"]:
        more = (facts.stage("detect").get("enough") or {}).get("prompts_needed")
        parts.append(f"{count['unclear']} {_are(count['unclear'])} costly and unclear")
        if isinstance(more, int | float) and more > 0:
            parts[-1] += f" (about {plural(int(more), 'prompt')} would settle it)"
    return "; ".join(parts) + "."


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


# The four tiles


def _which_tile(facts: Facts) -> Tile:
    question = "Which tokens are rocks?" if facts.rock_word == "rock" else "Which tokens are costly?"
    if not facts.types:
        command = facts.command("detect")
        return Tile("which", question, "not looked for", "none", "–", "No detection has run.", command)
    said = [f"By the `{facts.definition}` definition"]
    confirmed = [row["confirmed"] for row in facts.rocks if row.get("confirmed") is not None]
    if confirmed:
        said[0] += f"; {sum(confirmed)} of {len(confirmed)} confirmed on the other half of the prompts"
    count = Counter(str(row["class"]) for row in facts.types if row.get("class"))
    others = [f"{some} {name}" for name, some in sorted(count.items()) if name not in ("rock", "cheap")]
    said += [f"Also costly: {listed(others)}"] if others else []
    doubt = unstable(facts)
    said += [doubt[0].upper() + doubt[1:]] if doubt else []
    value = f"{len(facts.rocks)} of {plural(len(facts.types), 'type')}"
    chip = "unstable" if doubt else f"{len(facts.rocks)} found" if facts.rocks else "none"
    return Tile("which", question, chip, "open" if facts.rocks else "good", value, ". ".join(said) + ".")


def _cost_tile(facts: Facts) -> Tile:
    question = "What do they cost?"
    row = footprint_row(facts) if facts.rocks else {}
    loss, places, enrichment = (estimate(row, key) for key in ("share_loss", "share_positions", "enrichment"))
    if loss is None or enrichment is None:
        chip = "nothing" if facts.types else "not measured"
        detail = "There is no set of tokens to measure." if facts.types else "No detection has run."
        return Tile("cost", question, chip, "none", "–", detail)
    more = (enrichment.low if math.isfinite(enrichment.low) else enrichment.value) > 1
    grad = estimate(row, "share_grad")
    norm = f", and {interval(grad, percent)} of the gradient norm" if grad else ""
    return Tile(
        "cost",
        question,
        "more than their share" if more else "merely frequent",
        "bad" if more else "open",
        f"{interval(loss, percent)} of the loss",
        f"They fill {interval(places, percent)} of the positions{norm}. Enrichment {interval(enrichment)} "
        "(1 would be merely frequent).",
    )


def _matter_tile(facts: Facts, needed: Matter) -> Tile:
    question = "Does the student need them?"
    if not facts.rocks:
        said = "No token is called a rock; the census of the costliest candidates stands below."
        return Tile("matter", question, "no rocks", "none", "–", said if needed.ran else "Nothing to test.")
    if not needed.tested:
        why = "None of them was among the census' candidates." if needed.ran else "They were not banned at inference."
        command = None if needed.ran else facts.command("knockout")
        why += "" if command or facts.has_models else " This run holds no models."
        return Tile("matter", question, "not tested", "none", "–", why, command)
    if needed.pillars:
        value = f"{needed.pillars} of {needed.tested} needed"
        return Tile("matter", question, "needed", "bad", value, needed.sentence)
    if needed.undecided:
        value = f"{needed.undecided} of {needed.tested} undecided"
        return Tile("matter", question, "undecided", "open", value, needed.sentence)
    return Tile("matter", question, "not needed", "good", f"none of {needed.tested} needed", needed.sentence)


def _without_tile(facts: Facts, compared: Comparison) -> Tile:
    question = "What does training without them do?"
    if not compared.ran and not facts.rocks:
        return Tile("without", question, "no rocks", "none", "–", "There is nothing to leave out.")
    if not compared.ran:
        why = "No regime was trained without them." + ("" if facts.has_models else " This run holds no models.")
        return Tile("without", question, "not tried", "none", "–", why, facts.command("compare"))
    said = f"{compared.said[0].upper()}{compared.said[1:]}."
    if compared.verdict is None:
        return Tile("without", question, "not frozen", "none", "–", said)
    chips: dict[str, tuple[str, Tone]] = {
        "unchanged": ("no change", "good"),
        "gains": ("gains", "good"),
        "costs": ("costs accuracy", "bad"),
    }
    chip, tone = chips.get(compared.verdict, ("undecided", "open"))
    return Tile("without", question, chip, tone, f"{interval(compared.change, points)} points", said)


# What the tiles rest on


def unstable(facts: Facts) -> str:
    """Why the set of rocks would be another one on other prompts; empty where it would not, or where nothing tells."""
    known = [row["confirmed"] for row in facts.rocks if row.get("confirmed") is not None]
    if sum(known) < CONFIRMED_SHARE * len(known):
        return f"the other half of the prompts confirms {sum(known)} of {len(known)}"
    return ""


@once
def bypass(facts: Facts) -> Json:
    """The run's bypass list; empty where there is none or it cannot be read."""
    path = facts.run.path / "bypass.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        facts.notes.append(f"bypass.json was left out: {error}")
        found = {}
    return found if isinstance(found, dict) else {}


def decisions(facts: Facts) -> dict[int, tuple[str, str]]:
    """Token id → (skip, keep or undecided; the reason in words), from the bypass list."""
    found = {}
    for row in bypass(facts).get("decisions") or []:
        if isinstance(row, dict) and isinstance(row.get("token_id"), int) and row.get("decision"):
            found[row["token_id"]] = (str(row["decision"]), str(row.get("why") or row.get("reason") or ""))
    return found


def verdict_counts(rows: Iterable[Row]) -> str:
    """How many have each verdict of the census, the most frequent first."""
    count = Counter(row["verdict"] for row in rows)
    return listed([counted(name, count[name]) for name in sorted(count, key=lambda name: (-count[name], name))], 6)


def matter(facts: Facts) -> Matter:
    """Verdicts of the census on the rocks, and what grafting them gains."""
    own = _tested(facts)
    count = Counter(row["verdict"] for row in own)
    decided = decisions(facts)
    on_list = sum(decided.get(token_id, ("",))[0] == "skip" for token_id in facts.rock_ids) if bypass(facts) else None
    smallest, gain = facts.stage("knockout").get("smallest_detectable_effect"), _graft_gain(facts)
    said = f"Banned one at a time: {verdict_counts(own)} (ε = {number(100 * epsilon(facts), 1)} points)."
    said += f" The census could see effects from {number(100 * smallest, 1)} points." if smallest else ""
    said += f" Drawn by the teacher instead, they gain {interval(gain, points)} points." if gain else ""
    return Matter(bool(census_rows(facts)), len(own), count["Strong Pillar"], count["Undecided"], on_list, said)


def _tested(facts: Facts) -> list[Row]:
    """The census' rows of the rocks."""
    rows = verdicts_by_token(facts)
    return [rows[token_id] for token_id in sorted(facts.rock_ids) if token_id in rows]


def _graft_gain(facts: Facts) -> Estimate | None:
    """Gain in accuracy when the teacher draws the rocks."""
    return next((item for row in graft_rows(facts) if row["arm"] == "rocks" and (item := estimate(row, "gain"))), None)


def comparison(facts: Facts) -> Comparison:
    """The regime that leaves the rocks out, against uniform: `freeze`, else `freeze_rocks`."""
    found = finals(facts)
    if not found:
        return Comparison(False)
    regime = next((name for name in ("freeze", "freeze_rocks") if name in found), None)
    if regime is None or "uniform" not in found:
        why = f"the comparison holds {listed(list(found))}: no regime froze the rocks"
        if facts.stage("compare").get("nothing_to_freeze"):
            count = len(facts.rocks)
            which = "the declared rock is not" if count == 1 else f"none of the {count} declared rocks is"
            why = f"nothing was frozen: {f'{which} on the bypass list' if count else 'no rock is declared'}"
        return Comparison(True, said=why)
    row, base = found[regime], found["uniform"]
    change, ratio, seconds = estimate(row, "delta"), row.get("flops_ratio"), estimate(row, "seconds_ratio")
    saved = 1 - ratio if ratio is not None and math.isfinite(ratio) else None
    decided = str(row.get("verdict") or "undecided")
    said = f"{percent(row['accuracy'])} against {percent(base['accuracy'])}, {plural(row['num_seeds'], 'seed')}"
    if row["num_seeds"] < MIN_SEEDS:
        decided = "undecided"
        said += f" where a decision takes {MIN_SEEDS} (the interval is over prompts only)"
    if saved is not None:
        said += f"; {percent(saved) if saved > 0 else 'none'} of the FLOPs saved"
    if seconds is not None and math.isfinite(seconds.low):
        said += f", {interval(seconds)} × the seconds"
    if row.get("ceiling"):
        said += f"; ceiling {number(row['ceiling'])} ×"
    ids = bypass(facts).get("ids")
    frozen = len(ids) if regime == "freeze" and isinstance(ids, list) and ids else None
    if regime == "freeze_rocks":
        named = facts.stage("compare").get("frozen_by", {}).get("freeze_rocks")
        whose = (
            "All rocks"
            if facts.rocks or not named
            else f"{plural(len(named), 'token type')} that no test declares rocks"
        )
        said = f"{whose} left out: {said}"
        if decided in ("unchanged", "gains") and isinstance(ids, list):
            # What may be skipped is what the list says; without a single type on it nothing is recommended.
            said += f"; the bypass list is {'not compared' if ids else 'empty'}"
            decided = "undecided"
    return Comparison(True, decided, change, saved, frozen, said)


def accuracies(facts: Facts) -> list[Accuracy]:
    """Accuracy before distillation, after it, and the teacher's."""
    stage = facts.stage("distill")
    problems = facts.config.get("problems")
    where = "held-out prompts of the distillation" + (f", {problems} of them" if isinstance(problems, int) else "")
    found = []
    for name in ("before", "after", "teacher"):
        row = stage.get(f"accuracy_{name}")
        value = estimate(row, "accuracy") if isinstance(row, dict) else None
        if value is not None:
            found.append(Accuracy(name, value, where))
    if not any(item.name == "teacher" for item in found):
        where = "prompts of the graft, every position drawn by the teacher"
        for row in graft_rows(facts):
            if row["arm"] == "all positions" and (value := estimate(row, "accuracy")) is not None:
                found.append(Accuracy("teacher", value, where))
    return found


def all_accuracies(facts: Facts) -> list[Accuracy]:
    """Every accuracy that this run holds; they differ because what they were measured on differs."""
    names = {"before": "student before distillation", "after": "student after distillation", "teacher": "teacher"}
    found = [Accuracy(names[item.name], item.value, item.measured_on) for item in accuracies(facts)]
    sampled, census = facts.stage("sample").get("accuracy"), estimate(facts.stage("knockout"), "accuracy")
    if sampled is not None:
        where = "prompts of the detection, last checkpoint, temperature of the stage sample"
        found.append(Accuracy("sampled rollouts", Estimate(float(sampled), math.nan, math.nan, 0), where))
    if census is not None:
        found.append(Accuracy("census, nothing banned", census, "prompts of the census, last checkpoint"))
    for regime, row in finals(facts).items():
        if (ended := estimate(row, "accuracy")) is not None:
            where = f"prompts of the comparison, {plural(row['num_seeds'], 'seed')}, trained anew from the same start"
            found.append(Accuracy(f"regime {regime}", ended, where))
    return found


# The answer in five sentences


def answer(facts: Facts) -> list[str]:
    """What, how much, do they learn, do they matter, and without them; plain text."""
    return [_what(facts), _how_much(facts), _learn(facts), _needed(facts), _without(facts)]


def _ask(facts: Facts, stage: str, question: str) -> str:
    command = facts.command(stage)
    if command is None:
        return f"{question} is not known: this run names no models, so `{stage}` cannot run on it."
    return f"{question} is not known yet: run `{command}`."


def _what(facts: Facts) -> str:
    if not facts.types:
        return _ask(facts, "detect", "Which tokens are rocks")
    names = [f"“{visible(row['token'])}”" for row in facts.rocks]
    among, certified = plural(len(facts.types), "token type"), facts.definition == "certified"
    if not names:
        proven = "no type is proven to cost more than the tokens around it and to have stopped learning"
        why = proven if certified else "no type stays expensive in recurring contexts"
        return f"No rock was found among {among} by the `{facts.definition}` definition: {why}."
    one = len(names) == 1
    when = f"{'stays' if one else 'stay'} expensive before and after distillation"
    if facts.rock_word == "costly":
        when = f"{_are(len(names))} expensive at the one checkpoint that was scored"
    # `certified` tests cost and learning; contexts are only shown.
    where = "" if certified else f" and {'recurs' if one else 'recur'} in similar contexts"
    return f"{len(names)} of {among} {when}{where} (`{facts.definition}` definition): {listed(names)}."


def _how_much(facts: Facts) -> str:
    if not facts.types:
        return _ask(facts, "detect", "Their cost")
    row = footprint_row(facts)
    enrichment = estimate(row, "enrichment")
    if not facts.rocks or enrichment is None:
        return "What they cost cannot be said without a rock set."
    grad = estimate(row, "share_grad")
    gradient = f" and {interval(grad, percent)} of the gradient norm" if grad else ""
    said = f"enrichment {interval(enrichment)}"
    low, high = (end if math.isfinite(end) else enrichment.value for end in (enrichment.low, enrichment.high))
    if low > 1:
        means = f"{number(enrichment.value, 1)} times what their frequency explains ({said})"
    elif high < 1:
        means = f"less than their frequency explains ({said}), so they are merely frequent"
    else:
        means = f"no more than their frequency explains ({said})"
    return (
        f"They fill {interval(estimate(row, 'share_positions'), percent)} of the positions and carry "
        f"{interval(estimate(row, 'share_loss'), percent)} of the loss{gradient}: {means}."
    )


def _learn(facts: Facts) -> str:
    everything = persistence_rows(facts)
    rows = [row for row in everything if row["arm"] == "checkpoint"]
    if not rows and len(facts.steps) == 1:
        unknown = "Whether they learn is not known: only one checkpoint was scored"
        command = facts.command("distill")
        return f"{unknown}; distil with `{command}` and score every checkpoint." if command else f"{unknown}."
    if not rows:
        return _ask(facts, "score", "Whether they learn")
    last = max(row["step"] for row in rows)
    by_group = {row["group"]: row for row in rows if row["step"] == last}
    if "rocks" not in by_group:
        return "Whether they learn cannot be said: no rock was measured at two checkpoints."
    row, rare = by_group["rocks"], by_group.get("rare high-loss")
    change = estimate(row, "change")
    share = f" ({percent(row['after'] / row['before'] - 1, 0)})" if row.get("before") else ""
    said = (
        f"On the same texts their mean loss went from {number(row['before'], 3)} to {number(row['after'], 3)} nats"
        f"{share}, a change of {interval(change, digits=3)}"
    )
    if rare is not None and rare.get("before"):
        said += f", while rare high-loss types changed by {percent(rare['after'] / rare['before'] - 1, 0)}"
    # What other texts alone would bring: one checkpoint against itself.
    same = [row["change"] for row in everything if row["group"] == "rocks" and row["arm"].startswith("aa_")]
    if change is None or not same:
        return f"{said}."
    noise = max(abs(value) for value in same if value is not None)
    if not (math.isfinite(change.high) and (change.high < 0 or change.low > 0)):
        return f"{said}: they did not learn, as far as this run can see."
    if abs(change.value) <= noise:
        return f"{said}; one checkpoint against itself on other texts changes as much ({number(noise, 3)})."
    word = "fell" if change.value < 0 else "rose"
    return f"{said}; it {word} by more than the {number(noise, 3)} that other texts alone bring."


def _needed(facts: Facts) -> str:
    if not census_rows(facts):
        return _ask(facts, "knockout", "Whether the student needs them")
    if not facts.rock_ids:
        candidates = verdict_counts(verdicts_by_token(facts).values())
        return f"No rock could be tested; of the costliest candidates, {candidates}."
    own = _tested(facts)
    if not own:
        return "None of the rocks was among the candidates of the census."
    floor, accuracy, gain = noise_floor(facts), estimate(facts.stage("knockout"), "accuracy"), _graft_gain(facts)
    noise = f", noise floor up to {number(100 * floor, 1)}" if floor is not None else ""
    base = f", baseline accuracy {interval(accuracy, percent)}" if accuracy else ""
    if accuracy is not None and accuracy.value in (0.0, 1.0):
        base += ", which leaves no room for an effect"
    graft = f"; drawn by the teacher instead, they gain {interval(gain, points)} points" if gain else ""
    return (
        f"Banned at inference, {plural(len(own), 'rock')} tested gave {verdict_counts(own)} "
        f"(ε = {number(100 * epsilon(facts), 1)} points{noise}{base}){graft}."
    )


def _without(facts: Facts) -> str:
    found = finals(facts)
    base, freeze = found.get("uniform"), found.get("freeze")
    if not found:
        return _ask(facts, "compare", "What training without them costs or saves")
    if base is None or freeze is None:
        return f"What freezing costs is not known: the comparison holds {listed(list(found))}, not uniform and freeze."
    ratio, flops, seeds = estimate(freeze, "seconds_ratio"), freeze.get("flops_ratio"), freeze["num_seeds"]
    spent = f" with {percent(flops)} of its FLOPs" if flops is not None else ""
    if ratio is not None and math.isfinite(ratio.low):
        spent += f"{' and' if spent else ' in'} {interval(ratio, percent, digits=0)} of its seconds"
    few = "" if seeds >= MIN_SEEDS else f" where a decision takes {MIN_SEEDS}: the interval is over prompts only"
    return (
        f"Trained without them, the student ended {interval(estimate(freeze, 'delta'), points)} points from uniform "
        f"training ({percent(freeze['accuracy'])} against {percent(base['accuracy'])}, {plural(seeds, 'seed')}{few})"
        f"{spent}."
    )


# The terminal


def summary(facts: Facts, report: Path | None, *, width: int = 80) -> list[str]:
    """The end of a study: the verdict in lines of at most `width` columns, the next command, and the report."""
    found = verdict(facts)
    names = {"which": "rocks", "cost": "cost", "matter": "needed", "without": "skipped"}
    rows = [(names[tile.name], _plain_tile(facts, tile)) for tile in found.tiles]
    if found.accuracies:
        rows.append(("accuracy", said_accuracies(found)))
    lines = [_plain(found.title), *_wrapped(_plain(found.line), width), ""]
    for name, text in rows:
        lines += _wrapped(f"  {name:9} {_plain(text)}", width, indent=12)
    # A path or a command must stay in one piece to be pasted.
    lines += [f"  next      {_plain(found.command)}"] if found.command else []
    return [*lines, f"  report    {report if report is not None else facts.command('report')}"]


def found_by(stage: str, facts: Facts) -> str | None:
    """What a stage that has just ended found, in one line; None where it has nothing to tell."""
    found = verdict(facts)
    which, cost, needed, without = found.tiles
    if stage == "detect" and facts.types:
        rocks = f"{facts.rock_word}s: {_plain_tile(facts, which)}; {cost.value}"
        return _plain(rocks if facts.rocks else found.line)
    if stage == "knockout" and facts.ran("knockout"):
        return _plain(f"needed at inference: {_plain_tile(facts, needed)}")
    if stage == "compare" and facts.ran("compare"):
        return _plain(f"trained without them: {_plain_tile(facts, without)}")
    return f"accuracy: {said_accuracies(found)}" if stage == "distill" and found.accuracies else None


def said_accuracies(found: Verdict) -> str:
    """Before → after → teacher."""
    return " → ".join(f"{interval(item.value, percent)} {item.name}" for item in found.accuracies)


def _plain_tile(facts: Facts, tile: Tile) -> str:
    if tile.name == "which" and facts.rocks:
        return f"{tile.value}: {listed([visible(row['token']) for row in facts.rocks], NAMED)}"
    value = "" if tile.value == "–" else tile.value
    said = tile.chip if not value else value if tile.chip in value else f"{value}, {tile.chip}"
    return f"{said}. {tile.detail}"


def _plain(text: str) -> str:
    """Without the marks that the report sets as code."""
    return text.replace("`", "")


def _wrapped(text: str, width: int, *, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text, max(width, 40), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
