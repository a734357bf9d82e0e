"""Files as other trainers write them, built to their source: no real cluster dump was at hand."""

from __future__ import annotations

import json
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
        found.append(
            {
                "step": number * steps // count,
                "prompt": prompt,
                "tokens": tokens,
                "student": student,
                "engine": engine,
                "teacher": student - costs,
                "mask": [1] * len(tokens),
                "text": " ".join(f"w{id_}" for id_ in tokens[:-1]),
            }
        )
    return found


def tokenizer(path: Path) -> str:
    """The tokenizer of these rollouts, as a directory."""
    distilling.tokenizer().save_pretrained(path)
    return str(path)


def by_step(rows: list[dict]) -> dict[int, list[dict]]:
    return {step: [row for row in rows if row["step"] == step] for step in sorted({row["step"] for row in rows})}


def slime(path: Path, rows: list[dict], *, teacher: bool = True, kind: str = "train_data") -> list[Path]:
    """--dump-details: `_build_dump_payload` (train_data) or `save_debug_rollout_data` (rollout_data)."""
    found = []
    for step, own in by_step(rows).items():
        samples = [
            _slime_train(i, row) if kind == "train_data" else _slime_rollout(i, row) for i, row in enumerate(own)
        ]
        if not teacher:
            for sample in samples:
                sample.pop("teacher_log_probs"), sample.pop("opd_reverse_kl", None)
        payload = {"rollout_id": step, "samples": samples}
        if kind == "train_data":
            payload |= {"format_version": 2, "rank": 0, "dp_shards": [], "raw_reward": [0.0] * len(own)}
        file = path / kind / f"{step}.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(payload, file)
        found.append(file)
    return found


def _slime_train(index: int, row: dict) -> dict:
    def tensor(values):
        return torch.tensor(np.asarray(values), dtype=torch.float32)

    return {
        "sample_index": index,
        "tokens": torch.tensor(row["prompt"] + row["tokens"]),
        "response_lengths": len(row["tokens"]),
        "loss_masks": torch.tensor(row["mask"], dtype=torch.int),
        "log_probs": tensor(row["student"]),
        "rollout_log_probs": tensor(row["engine"]),
        "teacher_log_probs": tensor(row["teacher"]),
        "opd_reverse_kl": tensor(row["student"] - row["teacher"]),
    }


def _slime_rollout(index: int, row: dict) -> dict:
    """Sample.to_dict()."""
    return {
        "index": index,
        "tokens": row["prompt"] + row["tokens"],
        "response": row["text"],
        "response_length": len(row["tokens"]),
        "loss_mask": row["mask"],
        "rollout_log_probs": list(map(float, row["engine"])),
        "teacher_log_probs": list(map(float, row["teacher"])),
        "status": "completed",
    }


def prime_rl(path: Path, rows: list[dict], *, teacher: bool = False, stable: bool = True) -> list[Path]:
    """enable_token_export: TokenExporter._write, prompt and rollout in one list."""
    found = []
    for step, own in by_step(rows).items():
        file = path / "token_exports" / f"step_{step}" / "rank_0.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as out:
            for index, row in enumerate(own):
                out.write(json.dumps(_prime_rl(step, index, row, teacher), separators=(",", ":")) + "\n")
        if stable:
            (file.parent / "STABLE").touch()
        found.append(file)
    return found


def _prime_rl(step: int, index: int, row: dict, teacher: bool) -> dict:
    before, size = len(row["prompt"]), len(row["prompt"]) + len(row["tokens"])

    def column(values):
        return [0.0] * before + list(map(float, values))

    found = {
        "schema_version": 1,
        "step": step,
        "token_ids": row["prompt"] + row["tokens"],
        "loss_mask": [False] * before + [bool(m) for m in row["mask"]],
        "inference_logprobs": column(row["engine"]),
        "trainer_logprobs": column(row["student"]),
        "entropy": column(-row["student"]),
        "mismatch_kl": [None] * size,
    }
    return found | ({"ref_logprobs": column(row["teacher"])} if teacher else {})


def verl_jsonl(path: Path, rows: list[dict], *, ids: bool = True) -> list[Path]:
    """trainer.rollout_data_dir: `_write_generations`; with ids, the lists that ride in reward_extra_infos_dict."""
    found = []
    path.mkdir(parents=True, exist_ok=True)
    for step, own in by_step(rows).items():
        file = path / f"{step}.jsonl"
        with file.open("w") as out:
            for row in own:
                entry = {"input": "", "output": row["text"], "gts": "w3", "score": 1.0, "step": step}
                if ids:
                    entry |= {"prompts": row["prompt"], "responses": row["tokens"], "response_mask": row["mask"]}
                    entry |= {"old_log_probs": list(map(float, row["student"]))}
                    entry |= {"rollout_log_probs": list(map(float, row["engine"]))}
                    entry |= {"teacher_logprobs": list(map(float, row["teacher"]))}
                out.write(json.dumps(entry, ensure_ascii=False, default=str) + "\n")
        found.append(file)
    return found


