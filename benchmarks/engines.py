"""One process against two on the same work, command by command: `rocktokens --workers 2` and a single process.

    python benchmarks/engines.py [--prompts 400] [--repeats 3] [--commands sample score knockout]

Both run the built-in arithmetic pair, one thread each, alternating, each time into a new run. What is compared is the
wall clock of the whole command, start of Python included, and the same less the time of `rocktokens check`, which does
little else than start. Two quiet cores are needed for the ratio to mean anything; the load before each command is
recorded. Tokens a second of our sampler, of `generate` and of vLLM are benchmarks/sampling.py's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import save

ROLLOUTS = ["--rollouts.num-rollouts", "4", "--rollouts.max-new-tokens", "64"]


def seconds(*words: object, workers: int) -> float:
    """Wall clock of one command."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "rocktokens.cli", "--workers", str(workers), *map(str, words)],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return time.perf_counter() - start


def commands(path: Path, prompts: int) -> dict[str, list[object]]:
    """What is measured, in the order in which a run needs it."""
    census = [
        "--knockout.top",
        30,
        "--knockout.until",
        "budget",
        "--baseline.problems",
        prompts,
        "--knockout.resamples",
        200,
    ]
    return {
        "sample": ["sample", path, "--prompts.source", "arithmetic", "--prompts.limit", prompts, *ROLLOUTS],
        "score": ["score", path],
        "knockout": ["knockout", path, *census],
    }


def measure(folder: Path, prompts: int, wanted: list[str], repeats: int) -> list[dict[str, Any]]:
    """Seconds of each command with one and with two processes, alternating."""
    rows: list[dict[str, Any]] = []
    for repeat in range(repeats):
        for workers in (1, 2) if repeat % 2 == 0 else (2, 1):
            path = folder / f"run-{repeat}-{workers}"
            for name, words in commands(path, prompts).items():
                if name == "knockout" and name not in wanted:
                    continue
                if name == "knockout":
                    seconds("detect", path, workers=1)
                load = os.getloadavg()[0]
                taken = seconds(*words, workers=workers)
                rows.append({"command": name, "workers": workers, "seconds": taken, "load": load})
            shutil.rmtree(path)
    return rows


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--commands", nargs="+", default=["sample", "score", "knockout"])
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options.prompts, options.commands, options.repeats)
        start_up = statistics.median(seconds("check", workers=1) for _ in range(options.repeats))
    found = {}
    for name in options.commands:
        one, two = (
            statistics.median(row["seconds"] for row in rows if (row["command"], row["workers"]) == (name, workers))
            for workers in (1, 2)
        )
        found[name] = {"one": one, "two": two, "ratio": one / two, "without start": (one - start_up) / (two - start_up)}
        print(f"{name}: {one:.1f} s with one process, {two:.1f} s with two: {one / two:.2f} times as quick")
    if not options.no_save:
        save("engines", {"prompts": options.prompts, "start_up": start_up, "medians": found, "rows": rows})


if __name__ == "__main__":
    main()
