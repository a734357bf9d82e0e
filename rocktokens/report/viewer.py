"""What the rollout viewer shows: some real rollouts with every token's numbers, as compact columns.

The rollouts are those for which scoring kept the most probable tokens (score/shown.py), and a few of the census with
their knocked-out and grafted continuations. A page has a size: rollouts are left out from the end until the compressed
data fit, and the page says how many of how many it shows. `rocktokens view` pages through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rocktokens.causal.figures import ARMS, verdicts_by_token
from rocktokens.facts import Facts
from rocktokens.report.page import as_json, packed
from rocktokens.score.shown import MAX_LENGTH, shown_rollouts
from rocktokens.show import estimate, interval, points, visible
from rocktokens.values import Json, Row

Decode = Callable[[Sequence[int]], str]
MAX_BYTES = 4_000_000
"""Compressed and base64-encoded bytes that the viewer's data may take in a page."""
MAX_STEPS = 9
"""Checkpoints on the slider; more are thinned evenly, the first and the last always stay."""
MAX_CENSUS, MAX_OTHERS = 24, 16
"""Baseline rollouts of the census that are shown, and continuations of each, rocks first."""
PROMPT_LENGTH, ANSWER_LENGTH = 4_000, 2_000
"""Characters that are shown."""
TITLES = {
    "kl": "KL(student ‖ teacher)",
    "kl_pre": "KL before distillation",
    "log_ratio": "log-ratio",
    "student_logprob": "student log p",
    "teacher_logprob": "teacher log p",
    "student_entropy": "student entropy",
    "teacher_entropy": "teacher entropy",
    "grad_norm": "gradient norm",
}
COLUMNS = tuple(name for name in TITLES if name != "kl_pre")
# Measures that differ from checkpoint to checkpoint; the teacher's do not.
CHANGING = tuple(name for name in COLUMNS if not name.startswith("teacher"))


def payload(facts: Facts, decode: Decode | None = None, *, names: Sequence[str] | None = None) -> Json | None:
    """Rollouts, token types and what is known of each; None without scored rollouts.

    Args:
        facts: The run.
        decode: Token ids to text, for prompts and for tokens that detection did not name.
        names: Rollout ids to show, in place of the usual choice.
    """
    columns = facts.columns("rollouts")
    missing = [name for name in ("prompt_id", "rollout_id", "token_ids") if name not in columns]
    if columns and missing:
        facts.notes.append(f"the rollout viewer was left out: no column {', '.join(missing)}")
    if missing or not facts.steps:
        return None
    everything, census = rollout_list(facts), names is None
    if names is None:
        # Scoring kept both models' most probable tokens for the same rollouts.
        right, lengths = ([row[key] for row in everything] for key in ("correct", "length"))
        places = shown_rollouts(right, [length or 0 for length in lengths])
        names = [everything[place]["rollout_id"] for place in places]
    rows = facts.ask(f"select * from rollouts where rollout_id in ({quoted(names)})") if names else []
    by_name = {row["rollout_id"]: row for row in rows}
    scores = _scores(facts, list(by_name))
    chosen = [by_name[name] for name in names if name in scores]
    if not chosen:
        facts.notes.append("the rollout viewer was left out: no rollout has scored occurrences")
        return None
    types = Types(facts, decode)
    rollouts = [_rollout(facts, row, scores[row["rollout_id"]], types, decode) for row in chosen]
    _add_top_tokens(facts, rollouts, types)
    found: Row = {
        "titles": TITLES,
        "rollouts": rollouts,
        "census": census_rollouts(facts, types, decode) if census else [],
        "total": len(everything),
        "steps": slider_steps(facts),
        "definition": facts.definition,
        "has_top": any("top" in rollout for rollout in rollouts),
    }
    found["types"] = types.rows()
    return found


def fitted(found: Row) -> Json:
    """The payload with as many rollouts as fit the page."""
    while (takes := len(packed(as_json(found)))) > MAX_BYTES and len(found["rollouts"]) > 1:
        keep = max(1, min(len(found["rollouts"]) - 1, int(0.97 * len(found["rollouts"]) * MAX_BYTES / takes)))
        found = {**found, "rollouts": found["rollouts"][:keep]}
    return found


def rollout_list(facts: Facts) -> list[Row]:
    """Every rollout of the run by name, outcome and length, in the order of the table."""
    correct = "correct" if "correct" in facts.columns("rollouts") else "null::boolean"
    return facts.ask(f"select prompt_id, rollout_id, {correct} as correct, len(token_ids) as length from rollouts")


