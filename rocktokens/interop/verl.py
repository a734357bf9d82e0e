"""verl: `trainer.rollout_data_dir` writes N.jsonl; a batch can also be saved as plain tensors (.pt).

verl's own JSONL (`_write_generations` in trainer/ppo/ray_trainer.py) holds text: input, output, gts, score, step. Every
list of `reward_extra_infos_dict` with one entry per sample becomes a column of it, and so can carry `prompts`,
`responses`, `response_mask`, `old_log_probs` (or `rollout_log_probs`) and `teacher_logprobs`, each over the response.
A .pt file is a dictionary of the batch's tensors under verl's names: `prompts` (B, P) padded on the left, `responses`
(B, R) padded on the right, `attention_mask` (B, P + R), `response_mask`, `old_log_probs` and `rollout_log_probs`
(B, R), and `teacher_logprobs` (B, P + R, K), where entry s is of token s + 1. Read from verl 0.9.1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rocktokens.errors import DataError
from rocktokens.interop.formats import files_below
from rocktokens.interop.samples import Dump, Sample, checked, floats, json_lines, load_tensors, whole_numbers
from rocktokens.values import Row

TEXT_ONLY = (
    "{} holds text only, as verl's rollout_data_dir writes it, and the sampled token ids cannot be had back from text. "
    "Add responses, old_log_probs and teacher_logprobs to reward_extra_infos_dict, or save the batch as tensors: see "
    "docs/other-trainers.md"
)
TOP_K = (
    "teacher_logprobs hold the teacher's top {} tokens; the sampled token's is taken where it is among them and is "
    "missing elsewhere"
)


def read(files: list[Path]) -> Dump:
    """Every sample of every file."""
    samples: list[Sample] = []
    notes: list[str] = []
    for path in files_below(files, "*.jsonl", "*.pt"):
        if path.suffix == ".pt":
            samples += _batch(load_tensors(path), path, notes)
        else:
            rows = list(json_lines(path))
            samples += [_row(row, where, f"{path.stem}/{number}") for number, (where, row) in enumerate(rows)]
    return Dump(tuple(sorted(samples, key=lambda sample: sample.step)), tuple(dict.fromkeys(notes)))


def _row(row: Row, where: str, name: str) -> Sample:
    ids = row.get("responses", row.get("response_ids"))
    if not isinstance(ids, list):
        raise DataError(TEXT_ONLY.format(where.partition(",")[0]))
    mask = row.get("response_mask")
    score = row.get("acc", row.get("score"))
    return checked(
        Sample(
            step=int(row.get("step") or 0),
            rollout_id=str(row.get("request_id") or name),
            token_ids=whole_numbers(ids, f"{where}: responses"),
            prompt_ids=whole_numbers(row.get("prompts", row.get("prompt_ids")) or [], f"{where}: prompts"),
            counts_T=None if mask is None else np.asarray(mask, bool),
            student_logprob_T=floats(row.get("old_log_probs")),
            engine_logprob_T=floats(row.get("rollout_log_probs")),
            teacher_logprob_T=floats(row.get("teacher_logprobs")),
            student_entropy_T=floats(row.get("entropys")),
            text=row.get("output"),
            answer=None if row.get("gts") is None else str(row["gts"]),
            correct=None if score is None else float(score) > 0,
            source=where,
        )
    )


def _batch(batch: Any, path: Path, notes: list[str]) -> list[Sample]:
    if not isinstance(batch, dict) or not {"prompts", "responses"} <= batch.keys():
        raise DataError(f"{path} is no batch of verl: it needs tensors prompts and responses")
    prompt_BP, response_BR = np.asarray(batch["prompts"]), np.asarray(batch["responses"])
    width = prompt_BP.shape[1]
    if "attention_mask" not in batch:
        raise DataError(f"{path}: attention_mask is missing; without it padding cannot be told from tokens")
    seen_BS = np.asarray(batch["attention_mask"]).astype(bool)
    counts_BR = np.asarray(batch["response_mask"]).astype(bool) if "response_mask" in batch else seen_BS[:, width:]
    teacher_BR = _teacher(batch, response_BR, width, notes)
    step = int("".join(letter for letter in path.stem if letter.isdigit()) or 0)
    samples = []
    for number, (prompt_P, response_R) in enumerate(zip(prompt_BP, response_BR)):
        length = int(seen_BS[number, width:].sum())

        def column(values_BR: Any, number: int = number, length: int = length) -> Any:
            return None if values_BR is None else floats(np.asarray(values_BR)[number][:length])

        samples.append(
            checked(
                Sample(
                    step=step,
                    rollout_id=f"{path.stem}/{number}",
                    token_ids=whole_numbers(response_R[:length], f"{path}: responses"),
                    prompt_ids=whole_numbers(prompt_P[seen_BS[number, :width]], f"{path}: prompts"),
                    counts_T=counts_BR[number][:length],
                    student_logprob_T=column(batch.get("old_log_probs")),
                    engine_logprob_T=column(batch.get("rollout_log_probs")),
                    teacher_logprob_T=column(teacher_BR),
                    student_entropy_T=column(batch.get("entropys")),
                    source=f"{path}, sample {number}",
                )
            )
        )
    return samples


def _teacher(batch: Row, response_BR: Any, width: int, notes: list[str]) -> object:
    """The teacher's log-probability of every response token, out of verl's left-shifted, possibly top-k tensor."""
    if batch.get("teacher_logprobs") is None:
        return None
    found = np.asarray(batch["teacher_logprobs"], float)
    if found.ndim == 2 and found.shape == response_BR.shape:
        return found
    if found.ndim == 2:
        found = found[..., None]
    own_BRK = found[:, width - 1 : width - 1 + response_BR.shape[1]]
    if own_BRK.shape[2] == 1:
        return own_BRK[..., 0]
    if batch.get("teacher_ids") is None:
        raise DataError("teacher_logprobs have several columns, but teacher_ids is missing: whose are they?")
    ids_BRK = np.asarray(batch["teacher_ids"])[:, width - 1 : width - 1 + response_BR.shape[1]]
    hit_BRK = ids_BRK == response_BR[..., None]
    notes.append(TOP_K.format(own_BRK.shape[2]))
    return np.where(hit_BRK.any(-1), np.where(hit_BRK, own_BRK, -np.inf).max(-1), np.nan)
