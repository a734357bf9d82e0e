"""Distil a pair in two stages into a run: off-policy on the teacher's answers (optional), then on-policy.

    found = distill(DistillConfig(steps=300), pair, prompts, run)

Everything a killed run needs lies in the run: call it again with the same arguments and it goes on where it stopped,
bit for bit on a CPU. Knows models, prompts and a run directory; which stage follows is the pipeline's business.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedModel
from transformers.trainer_callback import PrinterCallback

from rocktokens.divergence.monitor import TokenMonitor
from rocktokens.errors import ConfigError, DataError, RunError
from rocktokens.models.devices import TINY_PARAMETERS
from rocktokens.models.pair import Pair, no_bars
from rocktokens.models.states import StateSource
from rocktokens.progress import progress
from rocktokens.prompts.checkers import Checker
from rocktokens.prompts.tasks import Prompt
from rocktokens.sample.accuracy import Evaluator
from rocktokens.sample.rollouts import make_engine, sample_rollouts
from rocktokens.sample.settings import RolloutConfig
from rocktokens.select.interface import Selector, selector_of
from rocktokens.select.settings import SelectorConfig
from rocktokens.train.checkpoints import last_complete_checkpoint
from rocktokens.train.off_policy import OffPolicyTrainer, answer_rows, load_weights
from rocktokens.train.saturation import Saturation
from rocktokens.train.settings import DistillConfig
from rocktokens.train.step_display import StepProgress
from rocktokens.train.step_record import RunDirectory, TokenBudget, TrainingRecord, is_out_of_time
from rocktokens.train.trainer import RockDistillationTrainer, device_arguments, processes

# Rollouts in one forward and backward pass of a model too large to take a whole step at once.
from rocktokens.values import Json, Row

MICRO_BATCH = 8
# A budget of tokens is given up after so many times the planned steps.
LONGEST = 20

Account = Callable[[str, dict[str, float], Saturation | None], None]
"""Told at the end of a training: its title, the totals of its record, and the slope test."""


@dataclass(frozen=True)
class Distilled:
    """What a distillation made."""

    student: PreTrainedModel
    """The pair's student, trained in place (wrapped by PEFT with a LoRA rank)."""
    record: TrainingRecord
    saturation: Saturation | None
    """The slope test at the end; None where the run was too short for it."""
    facts: Json
    """For the run's manifest: steps, why it stopped, accuracy before and after, where the time went."""


