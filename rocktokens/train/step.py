"""One optimiser step: what it cost, and what happens after it (monitor, telemetry, evaluation, the step's row).

The hooks run as a callback of the trainer, after the optimiser and before anything is logged or saved, so that a
checkpoint holds everything up to its own step. They read what the trainer gathered during the step.

Shapes: R rollouts of all ranks, C columns of the completion grid, K measured rows, S shared prompts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from transformers import TrainerCallback

from rocktokens.select.interface import Selector, overlap
from rocktokens.tables import STEP_STAGES, TRAINING_STAGES
from rocktokens.train.describe import begin_run, training_facts
from rocktokens.train.record import ALARMS, alarms
from rocktokens.train.weights import Rows, bite, with_losses
from rocktokens.values import Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerControl, TrainerState

    from rocktokens.train.trainer import RockDistillationTrainer

log = logging.getLogger(__name__)

WRITE_EVERY = 25  # steps between two writings of training.parquet, so that a run can be watched
# Column of the step's row → name of its series in TRL's trackers.
SERIES = {"loss_rocks": "rocks/loss", "loss_rest": "rest/loss", "kept_share": "kept_share", "accuracy": "accuracy"}
SERIES |= {"rocks_online": "rocks/online"} | {f"alarm_{name}": f"alarm/{name}" for name in ALARMS}


class Meter:
    """Seconds spent in named stages since the last `take`; stages may nest, and only the innermost one runs."""

    def __init__(self, device: torch.device | None = None) -> None:
        # CUDA returns before it has computed: without waiting, time would fall to whoever waits next.
        self._synchronise = torch.cuda.synchronize if device is not None and device.type == "cuda" else lambda: None
        self._seconds: dict[str, float] = dict.fromkeys(STEP_STAGES, 0.0)
        self._processor, self._processor_aside = time.process_time(), 0.0

    def now(self) -> float:
        """The clock, after the device has caught up."""
        self._synchronise()
        return time.perf_counter()

    @contextmanager
    def whole(self, name: str) -> Iterator[None]:
        """Count the block under `name`, whatever stages are named inside."""
        start, kept = self.now(), self._seconds
        self._seconds = dict.fromkeys(STEP_STAGES, 0.0)
        try:
            yield
        finally:
            self._seconds = kept
            self._seconds[name] += self.now() - start

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the block under `name`, less what inner stages claim."""
        start, claimed, processor = self.now(), sum(self._seconds.values()), time.process_time()
        try:
            yield
        finally:
            if name not in TRAINING_STAGES:  # what records, evaluates or saves is no part of training's cost
                self._processor_aside += time.process_time() - processor
            self._seconds[name] += self.now() - start - (sum(self._seconds.values()) - claimed)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._seconds[name] += seconds

    def take(self) -> dict[str, float]:
        """Seconds by stage, and processor seconds of training, since the last call; as columns of the record."""
        now = time.process_time()
        taken = {"seconds_processor": now - self._processor - self._processor_aside}
        taken |= {f"seconds_{stage}": seconds for stage, seconds in self._seconds.items()}
        self._processor, self._processor_aside = now, 0.0
        self._seconds = dict.fromkeys(STEP_STAGES, 0.0)
        return taken


