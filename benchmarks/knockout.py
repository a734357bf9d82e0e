"""Resumed knock-outs against full regeneration: tokens, seconds, width of intervals; writes docs/results/knockout.json.

    python benchmarks/knockout.py [--student DIR] [--problems 200]
    python benchmarks/knockout.py --student DIR --prompts FILE.jsonl     # any chat model; to knockout_pair.json

World: 30 candidates of the built-in world, the same problems and the same number of rollouts for each contestant, in
turns. `transformers` samples every knock-out rollout from its start by `generate(suppress_tokens=…)`, as such a census
is usually done; `regenerate` the same with our engine; `regenerate, same numbers` with the baseline rollout's random
numbers. `resume, until decided` is what `rocktokens knockout` does by default with this budget. Zipf: token statistics
of natural language (a unigram law with Zipf's exponent over 20,000 types, rollouts of 200 tokens), a simulated engine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import save

from rocktokens.causal.census import BannedSet
from rocktokens.causal.knockout import knockout_census
from rocktokens.causal.settings import BaselineConfig, KnockoutConfig
from rocktokens.prompts.checkers import MathChecker
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.prompts.tasks import Prompt, load_prompts
from rocktokens.sample.requests import Continuation, Request
from rocktokens.seeds import derive_seed

EOS = 0


class Counted:
    """An engine that counts what another one generates, and may hide that rollouts can be resumed."""

    def __init__(self, engine, *, resume: bool, own_numbers: bool = False) -> None:
        self.engine, self.exact_resume, self.own_numbers = engine, resume, own_numbers
        self.num_tokens, self.seconds = 0, 0.0

    def generate(self, requests, *, progress=None):
        """As the engine; banned requests may get random numbers of their own."""
        if self.own_numbers:
            requests = [
                Request(r.prefix, r.max_new_tokens, derive_seed("own", r.seed, *r.banned), r.banned) if r.banned else r
                for r in requests
            ]
        start = time.process_time()
        answers = self.engine.generate(requests)
        self.seconds += time.process_time() - start
        self.num_tokens += sum(len(answer.token_ids) for answer in answers)
        return answers


class Transformers:
    """The peer: Hugging Face `generate`, one ban at a time, in batches as large as ours."""

    exact_resume = False

    def __init__(self, model, tokenizer, batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size
        self.eos, self.pad = tokenizer.eos_token_id, tokenizer.pad_token_id

    def generate(self, requests, *, progress=None):
        """Every request from its start; a row's numbers are the batch's."""
        import torch

        answers: dict[int, Continuation] = {}
        by_ban: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            by_ban.setdefault(request.banned, []).append(index)
        for banned, members in by_ban.items():
            members.sort(key=lambda index: len(requests[index].prefix))
            for start in range(0, len(members), self.batch_size):
                batch = members[start : start + self.batch_size]
                longest = max(len(requests[index].prefix) for index in batch)
                rows = [[self.pad] * (longest - len(requests[i].prefix)) + list(requests[i].prefix) for i in batch]
                input_BT = torch.tensor(rows)
                torch.manual_seed(derive_seed("peer", *banned, start))
                out_BT = self.model.generate(
                    input_BT,
                    attention_mask=(input_BT != self.pad).long(),
                    do_sample=True,
                    top_k=0,
                    max_new_tokens=requests[batch[0]].max_new_tokens,
                    suppress_tokens=list(banned) or None,
                    pad_token_id=self.pad,
                )
                for index, row in zip(batch, out_BT[:, longest:].tolist()):
                    ended = self.eos in row
                    answers[index] = Continuation(tuple(row[: row.index(self.eos) + 1] if ended else row), not ended)
        return [answers[index] for index in range(len(requests))]


class ZipfEngine:
    """Tokens drawn from a Zipf law, whatever stands before; responses of a fixed length."""

    exact_resume = True

    def __init__(self, vocabulary: int = 20_000, exponent: float = 1.0, length: int = 200) -> None:
        weight_V = 1.0 / np.arange(1, vocabulary) ** exponent  # rank r is token r; token 0 ends a response
        self.weight_V, self.length = np.concatenate([[0.0], weight_V]), length
        self.cumulative_V = self.weight_V.cumsum()

    def generate(self, requests, *, progress=None):
        """Every request goes on to the fixed length; a banned draw is drawn again: the renormalised law."""
        answers = []
        for request in requests:
            rng = np.random.default_rng(request.seed + request.skip)
            count = request.max_new_tokens
            tokens = np.searchsorted(self.cumulative_V, rng.random(count) * self.cumulative_V[-1], side="right")
            while request.banned and np.isin(tokens, request.banned).any():
                wrong = np.isin(tokens, request.banned)
                draws = rng.random(wrong.sum()) * self.cumulative_V[-1]
                tokens[wrong] = np.searchsorted(self.cumulative_V, draws, side="right")
            answers.append(Continuation(tuple(tokens.tolist()), truncated=True))
        return answers


def world_candidates(world):
    """The planted sets and six more that responses use: 30 token types."""
    truth, grammar = world.truth(), world.grammar
    planted = [*truth.rocks.tokens, *truth.neutrals.tokens, *truth.stumbling_blocks.tokens, *truth.pillars.tokens]
    others = [*grammar.closers, *grammar.verbs, *grammar.lead, ",", "."]
    tokens = [token for token in dict.fromkeys(planted + others) if token in world.vocabulary][:30]
    ids = world.token_set(tuple(tokens)).ids
    return [BannedSet(f"token:{v}", "token", v, t, (v,)) for v, t in zip(ids, tokens)]


class GivenTask:
    """Problems of a .jsonl file through a model's chat template: what the world is to its own students."""

    def __init__(self, path: str, tokenizer) -> None:
        self.source = PromptsConfig(source=path, chat=True, checker="math")
        self.tokenizer, self.check = tokenizer, MathChecker()

    def prompts(self, count: int):
        """The first so many of those set aside for causal tests."""
        return load_prompts(replace(self.source, limit=count), self.tokenizer, part="causal")

    def candidates(self, sampler, count: int):
        """So many, evenly spaced, of the 30 commonest token types of some answers, the end token apart."""
        asked = [Request(prompt.prompt_ids, 80, number) for number, prompt in enumerate(self.prompts(50))]
        counts = Counter(token for answer in sampler.generate(asked) for token in answer.token_ids)
        del counts[self.tokenizer.eos_token_id]
        common = [token for token, _ in counts.most_common(30)]
        common = [common[rank] for rank in np.linspace(0, len(common) - 1, count).round().astype(int)]
        return [BannedSet(f"token:{v}", "token", v, self.tokenizer.decode([v]), (v,)) for v in common]


