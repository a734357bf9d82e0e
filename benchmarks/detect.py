"""Detection at scale: 10 million occurrences, 5,000 types, vocabulary 152k, planted rocks.

Prints seconds and peak memory of all of detection at two sizes, how the cost grows; for the same work, the ratio to the
straightforward per-occurrence Python loop that keeps lists of losses per token; and the geometry's memory at 152k
vocabulary × 5k types and its error. Each measurement is a process of its own. Results go to docs/results/detect.json.

    python benchmarks/detect.py                 # everything
    python benchmarks/detect.py --only detect --rows 1000000
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
RESULTS = ROOT / "docs" / "results" / "detect.json"
NUM_TYPES, VOCAB, NUM_ROCKS = 5_000, 152_000, 100
GAMMA, RESAMPLES = 0.3, 1000


def corpus(rows: int) -> tuple[dict[str, np.ndarray], set[int]]:
    """Planted corpus: prompts of 4 rollouts of 500 tokens."""
    from oracles_detect import simulate

    columns, rocks, _ = simulate(
        np.random.default_rng(0),
        num_prompts=rows // 2_000,
        num_rollouts=4,
        length=500,
        num_types=NUM_TYPES,
        vocab=VOCAB,
        num_rocks=NUM_ROCKS,
        topics=0.1,
    )
    return columns, set(rocks.tolist())


def run_detect(rows: int) -> dict[str, float]:
    """All of detection, from columns in memory to the report's tables."""
    from rocktokens.detect.rocks import detect_rocks
    from rocktokens.detect.settings import DetectConfig

    columns, rocks = corpus(rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.perf_counter()
    report = detect_rocks(columns, config=DetectConfig(k=NUM_ROCKS))
    tables = report.tables
    seconds = time.perf_counter() - start
    found = {
        f"recall_{name}": len(rocks & set(token_ids.tolist())) / len(rocks) for name, token_ids in report.sets.items()
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"rows": rows, "seconds": seconds, "peak_mb": peak, "before_mb": before, "tables": len(tables), **found}


def run_scores(rows: int) -> dict[str, float]:
    """The part of detection that the peer does too: burden, persistence, contexts, CCR, and intervals of the burden."""
    from rocktokens.detect.occurrences import Occurrences, rng_for
    from rocktokens.detect.paper import ETA, Thresholds, burden_intervals, loss_thresholds, score, type_vectors
    from rocktokens.detect.settings import DetectConfig

    columns, _ = corpus(rows)
    config = DetectConfig(resamples=RESAMPLES)
    # As for the peer, the types' vectors are there before the clock starts; and one turn pays for lazy initialisation.
    first = Occurrences.from_table(columns)
    vector_VH = type_vectors(first.token_ids_V, rng=rng_for(0, "vectors"))
    score(first, first.pairs(), config, vector_VH)
    start = time.perf_counter()
    occurrences = Occurrences.from_table(columns)
    pairs = occurrences.pairs()
    at = Thresholds(*loss_thresholds(occurrences, config), GAMMA, ETA, config.window)
    score(occurrences, pairs, config, vector_VH, at)
    scored = time.perf_counter() - start
    burden_intervals(pairs, config)
    return {"rows": rows, "seconds": scored, "seconds_with_intervals": time.perf_counter() - start}


def run_loop(rows: int) -> dict[str, float]:
    """The peer: one Python step an occurrence, lists of losses and contexts per token.

    Burden, persistent occurrences, windows, cosines of each occurrence with its others (by numpy, one occurrence at a
    time), CCR; then the bootstrap over prompts by adding up the lists of the prompts drawn, a tenth of a percent of the
    resamples measured and scaled up.
    """
    columns, _ = corpus(rows)
    tokens, rollouts, prompts = (columns[name].tolist() for name in ("token_id", "rollout_id", "prompt_id"))
    pre, post = columns["loss_pre"].tolist(), columns["loss_post"].tolist()
    vectors = np.random.default_rng(0).standard_normal((VOCAB, 64)).astype(np.float32)
    start = time.perf_counter()
    tau_pre, tau_post = np.quantile(pre, 0.8), np.quantile(post, 0.8)
    losses, contexts, by_prompt = defaultdict(list), defaultdict(list), defaultdict(list)
    for i, token in enumerate(tokens):
        losses[token].append(post[i])
        by_prompt[prompts[i]].append((token, post[i]))
        if pre[i] >= tau_pre and post[i] >= tau_post:
            total = np.zeros(64, np.float32)
            for offset in (-4, -3, -2, -1, 1, 2, 3, 4):
                j = i + offset
                if 0 <= j < len(tokens) and rollouts[j] == rollouts[i]:
                    total += vectors[tokens[j]] / abs(offset)
            contexts[token].append(total / (np.linalg.norm(total) or 1.0))
    scored = []
    for token, values in losses.items():
        encoded = np.array(contexts[token])
        others = encoded[:2048]
        rocks = sum((others @ own >= GAMMA).mean() >= 0.1 for own in encoded)
        scored.append((sum(values) * rocks / len(values), token))
    scored.sort(reverse=True)
    seconds = time.perf_counter() - start
    drawn = np.random.default_rng(0).integers(0, len(by_prompt), len(by_prompt)).tolist()
    total = defaultdict(float)
    for prompt in drawn:
        for token, loss in by_prompt[prompt]:
            total[token] += loss
    once = time.perf_counter() - start - seconds
    return {"rows": rows, "seconds": seconds, "seconds_with_intervals": seconds + RESAMPLES * once}


def run_geometry(rows: int) -> dict[str, float]:
    """Gradient geometry at 152k vocabulary × 5k types, streamed: memory whatever the number of occurrences."""
    import torch

    from rocktokens.geometry.gradients import GradientGeometry

    rng = np.random.default_rng(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    geometry = GradientGeometry(VOCAB)
    batch = 16
    start = time.perf_counter()
    for begin in range(0, rows, batch):
        token_N = (np.arange(begin, begin + batch) % NUM_TYPES).astype(np.int64)
        grad_NV = torch.from_numpy(rng.standard_normal((batch, VOCAB), dtype=np.float32))
        geometry.update(torch.from_numpy(token_N), grad_NV)
    table = geometry.table({})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "rows": rows,
        "types": len(table),
        "seconds": time.perf_counter() - start,
        "peak_mb": peak,
        "before_mb": before,
        "added_mb": peak - before,
    }


def run_geometry_error(rows: int) -> dict[str, float]:
    """Sketched against exact cosines at 152k vocabulary, gradients of simulated language models, 100 types."""
    import torch

    from rocktokens.geometry.gradients import GradientGeometry

    rng = np.random.default_rng(1)
    exact = GradientGeometry(VOCAB, exact_vocab=VOCAB)
    sketched = [GradientGeometry(VOCAB, seed=seed) for seed in range(2)]
    base_V = rng.standard_normal(VOCAB, dtype=np.float32)
    bias_TV = rng.standard_normal((100, VOCAB), dtype=np.float32)
    for begin in range(0, rows, 25):
        token_N = np.arange(begin, begin + 25) % 100
        logits_NV = 2 * base_V + 2 * rng.standard_normal((25, VOCAB), dtype=np.float32) + bias_TV[token_N]
        student_NV = torch.from_numpy(logits_NV)
        teacher_NV = student_NV + 0.5 * torch.from_numpy(rng.standard_normal((25, VOCAB), dtype=np.float32) + base_V)
        ratio_NV = student_NV.log_softmax(-1) - teacher_NV.log_softmax(-1)
        p_NV = student_NV.softmax(-1)
        grad_NV = p_NV * (ratio_NV - (p_NV * ratio_NV).sum(-1, keepdim=True))
        for geometry in (exact, *sketched):
            geometry.update(torch.from_numpy(token_N), grad_NV)
    truth, found = exact.table({}), [geometry.table({}) for geometry in sketched]
    names = ("cos_balanced", "cos_global", "cos_others")
    error = np.concatenate([np.abs(own[name].to_numpy() - truth[name].to_numpy()) for own in found for name in names])
    return {"rows": rows, "error_median": float(np.median(error)), "error_95": float(np.quantile(error, 0.95))}


JOBS = {
    "detect": run_detect,
    "scores": run_scores,
    "loop": run_loop,
    "geometry": run_geometry,
    "geometry_error": run_geometry_error,
}


def in_a_process(job: str, rows: int, threads: int | None = 1) -> dict[str, float]:
    """Run one job in a fresh process, so that peaks do not mix; on one thread, or on all cores (None)."""
    command = [sys.executable, __file__, "--only", job, "--rows", str(rows)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads or os.cpu_count())}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(JOBS))
    parser.add_argument("--rows", type=int, default=10_000_000)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(JOBS[args.only](args.rows)))
        return
    small, large = (in_a_process("detect", rows, threads=None) for rows in (args.rows // 10, args.rows))
    scores, loop = in_a_process("scores", args.rows // 10), in_a_process("loop", args.rows // 10)
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "detect_small": small,
        "detect_large": large,
        "growth": large["seconds"] / small["seconds"],
        "scores": scores,
        "loop": loop,
        "speed_up_scores": loop["seconds"] / scores["seconds"],
        "speed_up_with_intervals": loop["seconds_with_intervals"] / scores["seconds_with_intervals"],
        "geometry": in_a_process("geometry", 5_008),
        "geometry_error": in_a_process("geometry_error", 400),
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
