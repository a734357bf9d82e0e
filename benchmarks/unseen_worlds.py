"""Does detection find planted rocks in worlds that nobody has looked at?

    python benchmarks/unseen_worlds.py cornerstone:101 market:102 arithmetic:103

Each STRUCTURE:SEED is a world of its own: the built-in world's grammar and authors, but marker and closing words, style
table, token ids, corpus, both models and all problems drawn anew from the seed. Its pair is trained as `world build`
trains, distilled with the study's settings, and detection runs once, with its defaults. A result that is on file is
never computed again: what came out first is what stands.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import RESULTS, save

from rocktokens import open_run
from rocktokens.config import DetectConfig, PairConfig, PromptsConfig
from rocktokens.recipes import world_recipe
from rocktokens.stages import detect, distill, sample, score
from rocktokens.world import World, get_world, world_names
from rocktokens.world.build import build_world
from rocktokens.world.grammar import ARITHMETIC, MARKET

NAME = "unseen_worlds"
PROMPTS = 7000  # by hash six tenths train, two tenths are for detection


def drawn(structure: str, seed: int) -> World:
    """The structure's world with other words in the planted places, and everything random drawn anew."""
    world, chance = get_world(structure), random.Random(f"{structure}/{seed}")
    words = sorted({*ARITHMETIC.markers, *ARITHMETIC.closings, *MARKET.markers, *MARKET.closings})
    chance.shuffle(words)
    grammar = replace(world.grammar, markers=tuple(words[:4]), closings=tuple(words[4:8]))
    return replace(world, name=f"{structure}-{seed}", seed=seed, grammar=grammar)


def write_prompts(world: World, path: Path) -> None:
    problems = world.problems("detection", PROMPTS, seed=0)
    path.write_text("".join(f"{json.dumps({'prompt': p.prompt, 'answer': p.answer})}\n" for p in problems))


def found(run: Any, world: World) -> dict[str, Any]:
    """Precision and recall of every definition against what was planted."""
    planted, texts = set(world.truth().rocks.ids), {token_id: text for text, token_id in world.vocabulary.items()}
    facts = {}
    for definition in ("burden", "context", "excess"):
        named = run.rocks(definition)["token_id"].to_pylist()
        hits = len(planted & set(named))
        facts[definition] = {
            "precision": hits / len(named) if named else None,
            "recall": hits / len(planted),
            "named": [texts[token_id] for token_id in named],
        }
    return facts


def examine(structure: str, seed: int, work: Path) -> dict[str, Any]:
    """Train the pair, distil, detect: K as planted, and K chosen by the sweep."""
    world = drawn(structure, seed)
    pair_path, path, prompts_path = (work / world.name / part for part in ("pair", "run", "prompts.jsonl"))
    manifest = build_world(world, pair_path, processes=1)
    write_prompts(world, prompts_path)
    pair = PairConfig(student=str(pair_path / "student"), teacher=str(pair_path / "teacher"))
    prompts, recipe = PromptsConfig(source=str(prompts_path), checker="none"), world_recipe(structure)
    distill.distill(path, pair, prompts, recipe.distill)
    sample.sample(path, pair, prompts, recipe.rollouts, limit=recipe.detection_prompts)
    score.score(path, recipe.score)
    facts: dict[str, Any] = {"planted": list(world.truth().rocks.tokens), "accuracy": manifest["accuracy"]}
    for label, k in (("k_auto", "auto"), ("k_planted", len(world.truth().rocks))):
        detect.detect(path, DetectConfig(k=k))
        facts[label] = found(open_run(path), world)
    for row in open_run(path).read("footprints").to_pylist():
        if row["name"] in ("context", "excess"):
            facts[f"enrichment_{row['name']}"] = [row["enrichment"], row["enrichment_low"], row["enrichment_high"]]
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worlds", nargs="+", help=f"STRUCTURE:SEED, STRUCTURE one of {', '.join(world_names())}")
    parser.add_argument("--work", type=Path, default=Path("runs/unseen"))
    arguments = parser.parse_args()
    file = RESULTS / f"{NAME}.json"
    results = json.loads(file.read_text())["results"] if file.exists() else {}
    for label in arguments.worlds:
        structure, seed = label.split(":")
        if label not in results:
            results[label] = examine(structure, int(seed), arguments.work)
            save(NAME, results)
        for k in ("k_planted", "k_auto"):
            for definition, facts in results[label][k].items():
                print(f"{label:16} {k:10} {definition:8} precision {facts['precision']} recall {facts['recall']}")


if __name__ == "__main__":
    main()
