"""What a run means, in words: one `Verdict`, and the end of a study.

The report's title and first screen, every command's `--json`, the last lines of `study`, the list of `view`, a run in
a notebook and `run.verdict` all show the one `Verdict`; nothing else decides what a run means. What was not tested
says so, in grey, and names the command that would test it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from rocktokens.causal.figures import census_rows, counted, epsilon, graft_rows, verdicts_by_token
from rocktokens.compare.figures import finals
from rocktokens.detect.figures import footprint_row
from rocktokens.facts import Facts, once
from rocktokens.show import estimate, interval, listed, number, percent, plural, points, visible
from rocktokens.stats import MIN_SEEDS, Estimate
from rocktokens.values import Json

# Every state of a run and every answer has one tone: green only for what is proven, grey for what was not tested,
# plain for what was looked for and not found. The page, the list of runs and a notebook take their colours from here.
TONES = {
    **{"skip": "good", "keep": "bad", "none": "plain", "undecided": "open", "not tested": "none"},
    **{"found": "open", "unstable": "open", "more than their share": "bad", "merely frequent": "open"},
    **{"needed": "bad", "some needed": "bad", "not needed": "good"},
    **{"no change": "good", "gains": "good", "costs accuracy": "bad", "no rocks": "none", "not frozen": "none"},
}
LABELS = {
    "skip": "Skip them",
    "keep": "Keep them",
    "none": "None found",
    "undecided": "Not yet known",
    "not tested": "Not tested",
}
# What the comparison says of training without them → the state of the run.
TRAINED = {"no change": "skip", "gains": "skip", "costs accuracy": "keep", "undecided": "undecided"}
# Below this share of declared rocks confirmed on the held-out half of the prompts, the set is called unstable.
CONFIRMED_SHARE = 0.5
NAMED = 4  # rocks named at the end of a study


class Tile(NamedTuple):
    """One of the four questions that a study asks."""

    name: str
    question: str
    answer: str
    """In a word or two: a key of `TONES`."""
    value: str
    """The number that the answer rests on, with its interval."""
    detail: str
    command: str | None = None
    """What to run where the question was not asked; None where it was, or where this run cannot."""


@dataclass(frozen=True)
class Verdict:
    """What a run says, ready to be shown."""

    state: str
    """skip, keep, none, undecided or not tested."""
    title: str
    """The verdict as a sentence."""
    tone: str
    """The colour of the state: good, bad, plain, open or none."""
    label: str
    """The state in a word or two."""
    tiles: tuple[Tile, Tile, Tile, Tile]
    numbers: dict[str, str]
    """The tokens' share of all tokens, of the loss, their improvement, and what skipping them saves, if measured."""
    accuracies: dict[str, Estimate]
    """Before distillation, after it, and the teacher's, as far as they were measured."""
    command: str | None
    """The next command that would tell more; once it is decided, the one that hands the list to a trainer."""

    def __str__(self) -> str:
        return f"{self.label}: {self.title}"

    @property
    def accuracy(self) -> str:
        """Accuracy before → after (teacher)."""
        shown = {name: interval(value, percent) for name, value in self.accuracies.items()}
        teacher = f" (teacher {shown.pop('teacher')})" if "teacher" in shown else ""
        return (" → ".join(shown.values()) + teacher).strip() or "not tested: no answers were checked"

    def json(self) -> Json:
        """Plain values, for `--json`."""
        answers = {
            tile.name: {key: tile._asdict()[key] for key in ("answer", "value", "detail")} for tile in self.tiles
        }
        known = {
            name: {end: value if math.isfinite(value) else None for end, value in item._asdict().items()}
            for name, item in self.accuracies.items()
        }
        found = {"state": self.state, "sentence": self.title, "colour": self.tone, "next": self.command}
        return found | {"numbers": self.numbers, "accuracy": known, "answers": answers}


