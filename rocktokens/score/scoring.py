"""Rollouts in, scored occurrences out: what every sampled token cost under a student and the teacher.

Rows are packed by length into micro-batches of a token budget and padded on the right, where causal attention never
looks, so real positions need no mask. Only response positions count, the end token included; the state that scores the
token at position t is the one before it. The teacher's backbone runs once for all the students it is compared with;
where the teacher is served, the states of the next micro-batch are on their way while this one is measured.

For the rollouts that a reader is shown (shown.py), and for the positions of one checkpoint that cost most, the most
probable tokens of both models are kept, too.

Shapes: N response positions of a micro-batch, M of them shown, H and G widths, K tokens kept, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rocktokens.divergence.fused import Divergence, fused_divergence
from rocktokens.divergence.heads import Head, TopTokens, top_tokens
from rocktokens.errors import DataError
from rocktokens.models.states import LocalStates, Sequences, StateSource, source_of
from rocktokens.sample.requests import Rollout
from rocktokens.tables import METRICS

Observer = Callable[[Tensor, Tensor], None]
MAX_PADDING = 0.08  # share of a micro-batch
AHEAD = 2  # micro-batches whose states are asked of a served teacher before they are needed
NUM_COSTLY = 200  # costliest positions whose top tokens are kept; `detect` lists a hundred unless told otherwise


def micro_batches(rollouts: Sequence[Rollout], token_budget: int) -> Iterator[list[Rollout]]:
    """Rollouts of similar length together: at most `token_budget` padded tokens, little of it padding."""
    batch: list[Rollout] = []
    real = 0
    for rollout in sorted(rollouts, key=lambda r: (len(r.prompt_ids) + len(r.token_ids), r.rollout_id)):
        length = len(rollout.prompt_ids) + len(rollout.token_ids)
        padded = length * (len(batch) + 1)
        if batch and (padded > token_budget or padded - real - length > MAX_PADDING * padded):
            yield batch
            batch, real = [], 0
        batch.append(rollout)
        real += length
    if batch:
        yield batch


@torch.inference_mode()
def score(
    rollouts: Sequence[Rollout],
    students: Mapping[int, PreTrainedModel],
    teacher: PreTrainedModel | StateSource,
    *,
    eos_ids: Sequence[int],
    vocabulary: int,
    write: Callable[[int, pa.Table], None],
    token_budget: int = 8192,
    observers: Mapping[int, Observer] | None = None,
    top: TopTokenRecorder | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Score rollouts under every student; `write(step, table)` receives the rows micro-batch by micro-batch.

    `teacher` is a model or a source of its states. `observers[step]` is shown the finite gradients in logit space of
    that student, chunk by chunk. `top` keeps the most probable tokens of both models for some of the rollouts.
    """
    theirs = source_of(teacher)
    ours = {step: LocalStates(student) for step, student in students.items()}
    check_rollouts(rollouts, ours, theirs, vocabulary)
    batches = micro_batches(rollouts, token_budget)
    for batch, sequences, told_NG in _with_states(batches, theirs):
        token_N = torch.tensor([token for rollout in batch for token in rollout.token_ids])
        for step, source in ours.items():
            states_NH, head, device = source.response_states(sequences), source.head, source.head.weight_VH.device
            bias_V = theirs.head.bias_V
            measured = fused_divergence(
                states_NH.to(device),
                head.weight_VH[:vocabulary],
                told_NG.to(device),
                theirs.head.weight_VH[:vocabulary].to(device),
                token_N=token_N.to(device),
                student_bias=head.bias_V,
                teacher_bias=None if bias_V is None else bias_V.to(device),
                student_softcap=head.softcap,
                teacher_softcap=theirs.head.softcap,
                student_scale=head.scale,
                teacher_scale=theirs.head.scale,
                observe=_finite_only(observers[step]) if observers and step in observers else None,
            )
            table = _table(batch, token_N.numpy(), measured, eos_ids)
            write(step, table)
            if top is not None:
                top.see(step, batch, states_NH, head, told_NG, theirs.head, table["kl"].to_numpy())
        if progress is not None:
            progress(len(batch))


