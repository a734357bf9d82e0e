"""How cost grows: processor seconds of every part against its size, with the exponent of the growth fitted.

One thread, the least processor time of three turns, so that a busy machine does not show. An exponent of 1 is linear;
what lies above 1.15 is named. Writes docs/results/scaling.json and docs/results/scaling.svg.
    python benchmarks/scaling.py [--only detect_tokens …] [--no-save]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

TURNS = 3
SUPERLINEAR = 1.15
Job = Callable[[int], Callable[[], Any]]


def seconds(action: Callable[[], Any]) -> float:
    """Least processor time of a few turns, after one that pays for lazy initialisation."""
    best = math.inf
    for turn in range(TURNS + 1):
        start = time.process_time()
        action()
        if turn:
            best = min(best, time.process_time() - start)
    return best


def divergence_rows(rows: int) -> Callable[[], Any]:
    """The fused pass with gradients, vocabulary 20k."""
    return _divergence(rows, 20_000)


def divergence_vocabulary(vocabulary: int) -> Callable[[], Any]:
    """The fused pass with gradients, 64 rows."""
    return _divergence(64, vocabulary)


def _divergence(rows: int, vocabulary: int) -> Callable[[], Any]:
    from rocktokens.divergence.fused import fused_divergence

    generator = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(rows, 256, generator=generator) for _ in range(2))
    heads = [torch.randn(vocabulary, 256, generator=generator) / 8 for _ in range(2)]
    token_N = torch.zeros(rows, dtype=torch.long)
    leaves = hidden.requires_grad_(), heads[0].requires_grad_()
    return lambda: fused_divergence(leaves[0], leaves[1], teacher, heads[1], token_N=token_N).loss.backward()


def corpus(rows: int, vocabulary: int = 5_000) -> dict[str, np.ndarray]:
    """A planted corpus: prompts of 4 rollouts of 100 tokens, 500 types."""
    from oracles_detect import simulate

    return simulate(
        np.random.default_rng(0),
        num_prompts=rows // 400,
        num_rollouts=4,
        length=100,
        num_types=500,
        vocab=vocabulary,
        num_rocks=20,
        topics=0.1,
    )[0]


def detect_tokens(rows: int) -> Callable[[], Any]:
    """All of detection on so many occurrences."""
    from rocktokens.detect.rocks import detect_rocks
    from rocktokens.detect.settings import DetectConfig

    columns = corpus(rows)
    return lambda: detect_rocks(columns, config=DetectConfig())


def detect_vocabulary(vocabulary: int) -> Callable[[], Any]:
    """Detection on 40,000 occurrences of 500 types out of a vocabulary of so many."""
    from rocktokens.detect.rocks import detect_rocks
    from rocktokens.detect.settings import DetectConfig

    columns = corpus(40_000, vocabulary)
    return lambda: detect_rocks(columns, config=DetectConfig())


def persistence_checkpoints(count: int) -> Callable[[], Any]:
    """Scoring 256 occurrences at so many checkpoints: the fused pass without gradients, once each."""
    from rocktokens.divergence.fused import fused_divergence

    generator = torch.Generator().manual_seed(0)
    states = torch.randn(256, 256, generator=generator)
    heads = torch.randn(2, 20_000, 256, generator=generator) / 8

    @torch.no_grad()
    def score() -> None:
        for _ in range(count):
            fused_divergence(states, heads[0], states, heads[1])

    return score


def census_candidates(count: int) -> Callable[[], Any]:
    """The census' intervals and tests for so many candidates on 200 prompts."""
    from rocktokens.causal.inference import find

    rng = np.random.default_rng(0)
    difference_PV = rng.integers(-1, 2, (200, count)) * (rng.random((200, count)) < 0.2) / 4.0
    return lambda: find(difference_PV, epsilon=0.01, alpha=0.05, resamples=2_000, rng=np.random.default_rng(1))


