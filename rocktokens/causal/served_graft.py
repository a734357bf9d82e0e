"""Grafts on servers: the student's servers write, and where a rule says so one token comes from the teacher's.

A stretch is asked of the student's servers, its first token that the rule draws again is looked for, the teacher's
servers draw that one token, and the student goes on behind it. The coins are those of the local grafter; a draw's law
does not depend on how the stretches are cut. Each redrawn token costs two requests: for rules that redraw nearly every
token (`rest`, `all`) the grafter in this process is the better one, and this one says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from rocktokens.causal.graft import Grafter
from rocktokens.errors import ConfigError
from rocktokens.models.pair import Pair
from rocktokens.models.settings import PairConfig
from rocktokens.sample.graft_sampler import GraftSampler, graft_numbers
from rocktokens.sample.requests import Continuation, GraftRequest, Request
from rocktokens.sample.rollouts import make_sampler
from rocktokens.sample.sampler import Sampler
from rocktokens.sample.settings import RolloutConfig
from rocktokens.seeds import derive_seed
from rocktokens.servers.connect import Sampling, generating, open_sampling
from rocktokens.servers.settings import ServersConfig
from rocktokens.servers.vllm import VllmEngine
from rocktokens.stats import Floats

log = logging.getLogger(__name__)

# Requests a rollout above which grafts over servers are slower than in this process.
NOT_WORTH_IT = 50


def open_teacher(pair: PairConfig, servers: ServersConfig, rollouts: RolloutConfig) -> Sampling:
    """The teacher on its servers that generate; refused where there is none."""
    if not generating(servers):
        raise ConfigError(
            "grafts on servers need a teacher's server that generates among --servers.teacher; or leave "
            "--servers.student out, and both models are loaded here"
        )
    return open_sampling(pair, servers, rollouts, of_teacher=True)


def open_grafter(
    sampling: Sampling, teacher: Sampling | None, rollouts: RolloutConfig
) -> Callable[[Floats, Floats], Grafter]:
    """What makes a grafter for rules: of both models in this process, or of both on servers."""
    if isinstance(sampling.engine, VllmEngine):
        assert teacher is not None
        student, drawn = sampling.engine, teacher.engine
        assert isinstance(drawn, VllmEngine)
        return lambda rules, own: ServedGrafter(student, drawn, rules, own)
    assert isinstance(sampling.facts, Pair)
    local, theirs = sampling.engine, make_sampler(sampling.facts, rollouts, of_teacher=True)
    assert isinstance(local, Sampler)
    return lambda rules, own: GraftSampler(local, theirs, rules, own)  # type: ignore[return-value]


class ServedGrafter:
    """Continues prefixes with the student's servers, drawing tokens again from the teacher's as a rule says.

    `rules`: (K, V) redraw probabilities; `own`: (K,), rules under which the student itself draws again.
    """

    def __init__(self, student: VllmEngine, teacher: VllmEngine, rules: Floats, own: Floats) -> None:
        self.student, self.teacher, self.rules, self.own = student, teacher, rules, own
        self.redraws = 0

    def generate(
        self, requests: Sequence[GraftRequest], *, progress: Callable[[int], None] | None = None
    ) -> list[Continuation]:
        """One continuation a request, in order."""
        for request in requests:
            self._check(request)
        before = self.redraws
        found = self.student.pool.map(self._complete, requests, progress=progress)
        each = 2 * (self.redraws - before) / max(len(requests), 1)
        if each > NOT_WORTH_IT:
            log.info(
                "grafts took %.0f requests a rollout: rules that redraw so much are quicker with both models in this "
                "process (leave --servers.student out)",
                each,
            )
        return found

    def _check(self, request: GraftRequest) -> None:
        """Refuse what one of the models' servers cannot take; the teacher is asked up to where the student ends."""
        self.student.check(request)
        self.teacher.check(replace(request, max_new_tokens=self._room(request)))
        tokens, theirs = len(request.prefix) + self._room(request), self.teacher.context
        if theirs is not None and theirs < tokens:
            raise ConfigError(
                f"the teacher's context is {theirs} tokens, and grafts need up to {tokens}; lower max_new_tokens"
            )

    def _room(self, request: GraftRequest) -> int:
        own = self.student.context
        return request.max_new_tokens if own is None else min(request.max_new_tokens, own - len(request.prefix))

    async def _complete(self, request: GraftRequest) -> Continuation:
        room = self._room(request)
        coin_T = graft_numbers(request.graft_seed, request.skip, room)[:, 0]
        done: list[int] = []
        redraw_next = request.forced
        while True:
            if redraw_next:
                done.append(await self._redraw(request, done))
                redraw_next = False
            else:
                drawn = (await self._ask(self.student, request, done, room - len(done), "student")).token_ids
                rule = self.rules[request.rule][list(drawn)]
                hits = (coin_T[len(done) : len(done) + len(drawn)] < rule).nonzero()[0]
                done += drawn[: hits[0]] if len(hits) else drawn
                redraw_next = len(hits) > 0
            if not redraw_next and (len(done) >= room or done[-1] in self.student.eos_ids):
                return Continuation(tuple(done), truncated=done[-1] not in self.student.eos_ids)

    async def _redraw(self, request: GraftRequest, done: list[int]) -> int:
        self.redraws += 1
        engine = self.student if self.own[request.rule] else self.teacher
        return (await self._ask(engine, request, done, 1, "redraw")).token_ids[0]

    async def _ask(
        self, engine: VllmEngine, request: GraftRequest, done: list[int], room: int, who: str
    ) -> Continuation:
        """A stretch by one of the models; every stretch has a seed of its own."""
        seed = derive_seed(request.graft_seed, who, request.seed, request.skip + len(done))
        return await engine.complete(Request((*request.prefix, *done), room, seed))
