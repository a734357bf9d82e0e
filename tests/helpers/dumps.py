"""Files as other trainers write them, built to their source: no real cluster dump was at hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import distilling
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

COSTLY = 7


def rollouts(count: int = 60, seed: int = 0, steps: int = 2) -> list[dict]:
    """Rollouts over the tiny tokenizer; token 7 costs 1.5 nats wherever it stands, everything else about nothing."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        prompt = rng.integers(3, 64, rng.integers(2, 6)).tolist()
        tokens = [*rng.integers(3, 20, rng.integers(6, 14)).tolist(), distilling.EOS]
        student = -rng.uniform(0.2, 3.0, len(tokens))
        engine = student + rng.normal(0, 1e-3, len(tokens))
        costs = np.where(np.array(tokens) == COSTLY, 1.5, 0.0) + rng.normal(0, 0.3, len(tokens))
        row = {"step": number * steps // count, "prompt": prompt, "tokens": tokens, "mask": [1] * len(tokens)}
        row |= {"student": student, "engine": engine, "teacher": student - costs}
        found.append(row | {"text": " ".join(f"w{id_}" for id_ in tokens[:-1])})
    return found


def tokenizer(path: Path) -> str:
    """The tokenizer of these rollouts, as a directory."""
    distilling.tokenizer().save_pretrained(path)
    return str(path)


def by_step(rows: list[dict]) -> dict[int, list[dict]]:
    return {step: [row for row in rows if row["step"] == step] for step in sorted({row["step"] for row in rows})}


def write_lines(file: Path, entries: Iterable[dict]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries))
    return file


def slime(path: Path, rows: list[dict]) -> list[Path]:
    """--dump-details: `_build_dump_payload`."""
    (path / "train_data").mkdir(parents=True, exist_ok=True)
    found = []
    for step, own in by_step(rows).items():
        payload = {"rollout_id": step, "samples": [_slime(i, row) for i, row in enumerate(own)]}
        payload |= {"format_version": 2, "rank": 0, "dp_shards": [], "raw_reward": [0.0] * len(own)}
        found.append(path / "train_data" / f"{step}.pt")
        torch.save(payload, found[-1])
    return found


def _slime(index: int, row: dict) -> dict:
    columns = {"log_probs": "student", "rollout_log_probs": "engine", "teacher_log_probs": "teacher"}
    return {
        "sample_index": index,
        "tokens": torch.tensor(row["prompt"] + row["tokens"]),
        "response_lengths": len(row["tokens"]),
        "loss_masks": torch.tensor(row["mask"], dtype=torch.int),
        "opd_reverse_kl": torch.tensor(row["student"] - row["teacher"], dtype=torch.float32),
    } | {name: torch.tensor(row[own], dtype=torch.float32) for name, own in columns.items()}


def prime_rl(path: Path, rows: list[dict], *, teacher: bool = False, stable: bool = True) -> list[Path]:
    """enable_token_export: TokenExporter._write, prompt and rollout in one list."""
    found = []
    for step, own in by_step(rows).items():
        file = path / "token_exports" / f"step_{step}" / "rank_0.jsonl"
        found.append(write_lines(file, (_prime_rl(row, teacher) for row in own)))
        if stable:
            (file.parent / "STABLE").touch()
    return found


def _prime_rl(row: dict, teacher: bool) -> dict:
    before = [0.0] * len(row["prompt"])
    found = {
        "schema_version": 1,
        "step": row["step"],
        "token_ids": row["prompt"] + row["tokens"],
        "loss_mask": [False] * len(before) + [bool(m) for m in row["mask"]],
        "inference_logprobs": before + row["engine"].tolist(),
        "trainer_logprobs": before + row["student"].tolist(),
        "entropy": before + (-row["student"]).tolist(),
        "mismatch_kl": [None] * (len(before) + len(row["tokens"])),
    }
    return found | ({"ref_logprobs": before + row["teacher"].tolist()} if teacher else {})


