"""Sampling: the model's own choices, each row by itself, whatever shares its batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from markov import fit_p
from tiny import CONTEXT, VOCABULARY, generated, prompts, tiny_model

from rocktokens.errors import ConfigError, DataError
from rocktokens.sample.kv_decoder import Decoder
from rocktokens.sample.requests import Request
from rocktokens.sample.sampler import BLOCK_TOKENS, WIDE_VOCABULARY, Sampler, inverse_transform

EOS, PAD, INF = 1, 2, math.inf
NEVER = (0,)  # an end token that greedy decoding of these models does not meet


@pytest.fixture(scope="module", params=["llama", "gemma2"])  # gemma2: a cap and a short window
def model(request):
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


def sampler(model, **options) -> Sampler:
    return Sampler(model, **{"eos_ids": (EOS,), "pad_id": PAD, **options})


def requests(prefixes, limit: int = 16, **options) -> list[Request]:
    return [Request(prefix, limit, seed, **options) for seed, prefix in enumerate(prefixes)]


# --- greedy equals generate ---


def test_greedy_equals_generate_token_for_token(model):
    """Prompts of 1 to 14 tokens in one left-padded batch, with two end tokens that some of them meet."""
    prefixes = prompts(12)
    free = [generated(model, prefix, 24, NEVER) for prefix in prefixes]
    eos_ids = (free[0][5], free[3][9])
    expected = [generated(model, prefix, 24, eos_ids) for prefix in prefixes]
    assert 2 <= sum(len(tokens) < 24 for tokens in expected) < 12
    for batch_size in (1, 5, 64):
        engine = sampler(model, eos_ids=eos_ids, greedy=True, batch_size=batch_size)
        got = engine.generate(requests(prefixes, 24))
        assert [answer.token_ids for answer in got] == expected
        assert [answer.truncated for answer in got] == [tokens[-1] not in eos_ids for tokens in expected]


def test_greedy_with_a_ban_equals_generate_with_suppressed_tokens(model):
    """Also where logits are soft-capped: the ban acts after the cap."""
    prefixes = prompts(6, seed=1)
    banned = tuple({token for prefix in prefixes for token in generated(model, prefix, 12, NEVER)[:4]})
    got = sampler(model, eos_ids=NEVER, greedy=True).generate(requests(prefixes, 12, banned=banned))
    for prefix, answer in zip(prefixes, got):
        assert answer.token_ids == generated(model, prefix, 12, NEVER, suppress_tokens=list(banned))
        assert not set(answer.token_ids) & set(banned)


def test_resuming_a_sampled_rollout_with_its_own_numbers_gives_its_rest(model):
    (prefix,) = prompts(1, shortest=5)
    (whole,) = sampler(model, eos_ids=NEVER).generate([Request(prefix, 15, seed=3)])
    count = len(whole.token_ids)
    asked = [Request(prefix + whole.token_ids[:k], 15 - k, seed=3, skip=k) for k in range(count)]
    for k, answer in enumerate(sampler(model, eos_ids=NEVER).generate(asked)):
        assert whole.token_ids[:k] + answer.token_ids == whole.token_ids


def test_vocabulary_padding_is_never_emitted():
    """The head has 64 rows, the pair shares 40: the best of the shared ones is taken."""
    model = tiny_model("llama", seed=3)
    (prefix,) = prompts(1, vocabulary=40)
    engine = sampler(model, eos_ids=NEVER, greedy=True, vocabulary=40)
    (answer,) = engine.generate([Request(prefix, 20, 0)])
    assert answer.token_ids == generated(model, prefix, 20, NEVER, suppress_tokens=list(range(40, 64)))
    drawn = sampler(model, vocabulary=40).generate(requests(prompts(20, vocabulary=40)))
    assert max(token for answer in drawn for token in answer.token_ids) < 40


# --- seeds ---


def test_a_row_does_not_depend_on_its_batch(model):
    """Alone, in fives, all together, or in another order: the same tokens for the same seed."""
    asked = requests(prompts(15, seed=4), 20)
    together = sampler(model).generate(asked)
    assert sampler(model, batch_size=5).generate(asked) == together
    assert sampler(model, batch_size=1).generate(asked) == together
    assert sampler(model).generate(asked[::-1]) == together[::-1]
    assert sampler(model).generate(asked[3:4]) == together[3:4]


# --- the law ---


def law(model, prefix, *, temperature=1.0, banned=(), top_k=None, top_p=None) -> np.ndarray:
    """The next token's probabilities from the model's own logits, in float64 numpy."""
    with torch.no_grad():
        logits = model(torch.tensor([prefix])).logits[0, -1].double().numpy()
    logits[list(banned)] = -np.inf
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if top_k is not None:
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p is not None:
        kept = np.searchsorted(np.cumsum(p[order]), top_p) + 1
        p[order[kept:]] = 0
    return p / p.sum()


LAWS = [{}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.9}]


@pytest.mark.parametrize("banned", [(), (5, 59, 24)], ids=["", "banned"])
@pytest.mark.parametrize("options", LAWS, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_sampled_frequencies_are_the_models_probabilities(name, options, banned):
    model = tiny_model(name)
    (prefix,) = prompts(1, shortest=6)
    draws = 3_000
    asked = [Request(prefix, 1, seed, banned=banned) for seed in range(draws)]
    answers = sampler(model, batch_size=draws, **options).generate(asked)
    expected = {(token,): p for token, p in enumerate(law(model, prefix, banned=banned, **options)) if p > 0}
    assert fit_p([answer.token_ids for answer in answers], expected) > 1e-4


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(llama, uniform):
    """Not even by the smallest and the largest number that a stream can hold."""
    logits_BV = torch.tensor([[-INF, -INF, 1.0, -INF, 0.0, -INF], [0.0, -INF, -INF, -200.0, -INF, -INF]])
    token_B, bad_B = sampler(llama).choose(logits_BV, torch.full((2,), uniform, dtype=torch.float64))
    assert torch.isfinite(logits_BV[torch.arange(2), token_B]).all()
    assert not bad_B.any()


def test_exact_resume_is_not_claimed_with_top_k_or_top_p(llama):
    assert all(sampler(llama, **exact).exact_resume for exact in ({}, {"temperature": 0.3}, {"greedy": True}))
    assert not any(sampler(llama, **cut).exact_resume for cut in ({"top_k": 5}, {"top_p": 0.9}))


# --- endings ---


def test_the_end_token_is_part_of_the_response_and_ends_it(llama):
    answers = sampler(llama, eos_ids=(5, 59)).generate(requests(prompts(40), 30))
    assert 10 < sum(not answer.truncated for answer in answers) < 40
    for answer in answers:
        assert not {5, 59} & set(answer.token_ids[:-1])
        assert (answer.token_ids[-1] in (5, 59)) == (not answer.truncated)
        assert not answer.truncated or len(answer.token_ids) == 30


def test_the_models_context_is_a_limit_too(llama):
    asked = [Request(tuple([7] * (CONTEXT - 3)), 50, 0), Request((7, 8), 5, 1)]
    long, short = sampler(llama, eos_ids=NEVER, greedy=True).generate(asked)
    assert len(long.token_ids) == 3
    assert long.truncated
    assert len(short.token_ids) == 5


@pytest.mark.parametrize("longest", [20, 5])  # 5: all prompts are equally long
def test_what_all_prompts_begin_with_is_computed_once(model, longest):
    """A common beginning of 24 tokens; one prompt is nothing else. The logits are those of every row alone."""
    common = prompts(1, seed=9, shortest=24, longest=24)[0]
    rests = prompts(20, seed=10, shortest=5, longest=longest)
    prefixes = [common + rest for rest in rests] + [common] * (longest > 5)
    passed = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: passed.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    decoder = Decoder(model, pad_id=PAD)
    try:
        logits_BV = decoder.prefill(prefixes, room=3)
    finally:
        handle.remove()
    assert passed == [(1, 24), (len(prefixes), max(map(len, rests)))]
    rows = torch.arange(len(prefixes) - 1, -1, -2)  # half of them, in another order
    decoder.keep(rows)
    next_BV = decoder.advance(torch.full((len(rows),), 7))
    with torch.no_grad():
        for row, prefix in enumerate(prefixes):
            alone_V = model(torch.tensor([prefix])).logits[0, -1]
            torch.testing.assert_close(logits_BV[row], alone_V, rtol=1e-4, atol=1e-4)
        for place, row in enumerate(rows.tolist()):
            alone_V = model(torch.tensor([[*prefixes[row], 7]])).logits[0, -1]
            torch.testing.assert_close(next_BV[place], alone_V, rtol=1e-4, atol=1e-4)


# --- broken models and bad requests ---


def test_a_row_with_nan_logits_is_marked_and_spoils_no_other():
    model = tiny_model("llama")
    asked = requests([(10, 11, 12), (13, 63), (14,), (15, 16, 17, 18)])
    whole = sampler(model).generate(asked)
    with torch.no_grad():
        model.get_input_embeddings().weight[63] = math.nan
    got = sampler(model).generate(asked)
    assert got[1].invalid
    assert got[1].token_ids == ()
    for row in (0, 2, 3):
        before_63 = whole[row].token_ids[: (*whole[row].token_ids, 63).index(63) + 1]
        assert got[row].token_ids[: len(before_63)] == before_63


@pytest.mark.parametrize(
    ("prefix", "banned", "error"),
    [
        ((), (), DataError),
        ((3,) * CONTEXT, (), DataError),
        ((3, VOCABULARY), (), DataError),
        ((3,), tuple(range(VOCABULARY)), ConfigError),
        ((3,), (VOCABULARY,), ConfigError),
    ],
)
def test_bad_requests_are_refused(llama, prefix, banned, error):
    with pytest.raises(error):
        sampler(llama).generate([Request((3, 4), 2, 0), Request(prefix, 5, 0, banned=banned)])


@pytest.mark.parametrize("num_tokens", [WIDE_VOCABULARY + 1, WIDE_VOCABULARY + BLOCK_TOKENS, 151_936])
def test_a_wide_vocabulary_is_searched_as_token_by_token(num_tokens):
    rng = np.random.default_rng(num_tokens)
    mass = np.exp(rng.normal(0, 3, size=(8, num_tokens)) * (rng.random((8, num_tokens)) < 0.9)).astype(np.float32)
    mass[:, rng.random(num_tokens) < 0.3] = 0
    mass[0, :-1] = 0  # all of a row's mass in its very last token
    mass[1, 1:] = 0  # and in its first
    mass[0, -1] = mass[1, 0] = 0.25
    for uniform in (0.0, 0.1, 0.5, 0.9, 1 - 2**-53):
        got = inverse_transform(torch.tensor(mass), torch.full((8,), uniform, dtype=torch.float64)).tolist()
        for row, token in enumerate(got):
            exact = [0.0, *np.cumsum(mass[row].astype(np.longdouble))]
            assert mass[row, token] > 0
            slack = 1e-12 * exact[-1]
            assert exact[token] - slack <= uniform * exact[-1] <= exact[token + 1] + slack
