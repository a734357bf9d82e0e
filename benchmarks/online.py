"""How often are decisions made while training wrong? Simulated trainings; writes docs/results/online.json.

    python benchmarks/online.py            # some minutes on one core; --quick for less, not saved

adaptive: types frozen although they learn, to be 0, with falls of 30, 50 and 90 % and no rocks, with and without
warm-up; and with rocks, how many of them are frozen. monitor: trainings in which `TokenMonitor.rocks()` names any type
where there is no rock, at 2,000 and 20,000 types, to be <= 5 %. saturation: trainings that `until saturated` stops
although more than the tolerance was still to be gained, to be <= 5 %, at noise of 2 to 8 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import online_runs
from common import RESULTS, save

from rocktokens.stats import wilson_interval


def adaptive(times: int) -> list[dict]:
    """One row per scenario."""
    rows = []
    for scenario in online_runs.ADAPTIVE:
        found = [online_runs.simulate_adaptive(scenario, seed) for seed in range(times)]
        rows.append(
            {
                "scenario": scenario.name,
                "trainings": times,
                "false_freezes": sum(f.false_freezes for f in found),
                "rocks": scenario.rocks * times,
                "rocks_frozen": sum(f.found_rocks for f in found),
                "largest_share_of_loss_frozen": max(f.frozen_loss for f in found),
            }
        )
        print(rows[-1], flush=True)
    return rows


def monitor(times: int) -> list[dict]:
    """One row per number of types and kind of training."""
    rows = []
    for types in (2_000, 20_000):
        for kind in ("equal", "learning", "skewed"):
            named = [online_runs.simulate_monitor(kind, seed, types=types) for seed in range(times)]
            wrong = sum(count > 0 for count in named)
            share = wilson_interval(wrong, times)[:3]
            rows.append({"types": types, "kind": kind, "trainings": times, "with_false_rocks": wrong, "share": share})
            print(rows[-1], flush=True)
    return rows


def saturation(times: int) -> list[dict]:
    """One row per course of the loss, noise and warm-up."""
    rows = []
    for kind in online_runs.LOSSES:
        for noise in (0.02, 0.04, 0.08):
            for warmup in (0, 150):
                ends = [online_runs.simulate_saturation(kind, s, noise=noise, warmup=warmup) for s in range(times)]
                false = sum(wrong for _, wrong in ends)
                rows.append(
                    {
                        "loss": kind,
                        "noise": noise,
                        "warmup": warmup,
                        "trainings": times,
                        "false_stops": false,
                        "share": wilson_interval(false, times)[:3],
                        "stopped_early": sum(step < 3000 for step, _ in ends) / times,
                        "median_stop": float(np.median([step for step, _ in ends])),
                    }
                )
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--quick", action="store_true", help="a few trainings of each kind; results are not saved")
    flags.add_argument("--only", choices=("adaptive", "monitor", "saturation"), help="one part; the others are kept")
    options = flags.parse_args()
    times = {"adaptive": 2, "monitor": 2, "saturation": 5} if options.quick else {}
    saved = RESULTS / "online.json"
    start, results = time.perf_counter(), {}
    if options.only is not None and saved.exists():
        results = {part: rows for part, rows in json.loads(saved.read_text())["results"].items() if part != "summary"}
    for part, usual in (("adaptive", 25), ("monitor", 100), ("saturation", 100)):
        if options.only in (None, part):
            results[part] = globals()[part](times.get(part, usual))
    summary = {}
    if "adaptive" in results:
        summary["false_freezes"] = sum(row["false_freezes"] for row in results["adaptive"])
    if "monitor" in results:
        summary["false_rocks_worst"] = max(row["share"][0] for row in results["monitor"])
    if "saturation" in results:
        summary["false_stops_worst"] = max(row["share"][0] for row in results["saturation"])
    print({**summary, "seconds": round(time.perf_counter() - start)})
    if not options.quick:
        save("online", {"summary": summary, **results})


if __name__ == "__main__":
    main()
