"""What the run of a trainer says of itself, so that every command works on it: pair, prompts, settings, facts.

`rocktokens distill` names all of this before it trains. A script with our class only has TRL's arguments and a dataset;
what of them has a place among our settings is recorded here.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from trl.trainer.utils import get_config_model_id

from rocktokens.bypass import list_for, read_bypass
from rocktokens.causal.bans import named_tokens, texts_of
from rocktokens.errors import ConfigError, RunError
from rocktokens.models.settings import PairConfig
from rocktokens.models.tokens import FOLDER
from rocktokens.prompts.checkers import MathChecker
from rocktokens.prompts.settings import PromptsConfig
from rocktokens.run import MANIFEST, Run, open_run, write_text
from rocktokens.sample.settings import RolloutConfig
from rocktokens.select.settings import SELECTOR_OPTIONS, SelectorConfig
from rocktokens.settings import C, to_mapping
from rocktokens.train.record import saturation
from rocktokens.train.settings import DistillConfig
from rocktokens.values import Json, Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rocktokens.train.trainer import RockDistillationTrainer

log = logging.getLogger(__name__)

PROMPTS = "prompts.jsonl"
MOST_PROMPTS = 10_000  # kept of a large dataset; a stream is not read for this
ANSWERS = ("answer", "solution", "ground_truth", "target")  # columns that hold the reference answer, the first counts
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}


def token_ids_of(
    given: Run | str | Path | Iterable[int | str], tokenizer: PreTrainedTokenizerBase, *, skips: bool = False
) -> tuple[int, ...]:
    """Token ids of what a user names: ids, token texts, a bypass.json, or a run and its declared rocks.

    With `skips`, of a run that has one the bypass list: what training may leave out.
    """
    if isinstance(given, str | Path):
        if Path(given).is_file():
            return read_bypass(given).ids
        given = open_run(given) if (Path(given) / MANIFEST).is_file() else [str(given)]
    if isinstance(given, Run):
        listed = list_for(given, None, tokenizer, freezes=True) if skips else None
        return tuple(given.facts("detect")["rocks"]) if listed is None else listed
    names = [name if isinstance(name, str) else f"#{int(name)}" for name in given]
    if all(name.startswith("#") and name[1:].lstrip("-").isdigit() for name in names):
        return tuple(dict.fromkeys(int(name[1:]) for name in names))
    return tuple(named_tokens(names, texts_of(tokenizer), tokenizer))


def is_own(run: Run) -> bool:
    """Whether a trainer describes and completes the run: nobody else has said what it trains."""
    return "trainer" in run.manifest["config"] or not {"pair", "distill"} & run.manifest["config"].keys()


def describe_run(trainer: RockDistillationTrainer, run: Run, models: dict[str, str | PreTrainedModel | None]) -> None:
    """Record pair, prompts and tokenizer, in place of what an attempt that did not end has recorded.

    Models are those that the user gave; None for a served teacher.
    """
    if run.done("distill") or not trainer.accelerator.is_main_process:
        return
    names = {}
    for who, model in models.items():
        name = "" if model is None else model if isinstance(model, str) else get_config_model_id(model.config)
        names[who] = str(Path(name).absolute()) if name and Path(name).is_dir() else name
    sections: Json = {"trainer": {"class": type(trainer).__name__, "precision": trainer.precision.description, **names}}
    is_whole = not hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config")
    if not names["student"] and is_whole and trainer.keeps(0):  # a model without a name: its first checkpoint has one
        names["student"] = str(run.checkpoint(0).absolute())
    if all(names.values()):
        sections["pair"] = to_mapping(PairConfig(student=names["student"], teacher=names["teacher"]))
    else:
        log.warning("%s: a model has no path or hub name; commands on this run will need --pair.teacher and "
                    "--pair.student", run.path)  # fmt: skip
    processing: Any = trainer.processing_class  # a tokenizer, or a processor of several kinds of input
    processing.save_pretrained(run.path / FOLDER)
    rows = _prompt_rows(trainer.train_dataset)
    if rows is not None:
        write_text(run.path / PROMPTS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        source, checker = str((run.path / PROMPTS).absolute()), _checker_of(trainer, rows)
        sections["prompts"] = to_mapping(PromptsConfig(source=source, checker=checker))
    run.manifest["config"] = sections
    run.save()


def begin_run(trainer: RockDistillationTrainer, run: Run) -> None:
    """Record the settings of the training, once its number of steps is known; remove what an earlier attempt left."""
    state, args, options = trainer.state, trainer.args, trainer.options
    if state.global_step == 0 and run.done("distill"):
        raise RunError(
            f"{run.path} holds a complete training of {run.facts('distill')['steps']} steps; choose another directory "
            "for this one, or continue that one with train(resume_from_checkpoint=True) and a larger max_steps"
        )
    if not trainer.accelerator.is_main_process:
        return
    run.reopen("distill")
    if state.global_step == 0:
        for left in (run.path / "telemetry", *(run.checkpoint(step) for step in run.checkpoints())):
            shutil.rmtree(left, ignore_errors=True)
    rollouts = args.per_device_train_batch_size * args.gradient_accumulation_steps * trainer.accelerator.num_processes
    selector: Any = trainer.selector
    chosen = {name: getattr(selector, name, None) for name in SELECTOR_OPTIONS.get(selector.name, ())}
    chosen |= {"rocks": selector.token_ids} if "rocks" in chosen else {}
    adapter: Any = getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", {}).get("default")
    settings = {
        "steps": state.max_steps,
        "learning_rate": args.learning_rate,
        "schedule": SCHEDULES.get(str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))),
        "warmup": args.get_warmup_steps(state.max_steps) / max(state.max_steps, 1),
        "prompts_per_step": rollouts // options.rollouts_per_prompt,
        "rollouts_per_prompt": options.rollouts_per_prompt,
        "max_new_tokens": trainer.length_limit,
        "micro_batch": args.per_device_train_batch_size,
        "bf16": bool(args.bf16),
        "normalise": options.normalise,
        "loss": options.kind,
        "selector": _fitting(SelectorConfig, {"name": selector.name, **chosen}),
        "lora_rank": getattr(adapter, "r", None),
        "keep": max(1, len(set(options.keep_at or ()) - {0})),
        "seed": args.seed,
    }
    sampling = {"max_new_tokens": trainer.length_limit, "temperature": args.temperature}
    sampling |= {"top_k": args.top_k or None, "top_p": None if args.top_p == 1.0 else args.top_p}
    config = run.manifest["config"]
    config["distill"] = to_mapping(_fitting(DistillConfig, settings))
    config["rollouts"] = to_mapping(_fitting(RolloutConfig, sampling))
    run.save()


def _fitting(kind: type[C], values: Row) -> C:
    """Settings with those of the values that they can hold; TRL knows more schedules and losses than we do."""
    known: Row = {}
    for name, value in values.items():
        with suppress(ConfigError):
            known |= {name: value} if value is not None and kind(**known, **{name: value}) else {}
    return kind(**known)


def training_facts(trainer: RockDistillationTrainer) -> Json:
    """For the run's manifest: steps, saturation, accuracy before and after, where the time went; all ranks call it."""
    record, args, monitor = trainer.record, trainer.args, trainer.monitor.gathered()
    # While the rate rises little is learned: the slope test is on the steps after the warm-up.
    learned_S = record.column("step") > args.get_warmup_steps(trainer.state.max_steps)
    ended = saturation(record.column("loss")[learned_S])
    facts: Json = {
        "steps": trainer.state.global_step,
        "saturated": None if ended is None else ended.saturated,
        "saturation": None if ended is None else ended._asdict(),
        "selector": trainer.selector.name,
        "normalise": trainer.options.normalise,
        "vocabulary": trainer.vocabulary,
        "summary": record.summary(),
        "monitor_rocks": monitor.rocks(),
    }
    evaluated = np.flatnonzero(~np.isnan(record.column("accuracy")))
    for name, index in (("accuracy_before", 0), ("accuracy_after", -1)):
        if len(evaluated):
            row = record.rows[evaluated[index]]
            facts[name] = {key: row[key] for key in ("step", "accuracy", "accuracy_low", "accuracy_high")}
    if trainer.run is not None and args.should_save:
        record.write(trainer.run)
        trainer.run.write("monitor", monitor.table())
    return facts


