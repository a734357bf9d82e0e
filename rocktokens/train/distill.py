"""Distil a pair in two stages into a run: off-policy on the teacher's answers (optional), then on-policy.

    found = distill(DistillConfig(steps=300), pair, prompts, run)

Everything a killed run needs lies in the run: call it again with the same arguments and it continues where it stopped,
bit for bit on a CPU. Knows models, prompts and a run directory; which stage follows is the pipeline's business.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedModel, get_scheduler
from transformers.trainer_callback import PrinterCallback

from rocktokens.errors import DataError
from rocktokens.models.devices import TINY_PARAMETERS
from rocktokens.models.pair import Pair, no_bars
from rocktokens.progress import progress
from rocktokens.prompts.checkers import Checker
from rocktokens.prompts.tasks import Prompt
from rocktokens.run import failing
from rocktokens.sample.rollouts import Evaluator, make_sampler, sample_rollouts
from rocktokens.sample.settings import RolloutConfig
from rocktokens.select.interface import selector_of
from rocktokens.select.settings import SelectorConfig
from rocktokens.settings import require, to_mapping
from rocktokens.train.checkpoints import last_complete_checkpoint
from rocktokens.train.describe import training_facts
from rocktokens.train.record import TrainingRecord, saturation, show_account
from rocktokens.train.settings import DistillConfig
from rocktokens.train.trainer import (
    OffPolicyTrainer,
    RockDistillationTrainer,
    RockOptions,
    device_arguments,
    processes,
)
from rocktokens.values import Json, Row

if TYPE_CHECKING:
    from rocktokens.run import Run

log = logging.getLogger(__name__)

# Rollouts in one forward and backward pass of a model too large to take a whole step at once.
MICRO_BATCH = 8


@dataclass(frozen=True)
class Distilled:
    """What a distillation made."""

    student: PreTrainedModel
    """The pair's student, trained in place (wrapped by PEFT with a LoRA rank)."""
    record: TrainingRecord
    facts: Json
    """For the run's manifest: steps, saturation, accuracy before and after, where the time went."""


