"""Tokens a second of our sampler and of its peers, in one run, taking turns.

Tiny (default): `model.generate`; a 4-layer, 256-wide Llama of random weights, 64 prompts of mixed length, enough end
tokens that rollouts end at geometrically spread lengths (mean about 100, limit 256). Both sample at T = 1 and are
counted by the rollout tokens up to the end token.
    python benchmarks/sampling.py [--repeats 5] [--threads 1] [--no-save]
A model directory: `model.generate`, vLLM in an environment of its own if its Python is named, and the limit: the matrix
products of the same steps and nothing else. 16 prompts, 64 tokens each, bfloat16, no end token; to sampling_model.json.
    python benchmarks/sampling.py --model DIR [--vllm PYTHON] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import save
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rocktokens.sample.cpu_decoding import fast_on_cpu
from rocktokens.sample.requests import Request
from rocktokens.sample.sampler import Sampler

VOCABULARY, LIMIT, PROMPTS = 8192, 256, 64
EOS = list(range(100, 182))
PAD = 0
MODEL_PROMPTS, MODEL_TOKENS = 16, 64


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


SAMPLERS: dict[int, Sampler] = {}


def ours(model: Any, prompts: list[list[int]], seed: int, eos: list[int], limit: int) -> int:
    # One sampler for all turns, as every stage has: it packs the weights in the turn that warms up.
    sampler = SAMPLERS.setdefault(id(model), Sampler(model, eos_ids=eos, pad_id=PAD, batch_size=len(prompts)))
    requests = [Request(tuple(prompt), limit, seed * len(prompts) + i) for i, prompt in enumerate(prompts)]
    return sum(len(answer.token_ids) for answer in sampler.generate(requests))


def theirs(model: Any, prompts: list[list[int]], seed: int, eos: list[int], limit: int) -> int:
    torch.manual_seed(seed)
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=limit, eos_token_id=eos, pad_token_id=PAD
    )
    ended = torch.isin(out[:, longest:], torch.tensor(eos)).long()
    first = torch.where(ended.any(1), ended.argmax(1) + 1, out.shape[1] - longest)
    return int(first.sum())


class Products:
    """The limit: every linear layer's product, packed, for the prompts once and then step by step; nothing else."""

    def __init__(self, model: Any) -> None:
        from torch import nn

        layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
        self.head = model.get_output_embeddings()
        self.shapes = [(layer, layer.weight.shape[1]) for layer in layers]

    def run(self, model: Any, prompts: list[list[int]], tokens: int) -> int:
        rows = len(prompts)
        with torch.inference_mode(), fast_on_cpu(model, steps=tokens):
            for count in (sum(map(len, prompts)), *[rows] * (tokens - 1)):
                given = {width: torch.ones(count, width, dtype=layer.weight.dtype) for layer, width in self.shapes}
                for layer, width in self.shapes:
                    layer(given[width][: rows if layer is self.head else count])
        return rows * tokens


class Vllm:
    """vLLM in a process of another environment, driven by lines."""

    def __init__(self, python: str, model: str, prompts: list[list[int]], tokens: int) -> None:
        script = Path(__file__).with_name("vllm_peer.py")
        self.process = subprocess.Popen(
            [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._say(json.dumps({"model": model, "prompts": prompts, "tokens": tokens}))
        assert self._hear()["ready"]

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("vLLM ended without an answer; run benchmarks/vllm_peer.py by hand to see why")
        return json.loads(line)

    def run(self) -> int:
        self._say("run")
        return int(self._hear()["tokens"])

    def stop(self) -> None:
        self._say("stop")
        self.process.wait(60)


def rates_of(contestants: dict[str, Callable[[int], int]], repeats: int) -> dict[str, list[float]]:
    """Tokens a second of each, taking turns; the first turn is not recorded."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, contestant in contestants.items():
            start = time.perf_counter()
            tokens = contestant(turn)
            if turn:
                rates[name].append(tokens / (time.perf_counter() - start))
    return rates


def word_prompts(directory: str) -> list[list[int]]:
    """Chat prompts of mixed length."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    questions = [
        f"A shop sells {3 + i} boxes of {5 + 2 * i} pens each. " * (1 + i % 4) + "How many pens are that? Explain."
        for i in range(MODEL_PROMPTS)
    ]
    chats = [[{"role": "user", "content": question}] for question in questions]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def on_a_model(directory: str, python: str | None, repeats: int, threads: int) -> dict[str, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    prompts = word_prompts(directory)
    never = [model.config.vocab_size - 1]  # a padding row of the head: no contestant stops early
    peer = Vllm(python, directory, prompts, MODEL_TOKENS) if python else None
    products = Products(model)
    contestants: dict[str, Callable[[int], int]] = {
        "ours": lambda turn: ours(model, prompts, turn, never, MODEL_TOKENS),
        "generate": lambda turn: theirs(model, prompts, turn, never, MODEL_TOKENS),
        "products (limit)": lambda turn: products.run(model, prompts, MODEL_TOKENS),
    }
    if peer is not None:
        contestants["vLLM"] = lambda turn: peer.run()
    rates = rates_of(contestants, repeats)
    if peer is not None:
        peer.stop()
    return {"rates": rates, "prompt_tokens": sum(map(len, prompts)), "threads": threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--model", default=None)
    parser.add_argument("--vllm", default=None, help="the Python of an environment that has vLLM")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    threads = options.threads or (2 if options.model else 1)
    torch.set_num_threads(threads)
    if options.model:
        found = on_a_model(options.model, options.vllm, options.repeats, threads)
    else:
        model, prompts = model_and_prompts()
        contestants = {
            "ours": lambda turn: ours(model, prompts, turn, EOS, LIMIT),
            "generate": lambda turn: theirs(model, prompts, turn, EOS, LIMIT),
        }
        found = {"rates": rates_of(contestants, options.repeats), "threads": threads}
    rates = found.pop("rates")
    median = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {f"ours / {name}": median["ours"] / value for name, value in median.items() if name != "ours"}
    print(", ".join(f"{name} {value:.0f} tokens/s" for name, value in median.items()))
    print(", ".join(f"{name} {value:.2f}" for name, value in ratios.items()))
    if not options.no_save:
        results = {"tokens_per_second": rates, "median": median, "ratio": ratios["ours / generate"], **ratios, **found}
        save("sampling_model" if options.model else "sampling", results)


if __name__ == "__main__":
    main()