def sampler_rollouts(count: int) -> Callable[[], Any]:
    """So many rollouts of 32 tokens from a 2-layer, 128-wide model, 64 at a time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rocktokens.sample.requests import Request
    from rocktokens.sample.sampler import Sampler

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    sampler = Sampler(LlamaForCausalLM(config).eval(), eos_ids=[0], pad_id=0, batch_size=64)
    requests = [Request((5, 6, 7 + seed % 50), 32, seed) for seed in range(count)]
    return lambda: sampler.generate(requests)


JOBS: dict[str, tuple[Job, list[int]]] = {
    "divergence_rows": (divergence_rows, [256, 1024, 2560]),
    "divergence_vocabulary": (divergence_vocabulary, [5_000, 50_000, 152_000]),
    "detect_tokens": (detect_tokens, [40_000, 120_000, 400_000]),
    "detect_vocabulary": (detect_vocabulary, [5_000, 50_000, 152_000]),
    "persistence_checkpoints": (persistence_checkpoints, [1, 2, 4, 8]),
    "census_candidates": (census_candidates, [10, 50, 200]),
    "sampler_rollouts": (sampler_rollouts, [64, 256, 640]),
}


def exponent(sizes: list[int], costs: list[float]) -> float:
    """Slope of log cost against log size."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def figure(results: dict[str, Any]) -> str:
    """Cost against size, both relative to the smallest, on logarithmic axes; the grey line is linear growth."""
    width, height, edge = 640, 420, 56
    most = max(entry["sizes"][-1] / entry["sizes"][0] for entry in results.values())
    top = max(most, *(max(entry["seconds"]) / entry["seconds"][0] for entry in results.values()))

    def place(size: float, cost: float) -> str:
        across = edge + (width - 220 - edge) * math.log(size) / math.log(most)
        up = height - edge - (height - 2 * edge) * max(math.log(cost), 0.0) / math.log(top)
        return f"{across:.0f},{up:.0f}"

    colours = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"]
    parts = [f'<polyline points="{place(1, 1)} {place(most, most)}" stroke="#bbb" stroke-width="6" fill="none"/>']
    for number, (name, entry) in enumerate(results.items()):
        colour = colours[number % len(colours)]
        pairs = zip(entry["sizes"], entry["seconds"])
        points = " ".join(place(size / entry["sizes"][0], cost / entry["seconds"][0]) for size, cost in pairs)
        parts.append(f'<polyline points="{points}" stroke="{colour}" stroke-width="2" fill="none"/>')
        label = f"{name.replace('_', ', ')}: {entry['exponent']:.2f}"
        parts.append(f'<text x="{width - 210}" y="{edge + 20 * number}" fill="{colour}">{label}</text>')
    axes = f'<path d="M{edge},{edge} V{height - edge} H{width - 220}" stroke="#444" fill="none"/>'
    labels = (
        f'<text x="{edge}" y="{height - 20}">size, relative to the smallest (to {most:.0f})</text>'
        f'<text x="{edge}" y="{edge - 20}">processor seconds, relative (to {top:.0f}); exponents at the right</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13"><rect width="100%" height="100%" fill="white"/>{axes}{"".join(parts)}{labels}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(JOBS), default=None)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in options.only or JOBS:
        prepare, sizes = JOBS[name]
        costs = [seconds(prepare(size)) for size in sizes]
        slope = exponent(sizes, costs)
        results[name] = {
            "what": (prepare.__doc__ or "").strip(),
            "sizes": sizes,
            "seconds": costs,
            "exponent": slope,
            "superlinear": slope > SUPERLINEAR,
        }
        note = "  SUPERLINEAR" if slope > SUPERLINEAR else ""
        print(f"{name:26}{slope:6.2f}  " + ", ".join(f"{s:,}: {c:.3f} s" for s, c in zip(sizes, costs)) + note)
    if not options.no_save:
        save("scaling", results)
        (RESULTS / "scaling.svg").write_text(figure(results))


if __name__ == "__main__":
    main()
