"""A synthetic run with everything a report can show, every table by its schema.

Losses are planted: a few tokens stay expensive at every checkpoint, a few learn, the rest are cheap; detection finds
them. Results of the causal tests and of the comparison are written down (test_story reports a real study). Hostile
token texts can be put in place of ordinary ones.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rocktokens.detect.rocks import Occurrences, detect_rocks
from rocktokens.detect.settings import DetectConfig
from rocktokens.run import Run, open_run
from rocktokens.score.shown import shown_rollouts
from rocktokens.tables import OCCURRENCES, ROLLOUTS, TABLES, TOP_TOKENS

HOME = tempfile.TemporaryDirectory(prefix="rocktokens-reports-")
SECONDS = {"seconds_rollout": 0.7, "seconds_teacher": 0.2, "seconds_student": 0.25, "seconds_head": 0.1}
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
    """Write a run; `stages`: all, or detect for one that stopped there, or score. The same run again is a copy."""
    shutil.copytree(_made(stages, hostile, prompts, seed), path)
    return open_run(path)


@cache
def _made(stages: str, hostile: bool, prompts: int, seed: int) -> Path:
    """A run that was written, to be copied."""
    path = Path(HOME.name) / f"{stages}-{hostile}-{prompts}-{seed}"
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
        run.write_part(step, table)
        _top_tokens(run, rng, rollouts, step)
    run.finish("score", {"steps": list(STEPS)})
    if stages == "score":
        return path
    report = _detect(run, tables, tokenizer, seed)
    if stages == "detect":
        return path
    _geometry(run, rng, report)
    _training(run, rng)
    _census(run, report, tokenizer)
    _grafts(run)
    _compare(run, rng)
    return path


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
    tables = []
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
        tables.append(pa.table(columns).cast(TOP_TOKENS))
    run.write_part(step, pa.concat_tables(tables), folder="top_tokens")


def _detect(run: Run, tables: dict[int, pa.Table], tokenizer: FakeTokenizer, seed: int) -> Any:
    report = detect_rocks(Occurrences.read(tables), tokenizer, DetectConfig(resamples=200, seed=seed))
    for name in ("types", "sensitivity", "persistence", "footprints", "clusters"):
        run.write(name, report.tables[name])
    run.manifest["config"]["detect"] = {"resamples": 200, "seed": seed}
    run.finish("detect", report.facts())
    return report


def _write(run: Run, name: str, rows: list[dict[str, Any]]) -> None:
    """A table with the columns of its schema; what a row does not have is empty."""
    run.write(name, pa.Table.from_pylist(rows, schema=TABLES[name].schema))


def _around(name: str, value: float, reach: float) -> dict[str, float]:
    return {name: value, f"{name}_low": value - reach, f"{name}_high": value + reach}


def _geometry(run: Run, rng: np.random.Generator, report: Any) -> None:
    groups = {int(token_id): name for name, ids in report.groups.items() for token_id in ids}
    types = run.types().to_pylist()
    total, loss = sum(row["count"] for row in types), sum(row["count"] * row["loss_post"] for row in types)
    rows = []
    for row in types:
        rows.append({"token_id": row["token_id"], "group": groups.get(row["token_id"], "other"), "count": row["count"]})
        rows[-1] |= {"position_share": row["count"] / total, "grad_share": row["count"] * row["loss_post"] / loss}
        rows[-1] |= {"mean_grad_norm": row["loss_post"], "cos_others": rng.uniform(-0.5, 0.9)}
    _write(run, "geometry", rows)
    compared = {"metric": "cos_others", "first": "rocks", "second": "random others", "p_value": 0.2}
    run.finish("geometry", {"sketched": False, "comparisons": [compared]})


def _training(run: Run, rng: np.random.Generator) -> None:
    rows = []
    for step in range(101):
        done = step / 100
        losses = {"loss_rocks": 0.55 - 0.02 * done + rng.normal(0, 0.02), "loss_rest": 0.09 - 0.05 * done}
        rows.append({"step": step, "loss": 0.2 - 0.1 * done, "kept_share": 1.0, **SECONDS} | (losses if step else {}))
        rows[-1] |= _around("accuracy", 0.35 + 0.25 * done, 0.05) if step % 20 == 0 else {}
    _write(run, "training", rows)
    ends = {f"accuracy_{name}": _around("accuracy", value, 0.05) for name, value in (("before", 0.35), ("after", 0.6))}
    run.finish("distill", {"steps": 100, "saturated": True, **ends})


def _census(run: Run, report: Any, tokenizer: FakeTokenizer) -> None:
    """Three pillars, one rock that is a stumbling block, the others proven neutral; continuations of six rollouts."""
    rocks = [int(token_id) for token_id in report.rocks]
    pillars = [VOCABULARY.index(text) for text in ("3", " +", " =")]
    effects = dict.fromkeys([*rocks, *pillars, *range(15, 24)], ("Proven Neutral", 0.0))
    effects |= {token_id: ("Strong Pillar", -0.05 - token_id / 1000) for token_id in pillars}
    effects |= {rocks[0]: ("Strong Stumbling Block", 0.04)} if rocks else {}
    rows = []
    for token_id, (verdict, delta) in effects.items():
        names = {"set_id": f"token:{token_id}", "role": "candidate", "kind": "token", "token_id": token_id}
        rows.append(names | {"token": tokenizer.texts[token_id], "members": [token_id], "verdict": verdict})
        rows[-1] |= _around("delta", delta, 0.008) | {"used_share": 0.5, "placebo_floor": 0.011, "p": 0.01}
    _write(run, "census", rows)
    base = run.read("rollouts").to_pylist()[:6]
    _write(run, "baseline", base)
    used = [(row, token_id) for row in base for token_id in rocks[:3] if token_id in row["token_ids"]]
    _write(run, "knockouts", [_without(row, token_id) for row, token_id in used])
    known = {"epsilon": 0.01, "noise_floor": 0.011, "smallest_detectable_effect": 0.003, "power": 0.8}
    run.finish("knockout", known | _around("accuracy", 0.6, 0.03))


def _without(row: dict[str, Any], token_id: int) -> dict[str, Any]:
    """A rollout resumed where it used the token."""
    at = row["token_ids"].index(token_id)
    tokens = [*row["token_ids"][:at], VOCABULARY.index(" hmm"), *row["token_ids"][at + 1 :]]
    names = {"prompt_id": row["prompt_id"], "rollout_id": row["rollout_id"], "arm": "knockout"}
    made = {"set_id": f"token:{token_id}", "resumed_at": at, "correct": False, "num_tokens": 12}
    return names | made | {"token_ids": tokens}


def _grafts(run: Run) -> None:
    gains = {"rocks": 0.004, "rest": 0.17, "all": 0.18, "control": 0.02, "cluster digits": 0.12}
    own = {"num_types": 6, "share_positions": 0.16, "grad_share": 0.5}
    rows = [{"arm": arm, **own, **_around("gain", gain, 0.012)} for arm, gain in gains.items()]
    _write(run, "grafts", [row | _around("accuracy", 0.6 + row["gain"], 0.02) for row in rows])
    run.finish("graft", {"accuracy": 0.6})


def _compare(run: Run, rng: np.random.Generator) -> None:
    ends = {"uniform": (0.62, 1.0), "freeze": (0.618, 0.93), "random": (0.55, 0.93), "prefix": (0.61, 0.64)}
    curves, finals = [], []
    for regime, (end, pace) in ends.items():
        delta = end - ends["uniform"][0]
        row = {"regime": regime, "verdict": "unchanged" if delta > -0.02 else "costs", "num_seeds": 3}
        row |= {"over_seeds": True, "flops_ratio": pace, "kept_share": 0.78, "ceiling": 1.28, "seconds": 100 * pace}
        row |= _around("delta", delta, 0.007) | _around("accuracy", end, 0.03)
        finals.append(row | _around("seconds_ratio", pace, 0.02) | _around("change_same_tokens", delta, 0.01))
        for seed, step in itertools.product(range(3), range(0, 21, 4)):
            accuracy = 0.35 + (end - 0.35) * (1 - np.exp(-step / 6)) + rng.normal(0, 0.001)
            spent = {"tokens_total": 900 * step * pace, "seconds_total": 5.0 * step * pace}
            seconds = {name: pace * value for name, value in SECONDS.items()}
            curves.append({"regime": regime, "seed": seed, "step": step, "accuracy": accuracy} | spent | seconds)
    _write(run, "compare", curves)
    _write(run, "compare_summary", finals)
    run.finish(
        "compare", {"steps": 20, "verdicts": ["The rocks can be skipped here."], "estimators": "Means over seeds."}
    )
