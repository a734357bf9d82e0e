"""A resumed knock-out or graft has exactly the law of generating it from the start: chi-square on 100,000 rollouts."""

from __future__ import annotations

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

NUM = 100_000
LIMIT = 4


def baseline_of(engine, count, seed, limit=LIMIT, prompt=(0,)):
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


def knocked_out(engine, baseline, members, seed, *, placebo=False, limit=LIMIT):
    """Every rollout's knock-out twin, or its placebo."""
    banned = BannedSet("s", "token", members[0], "s", tuple(members))
    jobs, _ = plan(baseline, [banned], [0], exact_resume=True, placebo_problems=placebo * len(baseline.rollouts))
    how = {"limit": limit, "seed": seed, "exact_resume": True}
    begun = [resumed(job, banned, **how) for job in jobs if job.is_placebo == placebo]
    return twins(engine, baseline, [own for own in begun if own.request is not None])


def grafted(grafter, baseline, redraw, seed, *, limit=LIMIT):
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


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("seed", "members"),
    [
        (0, (2,)),
        (1, (1, 3)),
        *(pytest.param(seed, members, marks=SLOW) for seed in (2, 3, 4) for members in ((2,), (1, 3))),
    ],
)
def test_resumed_rollouts_follow_the_knockout_law(seed, members):
    engine = markov.MarkovEngine(markov.chain(seed))
    baseline = baseline_of(engine, NUM, seed)
    resumed, touched = knocked_out(engine, baseline, members, seed)
    full = [a.token_ids for a in engine.generate([Request((0,), LIMIT, 10**9 + i, members) for i in range(NUM)])]

    assert markov.fit_p([r.token_ids for r in baseline.rollouts], markov.law(engine.matrix, LIMIT)) > 0.01
    assert markov.fit_p(resumed, markov.law(engine.matrix, LIMIT, members)) > 0.01
    assert markov.same_p(resumed, full) > 0.01
    for index, rollout in enumerate(baseline.rollouts):
        if index not in touched:
            assert resumed[index] is rollout.token_ids
            assert not set(members) & set(rollout.token_ids)


def test_the_placebo_has_the_law_of_the_baseline():
    engine = markov.MarkovEngine(markov.chain(3))
    responses, touched = knocked_out(engine, baseline_of(engine, NUM, 3), (2,), 3, placebo=True)
    assert len(touched) > 10_000
    assert markov.fit_p(responses, markov.law(engine.matrix, LIMIT)) > 0.01


@SLOW
def test_drawing_the_place_again_without_a_ban_would_not_be_a_placebo():
    """Why the placebo goes on after the use: redrawing the use itself has another law."""
    engine = markov.MarkovEngine(markov.chain(3))
    baseline = baseline_of(engine, NUM, 3)
    responses = []
    uses = baseline.first_uses((2,))
    asked = [Request((0, *baseline.rollouts[i].token_ids[:at]), LIMIT - at, i + 7) for i, at in uses.items()]
    answers = dict(zip(uses, engine.generate(asked)))
    for i, rollout in enumerate(baseline.rollouts):
        responses.append((*rollout.token_ids[: uses[i]], *answers[i].token_ids) if i in uses else rollout.token_ids)
    assert markov.fit_p(responses, markov.law(engine.matrix, LIMIT)) < 1e-6