def slider_steps(facts: Facts) -> list[int]:
    """Checkpoints of the slider."""
    steps = facts.steps
    if len(steps) <= MAX_STEPS:
        return steps
    return [steps[int(place)] for place in np.linspace(0, len(steps) - 1, MAX_STEPS).round()]


def quoted(names: Iterable[str]) -> str:
    """Names as a list of SQL strings."""
    return ", ".join("'" + name.replace("'", "''") + "'" for name in names)


class Types:
    """Token types in the order in which the page first needs them."""

    def __init__(self, facts: Facts, decode: Decode | None) -> None:
        self.facts, self.decode = facts, decode
        self._place: dict[int, int] = {}

    def place(self, token_id: int) -> int:
        """Where a token type stands in the page's list."""
        return self._place.setdefault(token_id, len(self._place))

    def rows(self) -> list[Row]:
        """What the page knows about each."""
        facts, verdicts = self.facts, verdicts_by_token(self.facts)
        known = {row["token_id"]: row for row in facts.types}
        rows = []
        for token_id in self._place:
            row, text = known.get(token_id, {}), token_text(facts, token_id, self.decode)
            shown: Row = {"id": token_id, "text": visible(text), "flow": visible(text, flow=True)}
            shown |= {"cluster": row.get("cluster") or "unknown", "rock": token_id in facts.rock_ids}
            shown |= {"class": str(row["class"])} if row.get("class") else {}
            if token_id in verdicts:
                effect = estimate(verdicts[token_id], "delta")
                change = f", Δ {interval(effect, points)} points" if effect else ""
                shown["verdict"] = f"{verdicts[token_id]['verdict']}{change}"
            rows.append(shown)
        return rows


def token_text(facts: Facts, token_id: int, decode: Decode | None) -> str:
    """A token's text: as detection named it, else by the tokenizer, else its id."""
    return facts.token(token_id) if token_id in facts.texts or decode is None else decode([token_id])


def _scores(facts: Facts, names: list[str]) -> dict[str, dict[int, list[Row]]]:
    """Scored positions of the rollouts that the last checkpoint scored: rollout → checkpoint → rows by position."""
    if not names:
        return {}
    grouped: dict[str, dict[int, list[Row]]] = {}
    for row in facts.ask(
        f"select * from occurrences where step in ({', '.join(map(str, slider_steps(facts)))}) "
        f"and rollout_id in ({quoted(names)}) and position < {MAX_LENGTH} order by rollout_id, step, position"
    ):
        grouped.setdefault(row["rollout_id"], {}).setdefault(row["step"], []).append(row)
    return {name: by_step for name, by_step in grouped.items() if facts.steps[-1] in by_step}


def _common(facts: Facts, row: Row, decode: Decode | None) -> Row:
    """What is shown of every rollout, of detection or of the census."""
    return {
        "id": row["rollout_id"],
        "prompt": prompt_text(facts, row, decode),
        "answer": None if row.get("answer") is None else visible(str(row["answer"]))[:ANSWER_LENGTH],
        "correct": row.get("correct"),
        "truncated": bool(row.get("truncated")),
        "length": len(row["token_ids"]),
    }


def _rollout(facts: Facts, row: Row, scores: dict[int, list[Row]], types: Types, decode: Decode | None) -> Row:
    shown, first = scores[facts.steps[-1]], scores.get(facts.steps[0], [])
    columns = {name: [rounded(score.get(name)) for score in shown] for name in COLUMNS if name in shown[0]}
    if len(facts.steps) > 1 and len(first) == len(shown):
        columns = {"kl_pre": [rounded(score.get("kl")) for score in first], **columns}
    positions = [score["position"] for score in shown]
    return _common(facts, row, decode) | {
        "positions": None if positions == list(range(len(shown))) else positions,
        "tokens": [types.place(score["token_id"]) for score in shown],
        "spells": spelled(facts, row, shown),
        "columns": columns,
        "steps": {
            str(step): {name: [rounded(score.get(name)) for score in own] for name in CHANGING if name in own[0]}
            for step, own in scores.items()
            if step != facts.steps[-1] and len(own) == len(shown)
        },
    }


def prompt_text(facts: Facts, row: Row, decode: Decode | None) -> str | None:
    """The prompt as text, its middle left out where it is long; None where nothing can spell it."""
    ids = row.get("prompt_ids") or []
    if decode is not None:
        text = visible(decode(ids), flow=True)
    elif ids and all(token_id in facts.texts for token_id in ids):
        text = visible("".join(facts.texts[token_id] for token_id in ids), flow=True)
    else:
        return None
    half = PROMPT_LENGTH // 2
    if len(text) <= PROMPT_LENGTH:
        return text
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"


