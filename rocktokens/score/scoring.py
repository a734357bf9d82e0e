"""Rollouts in, scored occurrences out: what every sampled token cost under a student and the teacher.

Rows are packed by length into micro-batches of a token budget and padded on the right, where causal attention never
looks, so real positions need no mask. Only response positions count, the end token included; the state that scores the
token at position t is the one before it. The teacher's backbone runs once for all the students it is compared with;
where the teacher is served, the states of the next micro-batch are on their way while this one is measured.

Shapes: B rollouts of a micro-batch, T positions, N response positions of the micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rocktokens.divergence.fused import Divergence, fused_divergence
from rocktokens.errors import DataError
from rocktokens.models.states import LocalStates, Sequences, StateSource, source_of
from rocktokens.sample.requests import Rollout
from rocktokens.score.top_tokens import TopTokenRecorder
from rocktokens.tables import METRICS

Observer = Callable[[Tensor, Tensor], None]
# A micro-batch is closed before more than this share of it is padding.
MAX_PADDING = 0.08
# Micro-batches whose states are asked of a served teacher before they are needed.
AHEAD = 2


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
    chunk: int | None = None,
    observers: Mapping[int, Observer] | None = None,
    top: TopTokenRecorder | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Score rollouts under every student; `write(step, table)` receives the rows micro-batch by micro-batch.

    `teacher` is a model or a source of its states. `observers[step]` is shown the finite gradients in logit space of
    that student, chunk by chunk. `top` keeps the most probable tokens of both models for some of the rollouts.
    """
    theirs = source_of(teacher)
    ours: dict[int, StateSource] = {step: LocalStates(student) for step, student in students.items()}
    check_rollouts(rollouts, students, teacher, vocabulary)
    models = [*students.values(), *([teacher] if isinstance(teacher, PreTrainedModel) else [])]
    with _evaluating(*models):
        for batch, sequences, told_NG in _with_states(micro_batches(rollouts, token_budget), theirs):
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
                    chunk=chunk,
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


@contextmanager
def _evaluating(*models: PreTrainedModel) -> Iterator[None]:
    """No dropout inside; every model is left in the mode it came in."""
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, training in zip(models, modes):
            model.train(training)


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
    rollouts: Iterable[Rollout],
    students: Mapping[int, PreTrainedModel],
    teacher: PreTrainedModel | StateSource,
    vocabulary: int,
) -> None:
    """Refuse rollouts that are empty, hold ids the pair does not share, or are longer than a model reads."""
    contexts = {"teacher": source_of(teacher).context}
    contexts |= {f"student of step {step}": LocalStates(student).context for step, student in students.items()}
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
