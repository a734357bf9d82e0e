"""A synthetic run with everything a report can show, every table made by the function that makes it in a real run.

Losses are planted: a few tokens stay expensive at every checkpoint, a few learn, the rest are cheap. Outcomes of the
causal tests and of the comparison are drawn; their tables and verdicts are computed. Hostile token texts can be put in
place of ordinary ones.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rocktokens.causal.census import BannedSet, Effects, Outcomes, census_facts, census_table, make_schedule, run_looks
from rocktokens.causal.graft import GraftRow, graft_table
from rocktokens.causal.settings import KnockoutConfig
from rocktokens.compare.settings import CompareConfig
from rocktokens.compare.stage import write_comparison
from rocktokens.detect.rocks import Occurrences, detect_rocks
from rocktokens.detect.settings import DetectConfig
from rocktokens.geometry.gradients import GradientGeometry, compare_groups
from rocktokens.run import Run, open_run
from rocktokens.score.shown import shown_rollouts
from rocktokens.stage import Stage
from rocktokens.stats import Estimate
from rocktokens.tables import FLOP_STAGES, OCCURRENCES, ROLLOUTS, STEP_STAGES, TABLES, TOP_TOKENS
from rocktokens.train.record import TrainingRecord

HOME = tempfile.TemporaryDirectory(prefix="rocktokens-reports-")
CENSUS_PROMPTS, COMPARE_PROMPTS = 1000, 400
SECONDS = {"rollout": 0.7, "teacher": 0.2, "student": 0.25, "head": 0.1, "optimiser": 0.05}

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
    _geometry(run, rng, report, tables[STEPS[-1]])
    _training(run, rng)
    _census(run, rng, report, tokenizer)
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
    config = DetectConfig(resamples=200, seed=seed)
    report = detect_rocks(Occurrences.read(tables), tokenizer, config)
    for name in ("types", "sensitivity", "persistence", "footprints", "clusters"):
        run.write(name, report.tables[name])
    run.manifest["config"]["detect"] = {"resamples": 200, "seed": seed}
    run.finish("detect", report.facts())
    return report


def _geometry(run: Run, rng: np.random.Generator, report: Any, table: pa.Table) -> None:
    geometry = GradientGeometry(len(VOCABULARY))
    token_N = torch.tensor(np.array(table["token_id"]), dtype=torch.long)
    direction = torch.from_numpy(rng.normal(size=(len(VOCABULARY), len(VOCABULARY))))
    noise = torch.from_numpy(rng.normal(size=(len(token_N), len(VOCABULARY))))
    size = torch.from_numpy(np.array(table["grad_norm"], dtype=float))[:, None]
    geometry.update(token_N, (direction[token_N] + 2 * noise + 0.5) * size)
    found = geometry.table(report.groups)
    run.write("geometry", found)
    run.finish("geometry", {"sketched": False, "comparisons": compare_groups(found)})


def _training(run: Run, rng: np.random.Generator) -> None:
    record = TrainingRecord()
    for step in range(101):
        done = step / 100
        losses = {"loss_rocks": 0.55 - 0.02 * done + rng.normal(0, 0.02), "loss_rest": 0.09 - 0.05 * done}
        right = 0.35 + 0.25 * done
        read = {"accuracy": right, "accuracy_low": right - 0.05, "accuracy_high": right + 0.05}
        record.rows.append(_step(step, 0.2 - 0.1 * done) | (losses if step else {}) | (read if step % 20 == 0 else {}))
    record.write(run)
    ends = [{"accuracy": value, "accuracy_low": value - 0.05, "accuracy_high": value + 0.05} for value in (0.35, 0.6)]
    run.finish("distill", {"steps": 100, "saturated": True, "accuracy_before": ends[0], "accuracy_after": ends[1]})


def _step(step: int, loss: float, *, kept: float = 1.0, pace: float = 1.0) -> dict[str, Any]:
    """What training records of a step, accuracy and losses by group aside."""
    row = {"step": step, "loss": loss, "kept_share": kept, "weight_share": kept, "ceiling": 1 / kept}
    row |= {"tokens": 900, "prompt_tokens": 100, "rollouts": 16, "invalid": 0, "learning_rate": 1e-4}
    row |= {"seconds": 1.3 * pace, "seconds_processor": 1.2 * pace}
    row |= {f"seconds_{stage}": pace * SECONDS.get(stage, 0.0) for stage in STEP_STAGES}
    return row | {f"flops_{stage}": 1e9 * pace for stage in FLOP_STAGES}


def _census(run: Run, rng: np.random.Generator, report: Any, tokenizer: FakeTokenizer) -> None:
    """A census of simulated outcomes: three pillars, one stumbling block, the others without an effect."""
    rocks = [int(token_id) for token_id in report.rocks]
    pillars = [VOCABULARY.index(text) for text in ("3", " +", " =")]
    ids = list(dict.fromkeys([*rocks, *pillars, *range(15, 24)]))
    sets = [BannedSet(f"token:{i}", "token", i, tokenizer.texts[i], (i,)) for i in ids]
    config = KnockoutConfig(resamples=500, rounds=1)
    base_P = rng.random(CENSUS_PROMPTS) < 0.6
    rows: list[dict[str, Any]] = []

    def measure(look: int, begin: int, end: int, active: Sequence[int]) -> Outcomes:
        jobs = []
        for column in active:
            fall, rise = (
                (0.15, 0.0) if ids[column] in pillars else (0.0, 0.3) if ids[column] == rocks[0] else (0.0, 0.0)
            )
            for prompt in range(begin, end):
                uses = rng.random() < 0.5
                flip = uses and rng.random() < (fall if base_P[prompt] else rise)
                jobs.append((prompt, column, True, bool(base_P[prompt]) != flip))
                jobs.append((prompt, column, False, bool(base_P[prompt]) != (rng.random() < 0.02)))
        prompt_J, column_J, knockout_J, after_J = (np.array(values) for values in zip(*jobs))
        rows.extend(_outcome(p, "knockout" if k else "placebo", sets[c].set_id, a) for p, c, k, a in jobs)
        return Outcomes(
            problem_N=np.arange(begin, end),
            correct_N=base_P[begin:end].astype(float),
            used_V=np.full(len(sets), (end - begin) // 2),
            problem_J=prompt_J,
            before_J=base_P[prompt_J].astype(float),
            column_J=column_J,
            is_knockout_J=knockout_J.astype(bool),
            after_J=after_J.astype(float),
            placebo_problems=end,
        )

    effects = Effects(sets, CENSUS_PROMPTS, rollouts=1)
    census = run_looks(effects, make_schedule(CENSUS_PROMPTS, config.rounds), measure, config, seed=0)
    run.write("census", census_table(census))
    base = run.read("rollouts").to_pylist()[:6]
    run.write("baseline", pa.Table.from_pylist(base, schema=ROLLOUTS))
    rows += [_without(row, token_id) for row in base for token_id in rocks[:3] if token_id in row["token_ids"]]
    run.write("knockouts", pa.Table.from_pylist(rows, schema=TABLES["knockouts"].schema))
    run.finish("knockout", census_facts(census))


def _outcome(prompt: int, arm: str, set_id: str, correct: bool) -> dict[str, Any]:
    names = {"prompt_id": f"c{prompt}", "rollout_id": f"c{prompt}#0", "arm": arm, "set_id": set_id}
    return {**names, "correct": bool(correct), "num_tokens": 12}


def _without(row: dict[str, Any], token_id: int) -> dict[str, Any]:
    """A rollout resumed where it used the token."""
    at = row["token_ids"].index(token_id)
    tokens = [*row["token_ids"][:at], VOCABULARY.index(" hmm"), *row["token_ids"][at + 1 :]]
    names = {"prompt_id": row["prompt_id"], "rollout_id": row["rollout_id"], "arm": "knockout"}
    made = {"set_id": f"token:{token_id}", "resumed_at": at, "correct": False, "num_tokens": 12}
    return names | made | {"token_ids": tokens}


def _grafts(run: Run) -> None:
    gains = {"rocks": 0.004, "rest": 0.17, "all": 0.18, "control": 0.02, "cluster digits": 0.12}
    rows = [
        GraftRow(
            arm,
            6,
            0.16,
            Estimate(0.6 + gain, 0.58 + gain, 0.62 + gain, 60),
            Estimate(gain, gain - 0.012, gain + 0.012, 60),
        )
        for arm, gain in gains.items()
    ]
    types = run.types().to_pylist()
    digits = [row["token_id"] for row in types if row["cluster"] == "digits"]
    run.write("grafts", graft_table(rows, types, {"rocks": run.facts("detect")["rocks"], "cluster digits": digits}))
    run.finish("graft", {"accuracy": 0.6})


def _compare(run: Run, rng: np.random.Generator) -> None:
    """Trainings as the stage leaves them, read and written by the stage's own functions."""
    ends = {"uniform": (0.62, 1.0), "freeze": (0.618, 0.93), "random": (0.55, 0.93), "prefix": (0.61, 0.64)}
    ends["small"] = (0.6, 0.4)
    difficulty_P = rng.random(COMPARE_PROMPTS)
    arms = {
        (seed, regime): _arm(run.path / "compare" / regime / f"seed={seed}", rng, regime, end, pace, difficulty_P)
        for seed in range(3)
        for regime, (end, pace) in ends.items()
    }
    config = CompareConfig(regimes=tuple(ends), resamples=200, problems=COMPARE_PROMPTS)
    rocks = run.facts("detect")["rocks"]
    write_comparison(Stage(run, "compare", {}, {}), arms, config, {"normalise": "kept", "steps": 20, "rocks": rocks})


