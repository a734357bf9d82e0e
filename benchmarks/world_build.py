"""Makes a world's pair again from its seeds, and the manifest that says what was made.

    python benchmarks/world_build.py arithmetic --out worlds/arithmetic

Trains teacher and student (one process each, one thread each), measures both, writes the manifest last. Knows nothing
of distillation or detection. Started again after a kill, it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import platform
import queue
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from world_corpus import RECIPES, Recipe

from rocktokens.errors import RunError
from rocktokens.values import Json
from rocktokens.world import Problem, World

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MANIFEST = "manifest.json"
MODELS = ("teacher", "student")
EVALUATION_PROBLEMS = 2000
EVALUATION_BATCH = 250
MAX_NEW_TOKENS = 64
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")


@dataclass(frozen=True)
class Progress:
    """One sign of life: which model, how far, and its loss in nats a token."""

    world: str
    model: str
    step: int
    steps: int
    loss: float


def build_world(
    recipe: Recipe,
    out_dir: Path,
    *,
    progress: Callable[[Progress], None] | None = None,
    processes: int = 2,
    problems: int = EVALUATION_PROBLEMS,
) -> Json:
    """Train a world's pair into out_dir, measure it, write and return its manifest. Complete: does nothing."""
    world = recipe.world
    out_dir.mkdir(parents=True, exist_ok=True)
    claim_directory(recipe, out_dir)
    if (out_dir / MANIFEST).exists():
        return dict(json.loads((out_dir / MANIFEST).read_text()))

    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()  # the caller shows progress; one bar is enough
    began = time.monotonic()
    missing = [who for who in MODELS if not (out_dir / f"{who}.done").exists()]
    if processes > 1 and len(missing) > 1:
        _train_side_by_side(recipe, missing, out_dir, progress)
    else:
        for who in missing:
            _train(recipe, who, out_dir, lambda sign: progress(sign) if progress else None)
    seconds = time.monotonic() - began

    manifest = {
        "world": world.name,
        "recipe": described(recipe),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "seconds": round(seconds),
        "files": file_hashes(out_dir),
        "accuracy": measure(world, out_dir, num_problems=problems),
    }
    draft = out_dir / f"{MANIFEST}.tmp"
    draft.write_text(json.dumps(manifest, indent=2) + "\n")
    draft.replace(out_dir / MANIFEST)
    for leftover in (*(out_dir / f"{who}.done" for who in MODELS), out_dir / "recipe.json"):
        leftover.unlink(missing_ok=True)
    return manifest


def described(recipe: Recipe) -> Json:
    """Everything the weights depend on, apart from code and versions."""
    specs = ("teacher_habits", "student_habits", "teacher_model", "student_model")
    seeds = {key: getattr(recipe.world, key) for key in ("seed", "hidden_openers")}
    seeds |= {} if recipe.lead_seed is None else {"lead_seed": recipe.lead_seed}
    return seeds | {key: asdict(getattr(recipe, key)) for key in specs}


def claim_directory(recipe: Recipe, out_dir: Path) -> None:
    """Refuse a directory that holds another world or another recipe; otherwise mark it as ours."""
    wanted = json.loads(json.dumps({"world": recipe.world.name, "recipe": described(recipe)}))
    for name in (MANIFEST, "recipe.json"):
        if (out_dir / name).exists():
            found = json.loads((out_dir / name).read_text())
            if {key: found.get(key) for key in wanted} != wanted:
                raise RunError(f"{out_dir} holds a pair made with another recipe; choose an empty directory.")
            return
    (out_dir / "recipe.json").write_text(json.dumps(wanted))