def distill(
    config: DistillConfig,
    pair: Pair,
    prompts: Sequence[Prompt],
    run: RunDirectory,
    *,
    rocks: Sequence[int] = (),
    bypass: Sequence[int] | None = None,
    problems: Sequence[Prompt] = (),
    check: Checker | None = None,
    show: bool = True,
    on_step: Callable[[Row], None] | None = None,
    on_end: Account | None = None,
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
        show: show a progress bar.
        on_step: given the record's row of every optimiser step, in place of the progress bar.
        on_end: given each training's title, the totals of its record and the slope test, when it ends.
    """
    if len(prompts) < config.prompts_per_step:
        raise DataError(f"{len(prompts)} prompts are fewer than prompts_per_step = {config.prompts_per_step}")
    with _writing_to(run.path / "checkpoints"):
        (run.path / "checkpoints").mkdir(parents=True, exist_ok=True)
    if config.off_policy.answers is not None:
        off_policy(config, pair, prompts, run, problems=problems, check=check, show=show, on_end=on_end)
    selector = selector_of(config.selector, rocks, bypass)
    shadows = {name: selector_of(SelectorConfig(name=name), rocks, bypass) for name in config.shadows}
    with _writing_to(run.path):  # TRL makes its output directory, and the run keeps the tokenizer
        trainer = _on_policy_trainer(config, pair, prompts, run, selector, shadows, rocks)
    if problems and check is not None:
        _evaluate(trainer, config, problems, check, config.evaluate_every or max(1, config.steps // 10))
    _train(trainer, "on-policy distillation", show, on_step, on_end)
    monitor = trainer.monitor.gathered()
    if trainer.args.should_save:
        run.write("monitor", monitor.table())
    return Distilled(trainer.model, trainer.record, trainer.saturation, _facts(config, trainer, monitor))


def _on_policy_trainer(
    config: DistillConfig,
    pair: Pair,
    prompts: Sequence[Prompt],
    run: RunDirectory,
    selector: Selector,
    shadows: dict[str, Selector],
    rocks: Sequence[int],
) -> RockDistillationTrainer:
    schedule = config.schedule
    if schedule == "auto":
        schedule = "constant" if config.until == "saturated" else "linear"
    arguments = device_arguments(
        str(run.path / "checkpoints" / ".resume"),
        **_batching(config.prompts_per_step * config.rollouts_per_prompt, config.micro_batch, pair),
        max_steps=config.steps if config.tokens is None else config.steps * LONGEST,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant_with_warmup" if schedule == "constant" else schedule,
        warmup_steps=math.ceil(config.warmup * config.steps),
        max_grad_norm=config.clip,
        max_completion_length=config.max_new_tokens,
        save_steps=config.save_every or min(100, max(1, config.steps // 10)),
        **_vllm(config),
        report_to=list(config.report_to) or "none",
        **_precision(config.bf16),
        **_quiet(config.seed, config.steps),
    )
    generation = {"auto": "trl" if _sharded() else "ours", "vllm": "trl"}.get(config.generation, config.generation)
    keep = {round(config.steps * i / config.keep) for i in range(config.keep + 1)}
    if config.tokens is not None:
        keep |= {config.steps * times for times in range(2, LONGEST)}
    adapter = None
    if config.lora_rank is not None:
        adapter = LoraConfig(r=config.lora_rank, lora_alpha=2 * config.lora_rank, target_modules="all-linear")
    rows = [{"prompt_id": prompt.prompt_id, "prompt": list(prompt.prompt_ids)} for prompt in prompts]
    return RockDistillationTrainer(
        pair.student,
        pair.teacher,
        arguments,
        Dataset.from_list(rows),
        processing_class=pair.tokenizer,
        peft_config=adapter,
        selector=selector,
        shadows=shadows,
        run=run,
        rocks=rocks or None,
        normalise=config.normalise,
        kind=None if config.loss == "reverse_kl" else config.loss,
        audit_every=config.audit_every,
        budget=None if config.tokens is None else TokenBudget(config.steps, config.tokens),
        telemetry_every=config.telemetry_every if config.loss == "reverse_kl" else None,
        keep_at=keep,
        generation=generation,  # type: ignore[arg-type]
        rollouts_per_prompt=config.rollouts_per_prompt,
        until_saturated=config.until == "saturated",
        saturation_on=config.saturation_on,
        hours=config.hours,
        teacher_states=_served_states(pair),
    )


def _served_states(pair: Pair) -> StateSource | None:
    if pair.teacher is not None or pair.remote is None:
        return None
    return pair.remote.states


def _evaluate(
    trainer: RockDistillationTrainer, config: DistillConfig, problems: Sequence[Prompt], check: Checker, every: int
) -> None:
    """Measure accuracy on held-out prompts every so many steps."""
    trainer.evaluator = Evaluator(
        problems,
        check,
        trainer._tokenizer,
        max_new_tokens=config.max_new_tokens,
        num_rollouts=config.evaluate_rollouts,
        seed=config.seed,
    )
    trainer.evaluate_every = every
    trainer.check_evaluation()


def off_policy(
    config: DistillConfig,
    pair: Pair,
    prompts: Sequence[Prompt],
    run: RunDirectory,
    *,
    problems: Sequence[Prompt] = (),
    check: Checker | None = None,
    show: bool = True,
    on_end: Account | None = None,
) -> None:
    """Sample the teacher's answers once, train on them, and leave the student's weights in the run."""
    stage = config.off_policy
    final = run.path / "checkpoints" / "off_policy"
    if final.is_dir():
        load_weights(pair.student, final)
        return
    state = processes()
    if state.is_main_process and not run.has("teacher_answers"):
        asked = list(prompts)[: stage.answers]
        settings = RolloutConfig(num_rollouts=1, max_new_tokens=config.max_new_tokens, seed=config.seed)
        engine = make_engine(pair, settings, of_teacher=True)
        with progress("teacher's answers", len(asked), "answers") as advance:
            run.write(
                "teacher_answers",
                sample_rollouts(engine, asked, settings, pair.tokenizer, check, progress=advance),
            )
    state.wait_for_everyone()
    rows = answer_rows(run.read("teacher_answers"))
    if len(rows) < stage.batch:
        raise DataError(f"{len(rows)} teacher answers are fewer than off_policy.batch = {stage.batch}")
    steps = stage.epochs * (len(rows) // stage.batch)
    arguments = device_arguments(
        str(run.path / "checkpoints" / ".resume_off_policy"),
        **_batching(stage.batch, None, pair),
        max_steps=steps,
        learning_rate=stage.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=math.ceil(config.warmup * steps),
        max_grad_norm=config.clip,
        max_completion_length=config.max_new_tokens,
        save_steps=min(100, max(1, steps // 10)),
        **_precision(config.bf16),
        **_quiet(config.seed, steps),
    )
    trainer = OffPolicyTrainer(
        pair.student,
        pair.teacher,
        arguments,
        Dataset.from_list(rows),
        processing_class=pair.tokenizer,
        teacher_states=_served_states(pair),
        hard_share=stage.hard_share,
        run=run,
        until_accuracy=stage.until_accuracy,
    )
    if stage.until_accuracy is not None:
        if not problems or check is None:
            raise ConfigError("off_policy.until_accuracy needs held-out prompts with answers to check")
        _evaluate(trainer, config, problems, check, stage.evaluate_every)
    _train(trainer, "off-policy distillation", show, on_end=on_end)
    trainer.keep_model(final)


def _train(
    trainer: RockDistillationTrainer,
    title: str,
    show: bool,
    on_step: Callable[[Row], None] | None = None,
    on_end: Account | None = None,
) -> None:
    """Go on from the newest complete checkpoint, or start; show progress and, at the end, give the account."""
    trainer.remove_callback(PrinterCallback)
    output = Path(str(trainer.args.output_dir))
    found = last_complete_checkpoint(output)
    is_main = trainer.accelerator.is_main_process
    with no_bars(), StepProgress(title, int(trainer.args.max_steps), show=show and is_main) as watcher:
        trainer.on_step = on_step or watcher
        trainer.train(str(found) if found is not None else None)
    if trainer.run is not None and trainer.args.should_save:
        trainer.record.write(trainer.run)
    if on_end is not None and is_main:
        on_end(title, trainer.record.summary(), trainer.saturation)


@contextmanager
def _writing_to(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = "Free some space there, or choose a directory you can write to."
        raise RunError(f"cannot write {path}: {error.strerror or error}. {remedy}") from error


def _batching(rollouts: int, micro_batch: int | None, pair: Pair) -> dict[str, int]:
    """Rollouts a pass and passes a step, for this number of processes."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if rollouts % processes:
        raise ConfigError(f"{rollouts} rollouts per step cannot be divided over {processes} processes")
    own = rollouts // processes
    if micro_batch is None:
        tiny = sum(p.numel() for p in pair.student.parameters()) < TINY_PARAMETERS
        micro_batch = own if tiny else max(size for size in range(1, MICRO_BATCH + 1) if own % size == 0)
    if own % micro_batch:
        raise ConfigError(f"micro_batch {micro_batch} does not divide the {own} rollouts of a process")
    return {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": own // micro_batch}


def _vllm(config: DistillConfig) -> dict[str, object]:
    """TRL's settings for rollouts by vLLM, whose server takes the student's weights after every step (CUDA only)."""
    if config.generation != "vllm":
        return {"use_vllm": False}
    asked = config.vllm
    return {
        "use_vllm": True,
        "vllm_mode": asked.mode,
        "vllm_server_base_url": asked.url,
        "vllm_server_timeout": asked.timeout,
        "vllm_gpu_memory_utilization": asked.memory,
        "vllm_max_model_length": asked.max_length,
        "vllm_tensor_parallel_size": asked.tensor_parallel,
    }


def _precision(bf16: bool | None) -> dict[str, bool]:
    return {} if bf16 is None else {"bf16": bf16}


def _quiet(seed: int, steps: int) -> dict[str, object]:
    return {
        "seed": seed,
        "save_total_limit": 1,
        "logging_steps": max(1, min(10, steps // 10)),
        "disable_tqdm": True,
    }


def _sharded() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP") == "true" or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"


def _why_stopped(config: DistillConfig, trainer: RockDistillationTrainer) -> str:
    if trainer.state.global_step >= config.steps:
        return "steps" if config.tokens is None else "tokens"
    return "time" if is_out_of_time(trainer.record, config.hours) else "saturated"


def _facts(config: DistillConfig, trainer: RockDistillationTrainer, monitor: TokenMonitor) -> dict[str, object]:
    record, ended = trainer.record, trainer.saturation
    accuracy = record.column("accuracy")
    evaluated = np.flatnonzero(~np.isnan(accuracy))
    facts: Json = {
        "steps": trainer.state.global_step,
        "stopped": _why_stopped(config, trainer),
        "saturated": None if ended is None else ended.saturated,
        "saturation": None if ended is None else ended._asdict(),
        "selector": trainer.selector.name,
        "normalise": trainer.normalise,
        "vocabulary": trainer.vocabulary,
        "summary": record.summary(),
        "monitor_rocks": monitor.rocks(),
    }
    for name, index in (("accuracy_before", 0), ("accuracy_after", -1)):
        if len(evaluated):
            row = record.rows[evaluated[index]]
            facts[name] = {key: row[key] for key in ("step", "accuracy", "accuracy_low", "accuracy_high")}
    return facts
