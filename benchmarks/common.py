"""What every benchmark shares: a process per contestant, a quiet clock, peak memory, and results with circumstances."""

from __future__ import annotations

import datetime
import json
import multiprocessing as mp
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
PACKAGES = ("rocktokens", "torch", "transformers", "trl", "liger-kernel", "numpy", "pyarrow", "duckdb")


def environment() -> dict[str, Any]:
    """Where and when a number was measured."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "command": "python " + shlex.join([os.path.relpath(sys.argv[0]), *map(_without_folder, sys.argv[1:])]),
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "cpu": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def _without_folder(argument: str) -> str:
    """Absolute paths are somebody's machine; their last part says what was given."""
    return "/".join(["PATH", Path(argument).name]) if os.path.isabs(argument) else argument


def save(name: str, results: Any) -> None:
    """Write docs/results/NAME.json."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    here = environment()
    made = {"rocktokens": here["versions"]["rocktokens"], "commit": here["commit"]}
    path.write_text(json.dumps({"made_by": made, "environment": here, "results": results}, indent=2) + "\n")
    print(f"results: {os.path.relpath(path)}")


def peak_memory(action: Callable[[], Any]) -> tuple[float, float, float]:
    """Seconds, peak resident megabytes above what was resident before, and seconds of processor time."""
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark so far
    start, worked = time.perf_counter(), time.process_time()
    action()
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return seconds, (peak - before) / 1e6, worked


def _serve(pipe: Any, prepare: Callable[..., Callable[[], Any]], arguments: tuple) -> None:
    action = prepare(*arguments)
    pipe.send("ready")
    while pipe.recv() == "run":
        pipe.send(peak_memory(action))


def interleaved(contestants: dict[str, tuple[Callable, tuple]], repeats: int = 5) -> dict[str, dict[str, float]]:
    """Run every contestant in a process of its own, taking turns; medians of seconds, peak megabytes, processor time.

    One unrecorded turn each comes first: it pays for lazy initialisation.
    """
    context = mp.get_context("spawn")
    pipes, workers = {}, {}
    for name, (prepare, arguments) in contestants.items():
        pipes[name], far = context.Pipe()
        workers[name] = context.Process(target=_serve, args=(far, prepare, arguments), daemon=True)
        workers[name].start()
        assert pipes[name].recv() == "ready"
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contestants}
    for turn in range(repeats + 1):
        for name, pipe in pipes.items():
            pipe.send("run")
            sample = pipe.recv()
            if turn:
                samples[name].append(sample)
    for pipe in pipes.values():
        pipe.send("stop")
    for worker in workers.values():
        worker.join()
    return {
        name: {
            "seconds": statistics.median(s for s, _, _ in rows),
            "seconds_min": min(s for s, _, _ in rows),
            "seconds_max": max(s for s, _, _ in rows),
            "peak_mb": statistics.median(m for _, m, _ in rows),
            "cpu_seconds": statistics.median(w for _, _, w in rows),
        }
        for name, rows in samples.items()
    }