@once
def verdict(facts: Facts) -> Verdict:
    """Conclude from whatever the run holds."""
    (cost, numbers), (without, trained) = _cost(facts), _without(facts)
    tiles = which, _, needed, _ = _which(facts), cost, _needed(facts), without
    count, free = len(facts.rocks), set(bypass(facts).get("ids") or ()) & facts.rock_ids
    if which.answer != "found":
        state = "undecided" if which.answer == "unstable" else which.answer
    elif without.answer in TRAINED:
        state = TRAINED[without.answer]
    elif needed.answer == "needed":
        state = "keep"
    else:  # without a training, banning them can say keep, or that it cannot tell; never skip
        state = "undecided" if needed.answer != "not tested" and bypass(facts) and not free else "not tested"

    tokens, verb = plural(count, "token"), "resists" if count == 1 else "resist"
    found = f"{tokens} {verb} distillation" + (" so far" if facts.rock_word == "rock so far" else "")
    if facts.rock_word == "costly":
        found = f"{tokens} {'is' if count == 1 else 'are'} costly"
    if state == "skip":
        some = len(free) or count
        title = f"{found}; training may skip {f'{some} of them' if some < count else 'it' if count == 1 else 'them'}"
    elif state == "keep":
        why = (
            f"the student needs {needed.value}" if needed.answer == "needed" else "training without them costs accuracy"
        )
        title = f"{found}; keep them: {why}"
    elif which.answer == "found":
        known = (
            "whether training may skip them is not yet known" if state == "undecided" else "skipping them: not tested"
        )
        title = f"{found}; {known}"
    elif which.answer == "unstable":
        title = f"{found}, but other prompts would give another set"
    elif state == "none":
        title = "No rock tokens were found"
    elif state == "undecided":
        title = f"{which.value}; whether they resist distillation is not yet known"
    else:
        title = f"{which.value}; whether they resist distillation: not tested"
        title = title if facts.types else "Rock tokens have not been looked for: not tested"
    command = next((tile.command for tile in tiles if tile.command), None)
    if state == "skip":  # decided: what is left is to hand the list to a trainer
        command = f"rocktokens {f'export {facts.place} --format trl' if free else f'bypass {facts.place}'}"
    return Verdict(state, title, TONES[state], LABELS[state], tiles, numbers | trained, accuracies(facts), command)


def _which(facts: Facts) -> Tile:
    question, of_all = "Which tokens are rocks?", f"of {plural(len(facts.types), 'token type')}"
    if not facts.types:
        return Tile("which", question, "not tested", "–", "No detection has run.", facts.command("detect"))
    count = Counter(str(row["class"]) for row in facts.types if row.get("class"))
    others = [f"{some} {name}" for name, some in sorted(count.items()) if not name.startswith(("rock", "cheap"))]
    also = f" Also costly: {listed(others)}." if others else ""
    if facts.rocks:
        known = [row["confirmed"] for row in facts.rocks if row.get("confirmed") is not None]
        answer = "unstable" if sum(known) < CONFIRMED_SHARE * len(known) else "found"
        said = f"The other half of the prompts confirms {sum(known)} of {len(known)}." if known else ""
        return Tile("which", question, answer, f"{len(facts.rocks)} {of_all}", f"{said}{also}".strip())
    if facts.rock_word == "costly":
        said = "Without the loss before distillation, what does not learn cannot be told from what does."
        value = plural(count["costly"], "token is costly", "tokens are costly")
        return Tile(
            "which",
            question,
            "not tested",
            value,
            said,
            f"rocktokens study {facts.place}" if facts.has_models else None,
        )
    if count["unclear"]:
        more = (facts.stage("detect").get("enough") or {}).get("prompts_needed")
        said = f"About {plural(int(more), 'prompt')} would settle it." if isinstance(more, int | float) and more else ""
        value = plural(count["unclear"], "token is costly", "tokens are costly")
        return Tile("which", question, "undecided", value, f"{said}{also}".strip())
    return Tile("which", question, "none", f"none {of_all}", f"No token is proven to be costly and to stay so.{also}")


