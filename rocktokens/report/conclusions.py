"""What a run means, in words: one `Verdict` with four tiles, and the end of a study.

The report's title and card, the last lines of `study`, the list of `view` and a run in a notebook all show the one
`Verdict`; nothing else decides what a run means. What was not tested says so, in grey, and names the command.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rocktokens.causal.figures import census_rows, counted, epsilon, graft_rows, verdicts_by_token
from rocktokens.compare.figures import finals
from rocktokens.detect.figures import footprint_row
from rocktokens.facts import Facts, once
from rocktokens.show import Column, Table, estimate, interval, listed, number, percent, plural, points, visible
from rocktokens.stats import MIN_SEEDS, Estimate
from rocktokens.values import Json

# Every state of a run and every answer of a tile has one tone: green only for what is proven, grey for what was not
# tested. The page, the list of runs and a notebook take their colours from here.
TONES = {
    **{"skip": "good", "keep": "bad", "none": "good", "undecided": "open", "not tested": "none"},
    **{"found": "open", "unstable": "open", "more than their share": "bad", "merely frequent": "open"},
    **{"needed": "bad", "some needed": "bad", "not needed": "good"},
    **{"no change": "good", "gains": "good", "costs accuracy": "bad", "no rocks": "none", "not frozen": "none"},
}
LABELS = {
    "skip": "Skip them",
    "keep": "Keep them",
    "none": "No rocks",
    "undecided": "Not decided",
    "not tested": "Not tested",
}
# Below this share of declared rocks confirmed on the held-out half of the prompts, the set is called unstable.
CONFIRMED_SHARE = 0.5
NAMED = 8
"""Rocks named at the end of a study."""


class Tile(NamedTuple):
    """One of the four questions on the card."""

    name: str
    question: str
    answer: str
    """In a word or two: a key of `TONES`."""
    value: str
    """The number that the answer rests on, with its interval."""
    detail: str
    command: str | None = None
    """What to run where the question was not asked; None where it was, or where this run cannot."""

    @property
    def tone(self) -> str:
        """The colour of the answer."""
        return TONES[self.answer]


@dataclass(frozen=True)
class Verdict:
    """What a run says, ready to be shown."""

    state: str
    """skip, keep, none, undecided or not tested."""
    title: str
    tiles: tuple[Tile, Tile, Tile, Tile]
    accuracies: dict[str, Estimate]
    """Before distillation, after it, and the teacher's, as far as they were measured."""

    @property
    def label(self) -> str:
        """The state in a word or two."""
        return LABELS[self.state]

    @property
    def tone(self) -> str:
        """The colour of the state."""
        return TONES[self.state]

    @property
    def command(self) -> str | None:
        """The next command that would tell more."""
        return next((tile.command for tile in self.tiles if tile.command), None)

    @property
    def accuracy(self) -> str:
        """Before → after → teacher."""
        return " → ".join(f"{interval(value, percent)} {name}" for name, value in self.accuracies.items())

    def table(self) -> Table:
        """The four questions with their answers."""
        columns = [Column(name, name) for name in ("question", "answer", "value", "detail")]
        return Table(columns, [tile._asdict() for tile in self.tiles], name="verdict", caption=(self.accuracy,))


@once
def verdict(facts: Facts) -> Verdict:
    """Conclude from whatever the run holds."""
    tiles = which, _, needed, without = _which(facts), _cost(facts), _needed(facts), _without(facts)
    count, named = len(facts.rocks), plural(len(facts.rocks), f"{facts.rock_word} token")
    trained = {"no change": "skip", "gains": "skip", "costs accuracy": "keep", "undecided": "undecided"}
    if which.answer != "found":
        state = "undecided" if which.answer == "unstable" else which.answer
    elif without.answer in trained:
        state = trained[without.answer]
    elif needed.answer == "needed":
        state = "keep"
    else:  # without a training the census can say keep, or that it cannot tell; never skip
        state = "undecided" if needed.answer != "not tested" and bypass(facts) and not skipped(facts) else "not tested"

    if state == "skip":
        some = len(bypass(facts).get("ids") or facts.rocks)
        title = f"{'All' if some == count > 1 else f'{some} of'} {named} can be skipped"
    elif state == "keep":
        why = needed.value if needed.answer == "needed" else "training without them costs accuracy"
        title = f"Keep the {facts.rock_word} tokens: {why}"
    elif which.answer == "found":
        title = f"{named}; " + (
            "whether to skip them is not decided" if state == "undecided" else "skipping: not tested"
        )
    elif which.answer == "unstable":
        title = f"{named}, but other prompts would give another set"
    elif state == "none":
        title = "No rock tokens were found"
    elif state == "undecided":
        title = f"No rock token is proven; {which.value}"
    else:
        title = f"{which.value}; rocks: not tested" if facts.types else "Rock tokens have not been looked for yet"
    return Verdict(state, title, tiles, accuracies(facts))


