"""Does detection find what cannot be learned, in worlds that nobody has looked at?

    python benchmarks/unseen_worlds.py cornerstone:101 market:102 arithmetic:103 blocks:32

Each STRUCTURE:SEED is a world of its own: the built-in world's grammar and authors, but marker and closing words, style
table, token ids, corpus, both models and all problems drawn anew from the seed. Its pair is trained as `world build`
trains, distilled with the study's settings, and detection runs once, with its defaults. A result that is on file is
never computed again: what came out first is what stands. `--prepare` does everything but detection. (The result of
cornerstone:101 was made before `certified` existed, at K auto and K = number planted.)

`blocks:SEED` is the world of a stumbling block among the rocks: in `arithmetic`, whether a step begins with the planted
stumbling block or with its alternative becomes a hidden choice, drawn from the seed. Its whole list is made: detection,
census, grafts, bypass. On it belong the types that cannot be learned and that no answer depends on; neither the block
nor its alternative does.

The truth is what the texts' construction makes unlearnable: every type that the hidden table chooses. In `arithmetic`
the two delimiters are as unlearnable as the four markers.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import RESULTS, save
from world_build import build_world
from world_corpus import RECIPES, Recipe

from rocktokens import open_run
from rocktokens.detect import stage as detect
from rocktokens.detect.settings import DetectConfig
from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import MANIFEST
from rocktokens.sample import stage as sample
from rocktokens.score import stage as score
from rocktokens.study import study, world_recipe
from rocktokens.train import stage as distill
from rocktokens.world import World, world_names
from rocktokens.world.grammar import ARITHMETIC, MARKET

NAME = "unseen_worlds"
PROMPTS = 7000  # by hash six tenths train, two tenths are for detection
DEFINITIONS = ("certified", "burden", "context")


def drawn(structure: str, seed: int) -> Recipe:
    """The structure's world with other words in the planted places, and everything random drawn anew."""
    recipe, chance = RECIPES[structure], random.Random(f"{structure}/{seed}")
    words = sorted({*ARITHMETIC.markers, *ARITHMETIC.closings, *MARKET.markers, *MARKET.closings})
    chance.shuffle(words)
    grammar = replace(recipe.world.grammar, markers=tuple(words[:4]), closings=tuple(words[4:8]))
    world = replace(recipe.world, name=f"{structure}-{seed}", seed=seed, grammar=grammar)
    return replace(recipe, world=world)


def drawn_blocks(seed: int) -> Recipe:
    """`arithmetic` with hidden leads; both built-in models learn the new habit for some hundred steps."""
    recipe = RECIPES["arithmetic"]
    world = replace(recipe.world, name=f"blocks-{seed}")
    teacher = replace(recipe.teacher_model, steps=800, lr=1e-3, drill=0, grow=0)
    student = replace(recipe.student_model, steps=250, lr=1e-3, drill=0, clean=0)
    return replace(recipe, world=world, teacher_model=teacher, student_model=student, lead_seed=seed)


def write_prompts(world: World, path: Path) -> None:
    problems = world.problems("detection", PROMPTS, seed=0)
    path.write_text("".join(f"{json.dumps({'prompt': p.prompt, 'answer': p.answer})}\n" for p in problems))


def found(run: Any, world: World) -> dict[str, Any]:
    """Precision and recall of every definition against what cannot be learned, and the class of each such type."""
    truth, texts = world.truth(), {token_id: text for text, token_id in world.vocabulary.items()}
    unlearnable = set(truth.unlearnable.ids)
    facts: dict[str, Any] = {
        "unlearnable": list(truth.unlearnable.tokens),
        "of_them_delimiters": list(truth.costly.tokens),
        "level_off_by_construction": truth.rocks_level_off,
    }
    for definition in DEFINITIONS:
        named = run.rocks(definition)["token_id"].to_pylist()
        hits = len(unlearnable & set(named))
        facts[definition] = {
            "precision": hits / len(named) if named else None,
            "recall": hits / len(unlearnable),
            "named": [texts[token_id] for token_id in named],
        }
    rows = {row["token_id"]: row for row in run.types().to_pylist()}
    kept = ("class", "confirmed", "loss_pre", "loss_post", "fall", "fall_low", "fall_high", "p_costly", "p_stagnant")
    facts["types"] = {
        texts[token_id]: {name: row[name] for name in kept}
        for token_id, row in rows.items()
        if row["class"] or token_id in unlearnable
    }
    confirmed = run.facts("detect")["confirmed"]
    facts["confirmed"] = [texts[token_id] for token_id in confirmed]
    facts["detect"] = {name: run.facts("detect")[name] for name in ("num_prompts", "concentration", "enough", "notes")}
    for row in run.read("footprints").to_pylist():
        if row["name"] in DEFINITIONS:
            facts[row["name"]]["enrichment"] = [row["enrichment"], row["enrichment_low"], row["enrichment_high"]]
    return facts


