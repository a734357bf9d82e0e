"""What both models would have written at every position of the rollouts that a reader is shown.

The scoring pass has the hidden states of both models at hand; for the shown rollouts (shown.py), and for the
positions of one checkpoint that cost most, it keeps the most probable tokens of the student and of the teacher. Which
positions cost most is known at the end only: each that is among the costliest so far is kept, a few times their number.

Shapes: N response positions of a micro-batch, M of them shown, H and G widths, K tokens kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from torch import Tensor

from rocktokens.divergence.heads import TopTokens, top_tokens

if TYPE_CHECKING:
    from rocktokens.divergence.fused import Head
    from rocktokens.score.scoring import Rollout

NUM_COSTLY = 200
"""Costliest positions whose top tokens are kept; `detect` lists a hundred unless told otherwise."""


class TopTokenRecorder:
    """Keeps the K most probable tokens of student and teacher at the positions of some rollouts.

    Args:
        rollout_ids: The rollouts that will be shown.
        k: How many tokens to keep of each model.
        vocabulary: Size of the shared vocabulary.
        write: Receives (step, table) for every micro-batch that holds a shown rollout; the table's columns are those
            of `TOP_TOKENS` in tables.py.
        costly_step: The checkpoint whose costliest positions are kept too; None for no such positions.
    """

    def __init__(
        self,
        rollout_ids: Collection[str],
        k: int,
        vocabulary: int,
        write: Callable[[int, pa.Table], None],
        *,
        costly_step: int | None = None,
    ) -> None:
        self.rollout_ids, self.k, self.vocabulary, self.write = frozenset(rollout_ids), k, vocabulary, write
        self.costly_step = costly_step
        self._largest = np.full(NUM_COSTLY, 0.0, np.float32)
        self._teacher: tuple[Sequence[Rollout], np.ndarray, TopTokens] | None = None

    def see(
        self,
        step: int,
        batch: Sequence[Rollout],
        student_NH: Tensor,
        student: Head,
        teacher_NG: Tensor,
        teacher: Head,
        loss_N: np.ndarray | None = None,
    ) -> None:
        """Keep what one micro-batch shows; rows are the response positions of `batch`, rollout by rollout."""
        counts = [len(r.token_ids) for r in batch]
        chosen_N = np.repeat([r.rollout_id in self.rollout_ids for r in batch], counts)
        if loss_N is not None and step == self.costly_step:
            chosen_N |= self._among_costliest(loss_N)
        at_M = chosen_N.nonzero()[0]
        if not len(at_M):
            return
        known = self._teacher  # the teacher is the same for every student
        if known is None or known[0] is not batch or not np.array_equal(known[1], at_M):
            self._teacher = known = (batch, at_M, self._best(teacher_NG, at_M, teacher))
        ours, theirs = self._best(student_NH, at_M, student), known[2]
        columns = {
            name: np.repeat(np.array([getattr(r, name) for r in batch], dtype=object), counts)[at_M]
            for name in ("prompt_id", "rollout_id")
        }
        columns["position"] = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])[at_M]
        for name, best in (("student", ours), ("teacher", theirs)):
            columns[f"{name}_top_ids"] = _lists(best.ids_NK.cpu().numpy().astype(np.int32))
            columns[f"{name}_top_logprobs"] = _lists(best.logprobs_NK.float().cpu().numpy())
        self.write(step, pa.table(columns))

    def _among_costliest(self, loss_N: np.ndarray) -> np.ndarray:
        """Which of these losses are among the largest seen so far; those that are not finite are not."""
        known_N = np.where(np.isfinite(loss_N), loss_N, 0.0).astype(np.float32)
        self._largest = np.sort(np.concatenate([self._largest, known_N]))[-NUM_COSTLY:]
        return known_N >= max(float(self._largest[0]), float(np.finfo(np.float32).tiny))

    def _best(self, hidden_NH: Tensor, at_M: np.ndarray, head: Head) -> TopTokens:
        rows_MH = hidden_NH[at_M.tolist()].to(head.weight_VH.device)
        return top_tokens(rows_MH, head, self.k, vocabulary=self.vocabulary)


def _lists(values_NK: np.ndarray) -> pa.Array:
    """A matrix as an Arrow column of lists."""
    offsets = np.arange(len(values_NK) + 1, dtype=np.int32) * values_NK.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values_NK.ravel()))