def test_reusing_the_number_that_chose_the_banned_token_would_be_wrong():
    """Why the first draw of a resumption takes another number: the test would see it."""
    engine = markov.MarkovEngine(markov.chain(1))
    baseline = baseline_of(engine, NUM // 4, 1)
    uses = baseline.first_uses((2,))
    responses = [rollout.token_ids for rollout in baseline.rollouts]
    asked = [
        Request((0, *responses[i][:at]), LIMIT - at, baseline.rollouts[i].seed, (2,), skip=at) for i, at in uses.items()
    ]
    for (i, at), answer in zip(uses.items(), engine.generate(asked)):
        responses[i] = (*responses[i][:at], *answer.token_ids)
    assert markov.fit_p(responses, markov.law(engine.matrix, LIMIT, (2,))) < 1e-6


RULES = [(0, 0, 1, 0, 0), (0, 1, 0, 1, 0), (0.3, 0.3, 0, 0.3, 0.3), (1, 1, 1, 1, 1)]


@pytest.mark.parametrize(
    ("seed", "redraw"), [(0, RULES[0]), *(pytest.param(s, r, marks=SLOW) for s in (1, 2, 3) for r in RULES)], ids=str
)
def test_grafts_follow_the_law_of_direct_simulation(seed, redraw):
    student, teacher, redraw = markov.chain(seed), markov.chain(100 + seed), np.array(redraw, float)
    engine, grafter = markov.MarkovEngine(student), markov.MarkovGrafter(student, teacher, redraw[None])
    responses = grafted(grafter, baseline_of(engine, NUM, seed), redraw, seed)
    law = markov.graft_law(student, teacher, redraw, LIMIT)
    assert markov.fit_p(responses, law) > 0.01
    if seed == 1:
        direct = grafter.generate([GraftRequest((0,), LIMIT, 10**9 + i, graft_seed=2 * 10**9 + i) for i in range(NUM)])
        assert markov.same_p(responses, [answer.token_ids for answer in direct]) > 0.01


# ---------------------------------------------------------------- the same with a transformer behind it


def tiny(seed: int) -> PreTrainedModel:
    shape = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    return tiny_model(
        seed=seed, width=16, vocabulary=6, max_position_embeddings=32, initializer_range=0.8, **shape, **ends
    )


def model_law(mixes, vocabulary, limit, prompt):
    """Closed form from a function prefix -> next-token probabilities (vocabulary,)."""
    found, open_ = {}, {(): 1.0}
    for step in range(limit):
        grown = {}
        for path, p in open_.items():
            for token, q in enumerate(mixes((*prompt, *path))):
                if q > 0:
                    target = found if token == 0 or step == limit - 1 else grown
                    target[(*path, token)] = target.get((*path, token), 0.0) + p * q
        open_ = grown
    return found


def probabilities(model, vocabulary, banned=()):
    memo = {}

    def give(prefix):
        if prefix not in memo:
            with torch.no_grad():
                logits = model(torch.tensor([prefix])).logits[0, -1, :vocabulary].double().numpy()
            weight = np.exp(logits - logits.max())
            weight[list(banned)] = 0.0
            memo[prefix] = weight / weight.sum()
        return memo[prefix]

    return give


def sampler_of(model, vocabulary, **options):
    return Sampler(model, eos_ids=[0], pad_id=0, vocabulary=vocabulary, batch_size=8192, **options)


@pytest.mark.parametrize("num", [20_000, pytest.param(NUM, marks=SLOW)])
def test_a_transformer_resumed_follows_the_knockout_law(num):
    """Against the closed form, and against rollouts regenerated in full."""
    model, vocabulary, prompt, limit, token = tiny(0), 4, (5, 2), 3, 2
    engine = sampler_of(model, vocabulary)
    resumed, touched = knocked_out(
        engine, baseline_of(engine, num, 0, limit=limit, prompt=prompt), (token,), 0, limit=limit
    )
    full = engine.generate([Request(prompt, limit, 10**9 + index, (token,)) for index in range(num)])
    assert 0 < len(touched) < num
    law = model_law(probabilities(model, vocabulary, (token,)), vocabulary, limit, prompt)
    assert markov.fit_p(resumed, law) > 0.01
    assert markov.same_p(resumed, [answer.token_ids for answer in full]) > 0.01


@pytest.mark.parametrize("num", [20_000, pytest.param(NUM, marks=SLOW)])
def test_a_transformer_grafted_follows_the_law_of_direct_simulation(num):
    student, teacher, vocabulary, limit, prompt = tiny(1), tiny(2), 4, 3, (5, 2)
    redraw = np.array([0, 0, 1.0, 0.5])
    engine = sampler_of(student, vocabulary)
    grafter = GraftSampler(engine, sampler_of(teacher, vocabulary), redraw[None])
    responses = grafted(grafter, baseline_of(engine, num, 0, limit=limit, prompt=prompt), redraw, 0, limit=limit)
    p, q = probabilities(student, vocabulary), probabilities(teacher, vocabulary)

    def mixed(prefix):
        return p(prefix) * (1 - redraw) + (p(prefix) * redraw).sum() * q(prefix)

    assert markov.fit_p(responses, model_law(mixed, vocabulary, limit, prompt)) > 0.01
    direct = grafter.generate([GraftRequest(prompt, limit, 10**9 + i, graft_seed=2 * 10**9 + i) for i in range(num)])
    assert markov.same_p(responses, [answer.token_ids for answer in direct]) > 0.01


@pytest.mark.parametrize("token", [1, 2, 3, 4, 5])
def test_greedy_decoding_of_a_transformer_resumed_is_the_greedy_knockout(token):
    engine = sampler_of(tiny(4), None, greedy=True)
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
