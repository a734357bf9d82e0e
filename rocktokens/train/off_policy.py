"""The stage before OPD: the student learns from the teacher's own answers, sampled once and kept in the run.

Loss = (1 - h) forward KL + h cross-entropy with the answer's tokens, h = 1/2 by default, both from the same hidden
states and in chunks. On the same trainer as OPD, so that weights, meter, checkpoints and resume are the same.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from rocktokens.divergence.cross_entropy import chunked_cross_entropy
from rocktokens.divergence.fused import Divergence, Head
from rocktokens.train.step_weights import Rows
from rocktokens.train.trainer import RockDistillationTrainer
from rocktokens.values import Batch


class OffPolicyTrainer(RockDistillationTrainer):
    """Trains on answers given in the column `completion` (token ids) instead of sampling them."""

    samples = False

    def __init__(self, *trl_arguments: Any, hard_share: float = 0.5, **settings: Any) -> None:
        super().__init__(*trl_arguments, telemetry_every=None, **settings)
        self.beta = 0.0  # forward KL
        self.hard_share = hard_share
        self.record.name = "off_policy"
        self._answers: list[list[int]] = []

    def _generate_and_score_completions(self, inputs: list[Batch]) -> Batch:
        self._answers = [list(row["completion"]) for row in inputs]
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, *_: object, **__: object) -> list[list[int]]:
        return self._answers

    def _rows(
        self,
        student_BCH: Tensor,
        teacher_BCG: Tensor,
        heads: tuple[Head, Head],
        inputs: Batch,
        weight_BC: Tensor,
        keep_BC: Tensor,
        denominator: Any,
    ) -> tuple[Divergence, Rows]:
        found, rows = super()._rows(student_BCH, teacher_BCG, heads, inputs, weight_BC, keep_BC, denominator)
        hidden_KH = student_BCH.to(weight_BC.device)[keep_BC]
        token_K = inputs["completion_ids"].to(weight_BC.device)[keep_BC]
        factor_K = weight_BC[keep_BC] / denominator
        hard = chunked_cross_entropy(hidden_KH, heads[0], token_K, factor_K, self.vocabulary)
        return found._replace(loss=(1 - self.hard_share) * found.loss + self.hard_share * hard), rows

    def row_loss(self, rows: Rows) -> Tensor:
        """What each row adds to the loss, before its weight."""
        return (1 - self.hard_share) * rows.value_K - self.hard_share * rows.student_logprob_K


def answer_rows(answers: pa.Table) -> list[dict[str, object]]:
    """Rows for the trainer from a table of teacher answers; answers without a token are left out."""
    columns = [answers[name].to_pylist() for name in ("prompt_id", "prompt_ids", "token_ids")]
    return [
        {"prompt_id": prompt_id, "prompt": prompt_ids, "completion": token_ids}
        for prompt_id, prompt_ids, token_ids in zip(*columns)
        if token_ids
    ]


def load_weights(model: Any, path: Any) -> None:
    """Put the weights of a saved model directory into a model of the same shape."""
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(path, dtype=next(model.parameters()).dtype)
    with torch.no_grad():
        model.load_state_dict(saved.state_dict())
