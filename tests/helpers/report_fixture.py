"""A synthetic run with everything a report can show: written through the store, detected by the real detector.

Losses are planted: a few tokens stay expensive at every checkpoint, a few learn, the rest are cheap. Tables of later
stages hold plausible rows by their documented columns. Hostile token texts can be put in place of ordinary ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rocktokens.config import DetectConfig
from rocktokens.core.detection.detect import Occurrences, detect_rocks
from rocktokens.core.geometry import GradientGeometry, compare_groups
from rocktokens.core.shown import shown_rollouts
from rocktokens.runs.schema import OCCURRENCES, ROLLOUTS, TOP_TOKENS
from rocktokens.runs.store import Run

STEPS = (0, 50, 100)
OPENERS = [" So", " Thus", " Then", " First"]
MARKS = [" \\(", "\\)", "\n", ":", "**", "\n\n"]
DIGITS = list("0123456789")
WORDS = [" add", " the", " result", " is", " of", " and", " we", " get", " apples", " more", ".", " =", " +", " boxes"]
RARE = [" perhaps", " hmm", " however"]
VOCABULARY = ["<eos>", *OPENERS, *MARKS, *DIGITS, *WORDS, *RARE]
ROCKS = (" So", " Thus", " \\(", ":")
HOSTILE = (
    "</script><script>window.hacked=1</script>",
    '<img src=x onerror="window.hacked=1">',
    "\"'`&amp;&lt;b&gt;",
    "\u202eevil\u202c",
    "\x00\x07\x1b[31m",
    "\ufffd",
    "<b>bold</b>",
    '=HYPERLINK("x")',
    "javascript:alert(1)",
    "$\\alpha$ %{x}",
    "{{data}}",
    "\u200b",
    "مرحبا",
    "👩‍👩‍👧",
)


class FakeTokenizer:
    """Names tokens by a list."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def decode(self, ids: list[int], **_: Any) -> str:
        """Texts put together."""
        return "".join(self.texts[token_id] for token_id in ids)


def make_run(path: Path, *, stages: str = "all", hostile: bool = False, prompts: int = 40, seed: int = 0) -> Run:
    """Write a run; `stages`: all, or detect for one that stopped there, or score."""
    rng = np.random.default_rng(seed)
    texts = list(VOCABULARY)
    if hostile:
        for place, text in zip([2, *range(len(texts) - len(HOSTILE) + 1, len(texts))], HOSTILE):
            texts[place] = text
    tokenizer = FakeTokenizer(texts)
    config = {
        "pair": {"student": "models/tiny-student", "teacher": "models/tiny-teacher", "dtype": "auto"},
        "prompts": {"source": "arithmetic", "split": "detection", "seed": 0},
        "rollouts": {"num_rollouts": 4, "max_new_tokens": 64, "temperature": 1.0, "seed": 3},
    }
    run = Run.create(path, config)
    rollouts = _rollouts(rng, tokenizer, prompts, hostile)
    run.write("rollouts", rollouts)
    run.finish("sample", {"rollouts": len(rollouts), "accuracy": float(np.mean(rollouts["correct"].to_pylist()))})
    tables = _occurrences(rng, rollouts)
    for step, table in tables.items():
        with run.part_writer(step) as writer:
            writer.write(table)
        _top_tokens(run, rng, rollouts, step)
    run.finish("score", {"steps": list(STEPS)})
    if stages == "score":
        return run
    report = _detect(run, tables, tokenizer, seed)
    if stages == "detect":
        return run
    _geometry(run, rng, report, tables[STEPS[-1]])
    _training(run, rng)
    _census(run, rng, report, tokenizer)
    _grafts(run)
    _compare(run, rng)
    return run


def _sentence(rng: np.random.Generator) -> list[int]:
    at = {text: place for place, text in enumerate(VOCABULARY)}
    line = [at[OPENERS[rng.integers(4)]], at[" we"], at[" add"], at[" \\("]]
    line += [at[DIGITS[rng.integers(10)]], at[" +"], at[DIGITS[rng.integers(10)]], at["\\)"], at[" and"], at[" get"]]
    line += [at[WORDS[rng.integers(len(WORDS))]], at[":"], at[DIGITS[rng.integers(10)]], at["."], at["\n"]]
    if rng.random() < 0.12:
        line.insert(4, at[RARE[rng.integers(3)]])
    return line


