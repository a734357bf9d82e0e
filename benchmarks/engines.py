"""Engines and processes: tokens per second of three engines, a census on vLLM, and one process against two.

    python benchmarks/engines.py                                          # workers alone, the built-in pair
    python benchmarks/engines.py --model DIR --vllm PYTHON                # everything; about six minutes
    python benchmarks/engines.py --only tokens --model DIR --vllm PYTHON

tokens: our sampler, `generate` and a vLLM server (through our client) sample from the same prompts, taking turns, two
threads each. census: the same census with the sampler in this process and on the server. workers: `sample`, `score`,
`knockout` and `compare` of the built-in arithmetic pair with one process and with two, one thread each, taking turns;
the wall clock of the whole command, and the same less the time that Python and the models take to start. The load of
the machine before each measurement is recorded: ratios mean something on two quiet cores only. Results go to
docs/results/engines.json, section by section.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import RESULTS, environment

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("workers", "tokens", "census")
ROLLOUTS = ["--rollouts.num-rollouts", "4", "--rollouts.max-new-tokens", "64"]
COMMANDS = ("sample", "score", "knockout", "compare")
TOKEN_PROMPTS, TOKENS = 16, 32
CENSUS_PROMPTS, CENSUS_ROLLOUTS, CENSUS_TOKENS = 12, 2, 32


# ---------------------------------------------------------------- one process against two


def command(*words: object, workers: int = 1) -> float:
    """Wall clock of one command; what it says when it fails."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "rocktokens.cli", "--workers", str(workers), *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"rocktokens {' '.join(map(str, words))} failed: {done.stderr[-2000:]}")
    return time.perf_counter() - start


def shared_commands(path: Path, scale: float) -> dict[str, list[object]]:
    """What is measured, in the order in which a run needs it."""
    census: list[object] = ["--knockout.top", 30, "--knockout.until", "budget", "--knockout.resamples", 200]
    trainings: list[object] = ["--compare.regimes", "uniform", "entropy", "--compare.seeds", 2]
    trainings += ["--compare.steps", max(4, int(24 * scale)), "--compare.evaluations", 2, "--compare.rollouts", 2]
    trainings += ["--compare.problems", max(16, int(200 * scale)), "--compare.contexts", 50]
    return {
        "sample": ["sample", path, "--detection-prompts", max(128, int(6144 * scale)), *ROLLOUTS],
        "score": ["score", path],
        "knockout": ["knockout", path, *census, "--baseline.problems", max(64, int(512 * scale))],
        "compare": ["compare", path, *trainings],
    }


def measure_workers(folder: Path, wanted: list[str], repeats: int, scale: float) -> dict[str, Any]:
    """Seconds of each command with one and with two processes, alternating, each on a copy of one distilled run."""
    base = folder / "base"
    trained = ["--distill.steps", 4, "--distill.keep", 1, "--distill.prompts-per-step", 16]
    command("distill", base, "--prompts.source", "arithmetic", *trained)
    rows: list[dict[str, Any]] = []
    for repeat in range(repeats):
        for workers in (1, 2) if repeat % 2 == 0 else (2, 1):
            path = folder / f"run-{repeat}-{workers}"
            shutil.copytree(base, path)
            for name, words in shared_commands(path, scale).items():
                if name == "knockout":
                    command("detect", path)
                if name in ("knockout", "compare") and name not in wanted:
                    continue
                load = os.getloadavg()[0]
                seconds = command(*words, workers=workers)
                rows.append({"command": name, "workers": workers, "seconds": seconds, "load": load})
                print(f"  {name}, {workers} process(es): {seconds:.1f} s", flush=True)
            shutil.rmtree(path)
    start_up = command("check", "--prompts.source", "arithmetic")
    found = {}
    for name in wanted:
        one, two = (
            statistics.median(row["seconds"] for row in rows if (row["command"], row["workers"]) == (name, workers))
            for workers in (1, 2)
        )
        ratio = (one - start_up) / max(two - start_up, 1e-9)
        found[name] = {"one": one, "two": two, "ratio": one / two, "ratio_without_start": ratio}
    return {"start_up": start_up, "medians": found, "rows": rows}


# ---------------------------------------------------------------- engines


