"""The most probable tokens of a model at some positions, from hidden states and an output head.

What a reader of a rollout asks first is what the student, and what the teacher, would have written instead. Only the
positions that will be shown are asked, in chunks, so no positions x vocabulary tensor ever exists.

Shapes: N positions, V vocabulary, H width, K tokens kept, C positions of one chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rocktokens.divergence.heads import Head, logits_
from rocktokens.settings import require

# Logits held at once, the same bound as in the divergence pass.
CHUNK_ELEMENTS = 6_500_000


class TopTokens(NamedTuple):
    """Ids and log-probabilities of the K most probable tokens, most probable first."""

    ids_NK: Tensor
    logprobs_NK: Tensor
    """Natural logarithm of the probability over the whole shared vocabulary, float32."""


class TopChoices(NamedTuple):
    """Both models' K most probable tokens at every position, and what the teacher thinks of the student's."""

    student_ids_NK: Tensor
    student_logprobs_NK: Tensor
    teacher_at_student_NK: Tensor
    """The teacher's log-probabilities of the student's K tokens."""
    teacher_ids_NK: Tensor
    teacher_logprobs_NK: Tensor

    @classmethod
    def empty(cls, num_rows: int, k: int, device: torch.device) -> TopChoices:
        """Room for `num_rows` positions: ids -1, log-probabilities NaN."""
        ids, logprobs = (torch.full((num_rows, k), fill, device=device) for fill in (-1, torch.nan))
        return cls(ids, logprobs, logprobs.clone(), ids.clone(), logprobs.clone())

    def fill_(self, at: slice, s_RV: Tensor, t_RV: Tensor) -> None:
        """Read some positions off their log-probabilities."""
        k = self.size
        student, teacher = torch.topk(s_RV, k, dim=1), torch.topk(t_RV, k, dim=1)
        self.student_ids_NK[at], self.student_logprobs_NK[at] = student.indices, student.values
        self.teacher_at_student_NK[at] = t_RV.gather(1, student.indices)
        self.teacher_ids_NK[at], self.teacher_logprobs_NK[at] = teacher.indices, teacher.values

    @property
    def size(self) -> int:
        """How many tokens are kept of each model."""
        return self.student_ids_NK.shape[1]


def top_tokens(hidden_NH: Tensor, head: Head, k: int, *, vocabulary: int | None = None) -> TopTokens:
    """The K most probable tokens at every position, at temperature 1.

    Args:
        hidden_NH: Last hidden states, one row per position.
        head: The model's output head.
        k: How many tokens to keep; fewer where the vocabulary is smaller.
        vocabulary: Size of the vocabulary that student and teacher share; rows of the head beyond it are left out
            before the softmax. Unset: the whole head.

    Returns:
        Ids and log-probabilities, each with one row per position.
    """
    require(k >= 1, f"k must be at least 1, got {k}")
    head.refuse_unfit("model", hidden_NH)
    size_V = min(len(head.weight_VH), vocabulary or len(head.weight_VH))
    k, num_rows, device = min(k, size_V), len(hidden_NH), hidden_NH.device
    ids_NK = torch.empty((num_rows, k), dtype=torch.int64, device=device)
    logprobs_NK = torch.empty((num_rows, k), device=device)
    rows = max(1, min(num_rows, CHUNK_ELEMENTS // size_V))
    buffer_CV = torch.empty((rows, size_V), device=device)
    for start in range(0, num_rows, rows):
        at = slice(start, min(start + rows, num_rows))
        logits_CV = buffer_CV[: at.stop - at.start]
        logits_(logits_CV, hidden_NH[at], head)
        if head.softcap is not None:
            logits_CV.div_(head.softcap).tanh_().mul_(head.softcap)
        best = torch.topk(logits_CV, k, dim=1)
        ids_NK[at] = best.indices
        logprobs_NK[at] = best.values - torch.logsumexp(logits_CV, dim=1, keepdim=True)
    return TopTokens(ids_NK, logprobs_NK)