def prepare(recipe_of_pair: Recipe, structure: str, work: Path) -> Path:
    """Train the pair, distil, sample, score; nothing is detected. What is there is not made again."""
    world = recipe_of_pair.world
    pair_path, path, prompts_path = (work / world.name / part for part in ("pair", "run", "prompts.jsonl"))
    if (path / MANIFEST).exists() and open_run(path).done("score"):
        return path
    build_world(recipe_of_pair, pair_path, processes=1)
    write_prompts(world, prompts_path)
    pair = PairConfig(student=str(pair_path / "student"), teacher=str(pair_path / "teacher"))
    prompts, recipe = PromptsConfig(source=str(prompts_path), checker="none"), world_recipe(structure)
    distill.distill(path, pair, prompts, recipe.distill)
    sample.sample(path, pair, prompts, recipe.rollouts, limit=recipe.detection_prompts)
    score.score(path, recipe.score)
    return path


def examine(structure: str, seed: int, work: Path) -> dict[str, Any]:
    """Detection, once, with its defaults."""
    made = drawn(structure, seed)
    world, path = made.world, prepare(made, structure, work)
    accuracy = json.loads((work / world.name / "pair" / "manifest.json").read_text())["accuracy"]
    detect.detect(path, DetectConfig())
    return {"accuracy": accuracy, **found(open_run(path), world)}


def examine_blocks(seed: int, work: Path) -> dict[str, Any]:
    """The list of a world whose stumbling block and its alternative are hidden choices: settings as in the study."""
    made = drawn_blocks(seed)
    world, truth = made.world, made.world.truth()
    folder = work / world.name
    built = build_world(made, folder / "pair", processes=1)
    recipe = world_recipe("arithmetic")  # its prompts and its checker: the grammar is the same
    pair = PairConfig(student=str(folder / "pair/student"), teacher=str(folder / "pair/teacher"))
    stages = ("distill", "sample", "score", "detect", "knockout", "graft", "bypass")
    run = study(replace(recipe, path=folder / "run", pair=pair, stages=stages))
    texts = {token_id: text for text, token_id in world.vocabulary.items()}
    listed = json.loads((folder / "run/bypass.json").read_text())
    return {
        "accuracy": built["accuracy"],
        "should_be_listed": sorted(truth.unlearnable.tokens),
        "unlearnable_but_not_neutral": [world.grammar.stumble[0], world.grammar.lead[0]],
        "listed": sorted(texts[token_id] for token_id in listed["ids"]),
        "rocks": sorted(texts[token_id] for token_id in run.facts("detect")["rocks"]),
        "decisions": {row["token"]: [row["class"], row["verdict"], row["why"]] for row in listed["decisions"]},
        "grafts": {
            row["arm"]: [row["gain"], row["gain_low"], row["gain_high"]] for row in run.read("grafts").to_pylist()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "worlds", nargs="+", help=f"STRUCTURE:SEED, STRUCTURE one of {', '.join(world_names())}, blocks"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/unseen"))
    parser.add_argument("--prepare", action="store_true", help="everything but detection")
    arguments = parser.parse_args()
    file = RESULTS / f"{NAME}.json"
    results = json.loads(file.read_text())["results"] if file.exists() else {}
    for label in arguments.worlds:
        structure, seed = label.split(":")
        if structure == "blocks":
            if label not in results:
                results[label] = examine_blocks(int(seed), arguments.work)
                save(NAME, results)
            right = results[label]["listed"] == results[label]["should_be_listed"]
            print(f"{label:16} list {'right' if right else 'WRONG'}: {results[label]['listed']}")
            continue
        if arguments.prepare:
            prepare(drawn(structure, int(seed)), structure, arguments.work)
            continue
        if label not in results:
            results[label] = examine(structure, int(seed), arguments.work)
            save(NAME, results)
        for definition in DEFINITIONS:
            facts = results[label].get(definition) or results[label].get("k_planted", {}).get(definition)
            if facts:
                print(f"{label:16} {definition:9} precision {facts['precision']} recall {facts['recall']}")


if __name__ == "__main__":
    main()
