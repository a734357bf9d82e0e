"""A resumed knock-out or graft has exactly the law of generating it from the start: chi-square on 100,000 rollouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import markov
import numpy as np
import pytest
import torch
from tiny import FAMILIES, tiny_model
from tiny import prompts as random_prompts
from transformers import PreTrainedModel

from rocktokens.causal.baseline import Baseline, BaseRollout, Begun
from rocktokens.causal.census import BannedSet
from rocktokens.causal.graft import first_redraw
from rocktokens.causal.grafters import GraftSampler
from rocktokens.causal.knockout import plan, resumed
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.requests import GraftRequest, Request
from rocktokens.sample.sampler import Sampler
from rocktokens.seeds import derive_seed

NUM, FEW = 100_000, 20_000
SLOW = pytest.mark.slow


class World(NamedTuple):
    """An engine, whatever redraws its tokens from a teacher, and what both models say of the next token."""

    engine: Any
    grafter: Callable[[np.ndarray], Any]
    student_p: Callable[[tuple[int, ...]], np.ndarray]
    teacher_p: Callable[[tuple[int, ...]], np.ndarray]
    prompt: tuple[int, ...]
    limit: int

    def law(self, next_p=None) -> dict[tuple[int, ...], float]:
        """Probability of every response, from the next token's probabilities after each prefix; token 0 ends it."""
        found, open_ = {}, {(): 1.0}
        for step in range(self.limit):
            grown = {}
            for path, p in open_.items():
                for token, q in enumerate((next_p or self.student_p)((*self.prompt, *path))):
                    if q > 0:
                        (found if token == 0 or step == self.limit - 1 else grown)[*path, token] = p * q
            open_ = grown
        return found


def markov_world(seed: int) -> World:
    student, teacher = markov.chain(seed), markov.chain(100 + seed)
    grafter = lambda redraw: markov.MarkovGrafter(student, teacher, redraw[None])  # noqa: E731
    next_p = [lambda prefix, own=own: own[prefix[-1]] for own in (student, teacher)]
    return World(markov.MarkovEngine(student), grafter, *next_p, (0,), 4)


def small_model(seed: int) -> PreTrainedModel:
    shape = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    shape |= {"max_position_embeddings": 32, "initializer_range": 0.8, **ends}
    return tiny_model(seed=seed, width=16, vocabulary=6, **shape)


def sampler_of(model: PreTrainedModel, **options) -> Sampler:
    return Sampler(model, eos_ids=[0], pad_id=0, batch_size=8192, **options)


def transformer_world(seed: int) -> World:
    """Two rows of the heads are padding: four token types."""
    models = small_model(seed), small_model(seed + 1)
    engine, other = (sampler_of(model, vocabulary=4) for model in models)

    def next_p(model):
        @cache
        def give(prefix):
            with torch.no_grad():
                return model(torch.tensor([prefix])).logits[0, -1, :4].double().softmax(0).numpy()

        return give

    return World(engine, lambda redraw: GraftSampler(engine, other, redraw[None]), *map(next_p, models), (5, 2), 3)


def baseline_of(engine, count, seed, limit=4, prompt=(0,)):
    """Rollouts with the seeds' streams 0, 1, 2 …, built without the store between; problem i is rollout i."""
    asked = [Request(prompt, limit, seed * 10**7 + index) for index in range(count)]
    owner = Prompt("p", prompt, "", "yes")
    return Baseline(
        [
            BaseRollout(owner, index, f"p#{index}", answer.token_ids, True, request.seed)
            for index, (request, answer) in enumerate(zip(asked, engine.generate(asked)))
        ]
    )


def twins(engine, baseline, begun):
    """Every rollout's twin, copied or resumed as it was begun; and which were resumed."""
    responses = [rollout.token_ids for rollout in baseline.rollouts]
    for own, answer in zip(begun, engine.generate([own.request for own in begun])):
        responses[own.rollout.problem] = (*own.kept, *answer.token_ids)
    return responses, {own.rollout.problem for own in begun}


def knocked_out(engine, baseline, members, seed, *, placebo=False, limit=4):
    """Every rollout's knock-out twin, or its placebo."""
    banned = BannedSet("s", "token", members[0], "s", tuple(members))
    jobs, _ = plan(baseline, [banned], [0], exact_resume=True, placebo_problems=placebo * len(baseline.rollouts))
    how = {"limit": limit, "seed": seed, "exact_resume": True}
    begun = [resumed(job, banned, **how) for job in jobs if job.is_placebo == placebo]
    return twins(engine, baseline, [own for own in begun if own.request is not None])


def grafted(grafter, baseline, redraw, seed, limit):
    """Every rollout's grafted twin."""
    begun = []
    for rollout in baseline.rollouts:
        own = derive_seed(seed, "graft", rollout.rollout_id)
        at = first_redraw(rollout, redraw, own)
        if at is not None:
            kept = rollout.token_ids[:at]
            how = {"skip": at, "graft_seed": own, "forced": True}
            request = GraftRequest((*rollout.prompt.prompt_ids, *kept), limit - at, rollout.seed, **how)
            begun.append(Begun(rollout, kept, request, {}))
    return twins(grafter, baseline, begun)[0]


