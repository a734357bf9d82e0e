"""The faster decoding step on a CPU against the plain one, and that nothing of it outlives its block."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tiny import prompts, tiny_model
from torch import nn

from rocktokens.sample import cpu_decoding
from rocktokens.sample.cpu_decoding import ATTENTION, fast_on_cpu, one_query_attention
from rocktokens.sample.kv_decoder import Decoder
from rocktokens.sample.requests import Request
from rocktokens.sample.sampler import Sampler

needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this CPU; runs where it has"
)


class Layer(nn.Module):
    """What transformers' attention functions ask of a layer."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def attention_inputs(dtype: torch.dtype, heads: int = 6, keys: int = 2):
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, n, t, 16, generator=g) for n, t in ((heads, 1), (keys, 9), (keys, 9)))
    slab = torch.zeros(3, keys, 20, 16)
    slab[:, :, 2:11] = key  # keys come as a view of a longer slab
    mask = torch.ones(3, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., :4] = False
    return query.to(dtype), slab.to(dtype)[:, :, 2:11], value.to(dtype), mask


def exact_attention(query, key, value, mask, scaling):
    """Softmax attention in float64, head by head."""
    groups = query.shape[1] // key.shape[1]
    out = torch.zeros(query.shape[0], 1, *query.shape[1::2], dtype=torch.float64)
    for row in range(len(query)):
        for head in range(query.shape[1]):
            score = key[row, head // groups].double() @ query[row, head, 0].double() * scaling
            if mask is not None:
                score[~mask[row, 0, 0]] = -torch.inf
            out[row, 0, head] = score.softmax(0) @ value[row, head // groups].double()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [None, "bool", "added"])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_attention_of_one_query_equals_its_definition(dtype, masked, scaling):
    query, key, value, mask = attention_inputs(dtype)
    given = None if masked is None else mask
    if masked == "added":
        given = torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min)
    got, _ = one_query_attention(Layer(3), query, key, value, given, scaling=scaling, dropout=0.0)
    want = exact_attention(query, key, value, None if masked is None else mask, scaling or 16**-0.5)
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
        with torch.no_grad():
            output = model.generate(
                torch.tensor([prefix]), max_new_tokens=20, do_sample=False, eos_token_id=[0], pad_token_id=2
            )
            want = output[0, len(prefix) :].tolist()
            pairs = [(ours, theirs) for ours, theirs in zip(answer.token_ids, want)]
            parting = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
            if parting is None:
                equal += 1
                continue
            logits_V = model(output[:, : len(prefix) + parting]).logits[0, -1].float()
        ours, theirs = pairs[parting]
        assert logits_V[theirs] - logits_V[ours] <= 2**-6 * logits_V.abs().max()
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