def rounded(value: float | None, digits: int = 4) -> float | None:
    """As many significant digits as the page shows."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.{digits}g}")


def spelled(facts: Facts, row: Row, scores: list[Row]) -> dict[int, str]:
    """Where tokens cut a character (byte-level BPE), what they spell together: index of the first → the text."""
    text, at, start, found = row.get("text") or "", 0, None, {}
    for index, score in enumerate([*scores, None]):
        token = None if score is None else facts.token(score["token_id"])
        if token is not None and "\ufffd" in token:
            start = index if start is None else start
            continue
        if start is not None:
            end = len(text) if token is None else text.find(token, at)
            if end > at:
                found[start] = visible(text[at:end], flow=True)
            start = None
        if token is not None and (place := text.find(token, at)) >= 0:
            at = place + len(token)
    return found


def _add_top_tokens(facts: Facts, rollouts: list[Row], types: Types) -> None:
    """Add both models' most probable tokens to the rollouts, where scoring kept them.

    A rollout gets `top`: the teacher's ids (as places in the list of types) and log-probabilities, `k` per position,
    flat, and the student's for every checkpoint.
    """
    if not any((facts.run.path / "top_tokens").glob("step=*/*.parquet")):
        return
    shown = {rollout["id"]: rollout for rollout in rollouts}
    grouped: dict[tuple[str, int], list[Row]] = {}
    for row in facts.ask(
        f"select * from top_tokens where step in ({', '.join(map(str, slider_steps(facts)))}) "
        f"and rollout_id in ({quoted(shown)}) and position < {MAX_LENGTH} order by rollout_id, step, position"
    ):
        grouped.setdefault((row["rollout_id"], row["step"]), []).append(row)
    for (name, step), rows in grouped.items():
        if len(rows) == len(shown[name]["tokens"]):
            top = shown[name].setdefault("top", {"k": len(rows[0]["student_top_ids"]), "student": {}})
            top["student"][str(step)] = _flat(rows, "student", types)
            top["teacher"] = _flat(rows, "teacher", types)  # the same under every checkpoint


def _flat(rows: list[Row], who: str, types: Types) -> dict[str, list[Any]]:
    ids = [types.place(token_id) for row in rows for token_id in row[f"{who}_top_ids"]]
    return {"ids": ids, "logprobs": [rounded(value, 3) for row in rows for value in row[f"{who}_top_logprobs"]]}


def census_rollouts(facts: Facts, types: Types, decode: Decode | None) -> list[Row]:
    """Baseline rollouts of the census with their knocked-out and grafted continuations, where their ids were kept."""
    others = _others(facts)
    if not others or "token_ids" not in facts.columns("baseline"):
        return []
    names = quoted(list(others)[:MAX_CENSUS])
    shown = []
    for row in facts.ask(f"select * from baseline where rollout_id in ({names}) order by rollout_id"):
        shown.append(
            _common(facts, row, decode)
            | {
                "positions": None,
                "tokens": [types.place(token_id) for token_id in row["token_ids"][:MAX_LENGTH]],
                "spells": {},
                "columns": {},
                "steps": {},
                "others": [
                    {
                        "title": title,
                        "at": other["resumed_at"],
                        "correct": other["correct"],
                        "tokens": [types.place(token_id) for token_id in other["token_ids"][:MAX_LENGTH]],
                    }
                    for _, title, other in sorted(others[row["rollout_id"]], key=lambda item: item[0])[:MAX_OTHERS]
                ],
            }
        )
    return shown


def _others(facts: Facts) -> dict[str, list[tuple[int, str, Row]]]:
    """Baseline rollout → (order, what was changed, row) of its other continuations."""
    found: dict[str, list[tuple[int, str, Row]]] = {}
    if "token_ids" in facts.columns("knockouts"):
        names = {row.get("set_id"): row for row in facts.rows("census")}
        for row in facts.ask(
            "select * from knockouts where arm = 'knockout' and token_ids is not null order by rollout_id, set_id"
        ):
            census = names.get(row["set_id"], {})
            title = f"{visible(str(census.get('token') or row['set_id']))} banned"
            order = 0 if census.get("token_id") in facts.rock_ids else 2
            found.setdefault(row["rollout_id"], []).append((order, title, row))
    if "token_ids" in facts.columns("graft_rollouts"):
        for row in facts.ask("select * from graft_rollouts where token_ids is not null order by rollout_id, arm"):
            title = f"{ARMS.get(row['arm'], row['arm'])} drawn by the teacher"
            if row["arm"] == "placebo":
                title = "rocks drawn again by the student (placebo)"
            found.setdefault(row["rollout_id"], []).append((1, title, row))
    return found
