"""What the stages found about the rocks, read once from the run's tables: the facts that the verdict rests on.

Each function answers one question (which, needed, compared, stable, accuracies) from the columns that runs/schema.py
documents. What a run does not hold is None or 0, never guessed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass

from rocktokens.causal.figures import census_rows, counted, epsilon, graft_rows, verdicts_by_token
from rocktokens.compare.figures import finals
from rocktokens.facts import Facts
from rocktokens.show import estimate, interval, listed, number, percent, plural, points
from rocktokens.stats import MIN_SEEDS, Estimate
from rocktokens.values import Json

# Below this share of declared rocks confirmed on the other half of the prompts, the set is called unstable.
CONFIRMED_SHARE = 0.5


@dataclass(frozen=True)
class Matter:
    """What the census and the graft say about the rocks."""

    ran: bool
    tested: int
    pillars: int
    undecided: int
    listed: int | None
    """Rocks on the bypass list; None without a list."""
    sentence: str


@dataclass(frozen=True)
class Comparison:
    """What training without the rocks did."""

    ran: bool
    verdict: str | None
    """unchanged, gains, costs or undecided; None where no regime froze them."""
    change: Estimate | None
    compute_saved: float | None
    """1 − the ratio of FLOPs to those of uniform training."""
    frozen: int | None
    """Token types that were left out; None where that was not recorded."""
    why: str
    sentence: str


def bypass(facts: Facts) -> Json:
    """The run's bypass list; empty where there is none or it cannot be read."""
    return facts.memo("bypass", lambda: _bypass(facts))


def _bypass(facts: Facts) -> Json:
    path = facts.run.path / "bypass.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        facts.notes.append(f"bypass.json was left out: {error}")
        return {}
    return found if isinstance(found, dict) else {}


def decisions(facts: Facts) -> dict[int, tuple[str, str]]:
    """Token id → (skip, keep or undecided; the reason in words), from the bypass list."""
    found = {}
    for row in bypass(facts).get("decisions") or []:
        if isinstance(row, dict) and isinstance(row.get("token_id"), int) and row.get("decision"):
            found[row["token_id"]] = (str(row["decision"]), str(row.get("why") or row.get("reason") or ""))
    return found


def matter(facts: Facts) -> Matter:
    """Verdicts of the census on the rocks, and what grafting them gains."""
    rows = verdicts_by_token(facts)
    own = [rows[token_id] for token_id in sorted(facts.rock_ids) if token_id in rows]
    count = Counter(row["verdict"] for row in own)
    decided = decisions(facts)
    on_list = sum(decided.get(token_id, ("",))[0] == "skip" for token_id in facts.rock_ids) if bypass(facts) else None
    return Matter(
        bool(census_rows(facts)),
        len(own),
        count["Strong Pillar"],
        count["Undecided"],
        on_list,
        _matter_sentence(facts, count),
    )


def _matter_sentence(facts: Facts, count: Counter[str]) -> str:
    said = [counted(name, number_of) for name, number_of in count.most_common()]
    smallest = facts.stage("knockout").get("smallest_detectable_effect")
    power = f" The census could see effects from {number(100 * smallest, 1)} points." if smallest else ""
    gain = rock_gain(facts)
    graft = f" Drawn by the teacher instead, they gain {interval(gain, points)} points." if gain else ""
    words = listed(said, 6)
    return f"Banned one at a time: {words} (ε = {number(100 * epsilon(facts), 1)} points).{power}{graft}"


def rock_gain(facts: Facts) -> Estimate | None:
    """Gain in accuracy when the teacher draws the rocks."""
    return next((item for row in graft_rows(facts) if row["arm"] == "rocks" and (item := estimate(row, "gain"))), None)


def comparison(facts: Facts) -> Comparison:
    """The regime that leaves the rocks out, against uniform: `freeze`, else `freeze_rocks`."""
    found = finals(facts)
    regime = next((name for name in ("freeze", "freeze_rocks") if name in found), None)
    if not found:
        return Comparison(False, None, None, None, None, "", "")
    if regime is None or "uniform" not in found:
        why = f"the comparison holds {listed(list(found))}: no regime froze the rocks"
        if facts.stage("compare").get("nothing_to_freeze"):
            why = _nothing_frozen(facts)
        return Comparison(True, None, None, None, None, why, why[0].upper() + why[1:] + ".")
    row, base = found[regime], found["uniform"]
    change = estimate(row, "delta")
    ratio = row.get("flops_ratio")
    saved = 1 - ratio if ratio is not None and math.isfinite(ratio) else None
    verdict = str(row.get("verdict") or _verdict_of(change))
    said = f"{percent(row['accuracy'])} against {percent(base['accuracy'])}, {plural(row['num_seeds'], 'seed')}"
    if row["num_seeds"] < MIN_SEEDS:  # runs of earlier versions recorded a verdict of one seed
        verdict = "undecided"
        said += f" where a decision takes {MIN_SEEDS} (the interval is over prompts only)"
    if saved is not None:
        said += f"; {percent(saved) if saved > 0 else 'none'} of the FLOPs saved"
    seconds = estimate(row, "seconds_ratio")
    if seconds is not None and math.isfinite(seconds.low):
        said += f", {interval(seconds)} × the seconds"
    if row.get("ceiling"):
        said += f"; ceiling {number(row['ceiling'])} ×"
    listed_ids = bypass(facts).get("ids")
    frozen = len(listed_ids) if regime == "freeze" and isinstance(listed_ids, list) and listed_ids else None
    if regime == "freeze_rocks":
        said = f"{_left_out(facts)} left out: {said}"
        if verdict in ("unchanged", "gains") and isinstance(listed_ids, list):
            # What may be skipped is what the list says; without a single type on it nothing is recommended.
            said += f"; the bypass list is {'empty' if not listed_ids else 'not compared'}"
            verdict = "undecided"
    return Comparison(True, verdict, change, saved, frozen, "", f"{said}.")