def _rollouts(rng: np.random.Generator, tokenizer: FakeTokenizer, prompts: int, hostile: bool) -> pa.Table:
    rows = []
    for prompt in range(prompts):
        ids = [VOCABULARY.index(text) for text in (" add", "3", " +", "4")]
        for number in range(4):
            tokens = [token for _ in range(rng.integers(1, 5)) for token in _sentence(rng)]
            if hostile:
                tokens += list(range(len(VOCABULARY) - len(HOSTILE) + 1, len(VOCABULARY)))
            tokens.append(0)
            rows.append(
                {
                    "prompt_id": f"p{prompt:03d}",
                    "rollout_id": f"p{prompt:03d}#{number}",
                    "prompt_ids": ids,
                    "token_ids": tokens,
                    "text": tokenizer.decode(tokens[:-1]).replace("\ufffd", "🙂"),
                    "answer": "</p><script>window.hacked=1</script>" if hostile else "7",
                    "correct": bool(rng.random() < 0.6),
                    "truncated": False,
                    "seed": int(rng.integers(1 << 30)),
                }
            )
    return pa.Table.from_pylist(rows, schema=ROLLOUTS)


def _occurrences(rng: np.random.Generator, rollouts: pa.Table) -> dict[int, pa.Table]:
    rock_ids = {VOCABULARY.index(text) for text in ROCKS}
    rare_ids = {VOCABULARY.index(text) for text in RARE}
    keys = [
        (row["prompt_id"], row["rollout_id"], position, token)
        for row in rollouts.to_pylist()
        for position, token in enumerate(row["token_ids"])
    ]
    token_N = np.array([key[3] for key in keys])
    base_N = rng.gamma(1.2, 0.03, len(keys))
    level_N = np.where(np.isin(token_N, list(rock_ids)), rng.gamma(6, 0.09, len(keys)), base_N)
    rare_N = np.isin(token_N, list(rare_ids))
    tables = {}
    for step in STEPS:
        learned = 1 - step / STEPS[-1]
        scale_N = np.where(np.isin(token_N, list(rock_ids)), 1.0 + 0.03 * learned, 0.6 + 0.9 * learned)
        kl_N = np.where(rare_N, (0.5 + 1.6 * learned) * (0.7 + 0.6 * rng.random(len(keys))), level_N * scale_N)
        columns = {
            "prompt_id": [key[0] for key in keys],
            "rollout_id": [key[1] for key in keys],
            "position": [key[2] for key in keys],
            "token_id": token_N,
            "kl": kl_N,
            "log_ratio": kl_N + rng.normal(0, 0.1, len(keys)),
            "student_logprob": -rng.gamma(1, 0.5, len(keys)),
            "teacher_logprob": -rng.gamma(1, 0.5, len(keys)) - kl_N,
            "student_entropy": rng.gamma(2, 0.2, len(keys)),
            "teacher_entropy": rng.gamma(2, 0.2, len(keys)),
            "grad_norm": np.sqrt(kl_N) * 0.4,
            "is_eos": token_N == 0,
        }
        tables[step] = pa.table({name: pa.array(values) for name, values in columns.items()}).cast(OCCURRENCES)
    return tables


def _top_tokens(run: Run, rng: np.random.Generator, rollouts: pa.Table, step: int) -> None:
    """Five tokens of each model at every position of the rollouts that a report shows."""
    lengths = [len(tokens) for tokens in rollouts["token_ids"].to_pylist()]
    writer = run.top_token_writer(step)
    for place in shown_rollouts(rollouts["correct"].to_pylist(), lengths):
        row = rollouts.slice(place, 1).to_pylist()[0]
        columns: dict[str, Any] = {
            "prompt_id": [row["prompt_id"]] * lengths[place],
            "rollout_id": [row["rollout_id"]] * lengths[place],
            "position": np.arange(lengths[place], dtype=np.int32),
        }
        for who in ("student", "teacher"):
            order = [rng.permutation(len(VOCABULARY))[:5] for _ in range(lengths[place])]
            shares = [np.sort(rng.dirichlet(np.ones(6)))[::-1][:5] for _ in order]
            columns[f"{who}_top_ids"] = [ids.tolist() for ids in order]
            columns[f"{who}_top_logprobs"] = [np.log(share).tolist() for share in shares]
        writer.write(pa.table(columns).cast(TOP_TOKENS))
    writer.flush()


