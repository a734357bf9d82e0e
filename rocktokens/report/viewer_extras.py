"""More about the shown rollouts: both models' most probable tokens, what selectors would keep, other continuations.

Each part is left out where the run does not hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from rocktokens.causal.figures import ARMS
from rocktokens.errors import RockTokensError
from rocktokens.facts import Facts
from rocktokens.report.evidence import decisions
from rocktokens.report.viewer_tokens import Types, prompt_text, quoted
from rocktokens.score.shown import MAX_LENGTH
from rocktokens.show import visible
from rocktokens.values import Json, Row

MAX_CENSUS = 24
"""Baseline rollouts of the census that are shown with their other continuations."""
MAX_OTHERS = 16
"""Continuations shown for one of them, rocks first."""


def top_tokens(facts: Facts, rollouts: list[Row], types: Types, steps: Sequence[int]) -> None:
    """Add both models' most probable tokens to the rollouts, where scoring kept them.

    A rollout gets `top`: the teacher's ids (as places in the list of types) and log-probabilities, `k` per position,
    flat, and the student's for every checkpoint.
    """
    if not any((facts.run.path / "top_tokens").glob("step=*/*.parquet")):
        return
    wanted, shown = ", ".join(map(str, steps)), {rollout["id"]: rollout for rollout in rollouts}
    found = facts.query(
        f"select * from top_tokens where step in ({wanted}) and rollout_id in ({quoted(shown)}) "
        f"and position < {MAX_LENGTH} order by rollout_id, step, position"
    )
    grouped: dict[tuple[str, int], list[Row]] = {}
    for row in [] if found is None else found.to_pylist():
        grouped.setdefault((row["rollout_id"], row["step"]), []).append(row)
    for (name, step), rows in grouped.items():
        rollout = shown[name]
        if len(rows) != len(rollout["tokens"]):
            continue
        top = rollout.setdefault("top", {"k": len(rows[0]["student_top_ids"]), "student": {}})
        top["student"][str(step)] = _flat(rows, "student", types)
        top["teacher"] = _flat(rows, "teacher", types)  # the same under every checkpoint


def _flat(rows: list[Row], who: str, types: Types) -> dict[str, list[Any]]:
    ids = [types.place(token_id) for row in rows for token_id in row[f"{who}_top_ids"]]
    return {"ids": ids, "logprobs": [_short(value) for row in rows for value in row[f"{who}_top_logprobs"]]}


def _short(value: float) -> float | None:
    return float(f"{value:.3g}") if np.isfinite(value) else None


def overlays(facts: Facts, rollouts: list[Row], token_ids: list[int]) -> list[Json]:
    """What selectors would keep, the shown rollouts taken as the rollouts of one step.

    Each has a title and, per rollout, a string with one digit per position: the weight in ninths.
    """
    if not rollouts or not token_ids:
        return []
    import torch

    from rocktokens.select.interface import SelectorBatch, make_selector

    lengths = [len(rollout["tokens"]) for rollout in rollouts]
    columns = {name: _joined(rollouts, name) for name in ("kl", "student_entropy")}
    longest = int(facts.config.get("rollouts", {}).get("max_new_tokens") or max(lengths))
    batch = SelectorBatch(
        token_N=torch.tensor(token_ids),
        rollout_N=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        position_N=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        step=1,
        length_limit=max(longest, max(lengths)),
        value_N=torch.from_numpy(columns["kl"]),
        student_entropy_N=torch.from_numpy(columns["student_entropy"]),
    )
    skipped = sorted(token_id for token_id, (decision, _) in decisions(facts).items() if decision == "skip")
    rocks = sorted(facts.rock_ids)
    wanted: list[tuple[str, str, Json]] = []
    wanted += [("freeze: the bypass list left out", "freeze", {"rocks": skipped})] if skipped else []
    wanted += [("freeze_rocks: all rocks left out", "freeze", {"rocks": rocks})] if rocks else []
    wanted += [
        ("entropy: the top 20 % by student entropy", "entropy", {"keep": 0.2}),
        ("divergence: the top 20 % by KL", "divergence", {"keep": 0.2}),
        ("prefix: the first half of the length limit", "prefix", {"keep": 0.5}),
    ]
    return [
        {"title": title, "kept": kept}
        for title, name, options in wanted
        if (kept := _kept(lambda name=name, options=options: make_selector(name, **options).weights(batch), lengths))  # type: ignore[misc]
    ]


def _joined(rollouts: list[Row], name: str) -> np.ndarray:
    """A column of all rollouts, what is missing as 0."""
    values = [value for rollout in rollouts for value in rollout["columns"].get(name, [None] * len(rollout["tokens"]))]
    return np.array([0.0 if value is None else value for value in values])


def _kept(weigh: Callable[[], Any], lengths: list[int]) -> list[str]:
    """The weights as digits, one string per rollout; none where the selector refuses this batch."""
    try:
        weight_N = weigh().numpy()
    except RockTokensError:
        return []
    digits = "".join(str(round(9 * min(max(float(weight), 0.0), 1.0))) for weight in weight_N)
    ends = np.cumsum([0, *lengths])
    return [digits[start:end] for start, end in pairwise(ends)]


def census_rollouts(facts: Facts, types: Types, decode: Callable[[Sequence[int]], str] | None) -> list[Row]:
    """Baseline rollouts of the census with their knocked-out and grafted continuations, where their ids were kept."""
    others = _others(facts)
    if not others or "token_ids" not in facts.columns("baseline"):
        return []
    names = list(others)[:MAX_CENSUS]
    found = facts.query(f"select * from baseline where rollout_id in ({quoted(names)}) order by rollout_id")
    shown = []
    for row in [] if found is None else found.to_pylist():
        tokens = row["token_ids"][:MAX_LENGTH]
        shown.append(
            {
                "id": row["rollout_id"],
                "prompt": prompt_text(facts, row, decode),
                "answer": None if row.get("answer") is None else visible(str(row["answer"]))[:2000],
                "correct": row.get("correct"),
                "truncated": bool(row.get("truncated")),
                "length": len(row["token_ids"]),
                "positions": None,
                "tokens": [types.place(token_id) for token_id in tokens],
                "spells": {},
                "columns": {},
                "steps": {},
                "others": [
                    {**other, "tokens": [types.place(token_id) for token_id in other["tokens"][:MAX_LENGTH]]}
                    for other in others[row["rollout_id"]][:MAX_OTHERS]
                ],
            }
        )
    return shown


def _others(facts: Facts) -> dict[str, list[Json]]:
    """Baseline rollout → its other continuations: what was changed, where, the tokens, right or wrong."""
    found: dict[str, list[tuple[int, Row]]] = {}
    if "token_ids" in facts.columns("knockouts"):
        names = {row.get("set_id"): row for row in facts.rows("census")}
        rows = facts.query(
            "select * from knockouts where arm = 'knockout' and repeat = 0 and token_ids is not null "
            "order by rollout_id, set_id"
        )
        for row in [] if rows is None else rows.to_pylist():
            census = names.get(row["set_id"], {})
            rock = census.get("token_id") in facts.rock_ids
            title = f"{visible(str(census.get('token') or row['set_id']))} banned"
            found.setdefault(row["rollout_id"], []).append((0 if rock else 2, _other(row, title)))
    if "token_ids" in facts.columns("graft_rollouts"):
        rows = facts.query("select * from graft_rollouts where token_ids is not null order by rollout_id, arm")
        for row in [] if rows is None else rows.to_pylist():
            title = f"{ARMS.get(row['arm'], row['arm'])} drawn by the teacher"
            if row["arm"] == "placebo":
                title = "rocks drawn again by the student (placebo)"
            found.setdefault(row["rollout_id"], []).append((1, _other(row, title)))
    return {name: [other for _, other in sorted(own, key=lambda item: item[0])] for name, own in found.items()}


def _other(row: Row, title: str) -> Json:
    return {"title": title, "at": row["resumed_at"], "correct": row["correct"], "tokens": row["token_ids"]}