def file_hashes(out_dir: Path) -> dict[str, str]:
    """SHA-256 of every file of the two models."""
    files = sorted(path for who in MODELS for path in (out_dir / who).rglob("*") if path.is_file())
    return {path.relative_to(out_dir).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def measure(world: World, pair_dir: Path, *, num_problems: int) -> dict[str, dict[str, float]]:
    """Accuracy of both models, and of the teacher without the stumbling block, with 95 % intervals."""
    import numpy as np
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rocktokens.stats import accuracy_estimate

    held_out = world.problems("causal", num_problems, seed=0)
    block = list(world.truth().stumbling_blocks.ids)
    arms: dict[str, tuple[str, list[int]]] = {
        "teacher": ("teacher", []),
        "teacher_without_block": ("teacher", block),
        "student": ("student", []),
    }
    found = {}
    for label, (who, banned) in arms.items():
        tokenizer = AutoTokenizer.from_pretrained(pair_dir / who)
        model = AutoModelForCausalLM.from_pretrained(pair_dir / who).eval()
        right_P = right_of(world, model, tokenizer, held_out, banned=banned)
        share = accuracy_estimate(right_P, rng=np.random.default_rng(0))
        found[label] = {"value": share.value, "low": share.low, "high": share.high, "num_problems": share.num_prompts}
    return found


def right_of(
    world: World,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    *,
    banned: list[int],
    seed: int = 0,
) -> NDArray[np.float64]:
    """Which problems the model answers right (1 or 0), one sampled rollout each, T = 1, without the banned tokens."""
    import torch

    from rocktokens.stats import right_shares

    generate: Callable[..., torch.Tensor] = model.generate  # type: ignore[assignment]
    texts: list[str] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)  # generate() has no generator argument
        for start in range(0, len(problems), EVALUATION_BATCH):
            batch = problems[start : start + EVALUATION_BATCH]
            inputs = tokenizer([p.prompt for p in batch], return_tensors="pt", padding=True)
            ids_BT = generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, suppress_tokens=banned or None)
            texts += tokenizer.batch_decode(ids_BT[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return right_shares(texts, [problem.answer for problem in problems], world.check)


def _train(recipe: Recipe, who: Any, out_dir: Path, report: Callable[[Progress], None]) -> None:
    import torch
    from transformers.utils import logging as hf_logging
    from world_train import train_model

    hf_logging.disable_progress_bar()
    torch.set_num_threads(1)  # tiny matrices: threads would wait for each other
    steps = (recipe.teacher_model if who == "teacher" else recipe.student_model).steps
    train_model(recipe, who, out_dir, lambda step, loss: report(Progress(recipe.world.name, who, step, steps, loss)))
    (out_dir / f"{who}.done").touch()


def _train_into_queue(recipe: Recipe, who: str, out_dir: Path, signs: Any) -> None:
    parent = multiprocessing.parent_process()

    def report(sign: Progress) -> None:
        if parent is not None and not parent.is_alive():  # killed: a build started again must have the directory alone
            raise SystemExit(1)
        signs.put(sign)

    _train(recipe, who, out_dir, report)


def _train_side_by_side(
    recipe: Recipe, models: list[str], out_dir: Path, progress: Callable[[Progress], None] | None
) -> None:
    """One process per model; a process that dies ends the other too, and what was checkpointed stays."""
    context = multiprocessing.get_context("spawn")
    signs = context.Queue()
    workers = [
        context.Process(target=_train_into_queue, args=(recipe, who, out_dir, signs), daemon=True) for who in models
    ]
    for worker in workers:
        worker.start()
    while True:
        running = any(worker.is_alive() for worker in workers)  # asked first: what is sent before the end is still read
        try:
            sign = signs.get(timeout=0.5)
        except queue.Empty:
            if not running or any(worker.exitcode not in (None, 0) for worker in workers):
                break
            continue
        if progress is not None:
            progress(sign)
    for worker, who in zip(workers, models, strict=True):
        if worker.exitcode != 0:
            for other in workers:
                other.terminate()
            raise RunError(f"training the {who} failed (exit {worker.exitcode}); start again to resume it.")


def main() -> None:
    """Make a world's pair with a progress bar, and print how accurate both models became."""
    from rocktokens.progress import progress

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=RECIPES)
    parser.add_argument("--out", type=Path, help="default: worlds/WORLD")
    asked = parser.parse_args()
    recipe, out = RECIPES[asked.world], asked.out or Path("worlds") / asked.world
    steps = {"teacher": 0, "student": 0}
    with progress(f"training {asked.world}", recipe.teacher_model.steps + recipe.student_model.steps, "steps") as go:

        def advance(sign: Progress) -> None:
            go(sign.step - steps[sign.model])
            steps[sign.model] = sign.step

        manifest = build_world(recipe, out, progress=advance)
    for who, found in manifest["accuracy"].items():
        print(f"{who}: {100 * found['value']:.1f} % [{100 * found['low']:.1f}, {100 * found['high']:.1f}]")
    print(f"pair: {out}")


if __name__ == "__main__":
    main()