def _detect(run: Run, tables: dict[int, pa.Table], tokenizer: FakeTokenizer, seed: int) -> Any:
    config = DetectConfig(definition="context", k=6, resamples=200, num_rare=5, seed=seed)
    report = detect_rocks(Occurrences.from_checkpoints(tables), tokenizer, config)
    for name in ("types", "sweep", "sensitivity", "persistence"):
        run.write(name, getattr(report, f"{name}_table")())
    run.write("footprints", report.footprint_table())
    run.write("clusters", report.cluster_table())
    groups = {name: [int(token_id) for token_id in ids] for name, ids in report.groups.items()}
    run.manifest["config"]["detect"] = {"definition": "context", "k": 6, "resamples": 200, "num_rare": 5, "seed": seed}
    run.finish("detect", {**report.facts(), "groups": groups})
    return report


def _geometry(run: Run, rng: np.random.Generator, report: Any, table: pa.Table) -> None:
    geometry = GradientGeometry(len(VOCABULARY))
    token_N = torch.tensor(np.array(table["token_id"]), dtype=torch.long)
    direction = torch.from_numpy(rng.normal(size=(len(VOCABULARY), len(VOCABULARY))))
    noise = torch.from_numpy(rng.normal(size=(len(token_N), len(VOCABULARY))))
    size = torch.from_numpy(np.array(table["grad_norm"], dtype=float))[:, None]
    geometry.update(token_N, (direction[token_N] + 2 * noise + 0.5) * size)
    result = geometry.result()
    run.write("geometry", result.table(report.groups))
    comparisons = [row._asdict() for row in compare_groups(result, report.groups)]
    run.finish("geometry", {"sketched": False, "pooled_types": 0, "comparisons": comparisons})


def _training(run: Run, rng: np.random.Generator) -> None:
    steps = np.arange(0, 101)
    rows = []
    for step in steps.tolist():
        done = step / 100
        rows.append(
            {
                "step": step,
                "loss": 0.2 - 0.1 * done,
                "loss_rocks": None if step == 0 else float(0.55 - 0.02 * done + rng.normal(0, 0.02)),
                "loss_rest": None if step == 0 else float(0.09 - 0.05 * done + rng.normal(0, 0.004)),
                "kept_share": 1.0,
                "accuracy": float(0.35 + 0.25 * done) if step % 20 == 0 else None,
                "seconds": 1.3,
                "seconds_rollout": 0.7,
                "seconds_teacher": 0.2,
                "seconds_student": 0.25,
                "seconds_head": 0.1,
                "seconds_optimiser": 0.05,
            }
        )
    run.write("training", pa.Table.from_pylist(rows))
    ends = [{"accuracy": value, "accuracy_low": value - 0.05, "accuracy_high": value + 0.05} for value in (0.35, 0.6)]
    run.finish("distill", {"steps": 100, "saturated": True, "accuracy_before": ends[0], "accuracy_after": ends[1]})