def world_census(engine, world, prompts, sets, tokenizer, limit, config, problems):
    """One census, and the processor seconds it took (one thread; what else runs here does not count); the judging of
    answers and the statistics are in it."""
    start = time.process_time()
    found = knockout_census(
        engine,
        prompts,
        sets,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        checker=world.check,
        eos_ids=[tokenizer.eos_token_id],
        config=config,
        baseline=BaselineConfig(problems=problems, rollouts=2, max_new_tokens=limit),
    )
    return found.census, time.process_time() - start


def world_benchmark(options):
    """Contestants in turns on the same problems."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rocktokens.sample.sampler import Sampler
    from rocktokens.world import get_world

    torch.set_num_threads(1)
    world = get_world("arithmetic")
    source = options.student or str(world.student_path)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    ends = {"eos_ids": [tokenizer.eos_token_id], "pad_id": tokenizer.pad_token_id}
    sampler = Sampler(model, **ends, batch_size=options.batch_size)
    if options.prompts:
        task = GivenTask(options.prompts, tokenizer)
        world, prompts, sets = task, task.prompts(options.problems), task.candidates(sampler, options.candidates)
    else:
        prompts = load_prompts(PromptsConfig(source="arithmetic", split="causal", limit=options.problems), tokenizer)
        sets = world_candidates(world)
    config = KnockoutConfig(until="budget", placebo_share=0.0, resamples=1000)
    peer = Transformers(model, tokenizer, options.batch_size)
    names = ("resume", "transformers", "regenerate", "regenerate, same numbers", "resume, until decided")
    found: dict[str, list] = {name: [] for name in names}
    world_census(Counted(sampler, resume=True), world, prompts[:20], sets, tokenizer, 80, config, 20)  # warms up
    for _ in range(options.turns):
        for name in found:
            used = peer if name == "transformers" else sampler
            engine = Counted(used, resume=name.startswith("resume"), own_numbers=name == "regenerate")
            own = replace(config, until="decided", placebo_share=0.125) if name.endswith("decided") else config
            census, seconds = world_census(engine, world, prompts, sets, tokenizer, 80, own, options.problems)
            found[name].append((census, seconds, engine.seconds, engine.num_tokens))
    rows, label = {}, "pair" if options.prompts else "world"
    for name, turns in found.items():
        census = turns[0][0]
        rows[name] = {
            "processor_seconds": min(turn[1] for turn in turns),
            "engine_processor_seconds": min(turn[2] for turn in turns),
            "tokens": turns[0][3],
            "mean_width_points": 100 * float(np.mean([r.high - r.low for r in census.results])),
            "median_width_points": 100 * float(np.median([r.high - r.low for r in census.results])),
            "widths": {r.banned.token: 100 * (r.high - r.low) for r in census.results},
            "used_share": {r.banned.token: r.used_share for r in census.results},
            "tokens_by_candidate": {r.banned.token: r.num_tokens for r in census.results},
        }
        print(f"{label}, {name}: {rows[name]['processor_seconds']:.1f} s, {rows[name]['tokens']:,} tokens, "
              f"mean width {rows[name]['mean_width_points']:.2f} points", flush=True)  # fmt: skip
    ratios = {f"against {name}": against(rows["resume"], rows[name]) for name in names[1:4]}
    for name, ratio in ratios.items():
        print(name, {key: round(value, 2) for key, value in ratio.items()})
    return {"student": Path(source).name, "problems": options.problems, "ratios": ratios, "rows": rows}


def against(ours, peer):
    """Ratios to a peer; above 1 is better."""
    narrower = np.array([peer["widths"][token] / ours["widths"][token] for token in ours["widths"]])
    seconds = peer["processor_seconds"] / ours["processor_seconds"]
    return {
        "seconds_ratio": seconds,
        "tokens_ratio": peer["tokens"] / ours["tokens"],
        "width_ratio_mean": peer["mean_width_points"] / ours["mean_width_points"],
        "width_ratio_median": float(np.median(narrower)),
        "candidates_with_wider_interval": int((narrower < 0.95).sum()),
        "seconds_ratio_at_equal_width": seconds * float(np.median(narrower)) ** 2,
    }


def zipf_benchmark(options):
    """Tokens that a census generates, by how common the banned token is."""
    engine = ZipfEngine()
    rng = np.random.default_rng(0)
    ranks = np.unique(np.geomspace(20, 2000, 100).astype(int))
    ranks = np.sort(
        np.concatenate([ranks, rng.choice(np.setdiff1d(np.arange(20, 2001), ranks), 100 - len(ranks), False)])
    )
    sets = [BannedSet(f"token:{rank}", "token", int(rank), str(rank), (int(rank),)) for rank in ranks]
    prompts = [Prompt(f"p{i}", (1,), "", "yes") for i in range(options.zipf_problems)]
    config = KnockoutConfig(until="budget", placebo_share=0.0, resamples=100)
    base = BaselineConfig(problems=options.zipf_problems, rollouts=2, max_new_tokens=engine.length)
    counted = Counted(engine, resume=True)
    census = knockout_census(
        counted,
        prompts,
        sets,
        decode=lambda ids: str(hash(tuple(ids)) % 2),
        checker=lambda text, answer: text == "1",
        eos_ids=(EOS,),
        config=config,
        baseline=base,
    ).census
    rollouts = 2 * options.zipf_problems
    full = engine.length * rollouts * (len(sets) + 1)
    shares = engine.weight_V / engine.weight_V.sum()
    rows = []
    for low, high in ((20, 50), (50, 100), (100, 200), (200, 500), (500, 1000), (1000, 2001)):
        own = [r for r in census.results if low <= r.banned.token_id < high]
        rows.append(
            {
                "ranks": [low, high - 1],
                "candidates": len(own),
                "per_mille_of_tokens": 1000 * float(np.mean([shares[r.banned.token_id] for r in own])),
                "used_share": float(np.mean([r.used_share for r in own])),
                "tokens_ratio": engine.length * rollouts * len(own) / sum(r.num_tokens for r in own),
            }
        )
        print(f"zipf, ranks {low}–{high - 1}: in {100 * rows[-1]['used_share']:.0f} % of rollouts, "
              f"{rows[-1]['tokens_ratio']:.1f} × fewer tokens", flush=True)  # fmt: skip
    ratio = full / counted.num_tokens
    print(f"zipf, all {len(sets)} candidates, baseline included: {ratio:.1f} × fewer tokens")
    return {"tokens_ratio": ratio, "candidates": len(sets), "length": engine.length, "by_rank": rows}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--student", help="a distilled student of the world; unset: the shipped one, before OPD")
    flags.add_argument("--prompts", help="a .jsonl file of problems for --student, through its chat template")
    flags.add_argument("--candidates", type=int, default=30, help="with --prompts: how many types are banned in turn")
    flags.add_argument("--problems", type=int, default=150)
    flags.add_argument("--batch-size", type=int, default=512, help="rollouts in flight, for every contestant")
    flags.add_argument("--zipf-problems", type=int, default=250)
    flags.add_argument("--turns", type=int, default=2, help="how often each contestant runs; the quickest counts")
    flags.add_argument("--only", choices=("world", "zipf"))
    flags.add_argument("--no-save", action="store_true")
    options = flags.parse_args()
    if options.prompts:
        if options.student is None:
            flags.error("--prompts needs --student")
        found = world_benchmark(options)
        if not options.no_save:
            save("knockout_pair", found)
        return
    results = {}
    if options.only != "world":
        results["zipf"] = zipf_benchmark(options)
    if options.only != "zipf":
        results["world"] = world_benchmark(options)
    if not options.no_save and options.only is None:
        save("knockout", results)


if __name__ == "__main__":
    main()