def _cost(facts: Facts) -> tuple[Tile, dict[str, str]]:
    """What the tokens cost, and the numbers of the first screen."""
    question, row = "What do they cost?", footprint_row(facts) if facts.rocks else {}
    loss, places, enrichment = (estimate(row, key) for key in ("share_loss", "share_positions", "enrichment"))
    if loss is None or enrichment is None:
        rocks = "no rocks" if facts.types and facts.rock_word != "costly" else "not tested"
        return Tile("cost", question, rocks, "–", "There is no set of tokens to measure."), {}
    numbers = {"tokens": interval(places, percent), "loss": interval(loss, percent)}
    falls = []
    for of_rocks in (True, False):
        own = [row for row in facts.types if (row["token_id"] in facts.rock_ids) == of_rocks and row.get("count")]
        own = [row for row in own if row.get("loss_pre") is not None and row.get("loss_post") is not None]
        before, after = (sum(row["count"] * row[key] for row in own) for key in ("loss_pre", "loss_post"))
        falls.append(percent(1 - after / before if before else None, 0))
    if facts.rock_word != "costly":
        numbers |= {"improvement": falls[0], "others": falls[1]}
    more = (enrichment.low if math.isfinite(enrichment.low) else enrichment.value) > 1
    answer = "more than their share" if more else "merely frequent"
    said = f"They fill {numbers['tokens']} of the positions."
    return Tile("cost", question, answer, f"{numbers['loss']} of the loss", said), numbers


def _needed(facts: Facts) -> Tile:
    question, rows = "Does the student need them?", verdicts_by_token(facts)
    own = [rows[token_id] for token_id in sorted(facts.rock_ids) if token_id in rows]
    if not facts.rocks:
        answer = "not tested" if not facts.types or facts.rock_word == "costly" else "no rocks"
        return Tile("needed", question, answer, "–", "There is no set of tokens to ban.")
    if not own:
        ran = bool(census_rows(facts))
        why = "None of them was among the tokens that were banned." if ran else "They were not banned at inference."
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
        none_free = bypass(facts) and not set(bypass(facts).get("ids") or ()) & facts.rock_ids
        every = pillars == len(facts.rocks) or none_free
        return Tile("needed", question, "needed" if every else "some needed", f"{pillars} of {len(own)}", said)
    if open_:
        return Tile("needed", question, "undecided", f"{open_} of {len(own)} undecided", said)
    return Tile("needed", question, "not needed", f"none of {len(own)}", said)


def _without(facts: Facts) -> tuple[Tile, dict[str, str]]:
    """The regime that leaves the rocks out, against uniform: `freeze`, else `freeze_rocks`."""
    question, found = "What does training without them do?", finals(facts)
    if not found and not facts.rocks:
        untested = not facts.types or facts.rock_word == "costly"
        said = "Which tokens to leave out is not tested." if untested else "There is nothing to leave out."
        return Tile("without", question, "not tested" if untested else "no rocks", "–", said), {}
    if not found:
        why = "No training left them out." + ("" if facts.has_models else " This run holds no models.")
        return Tile("without", question, "not tested", "–", why, facts.command("compare")), {}
    regime = next((name for name in ("freeze", "freeze_rocks") if name in found), None)
    if regime is None or "uniform" not in found:
        why = f"The comparison holds {listed(list(found))}: none of them left the rocks out."
        if facts.stage("compare").get("nothing_to_freeze"):
            declared = plural(len(facts.rocks), "declared rock")
            why = f"Nothing was left out: none of {declared} is on the bypass list."
        return Tile("without", question, "not frozen", "–", why), {}
    row, base, ids = found[regime], found["uniform"], bypass(facts).get("ids")
    answers = {"unchanged": "no change", "gains": "gains", "costs": "costs accuracy"}
    answer = answers.get(str(row.get("verdict")), "undecided")
    trained, more = {"seeds": plural(row["num_seeds"], "seed")}, None
    said = f"{percent(row['accuracy'])} against {percent(base['accuracy'])}, {trained['seeds']}"
    if row["num_seeds"] < MIN_SEEDS:
        answer, more = "undecided", f"--seeds {MIN_SEEDS}"
        said += f" where a decision takes {MIN_SEEDS} (the interval is over prompts only)"
    elif answer == "undecided" and row.get("num_problems"):
        more = f"--problems {4 * row['num_problems']}"  # four times the prompts halve the interval
    if (ratio := row.get("flops_ratio")) is not None and math.isfinite(ratio):
        trained["saves"] = percent(1 - ratio) if ratio < 1 else "none"
        said += f"; {trained['saves']} of the FLOPs saved"
    if regime == "freeze_rocks":
        named = facts.stage("compare").get("frozen_by", {}).get("freeze_rocks")
        undeclared = f"{plural(len(named or ()), 'token type')} that no test declares rocks"
        said = f"{'All rocks' if facts.rocks or not named else undeclared} left out: {said}"
        if answer in ("no change", "gains") and isinstance(ids, list):
            # What may be skipped is what the list says; without a single type on it nothing is recommended.
            answer, said = "undecided", f"{said}; the bypass list is {'not compared' if ids else 'empty'}"
    again = facts.command("compare") if more else None
    command = f"{again} {more}" if again else None
    value = f"{interval(estimate(row, 'delta'), points)} points"
    return Tile("without", question, answer, value, f"{said}.", command), trained


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


