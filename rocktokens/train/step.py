"""What happens after an optimiser step: monitor, telemetry, evaluation, the step's row, and whether training stops.

Runs as a callback of the trainer, after the optimiser and before anything is logged or saved, so that a checkpoint
holds everything up to its own step. It reads what the trainer gathered during the step and knows no model.
"""

from __future__ import annotations

import logging
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from rocktokens.select.interface import Selector, overlap
from rocktokens.train.meter import step_flops
from rocktokens.train.record import ALARMS, SATURATION_EVERY
from rocktokens.train.weights import Rows, bite, with_losses
from rocktokens.values import Row

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

    from rocktokens.train.trainer import RockDistillationTrainer

log = logging.getLogger(__name__)

# training.parquet is rewritten this often, so that a run can be watched.
WRITE_EVERY = 25
# Column of the step's row → name of its series in TRL's trackers.
SERIES = {"loss_rocks": "rocks/loss", "loss_rest": "rest/loss", "kept_share": "kept_share", "accuracy": "accuracy"}
SERIES |= {"rocks_online": "rocks/online"} | {f"alarm_{name}": f"alarm/{name}" for name in ALARMS}


class StepHooks(TrainerCallback):
    """The trainer's own callback; one row of the record a step."""

    def __init__(self, trainer: RockDistillationTrainer) -> None:
        self.trainer = trainer
        self._began = self._learning_rate = 0.0
        self._rocks: list[int] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self.trainer
        if trainer.run is not None and state.global_step == 0 and 0 in trainer.options.keep_at:
            trainer.keep_model(trainer.run.checkpoint(0))
        if not trainer.record.rows:
            first = self._evaluate(state)
            trainer.record.rows += [{"step": 0} | first] if first else []
        trainer.meter.take()
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
            row |= self._shares() | self._rollouts(trained) | self._losses(trained, others)
            row |= self._shadows(trained, others)
            if control.should_log:
                row |= self._online()
            if trainer.run is not None and trainer.records_at(step):
                self._write_occurrences(step, Rows.joined([trained, others]))
        if trainer.run is not None and step in trainer.options.keep_at:
            trainer.keep_model(trainer.run.checkpoint(step))
        row |= self._evaluate(state)
        ended = trainer.meter.now()
        row["seconds"], self._began = ended - self._began, ended  # what is saved after a step counts to the next one
        row |= trainer.meter.take()
        trainer.record.rows.append(row)
        row |= trainer.alarms.look(trainer.record, step)
        for name, title in SERIES.items():
            if row.get(name) is not None:
                trainer._metrics["train"][title].append(row[name])
        if trainer.options.on_step is not None and trainer.accelerator.is_main_process:
            trainer.options.on_step(row)
        self._stop_if_enough(state, control, row)
        if trainer.run is not None and args.should_save and _due(state, WRITE_EVERY):
            trainer.record.write(trainer.run)

    def _shares(self) -> Row:
        """How many tokens there were, how many carried loss, and what the step should have cost."""
        trainer = self.trainer
        assert trainer.grid is not None
        weight_N, batch = trainer.weight_N, trainer.grid.batch
        kept = int((weight_N > 0).sum())
        response_R = trainer.grid.mask_RC.sum(1).numpy().astype(float)
        flops = step_flops(
            *trainer.shapes,
            trainer.prompt_lengths.numpy().astype(float),
            response_R,
            kept=kept,
            measured_first=trainer.selector.needs_losses,
            sampled=trainer.samples,
            shared_S=trainer.shared_prompts.numpy().astype(float),
        )
        return {
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

    def _sum(self, *values: Any) -> list[float]:
        """Numbers of this rank, added up over all ranks."""
        own = torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])
        accelerator = self.trainer.accelerator
        return accelerator.reduce(own.to(accelerator.device), reduction="sum").cpu().tolist()

    def _rollouts(self, trained: Rows) -> Row:
        """Lengths of the step's rollouts, how many have no end token, and the student's entropy, over all ranks."""
        trainer = self.trainer
        assert trainer.grid is not None
        mask_RC = trainer.grid.mask_RC
        has_tokens_R = mask_RC.any(1)
        if not bool(has_tokens_R.any()):
            return {}
        token_RC = torch.zeros(mask_RC.shape, dtype=torch.long)
        token_RC[mask_RC] = trainer.grid.batch.token_N
        last_R = (mask_RC * torch.arange(1, mask_RC.shape[1] + 1)).argmax(1, keepdim=True)
        ended_R = torch.isin(token_RC.gather(1, last_R).squeeze(1), torch.tensor(list(trainer.eos_token_ids)))
        entropy_K = trained.student_entropy_K[torch.isfinite(trained.student_entropy_K)].double()
        total, count = self._sum(entropy_K.sum(), len(entropy_K))
        return {
            "mean_length": float(mask_RC[has_tokens_R].sum(1).double().mean()),
            "truncated_share": float((~ended_R[has_tokens_R]).double().mean()),
            "entropy": total / count if count else None,
        }

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

    def _online(self) -> Row:
        """Rocks as the monitor declares them without a scoring pass, at every log line."""
        trainer = self.trainer
        rocks = trainer.monitor.gathered().rocks()
        if set(rocks) != set(self._rocks) and trainer.accelerator.is_main_process:
            names = ", ".join(repr(trainer._tokenizer.decode([id_])) for id_ in rocks[:20]) or "none"
            log.info("step %d: %d rocks so far: %s", trainer.state.global_step, len(rocks), names)
        self._rocks = rocks
        return {"rocks_online": len(rocks)}

    def _write_occurrences(self, step: int, rows: Rows) -> None:
        """Every occurrence of this rank's rollouts, as one part of telemetry/step=N."""
        trainer = self.trainer
        assert trainer.run is not None
        assert trainer.grid is not None
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
        with trainer.run.part_writer(
            step, folder="telemetry", part=f"rank{trainer.accelerator.process_index}"
        ) as writer:
            writer.write(pa.table(columns))

    def _evaluate(self, state: TrainerState) -> Row:
        """Accuracy on held-out prompts, at the steps that are evaluated."""
        trainer, evaluator, every = self.trainer, self.trainer.options.evaluator, self.trainer.options.evaluate_every
        if evaluator is None or every is None or not _due(state, every):
            return {}
        with trainer.meter.stage("evaluate"):
            found = evaluator.accuracy(trainer.sample, trainer.accelerator)
        return {"accuracy": found.value, "accuracy_low": found.low, "accuracy_high": found.high}

    def _stop_if_enough(self, state: TrainerState, control: TrainerControl, row: Row) -> None:
        """The loss no longer falls, the time is up, an alarm stops it, or the accuracy asked for is there."""
        trainer, options = self.trainer, self.trainer.options
        enough = trainer.alarms.stops
        if options.hours is not None:  # every rank has a clock of its own, but they must stop together
            enough |= self._sum(float(trainer.record.is_out_of_time(options.hours)))[0] > 0
        if options.until_accuracy is not None and row.get("accuracy") is not None:
            enough |= row["accuracy"] >= options.until_accuracy
        if enough or _due(state, SATURATION_EVERY):
            trainer.saturation = trainer.record.saturation(trainer.args, state.max_steps)
            enough |= options.until_saturated and trainer.record.has_saturated(trainer.args, state.max_steps)
        if not enough:
            return
        control.should_training_stop = True
        control.should_save = trainer.args.save_strategy != SaveStrategy.NO
        if trainer.run is not None and options.keep_at and state.global_step not in options.keep_at:
            trainer.keep_model(trainer.run.checkpoint(state.global_step))  # where OPD ended


def _due(state: TrainerState, every: int) -> bool:
    return state.global_step % every == 0 or state.global_step == state.max_steps