def _left_out(facts: Facts) -> str:
    """What the regime `freeze_rocks` left out: the declared rocks, or token types that the user named."""
    named = facts.stage("compare").get("frozen_by", {}).get("freeze_rocks")
    if facts.rocks or not named:
        return "All rocks"
    return f"{plural(len(named), 'token type')} that no test declares rocks"


def _nothing_frozen(facts: Facts) -> str:
    """Why the regime `freeze` had nothing to leave out."""
    count = len(facts.rocks)
    if not count:
        return "nothing was frozen: no rock is declared"
    which = "the declared rock is not" if count == 1 else f"none of the {count} declared rocks is"
    return f"nothing was frozen: {which} on the bypass list"


def _verdict_of(change: Estimate | None) -> str:
    """From the interval alone, where the comparison recorded no verdict of its own."""
    if change is None or not (math.isfinite(change.low) and math.isfinite(change.high)):
        return "undecided"
    return "costs" if change.high < 0 else "gains" if change.low > 0 else "undecided"


def unstable(facts: Facts) -> bool:
    """Whether the set of rocks would be another one on other prompts."""
    return bool(unstable_words(facts))


def unstable_words(facts: Facts) -> str:
    """Why the set is not stable; empty where it is, or where nothing tells."""
    confirmed = [row.get("confirmed") for row in facts.rocks]
    known = [value for value in confirmed if value is not None]
    if known and sum(known) < CONFIRMED_SHARE * len(known):
        return f"the other half of the prompts confirms {sum(known)} of {len(known)}"
    return ""


def which_sentence(facts: Facts) -> str:
    """How the set was declared, and what stands beside it."""
    count = Counter(str(row.get("class")) for row in facts.types if row.get("class"))
    said = [f"By the `{facts.definition}` definition"]
    confirmed = [row["confirmed"] for row in facts.rocks if row.get("confirmed") is not None]
    if confirmed:
        said[0] += f"; {sum(confirmed)} of {len(confirmed)} confirmed on the other half of the prompts"
    others = [f"{number_of} {name}" for name, number_of in sorted(count.items()) if name not in ("rock", "None", "")]
    others = [text for text in others if not text.endswith(" cheap")]
    if others:
        said.append(f"Also costly: {listed(others)}")
    words = unstable_words(facts)
    if words and facts.rocks:
        said.append(words[0].upper() + words[1:])
    return ". ".join(said) + "."


def no_rocks_sentence(facts: Facts) -> str:
    """What “none” rests on."""
    count = Counter(str(row.get("class")) for row in facts.types if row.get("class"))
    learning = sum(number_of for name, number_of in count.items() if name.startswith("learning"))
    parts = [f"Of {plural(len(facts.types), 'token type')} none stays expensive by the `{facts.definition}` definition"]
    if learning:
        parts.append(f"{learning} {'is' if learning == 1 else 'are'} costly and learning")
    if count["unclear"]:
        more = (facts.stage("detect").get("enough") or {}).get("prompts_needed")
        parts.append(f"{count['unclear']} {'is' if count['unclear'] == 1 else 'are'} costly and unclear")
        if isinstance(more, int | float) and more > 0:
            parts[-1] += f" (about {plural(int(more), 'prompt')} would settle it)"
    return "; ".join(parts) + "."


def accuracies(facts: Facts) -> list[tuple[str, Estimate, str]]:
    """(name, value, what it was measured on): before distillation, after it, the teacher's."""
    stage, found = facts.stage("distill"), []
    problems = facts.config.get("problems")
    where = "held-out prompts of the distillation" + (f", {problems} of them" if isinstance(problems, int) else "")
    for key, name in (("accuracy_before", "before"), ("accuracy_after", "after")):
        row = stage.get(key)
        value = estimate(row, "accuracy") if isinstance(row, dict) else None
        if value is not None:
            found.append((name, value, where))
    row = stage.get("accuracy_teacher")
    value = estimate(row, "accuracy") if isinstance(row, dict) else None
    if value is not None:
        found.append(("teacher", value, where))
        return found
    for row in graft_rows(facts):
        if row["arm"] == "all positions" and (value := estimate(row, "accuracy")) is not None:
            found.append(("teacher", value, "prompts of the graft, every position drawn by the teacher"))
    return found


def all_accuracies(facts: Facts) -> list[tuple[str, Estimate, str]]:
    """Every accuracy that this run holds, with what it was measured on: they differ because that differs."""
    names = {"before": "student before distillation", "after": "student after distillation", "teacher": "teacher"}
    found = [(names[name], value, where) for name, value, where in accuracies(facts)]
    sample = facts.stage("sample")
    if sample.get("accuracy") is not None:
        value = Estimate(float(sample["accuracy"]), math.nan, math.nan, 0)
        found.append(("sampled rollouts", value, "prompts of the detection, last checkpoint, temperature of `sample`"))
    census = estimate(facts.stage("knockout"), "accuracy")
    if census is not None:
        found.append(("census, nothing banned", census, "prompts of the census, last checkpoint"))
    for regime, row in finals(facts).items():
        ended = estimate(row, "accuracy")
        if ended is not None:
            where = f"prompts of the comparison, {plural(row['num_seeds'], 'seed')}, trained anew from the same start"
            found.append((f"regime {regime}", ended, where))
    return found