def accuracies(facts: Facts) -> dict[str, Estimate]:
    """Accuracy before distillation, after it, and the teacher's; else that of the graft which draws every position."""
    stage = facts.stage("distill")
    known = {name: stage.get(f"accuracy_{name}") for name in ("before", "after", "teacher")}
    graft = next((row for row in graft_rows(facts) if row["arm"] == "all positions"), None)
    known["teacher"] = known["teacher"] or graft
    found = {name: estimate(row, "accuracy") for name, row in known.items() if isinstance(row, dict)}
    return {name: value for name, value in found.items() if value is not None}


# The terminal


def summary(facts: Facts) -> list[str]:
    """The end of a study, six lines: tokens and loss, whether to skip them, what it saves, accuracy, two commands."""
    found = verdict(facts)
    without = found.tiles[3]
    tokens = found.title
    if facts.rocks:
        named = listed([visible(row["token"])[:12] for row in facts.rocks], NAMED)
        tokens = f"{len(facts.rocks)} ({named})" + (f", {found.numbers['loss']} of the loss" if found.numbers else "")
    skip = {"skip": "yes", "keep": "no", "none": "there is nothing to skip", "undecided": "not yet known"}
    said = skip.get(found.state, found.state) + (f": {without.value}" if without.value != "–" else "")
    lines = {
        "tokens": tokens,
        "skip": f"{said}, {found.numbers['seeds']}" if "seeds" in found.numbers else said,
        "saves": f"{found.numbers['saves']} of the FLOPs" if "saves" in found.numbers else "not tested",
        "accuracy": found.accuracy,
        "look": f"rocktokens view {facts.place}",
        "decide": found.command or "nothing more to run; train on all tokens",
    }
    return [f"{name:8} {text}" for name, text in lines.items()]


def found_by(stage: str, facts: Facts) -> str | None:
    """What a stage that has just ended found, in one line; None where it has nothing to tell."""
    found = verdict(facts)
    which, cost, needed, without = found.tiles
    if stage == "detect" and facts.types:
        tokens = listed([visible(row["token"]) for row in facts.rocks], 2 * NAMED)
        return f"{facts.rock_word}: {which.value}: {tokens}; {cost.value}" if facts.rocks else found.title
    if stage == "distill" and found.accuracies:
        return f"accuracy: {found.accuracy}"
    said = {"knockout": ("needed at inference", needed), "compare": ("trained without them", without)}.get(stage)
    if said is None or not facts.ran(stage):
        return None
    return f"{said[0]}: {said[1].value}, {said[1].answer}. {said[1].detail}"