def _prompt_rows(dataset: Any) -> list[Row] | None:
    """The dataset's prompts, with their answers where it has some; None where they are neither text nor messages."""
    if dataset is None or not hasattr(dataset, "__len__"):
        return None
    rows = []
    for row in dataset.select(range(min(len(dataset), MOST_PROMPTS))) if hasattr(dataset, "select") else dataset:
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            kept: Row = {"prompt": prompt}
        elif isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            kept = {"messages": prompt}
        else:
            return None
        answer = next((row[name] for name in ANSWERS if isinstance(row.get(name), str | int | float)), None)
        rows.append(kept if answer is None else {**kept, "answer": str(answer)})
        with suppress(TypeError):
            json.dumps(prompt)
            continue
        return None  # images
    return rows


def _checker_of(trainer: RockDistillationTrainer, rows: list[Row]) -> str:
    """How answers are checked: as the evaluator does, else as numbers and formulas where all of them are."""
    check: Any = getattr(trainer.options.evaluator, "check", None)
    module = getattr(check, "__module__", "__main__")
    if getattr(check, "__name__", "").isidentifier() and module != "__main__" and not module.startswith("rocktokens."):
        return f"{module}:{check.__name__}"
    reader = MathChecker()
    unread = next((row["answer"] for row in rows if "answer" in row and not reader.readable(row["answer"])), None)
    if unread is None:
        return "auto"
    # A wrong checker would find every answer wrong, and then no token would matter.
    log.warning("answers such as %r are neither numbers nor formulas: accuracy is not measured on this run unless a "
                "command says how, with --prompts.checker exact or package.module:function", unread)  # fmt: skip
    return "none"
