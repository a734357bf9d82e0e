"""Sampling from the student with the teacher at hand: a drawn token may be drawn again from the teacher.

Which tokens are drawn again is a rule: a probability for every token type. `GraftSampler` has both models in this
process, and their caches advance together; `ServedGrafter` has both on servers. Neither knows what the rules are for.

Shapes: B rows in the batch, L of them live, V vocabulary, K rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rocktokens.sample.cpu_decoding import fast_on_cpu
from rocktokens.sample.kv_decoder import Decoder
from rocktokens.sample.requests import Continuation, GraftRequest, Request
from rocktokens.sample.sampler import Sampler, Trunk
from rocktokens.seeds import derive_seed, uniforms
from rocktokens.stats import Floats

if TYPE_CHECKING:
    from rocktokens.servers.vllm import VllmEngine


def graft_numbers(seed: int, skip: int, count: int) -> np.ndarray:
    """(position, 2): the coin, and the number that the teacher's draw would take."""
    return uniforms(seed, 2 * (skip + count)).reshape(-1, 2)[skip:]


class TwinDecoder:
    """The student's and the teacher's decoding batches, row by row the same text."""

    def __init__(self, student: Decoder, teacher: Decoder) -> None:
        self.student, self.teacher = student, teacher
        self.teacher_LV: Tensor

    def prefill(self, prefixes: Sequence[Sequence[int]], *, room: int) -> Tensor:
        """Start both; the student's logits are returned, the teacher's kept."""
        self.teacher_LV = self.teacher.prefill(prefixes, room=room)
        return self.student.prefill(prefixes, room=room)

    @property
    def can_branch(self) -> bool:
        """Whether other batches may start from these rows."""
        return self.student.can_branch and self.teacher.can_branch

    def branch(self, trunk: TwinDecoder, row_B: Tensor, prefixes: Sequence[Sequence[int]], *, room: int) -> Tensor:
        """Start both with prefixes of a trunk's rows."""
        self.teacher_LV = self.teacher.branch(trunk.teacher, row_B, prefixes, room=room)
        return self.student.branch(trunk.student, row_B, prefixes, room=room)

    def advance(self, token_L: Tensor) -> Tensor:
        """Append one token to every row of both."""
        self.teacher_LV = self.teacher.advance(token_L)
        return self.student.advance(token_L)

    def keep(self, row_L: Tensor) -> None:
        """Drop all rows but these."""
        self.student.keep(row_L)
        self.teacher.keep(row_L)


