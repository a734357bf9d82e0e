"""The faster decoding step on a CPU against the plain one, and that nothing of it outlives its block."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from tiny import generated, prompts, tiny_model
from torch import nn

from rocktokens.sample import cpu_decoding
from rocktokens.sample.cpu_decoding import ATTENTION, fast_on_cpu, one_query_attention
from rocktokens.sample.kv_decoder import Decoder
from rocktokens.sample.requests import Request
from rocktokens.sample.sampler import Sampler

needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this CPU; runs where it has"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [None, "bool", "added"])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_attention_of_one_query_is_torchs_own_in_float64(dtype, masked, scaling, generator):
    """Six query heads on two key heads; keys come as a view of a longer slab."""
    query, slab, value = (torch.randn(3, n, t, 16, generator=generator) for n, t in ((6, 1), (2, 20), (2, 9)))
    query, key, value = query.to(dtype), slab.to(dtype)[:, :, 2:11], value.to(dtype)
    mask = None if masked is None else torch.arange(9) >= torch.tensor([4, 0, 0]).view(3, 1, 1, 1)
    given = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo().min) if masked == "added" else mask
    got, _ = one_query_attention(nn.Identity(), query, key, value, given, scaling=scaling, dropout=0.0)
    exact = (query.double(), *(own.double().repeat_interleave(3, 1) for own in (key, value)))
    want = F.scaled_dot_product_attention(*exact, attn_mask=mask, scale=scaling).transpose(1, 2)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_fast_step_has_the_logits_of_a_plain_one(family):
    model = tiny_model(family)
    token_B = torch.arange(6) + 3
    logits = []
    for context in (nullcontext(), fast_on_cpu(model, steps=64)):
        decoder = Decoder(model, pad_id=2)
        with context:
            decoder.prefill(prompts(6), room=4)
            logits.append([decoder.advance(token_B) for _ in range(3)])
    for plain, fast in zip(*logits):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)


@needs_bf16
def test_a_packed_weight_in_bf16_gives_the_very_numbers_of_the_plain_one():
    layer = nn.Linear(96, 300).to(torch.bfloat16)
    given = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        assert torch.equal(cpu_decoding._multiplier(layer, torch.bfloat16)(given), layer(given))


@needs_bf16
def test_bf16_greedy_rollouts_leave_those_of_generate_only_at_a_tie():
    """In 16 bit two tokens may have the same logit up to rounding; nowhere else may the two part."""
    model = tiny_model("llama").to(torch.bfloat16)
    prefixes = prompts(8)
    got = Sampler(model, eos_ids=(0,), pad_id=2, greedy=True).generate([Request(p, 20, 0) for p in prefixes])
    equal = 0
    for prefix, answer in zip(prefixes, got):
        want = generated(model, prefix, 20, (0,))
        parting = next((at for at, pair in enumerate(zip(answer.token_ids, want)) if pair[0] != pair[1]), None)
        equal += parting is None
        if parting is not None:
            with torch.no_grad():
                logits_V = model(torch.tensor([[*prefix, *want[:parting]]])).logits[0, -1].float()
            lost = logits_V[want[parting]] - logits_V[answer.token_ids[parting]]
            assert lost <= 2**-6 * logits_V.abs().max()
    assert equal >= 5


def packed_and_attention(model):
    return sum("forward" in vars(module) for module in model.modules()), model.config._attn_implementation


def test_inside_the_block_layers_are_packed_and_afterwards_as_before(monkeypatch):
    model, before = tiny_model("llama"), (0, "sdpa")
    assert packed_and_attention(model) == before
    inside = sum(type(module) is nn.Linear for module in model.modules()), ATTENTION
    with fast_on_cpu(model, steps=64):
        assert packed_and_attention(model) == inside
        with fast_on_cpu(model, steps=64):  # the student may be its own teacher
            pass
        assert packed_and_attention(model)[0] == inside[0]
        model(input_ids=torch.tensor([[3, 4, 5]])).logits.sum().backward()
    assert model.lm_head.weight.grad is not None  # gradients still flow inside
    assert packed_and_attention(model) == before
    with pytest.raises(KeyboardInterrupt), fast_on_cpu(model, steps=64):
        raise KeyboardInterrupt
    assert packed_and_attention(model) == before
    with fast_on_cpu(model, steps=3):  # too few steps to pay
        assert packed_and_attention(model) == (0, ATTENTION)
    monkeypatch.setattr(cpu_decoding, "MEMORY_SHARE", 0.0)
    with fast_on_cpu(model, steps=64):
        assert packed_and_attention(model) == (0, ATTENTION)
