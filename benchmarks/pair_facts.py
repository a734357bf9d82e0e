"""What the study of a real pair found, with intervals: read off its run and the pair's manifest, nothing is run here.

make study-smollm2
python benchmarks/pair_facts.py runs/smollm2      # to docs/results/smollm2.json
python benchmarks/pair_facts.py runs/qwen         # to docs/results/qwen.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from common import save

from rocktokens import open_run
from rocktokens.compare.judgement import skewed_estimate, values_by_prompt
from rocktokens.stats import bootstrap_estimate, wilson_interval

LEARNING = (
    "select (greatest(step, 1) - 1) // 40 * 40 + 1 as first_step, max(step) as last_step, count(*) as steps, "
    "avg(loss) as loss, stddev(loss) / sqrt(count(*)) as loss_error, sum(tokens)::bigint as tokens, "
    "median(seconds) as median_seconds from training where loss is not null group by 1 order by 1"
)
READINGS = "select step, accuracy, accuracy_low, accuracy_high from training where accuracy is not null order by step"
TRAINED = "select step, loss, tokens, seconds from training where loss is not null order by step"
TYPE_COLUMNS = ("token", "token_id", "cluster", "count_all", "loss_pre", "loss_post", "teacher_entropy", "rho")
CENSUS_COLUMNS = ("token", "role", "kind", "verdict", "used_share", "num_changed", "delta", "delta_low", "delta_high")
CENSUS_COLUMNS += ("p", "p_bh")
LOSS_BY_PROMPT = (
    "select step, prompt_id, sum(kl) as loss, count(*) as positions from occurrences where isfinite(kl) "
    "group by 1, 2 order by 1, 2"
)


def short(value: Any) -> Any:
    """The same with five significant digits."""
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [short(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def rocks(run: Any) -> dict[str, list[dict[str, Any]]]:
    """The rocks of every definition, strongest first, with their own score and its interval where it has one."""
    types = run.read("types").to_pylist()
    found = {}
    for definition, score in (("certified", "r"), ("burden", "r"), ("context", "ccr")):
        if not any(f"in_{definition}" in t for t in types):  # made by a version without it
            continue
        chosen = sorted((t for t in types if t[f"in_{definition}"]), key=lambda t: t[f"place_{definition}"])
        columns = (*TYPE_COLUMNS, score, f"{score}_low", f"{score}_high", "grad_share")
        found[definition] = [{column: row.get(column) for column in columns} for row in chosen]
    return found


def persistence(run: Any) -> list[dict[str, Any]]:
    """Loss before and after at the last checkpoint, beside what the same selection shows where nothing was trained."""
    last = max(run.steps())
    keep = ("group", "arm", "num_types", "before", "after", "change", "change_low", "change_high", "share_fallen")
    rows = [row for row in run.read("persistence").to_pylist() if row["step"] in (None, last)]
    return [{column: row[column] for column in keep} | {"p_value": row["p_value"]} for row in rows]


def levels(run: Any) -> dict[str, Any]:
    """Mean loss on the same rollouts at every checkpoint, and whether it falls more slowly at the end than at first.

    "slowing" is the fall a step in the first third of the checkpoints minus that in the last third; the loss has begun
    to level off where its interval lies above 0. Intervals are over prompts, paired.
    """
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in run.query(LOSS_BY_PROMPT).to_pylist():
        by_step.setdefault(row["step"], []).append(row)
    value_C = {
        step: values_by_prompt([row["loss"] for row in rows], [row["positions"] for row in rows])
        for step, rows in by_step.items()
    }
    steps = sorted(value_C)
    places = {tuple((row["prompt_id"], row["positions"]) for row in rows) for rows in by_step.values()}
    if len(places) > 1:
        raise SystemExit("checkpoints have finite losses at different positions: their losses cannot be paired")
    found: list[dict[str, Any]] = []
    for before, step in zip([None, *steps], steps):
        row: dict[str, Any] = {"step": step, "positions": sum(row["positions"] for row in by_step[step])}
        row["loss"] = list(skewed_estimate(value_C[step])[:3])
        if before is not None:
            row["change"] = list(skewed_estimate(value_C[step] - value_C[before])[:3])
        found.append(row)
    third = len(steps) // 3
    slowing = None
    if third:
        a, b, c, d = steps[0], steps[third], steps[-1 - third], steps[-1]
        early_C, late_C = (value_C[a] - value_C[b]) / (b - a), (value_C[c] - value_C[d]) / (d - c)
        slowing = {
            "first_third": [a, b, *skewed_estimate(early_C)[:3]],
            "last_third": [c, d, *skewed_estimate(late_C)[:3]],
            "slowing": list(skewed_estimate(early_C - late_C)[:3]),
        }
    return {"checkpoints": found, "fall_per_step": slowing}


def concentration(run: Any, costly: float = 0.5) -> dict[str, Any]:
    """How few positions carry the loss that is left, what stands there, and in which answers they are."""
    last = max(run.steps())
    by_prompt = run.query(
        f"select prompt_id, sum(kl) as loss, sum(kl) filter (kl > {costly}) as costly from occurrences "
        f"where step = {last} and not isnan(kl) group by 1 order by 1"
    ).to_pydict()
    loss_P, costly_P = (np.array([value or 0.0 for value in by_prompt[name]]) for name in ("loss", "costly"))
    share = bootstrap_estimate(lambda part, whole: part / whole, [costly_P, loss_P], rng=np.random.default_rng(0))
    count = run.query(
        f"select count(*) as positions, count(*) filter (kl > {costly}) as costly_positions, count(*) filter "
        f"(kl > {costly} and cluster = 'digits') as costly_digits from occurrences join types using (token_id) "
        f"where step = {last} and not isnan(kl)"
    ).to_pylist()[0]
    answers = run.query(
        f"with r as (select rollout_id, bool_or(kl > {costly}) as has_one from occurrences where step = {last} "
        "group by 1) select correct, count(*) as answers, count(*) filter (has_one) as with_one "
        "from r join rollouts using (rollout_id) group by 1 order by 1"
    ).to_pylist()
    for row in answers:
        row["share"] = list(wilson_interval(row["with_one"], row["answers"])[:3])
    return {"nats": costly, **count, "share_of_loss": list(share[:3]), "answers": answers}


def _classes(run: Any) -> list[dict[str, Any]]:
    """Every costly type with its class, largest burden first."""
    keep = (*TYPE_COLUMNS, "class", "confirmed", "p_costly", "p_stagnant", "fall", "fall_low", "fall_high", "r")
    rows = [row for row in run.read("types").to_pylist() if row.get("class")]
    return [{name: row.get(name) for name in keep} for row in sorted(rows, key=lambda row: -(row["r"] or 0))]


def facts(run: Any) -> dict[str, Any]:
    """Everything that stages of this run have found so far."""
    known = run.manifest["config"]
    found: dict[str, Any] = {"run_versions": run.manifest["versions"]}
    made = Path(known["pair"]["student"]).parent
    if (made / "run.json").is_file():  # a pair that a recipe of ours has made
        pair = open_run(made)
        found |= {"pair": pair.manifest["stages"], "pair_settings": pair.manifest["config"]["make"]}
    else:
        found["pair"] = {role: Path(known["pair"][role]).name for role in ("student", "teacher")}
    found["settings"] = {name: own for name, own in known.items() if name != "pair"}
    found["seconds_of_stages"] = run.manifest.get("seconds")
    found["learning"] = run.query(LEARNING if len(run.query(TRAINED)) > 80 else TRAINED).to_pylist()
    found["readings"] = run.query(READINGS).to_pylist()
    for stage in ("distill", "sample", "detect", "geometry", "knockout", "graft", "compare"):
        found[stage] = run.facts(stage) if run.done(stage) else None
    if found["detect"]:
        found["loss_of_checkpoints"] = levels(run)
        found["classes"] = _classes(run)
        found["costliest_positions"] = run.read("positions").slice(0, 20).to_pylist() if run.has("positions") else None
        found |= {"rocks": rocks(run), "persistence": persistence(run), "concentration": concentration(run)}
        found |= {name: run.read(name).to_pylist() for name in ("footprints", "clusters", "sweep")}
    if found["knockout"]:
        found["census"] = [{key: row[key] for key in CENSUS_COLUMNS} for row in run.read("census").to_pylist()]
    if found["graft"]:
        found["grafts"] = run.read("grafts").to_pylist()
    return short(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    options = parser.parse_args()
    found = facts(open_run(options.run))
    for name, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            print(f"\n{name}")
            for row in value:
                print("  ", row)
    save(options.run.resolve().name, found)


if __name__ == "__main__":
    main()
