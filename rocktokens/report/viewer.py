"""What the rollout viewer shows: some real rollouts with every token's numbers, as compact columns.

The rollouts are those for which scoring kept the most probable tokens (core/shown.py), and a few of the census with
their knocked-out and grafted continuations. A page has a size: rollouts are left out from the end until the compressed
data fit, and the page says how many of how many it shows. `rocktokens view` pages through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rocktokens.facts import Facts
from rocktokens.report.viewer_extras import census_rollouts, overlays, top_tokens
from rocktokens.report.viewer_tokens import Decode, Types, prompt_text, quoted
from rocktokens.score.shown import MAX_LENGTH, shown_rollouts
from rocktokens.show import visible

# Compressed and base64-encoded bytes that the viewer's data may take in a page.
from rocktokens.values import Json, Row

MAX_BYTES = 4_000_000
MAX_STEPS = 9
"""Checkpoints on the slider; more are thinned evenly, the first and the last always stay."""
CHANGING = ("kl", "log_ratio", "student_logprob", "student_entropy", "grad_norm")
"""Measures that differ from checkpoint to checkpoint; the teacher's do not."""
COLUMNS = ("kl", "log_ratio", "student_logprob", "teacher_logprob", "student_entropy", "teacher_entropy", "grad_norm")
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


def payload(facts: Facts, decode: Decode | None = None, *, names: Sequence[str] | None = None) -> Json | None:
    """Rollouts, token types and what is known of each; None without scored rollouts.

    Args:
        facts: The run.
        decode: Token ids to text, for prompts and for tokens that detection did not name.
        names: Rollout ids to show, in place of the usual choice.
    """
    columns = facts.columns("rollouts")
    missing = [name for name in ("prompt_id", "rollout_id", "token_ids") if name not in columns]
    if not columns or missing or not facts.steps:
        facts.notes += (
            [f"the rollout viewer was left out: no column {', '.join(missing)}"] if columns and missing else []
        )
        return None
    everything = rollout_list(facts)
    if names is None:
        chosen = choose(everything)
    else:
        by_name = {row["rollout_id"]: row for row in everything}
        chosen = [by_name[name] for name in names if name in by_name]
    chosen = _whole(facts, chosen)
    scores = _scores(facts, [row["rollout_id"] for row in chosen])
    chosen = [row for row in chosen if (row["prompt_id"], row["rollout_id"]) in scores]
    if not chosen:
        facts.notes.append("the rollout viewer was left out: no rollout has scored occurrences")
        return None
    types = Types(facts, decode)
    rollouts = [_rollout(facts, row, scores[row["prompt_id"], row["rollout_id"]], types, decode) for row in chosen]
    top_tokens(facts, rollouts, types, slider_steps(facts))
    shown_types = [rollout["tokens"] for rollout in rollouts]
    found: Row = {
        "titles": TITLES,
        "rollouts": rollouts,
        "census": census_rollouts(facts, types, decode) if names is None else [],
        "overlays": overlays(facts, rollouts, [types.ids[place] for row in shown_types for place in row]),
        "total": len(everything),
        "steps": slider_steps(facts),
        "definition": facts.definition,
        "has_top": any("top" in rollout for rollout in rollouts),
    }
    found["types"] = types.rows()
    return found


def fitted(found: Row, size: Callable[[Json], int]) -> Json:
    """The payload with as many rollouts as fit the page; `size` says how many bytes it takes there."""
    while (takes := size(found)) > MAX_BYTES and len(found["rollouts"]) > 1:
        keep = max(1, min(len(found["rollouts"]) - 1, int(0.97 * len(found["rollouts"]) * MAX_BYTES / takes)))
        found = {**found, "rollouts": found["rollouts"][:keep]}
    return found


def rollout_list(facts: Facts) -> list[Row]:
    """Every rollout of the run by name, outcome and length, in the order of the table."""
    correct = "correct" if "correct" in facts.columns("rollouts") else "null::boolean"
    found = facts.query(f"select prompt_id, rollout_id, {correct} as correct, len(token_ids) as length from rollouts")
    return [] if found is None else found.to_pylist()


def choose(rows: list[Row]) -> list[Row]:
    """The rollouts that are shown; scoring kept both models' most probable tokens for the same ones."""
    places = shown_rollouts([row.get("correct") for row in rows], [row.get("length") or 0 for row in rows])
    return [rows[place] for place in places]


def slider_steps(facts: Facts) -> list[int]:
    """Checkpoints of the slider."""
    steps = facts.steps
    if len(steps) <= MAX_STEPS:
        return steps
    return [steps[int(place)] for place in np.linspace(0, len(steps) - 1, MAX_STEPS).round()]


def _whole(facts: Facts, chosen: list[Json]) -> list[Json]:
    """The chosen rollouts with all their columns, in the order they were chosen."""
    wanted = quoted(row["rollout_id"] for row in chosen)
    found = facts.query(f"select * from rollouts where rollout_id in ({wanted})") if chosen else None
    rows = {(row["prompt_id"], row["rollout_id"]): row for row in ([] if found is None else found.to_pylist())}
    return [rows[row["prompt_id"], row["rollout_id"]] for row in chosen]


def _scores(facts: Facts, rollout_ids: list[str]) -> dict[tuple[str, str], dict[int, list[dict[str, object]]]]:
    """Scored positions of the chosen rollouts: (prompt, rollout) → checkpoint → rows by position."""
    if not rollout_ids:
        return {}
    steps = ", ".join(map(str, slider_steps(facts)))
    found = facts.query(
        f"select * from occurrences where step in ({steps}) and rollout_id in ({quoted(rollout_ids)}) "
        f"and position < {MAX_LENGTH} order by prompt_id, rollout_id, step, position"
    )
    grouped: dict[tuple[str, str], dict[int, list[dict[str, object]]]] = {}
    for row in [] if found is None else found.to_pylist():
        grouped.setdefault((row["prompt_id"], row["rollout_id"]), {}).setdefault(row["step"], []).append(row)
    last = facts.steps[-1]
    return {name: by_step for name, by_step in grouped.items() if last in by_step}


def _rollout(
    facts: Facts,
    row: Row,
    scores: dict[int, list[Row]],
    types: Types,
    decode: Decode | None,
) -> Row:
    shown = scores[facts.steps[-1]]
    columns = {name: [rounded(score.get(name)) for score in shown] for name in COLUMNS if name in shown[0]}
    first = scores.get(facts.steps[0])
    if first is not None and len(facts.steps) > 1 and len(first) == len(shown):
        columns = {"kl_pre": [rounded(score.get("kl")) for score in first], **columns}
    return {
        "id": row["rollout_id"],
        "prompt": prompt_text(facts, row, decode),
        "answer": None if row.get("answer") is None else visible(str(row["answer"]))[:2000],
        "correct": row.get("correct"),
        "truncated": bool(row.get("truncated")),
        "length": len(row["token_ids"]),
        "positions": [score["position"] for score in shown] if _gaps(shown) else None,
        "tokens": [types.place(score["token_id"]) for score in shown],
        "spells": spelled(facts, row, shown),
        "columns": columns,
        "steps": {
            str(step): {name: [rounded(score.get(name)) for score in own] for name in CHANGING if name in own[0]}
            for step, own in scores.items()
            if step != facts.steps[-1] and len(own) == len(shown)
        },
    }


def _gaps(scores: list[dict[str, object]]) -> bool:
    return [score["position"] for score in scores] != list(range(len(scores)))


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
        if token is not None and text.startswith(token, at):
            at += len(token)
        elif token is not None and (place := text.find(token, at)) >= 0:
            at = place + len(token)
    return found