def _which(facts: Facts) -> Tile:
    question, of_all = "Which tokens are rocks?", f"of {plural(len(facts.types), 'type')}"
    if not facts.types:
        return Tile("which", question, "not tested", "–", "No detection has run.", facts.command("detect"))
    count = Counter(str(row["class"]) for row in facts.types if row.get("class"))
    others = [f"{some} {name}" for name, some in sorted(count.items()) if name not in ("rock", "cheap")]
    also = f" Also costly: {listed(others)}." if others else ""
    if facts.rocks:
        known = [row["confirmed"] for row in facts.rocks if row.get("confirmed") is not None]
        answer = "unstable" if sum(known) < CONFIRMED_SHARE * len(known) else "found"
        said = f"The other half of the prompts confirms {sum(known)} of {len(known)}." if known else ""
        return Tile("which", question, answer, f"{len(facts.rocks)} {of_all}", f"{said}{also}".strip())
    if facts.rock_word == "costly":
        said = "Without the loss before distillation, what does not learn cannot be told from what does."
        return Tile("which", question, "not tested", plural(count["costly"], "costly token type"), said)
    if count["unclear"]:
        more = (facts.stage("detect").get("enough") or {}).get("prompts_needed")
        said = f"About {plural(int(more), 'prompt')} would settle it." if isinstance(more, int | float) and more else ""
        value = f"{plural(count['unclear'], 'costly type')} unclear"
        return Tile("which", question, "undecided", value, f"{said}{also}".strip())
    return Tile("which", question, "none", f"none {of_all}", f"By the `{facts.definition}` definition.{also}")


def _cost(facts: Facts) -> Tile:
    question, row = "What do they cost?", footprint_row(facts) if facts.rocks else {}
    loss, places, enrichment = (estimate(row, key) for key in ("share_loss", "share_positions", "enrichment"))
    if loss is None or enrichment is None:
        rocks = "no rocks" if facts.types and facts.rock_word == "rock" else "not tested"
        return Tile("cost", question, rocks, "–", "There is no set of tokens to measure.")
    more = (enrichment.low if math.isfinite(enrichment.low) else enrichment.value) > 1
    return Tile(
        "cost",
        question,
        "more than their share" if more else "merely frequent",
        f"{interval(loss, percent)} of the loss",
        f"They fill {interval(places, percent)} of the positions.",
    )


def _needed(facts: Facts) -> Tile:
    question, rows = "Does the student need them?", verdicts_by_token(facts)
    own = [rows[token_id] for token_id in sorted(facts.rock_ids) if token_id in rows]
    if not facts.rocks:
        return Tile("needed", question, "no rocks", "–", "There is nothing to ban.")
    if not own:
        ran = bool(census_rows(facts))
        why = "None of them was among the census' candidates." if ran else "They were not banned at inference."
        why += "" if facts.has_models else " This run holds no models."
        return Tile("needed", question, "not tested", "–", why, None if ran else facts.command("knockout"))
    count = Counter(row["verdict"] for row in own)
    by_number = sorted(count, key=lambda name: (-count[name], name))
    said = f"Banned one at a time: {listed([counted(name, count[name]) for name in by_number], 6)}, judged within "
    said += f"±{number(100 * epsilon(facts), 1)} points."
    gain = next((item for row in graft_rows(facts) if row["arm"] == "rocks" and (item := estimate(row, "gain"))), None)
    said += f" Drawn by the teacher instead, they gain {interval(gain, points)} points." if gain else ""
    pillars, open_ = count["Strong Pillar"], count["Undecided"]
    if pillars:
        every = pillars == len(facts.rocks) or (bypass(facts) and not skipped(facts))
        answer, value = "needed" if every else "some needed", f"{pillars} of {len(own)} needed"
    elif open_:
        answer, value = "undecided", f"{open_} of {len(own)} undecided"
    else:
        answer, value = "not needed", f"none of {len(own)}"
    return Tile("needed", question, answer, value, said)


