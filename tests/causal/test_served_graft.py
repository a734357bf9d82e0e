"""Grafts on servers: their law by chi-square, and contexts that are too short for either model."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import tiny
import torch
from markov import fit_p
from standin_server import Direct, StandIn

from rocktokens.causal.grafters import ServedGrafter
from rocktokens.errors import ConfigError
from rocktokens.sample.requests import GraftRequest
from rocktokens.servers.vllm import VllmEngine

VOCABULARY, EOS, PROMPT = 8, 1, (3, 4, 5)
STUDENT = tiny.tiny_model(vocabulary=VOCABULARY, seed=11)
TEACHER = tiny.tiny_model("qwen3", vocabulary=VOCABULARY, seed=12, width=48)
DRAWS = 2500


@torch.inference_mode()
def next_law(model, prefix: tuple[int, ...]) -> np.ndarray:
    return model(input_ids=torch.tensor([prefix])).logits[0, -1].double().softmax(0).numpy()


# One rule: the student's three likeliest first tokens are drawn again with probability 0.7.
RULES = np.zeros((1, VOCABULARY))
RULES[0, next_law(STUDENT, PROMPT).argsort()[-3:]] = 0.7


@contextmanager
def grafter(student=None, teacher=None, *, own: float = 0.0, student_limit=None, teacher_limit=None):
    """A grafter on two stand-ins, which are made as told."""
    with ExitStack() as stack:
        served = [
            stack.enter_context(StandIn(model, **(options or {})))
            for model, options in ((STUDENT, student), (TEACHER, teacher))
        ]
        engines = [
            VllmEngine(
                stack.enter_context(Direct(server)),
                eos_ids=(EOS,),
                vocabulary=VOCABULARY,
                model_context=limit,
            )
            for server, limit in zip(served, (student_limit, teacher_limit))
        ]
        yield ServedGrafter(*engines, RULES, np.array([own])), *served


def law(redrawn_by, *, forced: bool = False) -> dict[tuple[int, ...], float]:
    """Probability of every rollout of two tokens, in float64 from the models' own logits: no code of the grafter."""

    def step(prefix: tuple[int, ...], forced: bool) -> np.ndarray:
        student, again = next_law(STUDENT, prefix), next_law(redrawn_by, prefix)
        return again if forced else student * (1 - RULES[0]) + (student * RULES[0]).sum() * again

    found: dict[tuple[int, ...], float] = {}
    for first, p in enumerate(step(PROMPT, forced)):
        if first == EOS:
            found[(first,)] = p
            continue
        found |= {(first, second): p * q for second, q in enumerate(step((*PROMPT, first), False))}
    return found


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(("own", "redrawn_by", "other"), [(0.0, TEACHER, STUDENT), (1.0, STUDENT, TEACHER)])
def test_grafts_on_servers_have_the_grafters_law(own, redrawn_by, other, forced):
    """The student's draw, but where the rule says so one of the teacher's (or, as a placebo, of the student again)."""
    asked = [GraftRequest(PROMPT, 2, seed, graft_seed=10**6 + seed, forced=forced) for seed in range(DRAWS)]
    with grafter(own=own) as (grafts, *_):
        drawn = [answer.token_ids for answer in grafts.generate(asked)]
        assert grafts.redraws > DRAWS / 3
    assert fit_p(drawn, law(redrawn_by, forced=forced)) > 0.001
    assert fit_p(drawn, law(other, forced=forced)) < 1e-6


@pytest.mark.parametrize("short", ["student", "teacher"])
def test_a_server_too_short_for_a_graft_is_named_before_anything_is_drawn(short):
    asked = [GraftRequest(PROMPT, length, 0) for length in (2, 40)]
    with grafter(student_limit=96, teacher_limit=96, **{short: {"context": 12}}) as (grafts, *servers):
        with pytest.raises(ConfigError, match="--max-model-len 43") as error:
            grafts.generate(asked)
        assert servers[short == "teacher"].url in str(error.value)
        assert not any(server.requests for server in servers)