def verl_batch(path: Path, rows: list[dict], *, top_k: int = 1) -> list[Path]:
    """The batch's tensors under verl's names; teacher_logprobs (B, P + R, K), entry s of token s + 1."""
    path.mkdir(parents=True, exist_ok=True)
    found = []
    for step, own in by_step(rows).items():
        prompts, responses = max(len(r["prompt"]) for r in own), max(len(r["tokens"]) for r in own)
        size, width = len(own), prompts + responses
        batch = {
            "prompts": torch.zeros((size, prompts), dtype=torch.long),
            "responses": torch.zeros((size, responses), dtype=torch.long),
            "attention_mask": torch.zeros((size, width), dtype=torch.long),
            "response_mask": torch.zeros((size, responses), dtype=torch.long),
            "old_log_probs": torch.zeros((size, responses)),
            "rollout_log_probs": torch.zeros((size, responses)),
            "teacher_logprobs": torch.zeros((size, width, top_k)),
            "teacher_ids": torch.zeros((size, width, top_k), dtype=torch.int32),
        }
        for i, row in enumerate(own):
            p, r = len(row["prompt"]), len(row["tokens"])
            batch["prompts"][i, prompts - p :] = torch.tensor(row["prompt"])
            batch["responses"][i, :r] = torch.tensor(row["tokens"])
            batch["attention_mask"][i, prompts - p : prompts + r] = 1
            batch["response_mask"][i, :r] = torch.tensor(row["mask"])
            batch["old_log_probs"][i, :r] = torch.tensor(row["student"])
            batch["rollout_log_probs"][i, :r] = torch.tensor(row["engine"])
            shifted = slice(prompts - 1, prompts - 1 + r)
            batch["teacher_logprobs"][i, shifted, -1] = torch.tensor(row["teacher"]).float()
            batch["teacher_ids"][i, shifted, -1] = torch.tensor(row["tokens"], dtype=torch.int32)
        file = path / f"batch_{step}.pt"
        torch.save(batch, file)
        found.append(file)
    return found


def jsonl(path: Path, rows: list[dict], *, teacher: bool = True, **more) -> list[Path]:
    """Plain JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        for row in rows:
            entry = {"step": row["step"], "prompt_ids": row["prompt"], "token_ids": row["tokens"], "text": row["text"]}
            entry |= {"student_logprobs": list(map(float, row["student"])), "mask": row["mask"], **more}
            entry |= {"teacher_logprobs": list(map(float, row["teacher"]))} if teacher else {}
            out.write(json.dumps(entry) + "\n")
    return [path]


def trl(path: Path, rows: list[dict], *, telemetry: bool = True) -> list[Path]:
    """log_completions (TRL's to_parquet) and the telemetry of our trainer."""
    found = []
    for step, own in by_step(rows).items():
        file = path / "completions" / f"completions_{step:05d}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        texts = {"prompt": [""] * len(own), "completion": [row["text"] for row in own]}
        pq.write_table(pa.table({"step": [step] * len(own), **texts}), file)
        found.append(file)
        if not telemetry:
            continue
        part = path / "telemetry" / f"step={step}" / "part-rank0-00000.parquet"
        part.parent.mkdir(parents=True, exist_ok=True)
        rows_of = [(i, t, row) for i, row in enumerate(own) for t in range(len(row["tokens"]))]
        ratio = [float(row["student"][t] - row["teacher"][t]) for _, t, row in rows_of]
        columns = {
            "prompt_id": [f"p{i}" for i, _, _ in rows_of],
            "rollout_id": [f"{step}/{i}" for i, _, _ in rows_of],
            "position": pa.array([t for _, t, _ in rows_of], pa.int32()),
            "token_id": pa.array([row["tokens"][t] for _, t, row in rows_of], pa.int32()),
            "kl": pa.array(np.abs(ratio), pa.float32()),
            "log_ratio": pa.array(ratio, pa.float32()),
            "student_logprob": pa.array([float(row["student"][t]) for _, t, row in rows_of], pa.float32()),
            "teacher_logprob": pa.array([float(row["teacher"][t]) for _, t, row in rows_of], pa.float32()),
        }
        pq.write_table(pa.table(columns), part)
        found.append(part)
    return found


MAKERS = {"slime": slime, "prime-rl": prime_rl, "verl": verl_jsonl, "trl": trl}