def distill(
    config: DistillConfig,
    pair: Pair,
    prompts: Sequence[Prompt],
    run: Run,
    *,
    rocks: Sequence[int] = (),
    bypass: Sequence[int] | None = None,
    problems: Sequence[Prompt] = (),
    check: Checker | None = None,
    show: bool = True,
    on_step: Callable[[Row], None] | None = None,
    ends: Sequence[int] = (),
) -> Distilled:
    """Train the pair's student in place.

    Args:
        config: how to train.
        pair: student and teacher.
        prompts: what is trained on.
        run: receives checkpoints, the record of every step and telemetry.
        rocks: token types that selectors may leave out and whose loss is reported apart.
        bypass: the list that `freeze` leaves out where its configuration names no token ids.
        problems: held-out prompts on which accuracy is measured, if `check` is given too.
        check: `check(text, answer)` says whether a rollout is right.
        show: show a progress bar and, at the end, where the time went.
        on_step: called with the record's row of every optimiser step where no progress is shown.
        ends: steps at which continuations of the training end, the first after `config.steps`. The schedule is that of
            a training up to the last of them, with the same warm-up.
    """
    if len(prompts) < config.prompts_per_step:
        raise DataError(f"{len(prompts)} prompts are fewer than prompts_per_step = {config.prompts_per_step}")
    with failing(run.path / "checkpoints"):
        (run.path / "checkpoints").mkdir(parents=True, exist_ok=True)
    run.manifest["config"].setdefault("distill", to_mapping(config))  # the run is not the trainer's to describe
    if config.off_policy.answers is not None:
        off_policy(config, pair, prompts, run, show=show)
    sharded = "true" in (os.environ.get("ACCELERATE_USE_FSDP"), os.environ.get("ACCELERATE_USE_DEEPSPEED"))
    generation: Any = {"auto": "trl" if sharded else "ours", "vllm": "trl"}.get(config.generation, config.generation)
    evaluator = None
    if problems and check is not None:
        length = config.max_new_tokens
        evaluator = Evaluator(problems, check, pair.tokenizer, max_new_tokens=length, num_rollouts=1, seed=config.seed)
    is_reverse = config.loss == "reverse_kl"
    options = RockOptions(
        shadows={name: selector_of(SelectorConfig(name=name), rocks, bypass) for name in config.shadows},
        normalise=config.normalise,
        kind=None if is_reverse else config.loss,
        audit_every=config.audit_every,
        telemetry_every=config.telemetry_every if is_reverse else None,
        keep_at=_kept_steps(config, ends),
        generation=generation,
        rollouts_per_prompt=config.rollouts_per_prompt,
        evaluator=evaluator,
        evaluate_every=config.evaluate_every or max(1, config.steps // 10),
        on_step=on_step,
        teacher_states=_served_states(pair),
    )
    arguments = _arguments(
        config,
        pair,
        run.path / "checkpoints" / ".resume",
        rollouts=config.prompts_per_step * config.rollouts_per_prompt,
        micro_batch=config.micro_batch,
        steps=config.steps,
        until=ends[-1] if ends else config.steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant_with_warmup" if config.schedule == "constant" else config.schedule,
        save_steps=config.save_every or min(100, max(1, config.steps // 10)),
        report_to=list(config.report_to) or "none",
        **_vllm(config),
    )
    adapter = None
    if config.lora_rank is not None:
        adapter = LoraConfig(r=config.lora_rank, lora_alpha=2 * config.lora_rank, target_modules="all-linear")
    with failing(run.path):  # TRL makes its output directory, and the run keeps the tokenizer
        trainer = RockDistillationTrainer(
            pair.student,
            pair.teacher,
            arguments,
            Dataset.from_list([{"prompt_id": p.prompt_id, "prompt": list(p.prompt_ids)} for p in prompts]),
            processing_class=pair.tokenizer,
            peft_config=adapter,
            selector=selector_of(config.selector, rocks, bypass),
            run=run,
            rocks=rocks or None,
            options=options,
        )
    if ends and show and trainer.accelerator.is_main_process:
        log.info("%s", _said_of_continuing(trainer.args, config, ends))
    _train(trainer, run, "on-policy distillation", show=show)
    facts = training_facts(trainer) | ({"steps_before": [config.steps, *ends[:-1]]} if ends else {})
    return Distilled(trainer.model, trainer.record, facts)


def _kept_steps(config: DistillConfig, ends: Sequence[int]) -> frozenset[int]:
    """Steps whose student is kept: evenly spaced, and in a continuation as far apart as before."""
    kept, start = {0}, 0
    for end in (config.steps, *ends):
        parts = max(1, round(config.keep * (end - start) / config.steps))
        kept |= {start + round((end - start) * part / parts) for part in range(1, parts + 1)}
        start = end
    return frozenset(kept)


def _said_of_continuing(args: Any, config: DistillConfig, ends: Sequence[int]) -> str:
    """What a continuation does to the learning rate, which had come down to 0 in most schedules."""
    before, until = [config.steps, *ends][-2:]
    unused = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    schedule: Any = get_scheduler(args.lr_scheduler_type, unused, args.warmup_steps, until)
    rate = config.learning_rate * schedule.lr_lambdas[0](before)
    return (
        f"the training continues from step {before} to {until} with the optimiser's state; its {config.schedule} "
        f"schedule is stretched to step {until}, so that the learning rate is {rate:.2e} at step {before + 1}"
    )


def off_policy(config: DistillConfig, pair: Pair, prompts: Sequence[Prompt], run: Run, *, show: bool = True) -> None:
    """Sample the teacher's answers once, train on them, and leave the student's weights in the run."""
    stage = config.off_policy
    final = run.path / "checkpoints" / "off_policy"
    if final.is_dir():  # an earlier call finished this stage
        saved = AutoModelForCausalLM.from_pretrained(final, dtype=next(pair.student.parameters()).dtype)
        with torch.no_grad():
            pair.student.load_state_dict(saved.state_dict())
        return
    state = processes()
    if state.is_main_process and not run.has("teacher_answers"):
        asked = list(prompts)[: stage.answers]
        settings = RolloutConfig(num_rollouts=1, max_new_tokens=config.max_new_tokens, seed=config.seed)
        served = pair.remote.engine if pair.teacher is None and pair.remote is not None else None
        engine = make_sampler(pair, settings, of_teacher=True) if served is None else served(settings)
        with progress("teacher's answers", len(asked), "answers") as advance:
            table = sample_rollouts(engine, asked, settings, pair.tokenizer, None, progress=advance)
        run.write("teacher_answers", table)
    state.wait_for_everyone()
    answers = run.read("teacher_answers").select(["prompt_id", "prompt_ids", "token_ids"])
    answers = answers.rename_columns(["prompt_id", "prompt", "completion"])
    rows = [row for row in answers.to_pylist() if row["completion"]]  # an empty answer has nothing to train on
    if len(rows) < stage.batch:
        raise DataError(f"{len(rows)} teacher answers are fewer than off_policy.batch = {stage.batch}")
    steps = stage.epochs * (len(rows) // stage.batch)
    arguments = _arguments(
        config,
        pair,
        run.path / "checkpoints" / ".resume_off_policy",
        rollouts=stage.batch,
        micro_batch=None,
        steps=steps,
        learning_rate=stage.learning_rate,
        lr_scheduler_type="linear",
        save_steps=min(100, max(1, steps // 10)),
    )
    trainer = OffPolicyTrainer(
        pair.student,
        pair.teacher,
        arguments,
        Dataset.from_list(rows),
        processing_class=pair.tokenizer,
        run=run,
        options=RockOptions(teacher_states=_served_states(pair)),
    )
    _train(trainer, run, "off-policy distillation", show=show)
    trainer.keep_model(final)


def _arguments(
    config: DistillConfig,
    pair: Pair,
    output: Path,
    *,
    rollouts: int,
    micro_batch: int | None,
    steps: int,
    until: int | None = None,
    **settings: Any,
) -> Any:
    """TRL's configuration of a stage: `rollouts` a step over all processes, in passes of `micro_batch`."""
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    own, rest = divmod(rollouts, num_processes)
    require(rest == 0, f"{rollouts} rollouts per step cannot be divided over {num_processes} processes")
    if micro_batch is None:
        tiny = sum(p.numel() for p in pair.student.parameters()) < TINY_PARAMETERS
        # A tiny model is bound by the number of passes, a large one by the memory of its activations.
        micro_batch = own if tiny else max(size for size in range(1, MICRO_BATCH + 1) if own % size == 0)
    require(own % micro_batch == 0, f"micro_batch {micro_batch} does not divide the {own} rollouts of a process")
    if config.bf16 is not None:
        settings["bf16"] = config.bf16
    return device_arguments(
        str(output),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=own // micro_batch,
        max_steps=until or steps,
        warmup_steps=math.ceil(config.warmup * steps),
        max_grad_norm=1.0,
        max_completion_length=config.max_new_tokens,
        seed=config.seed,
        save_total_limit=1,  # only the newest serves to resume; kept checkpoints are apart
        logging_steps=max(1, min(10, steps // 10)),
        disable_tqdm=True,  # the bar is ours
        **settings,
    )


def _vllm(config: DistillConfig) -> dict[str, object]:
    """TRL's settings for rollouts by vLLM, whose server takes the student's weights after every step (CUDA only)."""
    if config.generation != "vllm":
        return {"use_vllm": False}
    url = config.vllm.url
    where = {"vllm_mode": "colocate" if url is None else "server", "vllm_server_base_url": url}
    return {"use_vllm": True, "vllm_gpu_memory_utilization": config.vllm.memory, **where}


def _served_states(pair: Pair) -> Any:
    """Where a served teacher's states come from; None for a teacher in this process."""
    return pair.remote.states if pair.teacher is None and pair.remote is not None else None


def _train(trainer: RockDistillationTrainer, run: Run, title: str, *, show: bool) -> None:
    """Train from the newest complete checkpoint, or from the start, with a progress bar and an account at the end."""
    trainer.remove_callback(PrinterCallback)
    show = show and trainer.accelerator.is_main_process
    args, record = trainer.args, trainer.record
    found = last_complete_checkpoint(str(args.output_dir))
    with no_bars(), ExitStack() as stack:
        if show:
            work = stack.enter_context(progress(title, args.max_steps, "steps"))

            def show_step(row: Row) -> None:
                if not work.done and row["step"] > 1:  # an earlier run took the steps before
                    work.resumed(row["step"] - 1)
                work(row["step"] - work.done)
                said = f"loss {row['loss']:.4f}"
                for name in ("rocks", "rest"):
                    said += f", {name} {row[f'loss_{name}']:.3f}" if row.get(f"loss_{name}") is not None else ""
                said += f", {row['tokens'] / max(row['seconds'], 1e-9):.0f} tokens/s"
                for own in [own for own in record.rows if own.get("accuracy") is not None][-1:]:
                    ends = f"[{own['accuracy_low']:.1%}, {own['accuracy_high']:.1%}]"
                    said += f", accuracy {own['accuracy']:.1%} {ends}"
                work.say(said, now=row.get("accuracy") is not None)

            trainer.options = replace(trainer.options, on_step=show_step)
        trainer.train(str(found) if found is not None else None)
    if args.should_save:
        record.write(run)
    if show:
        learned_S = record.column("step") > args.get_warmup_steps(args.max_steps)
        show_account(title, record, saturation(record.column("loss")[learned_S]))
