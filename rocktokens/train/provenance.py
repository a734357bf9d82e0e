"""What a trainer writes into its run about where it came from: pair, prompts and tokenizer.

Without it a run made by a trainer would name no models, and a later `sample` or `score` could not know what to load.
Prompts go into the run as a JSONL file, so that the same ones can be sampled again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl.trainer.utils import get_config_model_id

from rocktokens.values import Json, Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rocktokens.train.step_record import RunDirectory
    from rocktokens.train.trainer import RockDistillationTrainer

PROMPTS = "prompts.jsonl"
TOKENIZER = "tokenizer"
# Prompts kept of a large dataset; a stream is not read for this.
MOST_PROMPTS = 10_000


def describe_run(
    trainer: RockDistillationTrainer,
    run: RunDirectory,
    models: dict[str, str | PreTrainedModel | None],
    precision: str,
) -> None:
    """Record pair, prompts and tokenizer in a run that does not name them yet.

    Args:
        trainer: knows the prompts and the tokenizer.
        run: the run.
        models: student and teacher as the user gave them; None for a served teacher.
        precision: in which number formats is trained, in words.
    """
    if "pair" in run.manifest["config"] or not trainer.accelerator.is_main_process:
        return
    sections: Json = {"trainer": {"class": type(trainer).__name__, "precision": precision}}
    names = {who: _name(model) for who, model in models.items()}
    sections["trainer"] |= names
    if all(names.values()):
        sections["pair"] = {**names, "trust_remote_code": bool(trainer.args.trust_remote_code)}
    processing: Any = trainer.processing_class  # a tokenizer, or a processor of several kinds of input
    processing.save_pretrained(run.path / TOKENIZER)
    source = _write_prompts(trainer.train_dataset, run.path / PROMPTS)
    if source is not None:
        sections["prompts"] = {"source": str(source.absolute()), "split": "train"}
    run.describe(sections)


def _name(model: str | PreTrainedModel | None) -> str:
    if model is None:  # a served teacher: the command that named its servers records it
        return ""
    name = model if isinstance(model, str) else get_config_model_id(model.config)
    return str(Path(name).absolute()) if name and Path(name).is_dir() else name


def _write_prompts(dataset: Any, path: Path) -> Path | None:
    """The dataset's prompts as JSONL; None where they cannot be had as text or messages."""
    if dataset is None or not hasattr(dataset, "__len__"):
        return None
    lines = []
    for row in dataset.select(range(min(len(dataset), MOST_PROMPTS))) if hasattr(dataset, "select") else dataset:
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            line: Row = {"prompt": prompt}
        elif isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            line = {"messages": prompt}
        else:
            return None
        if isinstance(row.get("answer"), str):
            line["answer"] = row["answer"]
        try:
            lines.append(json.dumps(line, ensure_ascii=False))
        except TypeError:  # images
            return None
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
    draft.replace(path)
    return path