class GraftSampler(Sampler):
    """A student's sampler that asks the teacher where a rule says so.

    `rules`: (K, V) redraw probabilities; `own`: (K,), rules under which the student itself draws again.
    """

    def __init__(self, student: Sampler, teacher: Sampler, rules: Floats, own: Floats | None = None) -> None:
        super().__init__(
            student.model,
            eos_ids=student.eos_E.tolist(),
            pad_id=student.pad_id,
            vocabulary=student.vocabulary,
            temperature=student.temperature,
            greedy=student.greedy,
            top_k=student.top_k,
            top_p=student.top_p,
            batch_size=student.batch_size,
        )
        self.teacher = teacher
        self.own_K = torch.tensor(np.zeros(len(rules)) if own is None else own, dtype=torch.bool, device=self.device)
        self.rule_KV = torch.tensor(np.asarray(rules), dtype=torch.float64, device=self.device)

    def generate(
        self, requests: Sequence[Request], *, progress: Callable[[int], None] | None = None
    ) -> list[Continuation]:
        """One continuation a `GraftRequest`, in order."""
        was_training = self.teacher.model.training
        self.teacher.model.eval()
        steps = max((request.max_new_tokens for request in requests), default=0)
        try:
            with fast_on_cpu(self.teacher.model, steps=steps):
                return super().generate(requests, progress=progress)
        finally:
            self.teacher.model.train(was_training)

    def _generate_batch(self, requests: list[Request], trunk: Trunk | None = None) -> list[Continuation]:
        batch = [request for request in requests if isinstance(request, GraftRequest)]
        room = max(map(self._room, batch))
        number_BT2 = np.stack([graft_numbers(request.graft_seed, request.skip, room) for request in batch])
        self._coin_BT = torch.from_numpy(number_BT2[:, :, 0]).to(self.device)
        self._number_BT = torch.from_numpy(number_BT2[:, :, 1]).to(self.device)
        self._rule_B = torch.tensor([request.rule for request in batch], device=self.device)
        self._forced_B = torch.tensor([request.forced for request in batch], device=self.device)
        return super()._generate_batch(requests, trunk)

    def _decoder(self) -> TwinDecoder:  # type: ignore[override]
        return TwinDecoder(super()._decoder(), Decoder(self.teacher.model, pad_id=self.pad_id))

    def _draw(  # type: ignore[override]
        self, decoder: TwinDecoder, logits_LV: Tensor, uniform_L: Tensor, live_L: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        chosen_L, bad_L = self.choose(logits_LV, uniform_L)
        again_L = self._coin_BT[live_L, step] < self.rule_KV[self._rule_B[live_L], chosen_L]
        if step == 0:
            again_L |= self._forced_B[live_L]
        if bool(again_L.any()):
            own_L1 = self.own_K[self._rule_B[live_L]][again_L][:, None]
            asked_LV = torch.where(own_L1, logits_LV[again_L], decoder.teacher_LV[again_L][:, : self.vocabulary])
            theirs, bad = self.teacher.choose(asked_LV, self._number_BT[live_L, step][again_L])
            chosen_L[again_L], bad_L[again_L] = theirs, bad
        return chosen_L, bad_L


class ServedGrafter:
    """Grafts on servers: the student's servers write, and where a rule says so one token comes from the teacher's.

    A stretch is asked of the student's servers, its first token that the rule draws again is looked for, the teacher's
    servers draw that one token, and the student continues behind it. The coins are those of the local grafter; a draw's
    law does not depend on how the stretches are cut. `rules`: (K, V) redraw probabilities; `own`: (K,), rules under
    which the student itself draws again.
    """

    def __init__(self, student: VllmEngine, teacher: VllmEngine, rules: Floats, own: Floats) -> None:
        self.student, self.teacher, self.rules, self.own = student, teacher, rules, own
        self.redraws = 0

    def generate(
        self, requests: Sequence[GraftRequest], *, progress: Callable[[int], None] | None = None
    ) -> list[Continuation]:
        """One continuation a request, in order; refused where one of the models' servers has no room for it."""
        for request in requests:
            self.student.check(request)
            # The teacher is asked up to where the student ends.
            self.teacher.check(replace(request, max_new_tokens=self._room(request)))
        return self.student.pool.map(self._complete, requests, progress=progress)

    def _room(self, request: GraftRequest) -> int:
        own = self.student.context
        return request.max_new_tokens if own is None else min(request.max_new_tokens, own - len(request.prefix))

    async def _complete(self, request: GraftRequest) -> Continuation:
        room = self._room(request)
        coin_T = graft_numbers(request.graft_seed, request.skip, room)[:, 0]
        done: list[int] = []
        again = request.forced

        async def ask(engine: VllmEngine, length: int, who: str) -> tuple[int, ...]:
            # Every stretch has a seed of its own.
            seed = derive_seed(request.graft_seed, who, request.seed, request.skip + len(done))
            return (await engine.complete(Request((*request.prefix, *done), length, seed))).token_ids

        while True:
            if again:
                self.redraws += 1
                done += await ask(self.student if self.own[request.rule] else self.teacher, 1, "redraw")
                again = False
            else:
                drawn = await ask(self.student, room - len(done), "student")
                rule_T = self.rules[request.rule][list(drawn)]
                hits = (coin_T[len(done) : len(done) + len(drawn)] < rule_T).nonzero()[0]
                done += drawn[: hits[0]] if len(hits) else drawn
                again = len(hits) > 0
            if not again and (len(done) >= room or done[-1] in self.student.eos_ids):
                return Continuation(tuple(done), truncated=done[-1] not in self.student.eos_ids)