def _with_states(
    batches: Iterable[list[Rollout]], source: StateSource
) -> Iterator[tuple[list[Rollout], Sequences, Tensor]]:
    """Every micro-batch with the teacher's states; a served teacher is asked for some of them ahead."""
    with ThreadPoolExecutor(1) as executor:
        coming: deque[tuple[list[Rollout], Sequences, Future[Tensor]]] = deque()
        for batch in batches:
            ids = tuple(rollout.prompt_ids + rollout.token_ids for rollout in batch)
            starts = tuple(len(rollout.prompt_ids) for rollout in batch)
            sequences = Sequences(ids, starts, tuple(rollout.rollout_id for rollout in batch))
            if not source.ahead:
                yield batch, sequences, source.response_states(sequences)
                continue
            coming.append((batch, sequences, executor.submit(source.response_states, sequences)))
            if len(coming) > AHEAD:
                *known, told = coming.popleft()
                yield *known, told.result()  # type: ignore[misc]
        for *known, told in coming:
            yield *known, told.result()  # type: ignore[misc]


def _finite_only(observe: Observer) -> Observer:
    def seen(token_C: Tensor, grad_CV: Tensor) -> None:
        finite_C = torch.isfinite(grad_CV.sum(dim=1))
        if bool(finite_C.all()):
            observe(token_C, grad_CV)
        else:
            observe(token_C[finite_C], grad_CV[finite_C])

    return seen


def _table(batch: list[Rollout], token_N: np.ndarray, measured: Divergence, eos_ids: Sequence[int]) -> pa.Table:
    counts = [len(rollout.token_ids) for rollout in batch]
    row_N = pa.array(np.repeat(np.arange(len(batch)), counts))
    named = {"kl": measured.value_N} | {name: getattr(measured, f"{name}_N") for name in METRICS if name != "kl"}
    return pa.table(
        {
            "prompt_id": pa.array([rollout.prompt_id for rollout in batch]).take(row_N),
            "rollout_id": pa.array([rollout.rollout_id for rollout in batch]).take(row_N),
            "position": np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
            "token_id": token_N.astype(np.int32),
            **{name: value_N.float().cpu().numpy() for name, value_N in named.items()},
            "is_eos": np.isin(token_N, list(eos_ids)),
        }
    )


def check_rollouts(
    rollouts: Iterable[Rollout], students: Mapping[int, StateSource], teacher: StateSource, vocabulary: int
) -> None:
    """Refuse rollouts that are empty, hold ids the pair does not share, or are longer than a model reads."""
    contexts = {"teacher": teacher.context}
    contexts |= {f"student of step {step}": student.context for step, student in students.items()}
    for rollout in rollouts:
        if not rollout.prompt_ids or not rollout.token_ids:
            raise DataError(f"rollout {rollout.rollout_id} has an empty prompt or no response tokens; leave it out")
        ids = rollout.prompt_ids + rollout.token_ids
        if max(ids) >= vocabulary or min(ids) < 0:
            raise DataError(
                f"rollout {rollout.rollout_id} holds token id {min(ids) if min(ids) < 0 else max(ids)}, the pair has "
                f"{vocabulary} token types; it was made with another tokenizer"
            )
        for name, context in contexts.items():
            if context is not None and len(ids) > context:
                raise DataError(
                    f"rollout {rollout.rollout_id} has {len(ids)} tokens with its prompt, the {name} reads {context}; "
                    "leave it out or sample with a lower max_new_tokens"
                )


class TopTokenRecorder:
    """Keeps the K most probable tokens of student and teacher at the positions of some rollouts.

    `write` receives (step, table) for every micro-batch that holds such a position. Of the checkpoint `costly_step` the
    costliest positions are kept, too. Which these are is known at the end only: each that is among the costliest so far
    is kept, a few times their number.
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
        loss_N: np.ndarray,
    ) -> None:
        """Keep what one micro-batch shows; rows are the response positions of `batch`, rollout by rollout."""
        counts = [len(r.token_ids) for r in batch]
        chosen_N = np.repeat([r.rollout_id in self.rollout_ids for r in batch], counts)
        if step == self.costly_step:
            known_N = np.where(np.isfinite(loss_N), loss_N, 0.0).astype(np.float32)
            self._largest = np.sort(np.concatenate([self._largest, known_N]))[-NUM_COSTLY:]
            chosen_N |= known_N >= max(float(self._largest[0]), float(np.finfo(np.float32).tiny))
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

    def _best(self, hidden_NH: Tensor, at_M: np.ndarray, head: Head) -> TopTokens:
        rows_MH = hidden_NH[at_M.tolist()].to(head.weight_VH.device)
        return top_tokens(rows_MH, head, self.k, vocabulary=self.vocabulary)


def _lists(values_NK: np.ndarray) -> pa.Array:
    """A matrix as an Arrow column of lists."""
    offsets = np.arange(len(values_NK) + 1, dtype=np.int32) * values_NK.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values_NK.ravel()))
