"""`detect` on a run with very many occurrences: seconds, peak memory, and how both grow.

A run with two checkpoints is written piece by piece to a scratch directory: prompts of 4 rollouts of 500 tokens, 5,000
token types, 100 planted rocks. `detect` then reads it in a process of its own, whose largest resident memory is
measured. Both sizes, the larger and a tenth of it, are run, so that growth can be read off. Results go to
docs/results/detect_scale.json. With --report the same is measured for `report`, in another process of its own, on the
run that detection has left.

    python benchmarks/detect_scale.py                      # 100 million occurrences: about 12 GB of disk
    python benchmarks/detect_scale.py --rows 10000000 --report
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rocktokens.run import Run

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
RESULTS = ROOT / "docs" / "results" / "detect_scale.json"
NUM_TYPES, VOCAB, NUM_ROCKS, ROLLOUTS, LENGTH = 5_000, 152_000, 100, 4, 500
PIECE_PROMPTS = 500
STEPS = (0, 100)
MAX_GB = 8.0


def write_run(path: Path, rows: int) -> int:
    """A scored run of so many occurrences under each of two checkpoints; returns the number of planted rocks."""
    from oracles_detect import simulate

    from rocktokens.run import Run

    run = Run.create(path, {})
    prompts = rows // (ROLLOUTS * LENGTH)
    planted: set[int] = set()
    for first in range(0, prompts, PIECE_PROMPTS):
        columns, rocks, _ = simulate(
            np.random.default_rng([1, first]),
            num_prompts=min(PIECE_PROMPTS, prompts - first),
            num_rollouts=ROLLOUTS,
            length=LENGTH,
            num_types=NUM_TYPES,
            vocab=VOCAB,
            num_rocks=NUM_ROCKS,
            topics=0.1,
            types_rng=np.random.default_rng(0),
        )
        planted |= set(rocks.tolist())
        for step, loss in zip(STEPS, ("loss_pre", "loss_post")):
            run.write_part(step, _occurrences(columns, first, columns[loss]), part=f"{first:07d}")
    (path / "planted.json").write_text(json.dumps(sorted(planted)))
    return len(planted)


def _occurrences(columns: dict[str, np.ndarray], first: int, kl_N: np.ndarray):
    """Rows of one piece as the table that `score` writes."""
    import pyarrow as pa

    rng = np.random.default_rng([2, first])
    number = len(kl_N)
    prompt_N = columns["prompt_id"]
    prompts = [f"p{first + i:07d}" for i in range(int(prompt_N[-1]) + 1)]
    names = [f"{prompt}#{i}" for prompt in prompts for i in range(ROLLOUTS)]
    noise_N = rng.normal(0, 0.1, number).astype(np.float32)
    constant_N = np.full(number, -1.0, np.float32)
    return pa.table(
        {
            "prompt_id": pa.DictionaryArray.from_arrays(prompt_N, prompts).cast(pa.string()),
            "rollout_id": pa.DictionaryArray.from_arrays(columns["rollout_id"], names).cast(pa.string()),
            "position": columns["position"],
            "token_id": columns["token_id"].astype(np.int32),
            "kl": kl_N,
            "log_ratio": kl_N + noise_N,
            "student_logprob": constant_N,
            "teacher_logprob": constant_N,
            "student_entropy": np.abs(noise_N),
            "teacher_entropy": np.abs(noise_N),
            "grad_norm": np.sqrt(kl_N),
            "is_eos": np.zeros(number, bool),
        }
    )


def peak_gb() -> float:
    """The largest resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def timed(stage: Callable[[], Run]) -> tuple[Run, dict[str, float]]:
    """Do a stage in this process, as the command runs it; the run, and what it took."""
    before, start, cpu = peak_gb(), time.perf_counter(), time.process_time()
    run = stage()
    took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    return run, {**took, "peak_gb": peak_gb(), "before_gb": before}


def run_report(path: Path) -> dict[str, float]:
    """The report without its figures as images, whose number does not grow with the run."""
    from rocktokens.report.stage import report

    _, took = timed(lambda: report(path))
    return {**took, "html_mb": (path / "report.html").stat().st_size / 1e6}


def run_detect(path: Path) -> dict[str, float]:
    """Detection, and which of the planted rocks it found."""
    from rocktokens.detect.settings import DetectConfig
    from rocktokens.detect.stage import detect

    run, took = timed(lambda: detect(path, DetectConfig()))
    facts, planted = run.facts("detect"), set(json.loads((path / "planted.json").read_text()))
    found = set(run.rocks()["token_id"].to_pylist())
    return {
        "occurrences": facts["num_occurrences"],
        **took,
        "rocks_found": len(found & planted),
        "false_rocks": len(found - planted),
    }


def in_fresh_process(stage: str, path: Path) -> dict[str, float]:
    """What a stage says that it took."""
    command = [sys.executable, __file__, f"--{stage}", str(path)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(rows: int, scratch: Path, *, with_report: bool) -> dict[str, Any]:
    """Write a run, detect its rocks in a fresh process, perhaps report on it in another, remove it."""
    path = scratch / f"run-{rows}"
    start = time.perf_counter()
    subprocess.run([sys.executable, __file__, "--write", str(path), "--rows", str(rows)], check=True)
    written = time.perf_counter() - start
    size = sum(file.stat().st_size for file in path.rglob("*.parquet")) / 1e9
    found: dict[str, Any] = {"rows": rows, "disk_gb": size, "seconds_to_write": written}
    found |= in_fresh_process("detect", path)
    if with_report:
        found["report"] = in_fresh_process("report-on", path)
    shutil.rmtree(path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--scratch", type=Path, help="where the runs are written; default: a temporary directory")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--detect", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--report-on", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--report", action="store_true", help="measure `report` after detection, too")
    parser.add_argument("--no-file", action="store_true", help="print only")
    args = parser.parse_args()
    if args.write:
        write_run(args.write, args.rows)
        return
    if args.detect:
        print(json.dumps(run_detect(args.detect)))
        return
    if args.report_on:
        print(json.dumps(run_report(args.report_on)))
        return
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        small, large = (measure(rows, Path(scratch), with_report=args.report) for rows in (args.rows // 10, args.rows))
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
        "small": small,
        "large": large,
        "growth_of_seconds": large["seconds"] / small["seconds"],
        "growth_of_rows": large["rows"] / small["rows"],
        "within_8_gb": large["peak_gb"] <= MAX_GB,
    }
    if args.report:
        result["report_within_8_gb"] = large["report"]["peak_gb"] <= MAX_GB
        result["growth_of_report_seconds"] = large["report"]["seconds"] / small["report"]["seconds"]
    print(json.dumps(result, indent=2))
    if not args.no_file:
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