def _without(facts: Facts) -> Tile:
    """The regime that leaves the rocks out, against uniform: `freeze`, else `freeze_rocks`."""
    question, found = "What does training without them do?", finals(facts)
    if not found and not facts.rocks:
        return Tile("without", question, "no rocks", "–", "There is nothing to leave out.")
    if not found:
        why = "No regime was trained without them." + ("" if facts.has_models else " This run holds no models.")
        return Tile("without", question, "not tested", "–", why, facts.command("compare"))
    regime = next((name for name in ("freeze", "freeze_rocks") if name in found), None)
    if regime is None or "uniform" not in found:
        why = f"The comparison holds {listed(list(found))}: no regime froze the rocks."
        if facts.stage("compare").get("nothing_to_freeze"):
            declared = plural(len(facts.rocks), "declared rock")
            why = f"Nothing was frozen: none of {declared} is on the bypass list."
        return Tile("without", question, "not frozen", "–", why)
    row, base, ids = found[regime], found["uniform"], bypass(facts).get("ids")
    answers = {"unchanged": "no change", "gains": "gains", "costs": "costs accuracy"}
    answer = answers.get(str(row.get("verdict")), "undecided")
    said = f"{percent(row['accuracy'])} against {percent(base['accuracy'])}, {plural(row['num_seeds'], 'seed')}"
    if row["num_seeds"] < MIN_SEEDS:
        answer = "undecided"
        said += f" where a decision takes {MIN_SEEDS} (the interval is over prompts only)"
    if (ratio := row.get("flops_ratio")) is not None and math.isfinite(ratio):
        said += f"; {percent(1 - ratio) if ratio < 1 else 'none'} of the FLOPs saved"
    if regime == "freeze_rocks":
        named = facts.stage("compare").get("frozen_by", {}).get("freeze_rocks")
        undeclared = f"{plural(len(named or ()), 'token type')} that no test declares rocks"
        said = f"{'All rocks' if facts.rocks or not named else undeclared} left out: {said}"
        if answer in ("no change", "gains") and isinstance(ids, list):
            # What may be skipped is what the list says; without a single type on it nothing is recommended.
            answer, said = "undecided", f"{said}; the bypass list is {'not compared' if ids else 'empty'}"
    return Tile("without", question, answer, f"{interval(estimate(row, 'delta'), points)} points", f"{said}.")


# What the tiles rest on


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


def skipped(facts: Facts) -> list[int]:
    """Rocks that the bypass list lets a training skip."""
    return [
        token_id for token_id, (word, _) in decisions(facts).items() if word == "skip" and token_id in facts.rock_ids
    ]


def accuracies(facts: Facts) -> dict[str, Estimate]:
    """Accuracy before distillation, after it, and the teacher's; else that of the graft which draws every position."""
    stage = facts.stage("distill")
    known = {name: stage.get(f"accuracy_{name}") for name in ("before", "after", "teacher")}
    graft = next((row for row in graft_rows(facts) if row["arm"] == "all positions"), None)
    known["teacher"] = known["teacher"] or graft
    found = {name: estimate(row, "accuracy") for name, row in known.items() if isinstance(row, dict)}
    return {name: value for name, value in found.items() if value is not None}


# The terminal


def summary(facts: Facts, report: Path | None, *, width: int = 80) -> list[str]:
    """The end of a study: the verdict in lines of at most `width` columns, the next command, and the report."""
    found = verdict(facts)
    names = ("rocks", "cost", "needed", "skipped")
    rows = [(name, _plain(facts, tile)) for name, tile in zip(names, found.tiles)]
    lines = [found.title, ""]
    for name, text in [*rows, *([("accuracy", found.accuracy)] if found.accuracies else [])]:
        lines += textwrap.wrap(
            f"  {name:9} {text}",
            max(width, 40),
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
    # A path or a command stays in one piece, however long, to be pasted.
    lines += [f"  next      {found.command}"] if found.command else []
    return [*lines, f"  report    {report if report is not None else facts.command('report')}"]


def found_by(stage: str, facts: Facts) -> str | None:
    """What a stage that has just ended found, in one line; None where it has nothing to tell."""
    found = verdict(facts)
    which, cost, needed, without = found.tiles
    if stage == "detect" and facts.types:
        return f"{facts.rock_word}s: {_plain(facts, which)}; {cost.value}" if facts.rocks else found.title
    if stage == "knockout" and facts.ran("knockout"):
        return f"needed at inference: {_plain(facts, needed)}"
    if stage == "compare" and facts.ran("compare"):
        return f"trained without them: {_plain(facts, without)}"
    return f"accuracy: {found.accuracy}" if stage == "distill" and found.accuracies else None


def _plain(facts: Facts, tile: Tile) -> str:
    """A tile in a line, without the marks that the report sets as code."""
    if tile.name == "which" and facts.rocks:
        return f"{tile.value}: {listed([visible(row['token']) for row in facts.rocks], NAMED)}"
    said = tile.answer if tile.value == "–" else f"{tile.value}, {tile.answer}"
    return f"{tile.value if tile.answer in tile.value else said}. {tile.detail}".replace("`", "")
