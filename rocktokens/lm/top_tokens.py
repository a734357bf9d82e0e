"""What both models would have written at every position of the rollouts that a reader is shown.

The scoring pass has the hidden states of both models at hand; for the shown rollouts (core/shown.py) alone it keeps
the most probable tokens of the student and of the teacher. Other rollouts cost nothing.

Shapes: N response positions of a micro-batch, M of them shown, H and G widths, K tokens kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from torch import Tensor

from rocktokens.core.top_tokens import TopTokens, top_tokens

if TYPE_CHECKING:
    from rocktokens.core.divergence import Head
    from rocktokens.lm.scoring import Rollout


class TopTokenRecorder:
    """Keeps the K most probable tokens of student and teacher at the positions of some rollouts.

    Args:
        rollout_ids: The rollouts that will be shown.
        k: How many tokens to keep of each model.
        vocabulary: Size of the shared vocabulary.
        write: Receives (step, table) for every micro-batch that holds a shown rollout; the table's columns are those
            of `TOP_TOKENS` in runs/schema.py.
    """

    def __init__(
        self, rollout_ids: Collection[str], k: int, vocabulary: int, write: Callable[[int, pa.Table], None]
    ) -> None:
        self.rollout_ids, self.k, self.vocabulary, self.write = frozenset(rollout_ids), k, vocabulary, write
        self._teacher: tuple[Sequence[Rollout], TopTokens] | None = None

    def see(
        self,
        step: int,
        batch: Sequence[Rollout],
        student_NH: Tensor,
        student: Head,
        teacher_NG: Tensor,
        teacher: Head,
    ) -> None:
        """Keep what one micro-batch shows; rows are the response positions of `batch`, rollout by rollout."""
        shown_N = np.repeat([r.rollout_id in self.rollout_ids for r in batch], [len(r.token_ids) for r in batch])
        at_M = shown_N.nonzero()[0]
        if not len(at_M):
            return
        if self._teacher is None or self._teacher[0] is not batch:  # the teacher is the same for every student
            self._teacher = (batch, self._best(teacher_NG, at_M, teacher))
        ours, theirs = self._best(student_NH, at_M, student), self._teacher[1]
        rollouts = [r for r in batch if r.rollout_id in self.rollout_ids]
        counts = [len(r.token_ids) for r in rollouts]
        columns = {
            "prompt_id": np.repeat(np.array([r.prompt_id for r in rollouts], dtype=object), counts),
            "rollout_id": np.repeat(np.array([r.rollout_id for r in rollouts], dtype=object), counts),
            "position": np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
        }
        for name, best in (("student", ours), ("teacher", theirs)):
            columns[f"{name}_top_ids"] = _lists(best.ids_NK.cpu().numpy().astype(np.int32))
            columns[f"{name}_top_logprobs"] = _lists(best.logprobs_NK.float().cpu().numpy())
        self.write(step, pa.table(columns))

    def _best(self, hidden_NH: Tensor, at_M: np.ndarray, head: Head) -> TopTokens:
        rows_MH = hidden_NH[at_M.tolist()].to(head.weight_VH.device)
        return top_tokens(rows_MH, head, self.k, vocabulary=self.vocabulary)


def _lists(values_NK: np.ndarray) -> pa.Array:
    """A matrix as an Arrow column of lists."""
    offsets = np.arange(len(values_NK) + 1, dtype=np.int32) * values_NK.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values_NK.ravel()))
