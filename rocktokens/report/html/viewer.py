"""What the rollout viewer shows: some real rollouts with every token's numbers, as compact columns.

The whole run can be millions of occurrences; a page holds some tens of thousands. Rollouts are taken evenly over the
run, right and wrong answers in turn, so that the choice shows what the run holds and is the same every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rocktokens.core.shown import MAX_LENGTH, shown_rollouts
from rocktokens.report.figures.causal import verdicts_by_token
from rocktokens.report.formats import interval, points, visible
from rocktokens.report.run_facts import Facts, estimate

COLUMNS = ("kl", "log_ratio", "student_logprob", "teacher_logprob", "student_entropy", "teacher_entropy", "grad_norm")
TITLES = {
    "kl": "KL after OPD",
    "kl_pre": "KL before OPD",
    "log_ratio": "log-ratio",
    "student_logprob": "student log p",
    "teacher_logprob": "teacher log p",
    "student_entropy": "student entropy",
    "teacher_entropy": "teacher entropy",
    "grad_norm": "gradient norm",
}
Decode = Callable[[Sequence[int]], str]


def payload(facts: Facts, decode: Decode | None = None) -> dict[str, Any] | None:
    """Rollouts, token types and what is known of each; None without scored rollouts."""
    columns = facts.columns("rollouts")
    missing = [name for name in ("prompt_id", "rollout_id", "token_ids") if name not in columns]
    if not columns or missing or not facts.steps:
        facts.notes += (
            [f"the rollout viewer was left out: no column {', '.join(missing)}"] if columns and missing else []
        )
        return None
    correct = "correct" if "correct" in columns else "null::boolean"
    found = facts.query(f"select prompt_id, rollout_id, {correct} as correct, len(token_ids) as length from rollouts")
    everything = [] if found is None else found.to_pylist()
    chosen = _whole(facts, choose(everything))
    scores = _scores(facts, [row["rollout_id"] for row in chosen])
    chosen = [row for row in chosen if (row["prompt_id"], row["rollout_id"]) in scores]
    if not chosen:
        facts.notes.append("the rollout viewer was left out: no rollout has scored occurrences")
        return None
    used: dict[int, int] = {}
    rollouts = [_rollout(facts, row, scores[row["prompt_id"], row["rollout_id"]], used, decode) for row in chosen]
    return {
        "titles": TITLES,
        "types": [_type(facts, token_id) for token_id in used],
        "rollouts": rollouts,
        "total": len(everything),
        "steps": [facts.steps[0], facts.steps[-1]],
        "definition": facts.definition,
    }


def choose(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rollouts that are shown; scoring kept both models' most probable tokens for the same ones."""
    places = shown_rollouts([row.get("correct") for row in rows], [row.get("length") or 0 for row in rows])
    return [rows[place] for place in places]


def _whole(facts: Facts, chosen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chosen rollouts with all their columns, in the order they were chosen."""
    wanted = _quoted(row["rollout_id"] for row in chosen)
    found = facts.query(f"select * from rollouts where rollout_id in ({wanted})") if chosen else None
    rows = {(row["prompt_id"], row["rollout_id"]): row for row in ([] if found is None else found.to_pylist())}
    return [rows[row["prompt_id"], row["rollout_id"]] for row in chosen]


def _quoted(names: Iterable[str]) -> str:
    return ", ".join("'" + name.replace("'", "''") + "'" for name in names)


def _scores(facts: Facts, rollout_ids: list[str]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Scored positions of the chosen rollouts at the last checkpoint, with the first checkpoint's kl beside them."""
    wanted = _quoted(rollout_ids)
    first, last = facts.steps[0], facts.steps[-1]
    keys = "prompt_id, rollout_id, position"
    pre = f"select {keys}, kl as kl_pre from occurrences where step = {first} and rollout_id in ({wanted})"
    found = facts.query(
        f"select post.*, pre.kl_pre from (select * from occurrences where step = {last} and rollout_id in ({wanted})) "
        f"post left join ({pre}) pre using ({keys}) order by {keys}"
    )
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in [] if found is None else found.to_pylist():
        if first == last:
            row["kl_pre"] = None
        grouped.setdefault((row["prompt_id"], row["rollout_id"]), []).append(row)
    return grouped


def _rollout(
    facts: Facts, row: dict[str, Any], scores: list[dict[str, Any]], used: dict[int, int], decode: Decode | None
) -> dict[str, Any]:
    shown = scores[:MAX_LENGTH]
    for score in shown:
        used.setdefault(score["token_id"], len(used))
    columns = {
        name: [_rounded(score.get(name)) for score in shown] for name in ("kl_pre", *COLUMNS) if name in shown[0]
    }
    if all(value is None for value in columns.get("kl_pre", [])):
        columns.pop("kl_pre", None)
    return {
        "id": row["rollout_id"],
        "prompt": _prompt(facts, row, decode),
        "answer": None if row.get("answer") is None else visible(str(row["answer"])),
        "correct": row.get("correct"),
        "truncated": bool(row.get("truncated")),
        "length": len(scores),
        "positions": [score["position"] for score in shown] if _gaps(shown) else None,
        "tokens": [used[score["token_id"]] for score in shown],
        "spells": _spelled(facts, row, shown),
        "columns": columns,
    }


def _gaps(scores: list[dict[str, Any]]) -> bool:
    return [score["position"] for score in scores] != list(range(len(scores)))


def _rounded(value: float | None) -> float | None:
    """Four significant digits: what the page shows."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.4g}")


def _prompt(facts: Facts, row: dict[str, Any], decode: Decode | None) -> str | None:
    ids = row.get("prompt_ids") or []
    if decode is not None:
        return visible(decode(ids), flow=True)
    if ids and all(token_id in facts.texts for token_id in ids):
        return visible("".join(facts.texts[token_id] for token_id in ids), flow=True)
    return None


def _spelled(facts: Facts, row: dict[str, Any], scores: list[dict[str, Any]]) -> dict[int, str]:
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
        if token is not None and text.startswith(token, at):
            at += len(token)
        elif token is not None and (place := text.find(token, at)) >= 0:
            at = place + len(token)
    return found


def _type(facts: Facts, token_id: int) -> dict[str, Any]:
    row = _types(facts).get(token_id, {})
    text = facts.token(token_id)
    census = _verdicts(facts).get(token_id)
    shown: dict[str, Any] = {"id": token_id, "text": visible(text), "flow": visible(text, flow=True)}
    shown["cluster"] = row.get("cluster") or "unknown"
    shown["rock"] = token_id in facts.rock_ids
    if census is not None:
        effect = estimate(census, "delta")
        shown["verdict"] = census["verdict"] + (f", Δ {interval(effect, points)} points" if effect else "")
    return shown


def _types(facts: Facts) -> dict[int, dict[str, Any]]:
    return facts.memo("types", lambda: {row["token_id"]: row for row in facts.types})


def _verdicts(facts: Facts) -> dict[int, dict[str, Any]]:
    return facts.memo("verdicts", lambda: verdicts_by_token(facts))