@pytest.mark.parametrize(
    ("make", "seed", "members", "num"),
    [
        (transformer_world, 0, (2,), FEW),
        (markov_world, 1, (1, 3), NUM),
        pytest.param(transformer_world, 0, (2,), NUM, marks=SLOW),
        *(pytest.param(markov_world, seed, own, NUM, marks=SLOW) for seed in (0, 2, 3, 4) for own in ((2,), (1, 3))),
    ],
)
def test_resumed_rollouts_follow_the_knockout_law(make, seed, members, num):
    """Against the closed form, and against rollouts regenerated in full with the ban."""
    world = make(seed)
    baseline = baseline_of(world.engine, num, seed, world.limit, world.prompt)
    resumed, touched = knocked_out(world.engine, baseline, members, seed, limit=world.limit)
    asked = [Request(world.prompt, world.limit, 10**9 + i, members) for i in range(num)]
    full = [answer.token_ids for answer in world.engine.generate(asked)]

    def without(prefix):
        allowed_V = world.student_p(prefix).copy()
        allowed_V[list(members)] = 0.0
        return allowed_V / allowed_V.sum()

    assert markov.fit_p([rollout.token_ids for rollout in baseline.rollouts], world.law()) > 0.01
    assert markov.fit_p(resumed, world.law(without)) > 0.01
    assert markov.same_p(resumed, full) > 0.01
    for index, rollout in enumerate(baseline.rollouts):
        if index not in touched:
            assert resumed[index] is rollout.token_ids
            assert not set(members) & set(rollout.token_ids)


def test_the_placebo_has_the_law_of_the_baseline():
    world = markov_world(3)
    responses, touched = knocked_out(world.engine, baseline_of(world.engine, NUM, 3), (2,), 3, placebo=True)
    assert len(touched) > 10_000
    assert markov.fit_p(responses, world.law()) > 0.01


def test_reusing_the_number_that_chose_the_banned_token_would_be_wrong():
    """Why the first draw of a resumption takes another number: the test would see it."""
    engine = markov_world(1).engine
    baseline = baseline_of(engine, NUM // 4, 1)
    uses = baseline.first_uses((2,))
    responses = [rollout.token_ids for rollout in baseline.rollouts]
    for i, at in uses.items():
        request = Request((0, *responses[i][:at]), 4 - at, baseline.rollouts[i].seed, (2,), skip=at)
        uses[i] = (at, request)
    for i, answer in zip(uses, engine.generate([request for _, request in uses.values()])):
        responses[i] = (*responses[i][: uses[i][0]], *answer.token_ids)
    assert markov.fit_p(responses, markov.law(engine.matrix, 4, (2,))) < 1e-6


RULES = [(0, 0, 1, 0, 0), (0, 1, 0, 1, 0), (0.3, 0.3, 0, 0.3, 0.3), (1, 1, 1, 1, 1)]


@pytest.mark.parametrize(
    ("make", "seed", "redraw", "num"),
    [
        (transformer_world, 1, (0, 0, 1, 0.5), FEW),
        (markov_world, 0, RULES[0], NUM),
        pytest.param(transformer_world, 1, (0, 0, 1, 0.5), NUM, marks=SLOW),
        *(pytest.param(markov_world, seed, rule, NUM, marks=SLOW) for seed in (1, 2, 3) for rule in RULES),
    ],
)
def test_grafts_follow_the_law_of_direct_simulation(make, seed, redraw, num):
    world, redraw = make(seed), np.array(redraw, float)
    grafter, baseline = world.grafter(redraw), baseline_of(world.engine, num, seed, world.limit, world.prompt)
    responses = grafted(grafter, baseline, redraw, seed, world.limit)

    def mixed(prefix):
        p_V = world.student_p(prefix)
        return p_V * (1 - redraw) + (p_V * redraw).sum() * world.teacher_p(prefix)

    assert markov.fit_p(responses, world.law(mixed)) > 0.01
    asked = [GraftRequest(world.prompt, world.limit, 10**9 + i, graft_seed=2 * 10**9 + i) for i in range(num)]
    assert markov.same_p(responses, [answer.token_ids for answer in grafter.generate(asked)]) > 0.01


@pytest.mark.parametrize("token", [1, 2, 3, 4, 5])
def test_greedy_decoding_of_a_transformer_resumed_is_the_greedy_knockout(token):
    engine = sampler_of(small_model(4), greedy=True)
    prompt = (3, 1, 4)
    baseline = baseline_of(engine, 1, 0, limit=16, prompt=prompt)
    resumed, _ = knocked_out(engine, baseline, (token,), 0, limit=16)
    assert resumed == [engine.generate([Request(prompt, 16, 0, (token,))])[0].token_ids]


class Unshared(Sampler):
    """Every batch prefills its own prefixes."""

    def _blocks(self, requests):
        return [([], list(range(len(requests))))]


@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_that_begin_alike_are_prefilled_once_and_no_token_changes(family):
    """Rollouts resumed at every place: the same tokens whether beginnings are copied or computed."""
    model = tiny_model(family)
    options = {"eos_ids": [1], "pad_id": 2, "batch_size": 16}
    shared, unshared = Sampler(model, **options), Unshared(model, **options)
    starts = random_prompts(6, shortest=3)
    rollouts = shared.generate([Request(prompt, 20, seed) for seed, prompt in enumerate(starts)])
    requests = [
        Request((*prompt, *rollout.token_ids[:at]), 20 - at, 7 * at + number, banned=(3 + at,))
        for number, (prompt, rollout) in enumerate(zip(starts, rollouts))
        for at in range(len(rollout.token_ids))
    ]
    assert len(shared._blocks(requests)[0][0]) > 1, "nothing is shared"
    assert shared.generate(requests) == unshared.generate(requests)
    assert shared.generate(requests[::-1]) == unshared.generate(requests)[::-1]