def verl_jsonl(path: Path, rows: list[dict], *, ids: bool = True) -> list[Path]:
    """trainer.rollout_data_dir: `_write_generations`; with ids, the lists that ride in reward_extra_infos_dict."""

    def entry(row: dict) -> dict:
        text = {"input": "", "output": row["text"], "gts": "w3", "score": 1.0, "step": row["step"]}
        lists = {"prompts": row["prompt"], "responses": row["tokens"], "response_mask": row["mask"]}
        columns = {"old_log_probs": "student", "rollout_log_probs": "engine", "teacher_logprobs": "teacher"}
        lists |= {name: row[own].tolist() for name, own in columns.items()}
        return text | (lists if ids else {})

    return [write_lines(path / f"{step}.jsonl", map(entry, own)) for step, own in by_step(rows).items()]


def verl_batch(path: Path, rows: list[dict], *, top_k: int = 1) -> list[Path]:
    """The batch's tensors under verl's names; teacher_logprobs (B, P + R, K), entry s of token s + 1."""
    path.mkdir(parents=True, exist_ok=True)
    found = []
    columns = {
        "responses": "tokens",
        "response_mask": "mask",
        "old_log_probs": "student",
        "rollout_log_probs": "engine",
    }
    for step, own in by_step(rows).items():
        prompts, responses = max(len(r["prompt"]) for r in own), max(len(r["tokens"]) for r in own)
        batch = {name: torch.zeros((len(own), responses), dtype=torch.long) for name in ("responses", "response_mask")}
        batch |= {name: torch.zeros((len(own), responses)) for name in ("old_log_probs", "rollout_log_probs")}
        batch["prompts"] = torch.zeros((len(own), prompts), dtype=torch.long)
        batch["attention_mask"] = torch.zeros((len(own), prompts + responses), dtype=torch.long)
        batch["teacher_logprobs"] = torch.zeros((len(own), prompts + responses, top_k))
        for i, row in enumerate(own):
            p, r = len(row["prompt"]), len(row["tokens"])
            batch["prompts"][i, prompts - p :] = torch.tensor(row["prompt"])
            batch["attention_mask"][i, prompts - p : prompts + r] = 1
            for name, column in columns.items():
                batch[name][i, :r] = torch.tensor(row[column])
            batch["teacher_logprobs"][i, prompts - 1 : prompts - 1 + r, -1] = torch.tensor(row["teacher"]).float()
        found.append(path / f"batch_{step}.pt")
        torch.save(batch, found[-1])
    return found


def jsonl(path: Path, rows: list[dict], **more) -> list[Path]:
    """Plain JSONL."""
    names = {"step": "step", "prompt_ids": "prompt", "token_ids": "tokens", "text": "text", "mask": "mask"}
    plain = [{name: row[own] for name, own in names.items()} for row in rows]
    for entry, row in zip(plain, rows):
        entry |= {f"{who}_logprobs": row[who].tolist() for who in ("student", "teacher")} | more
    return [write_lines(path, plain)]


def trl(path: Path, rows: list[dict], *, telemetry: bool = True) -> list[Path]:
    """log_completions (TRL's to_parquet) and the telemetry of our trainer."""
    found = []
    for step, own in by_step(rows).items():
        texts = {"prompt": [""] * len(own), "completion": [row["text"] for row in own]}
        tables = {f"completions/completions_{step:05d}.parquet": {"step": [step] * len(own), **texts}}
        if telemetry:
            places = [(i, t, row) for i, row in enumerate(own) for t in range(len(row["tokens"]))]
            student, teacher = (
                np.array([row[who][t] for _, t, row in places], np.float32) for who in ("student", "teacher")
            )
            tables[f"telemetry/step={step}/part-rank0-00000.parquet"] = {
                "prompt_id": [f"p{i}" for i, _, _ in places],
                "rollout_id": [f"{step}/{i}" for i, _, _ in places],
                "position": pa.array([t for _, t, _ in places], pa.int32()),
                "token_id": pa.array([row["tokens"][t] for _, t, row in places], pa.int32()),
                "kl": np.abs(student - teacher),
                "log_ratio": student - teacher,
                "student_logprob": student,
                "teacher_logprob": teacher,
            }
        for name, table in tables.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(table), path / name)
            found.append(path / name)
    return found
