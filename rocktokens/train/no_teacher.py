"""A control that learns without a teacher: tokens that were sampled although improbable are made more improbable.

Every sampled token whose probability was below LOW has the advantage -1, every other has 0; the loss is the policy
gradient's, -advantage x log p(token). The claim of arXiv 2608.31046 is that this alone gives much of what distillation
gives. A comparison shows how much of a gain needs the teacher at all.

Shapes: B rollouts, C columns of the completion grid, K rows with a weight, H width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rocktokens.divergence.cross_entropy import chunked_cross_entropy
from rocktokens.divergence.fused import Divergence, Head
from rocktokens.models.pair import head_of
from rocktokens.train.precision import as_factors, mixed, product_dtype
from rocktokens.train.step_inputs import whole
from rocktokens.train.step_weights import Rows
from rocktokens.train.trainer import RockDistillationTrainer
from rocktokens.values import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Sampled tokens below this probability are the improbable ones.
LOW = 0.1


class NoTeacherTrainer(RockDistillationTrainer):
    """The trainer with a constant negative advantage on improbable tokens; the teacher is never run."""

    scores = False

    def _divergence(
        self, unwrapped_student: PreTrainedModel, inputs: Batch, weight_BC: Tensor, denominator: Tensor | float
    ) -> tuple[Divergence, Rows]:
        with mixed(self.accelerator, self.autocast):
            student_BCH = self._states(unwrapped_student, inputs)
        with self.meter.stage("head"):
            head = whole(head_of(unwrapped_student), student_BCH.dtype)
            at = weight_BC.to(head.weight_VH.device)
            dtype = product_dtype(self.accelerator, self.autocast, at.device)
            head, student_BCH = as_factors(head, student_BCH, dtype)
            return self._rows(student_BCH, student_BCH.detach(), (head, head), inputs, at, at > 0, denominator)

    def _rows(
        self,
        student_BCH: Tensor,
        teacher_BCG: Tensor,
        heads: tuple[Head, Head],
        inputs: Batch,
        weight_BC: Tensor,
        keep_BC: Tensor,
        denominator: Tensor | float,
    ) -> tuple[Divergence, Rows]:
        with torch.no_grad():  # the student against itself: its log-probabilities and entropies
            found, rows = super()._rows(
                student_BCH.detach(), teacher_BCG, heads, inputs, weight_BC, keep_BC, denominator
            )
        device = weight_BC.device
        hidden_KH, token_K = student_BCH.to(device)[keep_BC], inputs["completion_ids"].to(device)[keep_BC]
        advantage_K = -_improbable(rows).to(device)
        factor_K = advantage_K * weight_BC[keep_BC] / denominator
        loss = chunked_cross_entropy(hidden_KH, heads[0], token_K, factor_K, self.vocabulary)
        return found._replace(loss=loss), rows

    def row_loss(self, rows: Rows) -> Tensor:
        """What each row adds to the loss, before its weight."""
        return _improbable(rows) * rows.student_logprob_K


def _improbable(rows: Rows) -> Tensor:
    """1 where the sampled token's probability was below LOW, else 0."""
    return (rows.student_logprob_K < torch.tensor(LOW).log()).float()
