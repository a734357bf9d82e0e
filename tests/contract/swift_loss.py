"""Run by ms-swift's interpreter: its GKD loss before and after an exported plug-in; prints findings as JSON.

python swift_loss.py FOLDER; FOLDER/list.py was exported for FOLDER/tokenizer, FOLDER/empty.py has no ids.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import swift
import torch
from swift.rlhf_trainers import gkd_trainer
from swift.rlhf_trainers.gkd_loss import TeacherOutput
from swift.utils import import_external_file
from transformers import AutoTokenizer

FOLDER, WIDTH, VOCABULARY, COSTLY = Path(sys.argv[1]), 24, 64, 7
ORIGINAL = gkd_trainer.GKDTrainer._compute_jsd_loss


def trainer(tokenizer: object, top: int | None = None) -> Any:
    """ms-swift's trainer with what its loss reads, and no model."""
    made = object.__new__(gkd_trainer.GKDTrainer)
    made.__dict__.update(beta=1.0, temperature=0.9, gkd_logits_topk=top, template=SimpleNamespace(tokenizer=tokenizer))
    return made


def loss(made: Any, labels: torch.Tensor, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and its gradient in the student's logits; the teacher is another one at the costly token alone."""
    rng = torch.Generator().manual_seed(seed)
    teacher = torch.randn((*labels.shape, VOCABULARY), generator=rng)
    student = teacher + 0.1 * torch.randn(teacher.shape, generator=rng)
    student[..., COSTLY] += 4.0 * (labels.roll(-1, 1) == COSTLY)
    student.requires_grad_()
    value = made._compute_jsd_loss(student, TeacherOutput(full_logits=teacher, labels=labels.clone()), labels)
    return value.detach(), torch.autograd.grad(value, student)[0]


def main() -> None:
    """Print what was found."""
    own, other = (AutoTokenizer.from_pretrained(FOLDER / name) for name in ("tokenizer", "other"))
    labels = torch.randint(3, 20, (40, WIDTH), generator=torch.Generator().manual_seed(1))
    labels[:, :4] = -100
    listed = import_external_file(str(FOLDER / "list.py"))
    cut = labels.masked_fill(torch.isin(labels, torch.tensor(listed.IDS)), -100)
    with_list, found = gkd_trainer.GKDTrainer._compute_jsd_loss, {"ms-swift": swift.__version__}
    cases = {}
    for top in (None, 8):
        listed.calls = 0
        ours = loss(trainer(own, top), labels)
        gkd_trainer.GKDTrainer._compute_jsd_loss = ORIGINAL
        theirs, plain = loss(trainer(own, top), cut), loss(trainer(own, top), labels)
        empty = import_external_file(str(FOLDER / "empty.py"))
        empty.calls, gkd_trainer.GKDTrainer._compute_jsd_loss = 0, empty.jsd
        without = loss(trainer(own, top), labels)
        gkd_trainer.GKDTrainer._compute_jsd_loss = with_list
        at = torch.isin(labels, torch.tensor(listed.IDS)).roll(-1, 1)
        cases[f"top {top}"] = {
            "labels cut by hand give the same": all(torch.equal(*pair) for pair in zip(ours, theirs)),
            "an empty list changes nothing": all(torch.equal(*pair) for pair in zip(without, plain)),
            "no gradient at the ids": bool(at.any()) and not ours[1][at].any(),
        }
    found["cases"], listed.calls = cases, 0
    try:
        loss(trainer(other), labels)
    except ValueError as error:
        found["refused"] = str(error)
    os.environ |= {"ROCKTOKENS_TELEMETRY": str(FOLDER / "record"), "ROCKTOKENS_TELEMETRY_EVERY": "1"}
    listed.calls = 0
    for seed in range(2):
        loss(trainer(own), labels, seed)
    print(json.dumps(found))


main()