def _census(run: Run, rng: np.random.Generator, report: Any, tokenizer: FakeTokenizer) -> None:
    rows = []
    rocks = [int(token_id) for token_id in report.rocks]
    pillars = [VOCABULARY.index(text) for text in ("3", " +", " =")]
    for token_id in [*rocks, *pillars, *range(15, 24)]:
        delta, width, verdict = float(rng.normal(0, 0.002)), 0.008, "Proven Neutral"
        if token_id in pillars:
            delta, width, verdict = -0.08 + float(rng.normal(0, 0.02)), 0.03, "Strong Pillar"
        elif token_id == rocks[0]:
            delta, width, verdict = 0.035, 0.02, "Strong Stumbling Block"
        elif token_id % 5 == 0:
            width, verdict = 0.025, "Undecided"
        rows.append(
            {
                "set_id": f"token:{token_id}",
                "token_id": token_id,
                "token": tokenizer.texts[token_id],
                "kind": "token",
                "delta": delta,
                "delta_low": delta - width,
                "delta_high": delta + width,
                "p": 0.001 if "Strong" in verdict else 0.6,
                "p_bh": 0.004 if "Strong" in verdict else 0.8,
                "num_used": int(rng.integers(10, 200)),
                "placebo_floor": float(rng.uniform(0.002, 0.012)),
                "role": "candidate",
                "members": [token_id],
                "verdict": verdict,
            }
        )
    run.write("census", pa.Table.from_pylist(rows))
    outcomes = []
    for prompt in range(60):
        right = bool(rng.random() < 0.6)
        outcomes.append((f"c{prompt}", f"c{prompt}#0", "baseline", "", None, right, None))
        for candidate in range(6):
            flipped = right if rng.random() > 0.04 else not right
            outcomes.append((f"c{prompt}", f"c{prompt}#0", "placebo", f"token:{candidate}", 3, flipped, None))
    base = run.read("rollouts").to_pylist()[:6]
    for row in base:
        for token_id in rocks[:3]:
            if token_id in row["token_ids"]:
                at = row["token_ids"].index(token_id)
                tokens = [*row["token_ids"][:at], VOCABULARY.index(" hmm"), *row["token_ids"][at + 1 :]]
                key = (row["prompt_id"], row["rollout_id"], "knockout", f"token:{token_id}", at, False, tokens)
                outcomes.append(key)
    run.write("baseline", pa.Table.from_pylist(base, schema=ROLLOUTS))
    names = ("prompt_id", "rollout_id", "arm", "set_id", "resumed_at", "correct", "token_ids")
    run.write("knockouts", pa.Table.from_pylist([{**dict(zip(names, row)), "repeat": 0} for row in outcomes]))
    run.finish("knockout", {"epsilon": 0.01, "smallest_detectable_effect": 0.018, "noise_floor": 0.012})


def _grafts(run: Run) -> None:
    gains = {"rocks": 0.004, "rest": 0.17, "all": 0.18, "control": 0.02, "cluster digits": 0.12}
    rows = [
        {
            "arm": arm,
            "num_types": 6,
            "share_positions": 0.16,
            "grad_share": None if arm == "control" else 0.5,
            "accuracy": 0.6 + gain,
            "gain": gain,
            "gain_low": gain - 0.012,
            "gain_high": gain + 0.012,
        }
        for arm, gain in gains.items()
    ]
    run.write("grafts", pa.Table.from_pylist(rows))
    run.finish("graft", {"accuracy": 0.6})


def _compare(run: Run, rng: np.random.Generator) -> None:
    ends = {"uniform": (0.62, 1.0), "freeze": (0.615, 0.93), "random": (0.55, 0.93), "prefix": (0.61, 0.64)}
    rows = []
    for regime, (end, pace) in ends.items():
        for seed in range(3):
            for step in range(0, 101, 20):
                accuracy = 0.35 + (end - 0.35) * (1 - np.exp(-step / 30)) + rng.normal(0, 0.008)
                rows.append(
                    {
                        "regime": regime,
                        "seed": seed,
                        "step": step,
                        "seconds": 1.3 * pace,
                        "seconds_total": 1.3 * step * pace,
                        "accuracy": float(accuracy),
                        "kept_share": 0.78 if regime in ("freeze", "random") else 1.0,
                        "seconds_rollout": 14.0 * pace,
                        "seconds_teacher": 4.0,
                        "seconds_student": 5.0,
                        "seconds_head": 2.0 * pace,
                    }
                )
    run.write("compare", pa.Table.from_pylist(rows))
    summary = [
        {
            "regime": regime,
            "verdict": "unchanged" if regime in ("uniform", "freeze", "prefix") else "costs",
            "accuracy": end,
            "accuracy_low": end - 0.02,
            "accuracy_high": end + 0.02,
            "delta": end - 0.62,
            "delta_low": end - 0.63,
            "delta_high": end - 0.61,
            "seconds_ratio": pace,
            "flops_ratio": pace,
            "num_seeds": 3,
            "kept_share": 0.78 if regime in ("freeze", "random") else 1.0,
            "ceiling": 1.28 if regime in ("freeze", "random") else 1.0,
        }
        for regime, (end, pace) in ends.items()
    ]
    run.write("compare_summary", pa.Table.from_pylist(summary))
    verdicts = ["The rocks can be skipped here: trained without them, accuracy changed by −0.5 points [−1.5, +0.5]."]
    run.finish("compare", {"regimes": summary, "verdicts": verdicts, "estimators": "Means over seeds and problems."})