@dataclass(frozen=True)
class ModelShape:
    """What a forward pass of a model costs, read off its parameters. A mixture of experts counts its active share."""

    backbone_parameters: int
    attention_width: int
    """Layers x heads x head width: what attention's cost grows with, per position attended to."""
    head_elements: int
    """Vocabulary x width."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelShape:
        """The shape of a causal language model; output head and input embeddings are no part of the backbone."""
        config, head = model.config.get_text_config(), model.get_output_embeddings().weight
        outside = {id(head), id(model.get_input_embeddings().weight)}
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        active = getattr(config, "num_experts_per_tok", experts) / experts if experts else 1.0
        backbone = 0.0
        for name, parameter in model.named_parameters():
            if id(parameter) not in outside:
                backbone += parameter.numel() * (active if ".experts." in name else 1.0)
        heads = getattr(config, "num_attention_heads", 1)
        head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(round(backbone), config.num_hidden_layers * heads * head_width, head.numel())

    def backbone(self, length_R: np.ndarray) -> float:
        """FLOPs of a forward pass without the head over sequences of these lengths, padding not counted."""
        tokens = float(length_R.sum())
        attended = float((length_R * (length_R + 1.0) / 2).sum())
        return 2.0 * self.backbone_parameters * tokens + 4.0 * self.attention_width * attended

    def head(self, rows: float) -> float:
        """FLOPs of one vocabulary projection of these rows."""
        return 2.0 * self.head_elements * rows


def step_flops(
    student: ModelShape,
    teacher: ModelShape,
    prompt_R: np.ndarray,
    response_R: np.ndarray,
    *,
    kept: int,
    measured_first: bool,
    sampled: bool = True,
    shared_S: np.ndarray | None = None,
) -> dict[str, float]:
    """FLOPs of one optimiser step by stage. A backward costs two forwards; the loss projects once and back twice.

    Lengths are in tokens: of every rollout's prompt, of its response, and of every prompt that was not computed because
    another rollout of it had been. Where a selector had losses measured first, the teacher's states of that pass serve
    the loss, too.
    """
    whole_R, tokens = prompt_R + response_R, float(response_R.sum())
    shared_S = np.zeros(0) if shared_S is None else shared_S
    student_forward, teacher_forward = (
        shape.backbone(whole_R) - shape.backbone(shared_S) for shape in (student, teacher)
    )
    selecting = student_forward + teacher_forward + student.head(tokens) + teacher.head(tokens)
    return {
        "rollout": student_forward + student.head(tokens) if sampled else 0.0,
        "select": selecting if measured_first else 0.0,
        "teacher": 0.0 if measured_first else teacher_forward,
        "student": 3.0 * student_forward,
        "head": 3.0 * student.head(kept) + teacher.head(kept),
    }


class StepHooks(TrainerCallback):
    """The trainer's own callback; one row of the record a step."""

    def __init__(self, trainer: RockDistillationTrainer) -> None:
        self.trainer = trainer
        self._began = self._learning_rate = 0.0
        self._rocks: list[int] = []
        self._warned: set[str] = set()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self.trainer
        if trainer.run is not None:
            if trainer.owns_run:
                begin_run(trainer, trainer.run)
            if state.global_step == 0 and trainer.keeps(0):
                trainer.keep_model(trainer.run.checkpoint(0))
        if not trainer.record.rows:
            first = self._evaluate(state)
            trainer.record.rows += [{"step": 0} | first] if first else []
        trainer.meter.take()  # what came before the first step is not its cost
        self._began = trainer.meter.now()

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._learning_rate = float(self.trainer.optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer, step = self.trainer, state.global_step
        trainer.meter.add("optimiser", trainer.meter.now() - trainer.left)  # since the last backward: clipping too
        trained, others = Rows.joined(trainer.trained), Rows.joined(trainer.others)
        trainer.trained, trainer.others = [], []
        with trainer.meter.stage("telemetry"):
            trainer.monitor.update(trained.token_K, trained.value_K, trained.grad_norm_K)
            selectors = (trainer.selector, *trainer.shadows.values())
            watching = [selector for selector in selectors if type(selector).observe is not Selector.observe]
            if watching:  # selectors with a memory see every rank's losses
                monitor = trainer.monitor.gathered()
                for selector in watching:
                    selector.observe(monitor)
            row: Row = {"step": step, "learning_rate": self._learning_rate}
            row |= self._counts(trained) | self._losses(trained, others) | self._shadows(trained, others)
            if control.should_log:  # rocks as the monitor declares them, without a scoring pass
                rocks = trainer.monitor.gathered().rocks()
                row["rocks_online"] = len(rocks)
                if set(rocks) != set(self._rocks) and trainer.accelerator.is_main_process:
                    names = ", ".join(repr(trainer._tokenizer.decode([id_])) for id_ in rocks[:20]) or "none"
                    log.info("step %d: %d rocks so far: %s", step, len(rocks), names)
                self._rocks = rocks
            if trainer.run is not None and trainer.records_at(step):
                self._write_occurrences(step, Rows.joined([trained, others]))
        if trainer.run is not None and trainer.keeps(step):
            trainer.keep_model(trainer.run.checkpoint(step))
        row |= self._evaluate(state)
        ended = trainer.meter.now()
        row["seconds"], self._began = ended - self._began, ended  # what is saved after a step counts to the next one
        row |= trainer.meter.take()
        trainer.record.rows.append(row)
        for name, sentence in alarms(trainer.record, trainer.precision.forward).items():
            row[f"alarm_{name}"] = 1
            if name not in self._warned:
                log.warning("alarm at step %d, %s: %s", step, name, sentence)
            self._warned.add(name)
        for name, title in SERIES.items():
            if row.get(name) is not None:
                trainer._metrics["train"][title].append(row[name])
        if trainer.options.on_step is not None and trainer.accelerator.is_main_process:
            trainer.options.on_step(row)
        if trainer.run is not None and args.should_save and _due(state, WRITE_EVERY):
            trainer.record.write(trainer.run)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self.trainer
        if trainer.run is None or not trainer.owns_run:
            return
        if trainer.options.keep_at is None and state.global_step not in trainer.run.checkpoints():  # stopped early
            trainer.keep_model(trainer.run.checkpoint(state.global_step))
        facts = training_facts(trainer)
        if args.should_save:
            trainer.run.finish("distill", facts)

    def _counts(self, trained: Rows) -> Row:
        """Tokens that were sampled and that carried loss, what the step should have cost, lengths and entropy."""
        trainer = self.trainer
        assert trainer.grid is not None
        weight_N, batch, mask_RC = trainer.weight_N, trainer.grid.batch, trainer.grid.mask_RC
        kept = int((weight_N > 0).sum())
        response_R = mask_RC.sum(1).numpy().astype(float)
        flops = step_flops(
            *trainer.shapes,
            trainer.prompt_lengths.numpy().astype(float),
            response_R,
            kept=kept,
            measured_first=trainer.selector.needs_losses,
            sampled=trainer.samples,
            shared_S=torch.cat([torch.zeros(0), *trainer.shared_prompts]).numpy().astype(float),
        )
        row: Row = {
            "kept_share": kept / max(len(batch), 1),
            "weight_share": float(weight_N.double().sum()) / max(len(batch), 1),
            "ceiling": len(batch) / kept if kept else None,
            "tokens": len(batch),
            "scored": len(batch),
            **bite(weight_N, trainer.audited or batch, trainer.eos_token_ids),
            "prompt_tokens": int(trainer.prompt_lengths.sum()),
            "rollouts": len(response_R),
            **{f"flops_{stage}": value for stage, value in flops.items()},
        }
        if not len(batch):
            return row
        last_RC = mask_RC & (mask_RC.flip(1).cumsum(1).flip(1) == 1)  # the last position of every rollout with tokens
        ended = torch.isin(batch.token_N[last_RC[mask_RC]], torch.tensor(list(trainer.eos_token_ids)))
        entropy_K = trained.student_entropy_K[torch.isfinite(trained.student_entropy_K)].double()
        total, count = self._sum(entropy_K.sum(), len(entropy_K))
        return row | {
            "mean_length": float(response_R[response_R > 0].mean()),
            "truncated_share": float((~ended).double().mean()),
            "entropy": total / count if count else None,
        }

    def _sum(self, *values: Any) -> list[float]:
        """Numbers of this rank, added up over all ranks."""
        own = torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])
        accelerator = self.trainer.accelerator
        return accelerator.reduce(own.to(accelerator.device), reduction="sum").cpu().tolist()

    def _losses(self, trained: Rows, others: Rows) -> Row:
        """The step's loss, and apart from it the mean on rocks and on the rest where all of them were measured."""
        trainer = self.trainer
        assert trainer.grid is not None
        token_K = torch.cat([trained.token_K, others.token_K])
        value_K = torch.cat([trained.value_K, others.value_K]).double()
        valid_K = torch.isfinite(value_K)
        rocks = torch.tensor(sorted(trainer.rocks), dtype=torch.long)
        rock_K = torch.isin(token_K, rocks)
        loss, rock_loss, rocks_seen, rest_loss, rest_seen, invalid = self._sum(
            torch.nan_to_num(trainer.row_loss(trained).double() * trained.weight_K, posinf=0.0).sum(),
            value_K[valid_K & rock_K].sum(),
            rock_K.sum(),
            value_K[valid_K & ~rock_K].sum(),
            (~rock_K).sum(),
            (~valid_K).sum(),
        )
        rock_count = int(torch.isin(trainer.grid.batch.token_N, rocks).sum())
        rest_count = len(trainer.grid.batch) - rock_count
        row: Row = {"loss": loss / trainer.denominator, "invalid": int(invalid)}
        # Frozen tokens are measured on telemetry steps only; a mean over some of them would be of another set.
        if trainer.rocks and rock_count and rocks_seen == rock_count:
            row["loss_rocks"] = rock_loss / rock_count
        if trainer.rocks and rest_count and rest_seen == rest_count:
            row["loss_rest"] = rest_loss / rest_count
        return row

    def _shadows(self, trained: Rows, others: Rows) -> Row:
        """Kept share of every shadow, and its overlap with the selector in force and with each other.

        With audits, on audit steps only. A shadow that needs losses, or the most probable tokens, is left out where
        they were not measured for every occurrence.
        """
        trainer = self.trainer
        full, shadows = trainer.audited, trainer.shadows
        if not shadows or (trainer.options.audit_every is not None and full is None):
            return {}
        assert trainer.grid is not None
        if full is None and any(shadow.needs_losses and not shadow.needs_top for shadow in shadows.values()):
            full = with_losses(trainer.accelerator, trainer.grid, Rows.joined([trained, others]))
        kept = {trainer.selector.name: trainer.weight_N}
        for name, shadow in shadows.items():
            seen = full if shadow.needs_losses else trainer.grid.batch
            if seen is not None and not (shadow.needs_top and seen.student_top_id_Nk is None):
                kept[name] = shadow.weights(seen)
        row = {f"shadow_kept_{name}": float((kept[name] > 0).float().mean()) for name in shadows if name in kept}
        for first, second in combinations(kept, 2):
            row[f"overlap_{first}_{second}"] = overlap(kept[first], kept[second])
        return row

    def _write_occurrences(self, step: int, rows: Rows) -> None:
        """Every occurrence of this rank's rollouts, as one part of telemetry/step=N."""
        trainer = self.trainer
        assert trainer.run is not None
        assert trainer.grid is not None
        # By rollout and position, as every table of occurrences is sorted.
        rows = rows.at(torch.from_numpy(np.lexsort((rows.position_K.numpy(), rows.rollout_K.numpy()))))
        rollouts = [f"{step}/{trainer.grid.first_row + i}" for i in range(len(trainer.prompt_names))]
        local = pa.array((rows.rollout_K - trainer.grid.first_row).numpy())
        columns: Row = {
            "prompt_id": pa.array(trainer.prompt_names).take(local),
            "rollout_id": pa.array(rollouts).take(local),
            "position": rows.position_K.int().numpy(),
            "token_id": rows.token_K.int().numpy(),
            "kl": rows.value_K.numpy(),
        }
        names = ("log_ratio", "student_logprob", "teacher_logprob", "student_entropy", "teacher_entropy", "grad_norm")
        columns |= {name: getattr(rows, f"{name}_K").numpy() for name in names}
        columns["is_eos"] = np.isin(rows.token_K.numpy(), list(trainer.eos_token_ids))
        part = f"rank{trainer.accelerator.process_index}"
        trainer.run.write_part(step, pa.table(columns), folder="telemetry", part=part)

    def _evaluate(self, state: TrainerState) -> Row:
        """Accuracy on held-out prompts, at the steps that are evaluated."""
        trainer, evaluator, every = self.trainer, self.trainer.options.evaluator, self.trainer.options.evaluate_every
        if evaluator is None or every is None or not _due(state, every):
            return {}
        with trainer.meter.stage("evaluate"):
            found = evaluator.accuracy(trainer.sample, trainer.accelerator)
        return {"accuracy": found.value, "accuracy_low": found.low, "accuracy_high": found.high}


def _due(state: TrainerState, every: int) -> bool:
    return state.global_step % every == 0 or state.global_step == state.max_steps
