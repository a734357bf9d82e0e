"""Tokens a second of our sampler and of `model.generate`: 64 prompts of mixed length, responses of mixed length.

A 4-layer, 256-wide Llama of random weights; enough end tokens that responses end at geometrically spread lengths
(mean about 100, limit 256). Both sample at T = 1 and are counted by the response tokens up to the end token.
    python benchmarks/sampling.py [--repeats 5] [--threads 1] [--no-save]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import save
from transformers import LlamaConfig, LlamaForCausalLM

from rocktokens.lm.sampling.requests import Request
from rocktokens.lm.sampling.sampler import Sampler

VOCABULARY, LIMIT, PROMPTS = 8192, 256, 64
EOS = list(range(100, 182))
PAD = 0


def model_and_prompts() -> tuple[LlamaForCausalLM, list[list[int]]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    lengths = torch.randint(8, 128, (PROMPTS,)).tolist()
    prompts = [torch.randint(200, VOCABULARY, (length,)).tolist() for length in lengths]
    return LlamaForCausalLM(config).eval(), prompts


def ours(model: LlamaForCausalLM, prompts: list[list[int]], seed: int) -> int:
    sampler = Sampler(model, eos_ids=EOS, pad_id=PAD, batch_size=PROMPTS)
    requests = [Request(tuple(prompt), LIMIT, seed * PROMPTS + i) for i, prompt in enumerate(prompts)]
    return sum(len(answer.token_ids) for answer in sampler.generate(requests))


def theirs(model: LlamaForCausalLM, prompts: list[list[int]], seed: int) -> int:
    torch.manual_seed(seed)
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=LIMIT, eos_token_id=EOS, pad_token_id=PAD
    )
    ended = torch.isin(out[:, longest:], torch.tensor(EOS)).long()
    first = torch.where(ended.any(1), ended.argmax(1) + 1, out.shape[1] - longest)
    return int(first.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, prompts = model_and_prompts()
    rates: dict[str, list[float]] = {"ours": [], "generate": []}
    for turn in range(options.repeats + 1):
        for name, contestant in (("ours", ours), ("generate", theirs)):
            start = time.perf_counter()
            tokens = contestant(model, prompts, turn)
            if turn:
                rates[name].append(tokens / (time.perf_counter() - start))
    median = {name: statistics.median(values) for name, values in rates.items()}
    ratio = median["ours"] / median["generate"]
    print(f"ours {median['ours']:.0f} tokens/s, generate {median['generate']:.0f} tokens/s: {ratio:.2f} x")
    if not options.no_save:
        save("sampling", {"tokens_per_second": rates, "median": median, "ratio": ratio, "threads": options.threads})


if __name__ == "__main__":
    main()
