"""What a built-in world's pair shows, with intervals: read off a study's run, nothing is trained here.

rocktokens study WORLD --path runs/WORLD --stages distill sample score detect knockout graft
python benchmarks/world_facts.py WORLD [WORLD ...]

With --only-detection, after the stages up to detect: precision and recall against what cannot be learned, and classes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from common import save

from rocktokens import open_run
from rocktokens.world import get_world
from rocktokens.world.worlds import World

RESAMPLES = 2000


def losses(run: Any, world: World) -> dict[str, list[float]]:
    """The planted rocks' and the rest's loss before and after on fixed contexts, with a bootstrap over prompts."""
    rocks = ", ".join(map(str, world.truth().rocks.ids))
    first, last = min(run.steps()), max(run.steps())
    table = run.query(
        f"select prompt_id, count(*) filter (token_id in ({rocks}) and step = {last}) as rock_positions, "
        f"count(*) filter (step = {last}) as positions, "
        f"coalesce(sum(kl) filter (token_id in ({rocks}) and step = {first}), 0) as rock_pre, "
        f"coalesce(sum(kl) filter (token_id in ({rocks}) and step = {last}), 0) as rock_post, "
        f"sum(kl) filter (step = {first}) as pre, sum(kl) filter (step = {last}) as post "
        "from occurrences group by prompt_id order by prompt_id"
    ).to_pydict()
    by_prompt = {name: np.asarray(column, float) for name, column in table.items() if name != "prompt_id"}
    num_prompts = len(by_prompt["positions"])
    weight_RP = np.random.default_rng(0).multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), RESAMPLES)

    def read(weight_P: np.ndarray) -> dict[str, float]:
        total = {name: float(value_P @ weight_P) for name, value_P in by_prompt.items()}
        rest = total["positions"] - total["rock_positions"]
        share = total["rock_positions"] / total["positions"]
        rest_pre, rest_post = total["pre"] - total["rock_pre"], total["post"] - total["rock_post"]
        return {
            "rocks_loss_pre": total["rock_pre"] / total["rock_positions"],
            "rocks_loss_post": total["rock_post"] / total["rock_positions"],
            "rocks_loss_change": total["rock_post"] / total["rock_pre"] - 1,
            "rest_loss_pre": rest_pre / rest,
            "rest_loss_post": rest_post / rest,
            "rest_loss_change": rest_post / rest_pre - 1,
            "rocks_share_of_positions": share,
            "rocks_share_of_loss": total["rock_post"] / total["post"],
            "rocks_enrichment": total["rock_post"] / total["post"] / share,
        }

    drawn = [read(weight_P) for weight_P in weight_RP]
    found = {}
    for name, value in read(np.ones(num_prompts)).items():
        low, high = np.quantile([draw[name] for draw in drawn], (0.025, 0.975))
        found[name] = [round(float(number), 5) for number in (value, low, high)]
    return found


def bans(run: Any, world: World) -> dict[str, dict[str, Any]]:
    """The census on everything planted: verdict and effect in points with its interval."""
    rows = {row["token_id"]: row for row in run.read("census").to_pylist() if row["kind"] == "token"}
    truth, found = world.truth(), {}
    for name in ("rocks", "pillars", "neutrals", "stumbling_blocks"):
        tokens = getattr(truth, name)
        for token, token_id in zip(tokens.tokens, tokens.ids, strict=True):
            row = rows.get(token_id)
            effect = [round(100 * row[key], 2) for key in ("delta", "delta_low", "delta_high")] if row else None
            found[f"{name}: {token}"] = {"verdict": row["verdict"] if row else "not a candidate", "points": effect}
    return found


def detection(run: Any, world: World) -> dict[str, Any]:
    """Precision and recall against what cannot be learned (markers, and delimiters where the table chooses them)."""
    truth, texts = world.truth(), {token_id: text for text, token_id in world.vocabulary.items()}
    unlearnable = set(truth.unlearnable.ids)
    found: dict[str, Any] = {
        "unlearnable": list(truth.unlearnable.tokens),
        "of_them_delimiters": list(truth.costly.tokens),
        "level_off_by_construction": truth.rocks_level_off,
    }
    for definition in ("certified", "burden", "context"):
        ids = run.rocks(definition)["token_id"].to_pylist()
        hits = len(unlearnable & set(ids))
        found[definition] = {
            "precision": hits / len(ids) if ids else None,
            "recall": hits / len(unlearnable),
            "named": [texts[token_id] for token_id in ids],
        }
    kept = ("class", "confirmed", "loss_pre", "loss_post", "fall", "fall_low", "fall_high")
    found["types"] = {
        texts[row["token_id"]]: {name: row[name] for name in kept}
        for row in run.types().to_pylist()
        if row["class"] or row["token_id"] in unlearnable
    }
    found["confirmed"] = [texts[token_id] for token_id in run.facts("detect")["confirmed"]]
    return found


def facts(name: str, runs: Path) -> dict[str, Any]:
    """Everything one world's run shows of what was planted."""
    world, run = get_world(name), open_run(runs / name)
    done = run.facts
    census = done("knockout")
    return {
        "manifest": json.loads((world.path / "manifest.json").read_text())["accuracy"],
        "after_opd": [census["accuracy"], census["accuracy_low"], census["accuracy_high"]],
        "saturation": done("distill")["saturation"],
        "seconds_distill": round(done("distill")["summary"]["seconds"]),
        "losses": losses(run, world),
        "detection": detection(run, world),
        "bans": bans(run, world),
        "grafts": [
            {key: row[key] for key in ("arm", "gain", "gain_low", "gain_high")}
            for row in run.read("grafts").to_pylist()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worlds", nargs="+")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--only-detection", action="store_true", help="what detection says; no census or graft is read")
    options = parser.parse_args()
    if options.only_detection:
        said = {name: detection(open_run(options.runs / name), get_world(name)) for name in options.worlds}
        for name, found in said.items():
            print(name, {key: found[key] for key in ("certified", "confirmed")})
        save("worlds_detection", said)
        return
    results = {name: facts(name, options.runs) for name in options.worlds}
    for name, found in results.items():
        print(f"\n{name}: after OPD {found['after_opd']}, {found['detection']}")
        for key, value in found["losses"].items():
            print(f"  {key:26} {value[0]:8.4f} [{value[1]:.4f}, {value[2]:.4f}]")
        for key, ban in found["bans"].items():
            print(f"  ban of {key:28} {ban['verdict']:24} {ban['points']}")
        for row in found["grafts"]:
            print(f"  graft {row}")
    save("worlds", results)


if __name__ == "__main__":
    main()