def _arm(path: Path, rng: np.random.Generator, regime: str, end: float, pace: float, difficulty_P: np.ndarray) -> Run:
    arm, record = Run.create(path), TrainingRecord()
    kept = 0.78 if regime in ("freeze", "random") else 1.0
    for step in range(1, 21):
        row = _step(step, 0.1, kept=kept, pace=5 * pace * rng.uniform(0.97, 1.03))
        row |= {"scored": row["tokens"], "changed_share": 1 - kept, "end_dropped_share": 0.0}
        if step % 5 == 1:
            row |= {"changed_loss_share": 0.4 * (kept < 1)}
        record.rows.append(row)
    record.write(arm)
    for step in range(0, 21, 4):
        accuracy = 0.35 + (end - 0.35) * (1 - np.exp(-step / 6)) + rng.normal(0, 0.001)
        names = [f"h{i}" for i in range(COMPARE_PROMPTS)]
        columns = {"prompt_id": names, "correct": (difficulty_P < accuracy).astype(float)}
        columns |= {"rollouts": np.ones(COMPARE_PROMPTS, np.int32), "length": rng.normal(40, 5, COMPARE_PROMPTS)}
        arm.write(f"problems/step={step}", pa.table(columns | {"truncated": np.zeros(COMPARE_PROMPTS)}))
        losses = {"rock_positions": [40, 50, 60], "rock_loss": [18.0, 27.0, 30.0], "rest_positions": [300, 320, 340]}
        arm.write(f"losses/step={step}", pa.table({"prompt_id": names[:3], **losses, "rest_loss": [17.0, 20.0, 21.0]}))
        found = {"heldout_loss_rocks": 0.5, "heldout_loss_rest": 0.06}
        found |= {"heldout_length": rng.normal(40, 0.5), "heldout_truncated": 0.01 + 0.001 * rng.random()}
        arm.manifest["stages"][f"read/step={step}"] = found
    arm.finish("train", {"steps": 20})
    return arm