def serve(python: str, model: str, log: Path) -> Any:
    """A vLLM server of the model in its own dtype, for as long as the block lasts."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import vllm_server

    vllm_server.PYTHON = python
    return vllm_server.serve(model, log, dtype="auto", words=["--max-model-len", "512"])


class Contestants:
    """Three engines of one model, and its prompts."""

    def __init__(self, model: str, url: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from rocktokens.sample.sampler import Sampler
        from rocktokens.servers.pool import ServerPool
        from rocktokens.servers.settings import ServersConfig
        from rocktokens.servers.vllm import VllmEngine

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
        self.eos = int(self.tokenizer.eos_token_id)
        self.vocabulary = int(self.model.config.vocab_size)
        texts = [f"What is {7 * i + 3} plus {11 * i + 5}? Explain how you get there." for i in range(64)]
        self.prompts = [tuple(self.tokenizer(text)["input_ids"]) for text in texts]
        self.pool = ServerPool([url], ServersConfig(concurrency=64))
        known = {"eos_ids": (self.eos,), "vocabulary": self.vocabulary}
        self.served = VllmEngine(self.pool, **known, model_context=512)
        pad = self.tokenizer.pad_token_id
        self.own = Sampler(self.model, eos_ids=(self.eos,), pad_id=int(pad or 0), batch_size=64)
        torch.set_num_threads(2)

    def ours(self, engine: Any, seed: int, tokens: int) -> int:
        """Sample with one of our engines; the end token is banned, so that all draw equally many tokens."""
        from rocktokens.sample.requests import Request

        asked = [
            Request(ids, tokens, 1000 * seed + i, (self.eos,)) for i, ids in enumerate(self.prompts[:TOKEN_PROMPTS])
        ]
        return sum(len(found.token_ids) for found in engine.generate(asked))

    def generate(self, seed: int, tokens: int) -> int:
        """The same by `model.generate`."""
        import torch

        torch.manual_seed(seed)
        chosen = self.prompts[:TOKEN_PROMPTS]
        longest = max(map(len, chosen))
        pad = int(self.tokenizer.pad_token_id or 0)
        ids = torch.tensor([[pad] * (longest - len(one)) + list(one) for one in chosen])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in chosen])
        sizes = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        out = self.model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=pad, **sizes
        )
        return int(out[:, longest:].numel())


def measure_tokens(three: Contestants, repeats: int, tokens: int) -> dict[str, Any]:
    """Tokens per second of our sampler, `generate` and vLLM, taking turns; one short unrecorded turn each."""
    contestants: dict[str, Callable[[int, int], int]] = {
        "ours": lambda seed, number: three.ours(three.own, seed, number),
        "generate": three.generate,
        "vllm server": lambda seed, number: three.ours(three.served, seed, number),
    }
    rows: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run(99, 4)
    for turn in range(repeats):
        for name, run in contestants.items():
            start = time.perf_counter()
            number = run(turn, tokens)
            rows[name].append(number / (time.perf_counter() - start))
            print(f"  {name}: {rows[name][-1]:.1f} tokens/s", flush=True)
    medians = {name: statistics.median(own) for name, own in rows.items()}
    return {"prompts": TOKEN_PROMPTS, "tokens": tokens, "tokens_per_second": medians, "turns": rows}


def measure_census(three: Contestants, problems: int) -> dict[str, Any]:
    """Seconds of one census in this process and on the server: the same prompts, bans and seeds."""
    from rocktokens.causal.census import BannedSet
    from rocktokens.causal.knockout import knockout_census
    from rocktokens.causal.settings import BaselineConfig, KnockoutConfig
    from rocktokens.prompts.tasks import Prompt

    prompts = [Prompt(f"p{number}", ids, "", "x") for number, ids in enumerate(three.prompts[:problems])]
    tokens = [int(three.tokenizer(text)["input_ids"][-1]) for text in (" the", ".", " is")]
    sets = [BannedSet(f"t{token}", "token", token, three.tokenizer.decode([token]), (token,)) for token in tokens]
    found: dict[str, Any] = {}
    for name, engine in (("in process", three.own), ("on vLLM", three.served)):
        start = time.perf_counter()
        result = knockout_census(
            engine,
            prompts,
            sets,
            decode=lambda ids: three.tokenizer.decode(ids),
            checker=lambda text, answer: any(character.isdigit() for character in text),
            eos_ids=(three.eos,),
            vocabulary=three.vocabulary,
            config=KnockoutConfig(until="budget", rounds=1, resamples=200),
            baseline=BaselineConfig(problems=problems, rollouts=CENSUS_ROLLOUTS, max_new_tokens=CENSUS_TOKENS),
        )
        effects = {row.banned.token: [row.delta, row.low, row.high] for row in result.census.results}
        found[name] = {"seconds": time.perf_counter() - start, "effects": effects}
        print(f"  census {name}: {found[name]['seconds']:.1f} s", flush=True)
    found["ratio"] = found["in process"]["seconds"] / found["on vLLM"]["seconds"]
    return {"problems": problems, "rollouts": CENSUS_ROLLOUTS, "tokens": CENSUS_TOKENS, "sets": len(sets), **found}


# ---------------------------------------------------------------- results


def keep(section: str, result: dict[str, Any], *, save: bool) -> None:
    """Print a section and write it beside those that are there; a later failure loses nothing."""
    print(json.dumps({section: result}, indent=1)[:4000], flush=True)
    if save:
        path = RESULTS / "engines.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        sections = {name: own for name, own in known.items() if name in SECTIONS}
        path.write_text(json.dumps({**sections, section: {**environment(), **result}}, indent=2) + "\n")


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--model", help="directory of the model for tokens and census")
    parser.add_argument("--vllm", default=os.environ.get("ROCKTOKENS_VLLM_PYTHON"), help="Python that has vLLM")
    parser.add_argument("--repeats", type=int, default=1, help="turns of the commands; engines take one more")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the work; less than 1 for a quick trial")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if {"tokens", "census"} & set(options.only) and options.model and options.vllm:
            with serve(options.vllm, options.model, Path(folder) / "vllm.log") as url:
                three = Contestants(options.model, url)
                if "tokens" in options.only:
                    tokens = max(4, int(TOKENS * options.scale))
                    keep("tokens", measure_tokens(three, options.repeats + 1, tokens), save=not options.no_save)
                if "census" in options.only:
                    problems = max(4, int(CENSUS_PROMPTS * options.scale))
                    keep("census", measure_census(three, problems), save=not options.no_save)
                del three
        elif {"tokens", "census"} & set(options.only):
            print("tokens and census need --model and --vllm (or ROCKTOKENS_VLLM_PYTHON); they are left out")
        if "workers" in options.only:
            found = measure_workers(Path(folder), options.commands, options.repeats, options.scale)
            keep("workers", found, save=not options.no_save)


if __name__ == "__main__":
    main()
