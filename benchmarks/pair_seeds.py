"""One comparison whose seeds were trained one at a time, on several machines or days: every seed beside their mean.

rocktokens compare runs/qwen … --first-seed N --seeds 1 --results early_seedN.json       # for every seed
python benchmarks/pair_seeds.py qwen_compare_early_seeds early_seed0.json early_seed1.json early_seed2.json

Where the trainings themselves are at hand, `rocktokens compare --seeds 3` on their run says more: its interval is over
seeds and prompts. Here the interval of a mean is over seeds alone (Student's t), for the prompts that were evaluated;
fewer than three seeds have none.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import save
from pair_page import number, table

from rocktokens.compare.judgement import seed_estimate
from rocktokens.show import interval, points
from rocktokens.stats import MIN_SEEDS, Estimate

# What is compared with uniform, seed by seed: the column, and whether the file holds the difference itself.
CHANGES = {"accuracy": False, "loss_rocks": False, "loss_rest": False, "truncated_change": True}

# Settings of a distillation that say what is kept and measured on the way, not how it trains.
RECORDING = ("keep", "evaluate_every", "evaluate_rollouts", "telemetry_every")


def read(paths: Sequence[Path]) -> dict[int, dict[str, dict[str, Any]]]:
    """Seed → regime → its row; every file must hold one seed, and nothing but seed and regimes may differ."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    first: dict[str, Any] | None = None
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        sections = content["settings"]
        settings = dict(sections["compare"])
        seed = settings.pop("first_seed", 0)
        if settings.get("seeds") != 1 or seed in found:
            raise SystemExit(
                f"{path} holds {settings.get('seeds')} seeds from seed {seed} on; wanted: one seed per file"
            )
        own = {name: value for name, value in settings.items() if name != "regimes"}
        for section in ("prompts", "distill"):
            kept = {name: value for name, value in sections[section].items() if name not in RECORDING}
            own |= {f"{section}.{name}": value for name, value in kept.items()}
        first = own if first is None else first
        others = [name for name in own if name in first and own[name] != first[name]]  # versions may know more settings
        if others:
            raise SystemExit(f"{path} is another comparison than {paths[0]}: it differs in {', '.join(others)}")
        found[seed] = {row["regime"]: row for row in content["results"]["regimes"]}
    return dict(sorted(found.items()))


def combine(seeds: dict[int, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """By regime and measure: the change of every seed that has both, their mean, and its interval over seeds."""
    rows = []
    for regime in dict.fromkeys(name for own in seeds.values() for name in own if name != "uniform"):
        for measure, direct in CHANGES.items():
            values = {}
            for seed, own in seeds.items():
                row, base = own.get(regime), own.get("uniform")
                if row is None or base is None or row.get(measure) is None:
                    continue
                values[seed] = row[measure] if direct else row[measure] - base[measure]
            if values:
                mean = seed_estimate(list(values.values()))
                rows.append({"regime": regime, "measure": measure, "by_seed": values, "mean": mean.value})
                if len(values) >= MIN_SEEDS:
                    rows[-1]["interval"] = [mean.low, mean.high]
    return rows


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The same as a Markdown table, points for shares and nats for losses."""
    shown = []
    for row in rows:
        say: Callable[[float], str] = points if "loss" not in row["measure"] else _nats
        said = say(row["mean"]) + ", too few for an interval"
        if "interval" in row:
            said = interval(Estimate(row["mean"], *row["interval"], len(row["by_seed"])), say)
        shown.append([row["regime"], row["measure"], ", ".join(map(say, row["by_seed"].values())), said])
    return table(("regime", "change of", "by seed", "mean over seeds"), shown)


def _nats(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the file in docs/results")
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    seeds = read(options.files)
    for name in ("accuracy", "loss_rocks", "loss_rest"):
        print(name, "of uniform:", ", ".join(number(own["uniform"].get(name)) for own in seeds.values()))
    rows = combine(seeds)
    print(page(rows))
    save(options.name, {"files": [path.name for path in options.files], "seeds": list(seeds), "changes": rows})


if __name__ == "__main__":
    main()
