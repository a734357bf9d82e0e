"""What happens around an optimiser step: monitor, selectors' memory, telemetry, evaluation, saturation, the step's row.

Runs as a callback of the trainer, after the optimiser and before anything is logged or saved, so that a checkpoint
holds everything up to its own step. It reads what the trainer gathered during the step and knows no model.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from rocktokens.select.interface import Selector
from rocktokens.train.step_alarms import ALARMS
from rocktokens.train.step_meter import step_flops
from rocktokens.train.step_record import SATURATION_EVERY, StepPlan, has_saturated, is_out_of_time, saturation_of
from rocktokens.train.step_weights import Rows, bite, compare_shadows, with_losses
from rocktokens.values import Row

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState

    from rocktokens.train.trainer import RockDistillationTrainer

log = logging.getLogger(__name__)

# training.parquet is rewritten this often, so that a run can be watched.
WRITE_EVERY = 25


class StepHooks(TrainerCallback):
    """The trainer's own callback; one row of the record a step."""

    def __init__(self, trainer: RockDistillationTrainer) -> None:
        self.trainer = trainer
        self._began = self._learning_rate = 0.0
        self._rocks: list[int] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self.trainer
        if trainer.run is not None and state.global_step == 0 and 0 in trainer.keep_at:
            trainer.keep_checkpoint()
        if trainer.evaluator is not None and not trainer.record.rows and trainer.evaluate_every is not None:
            trainer.record.add({"step": 0} | self._evaluate())
        trainer.meter.take()
        trainer.meter.take_processor()
        self._began = trainer.meter.now()

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._learning_rate = float(self.trainer.optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self.trainer
        trainer.meter.add("optimiser", trainer.meter.now() - trainer.left)  # since the last backward: clipping too
        trained, others = Rows.joined(trainer.trained), Rows.joined(trainer.others)
        trainer.trained, trainer.others = [], []
        with trainer.meter.stage("telemetry"):
            trainer.monitor.update(trained.token_K, trained.value_K, trained.grad_norm_K)
            self._observe()
            row = {"step": state.global_step, "learning_rate": self._learning_rate}
            row |= self._shares() | self._rollouts(trained) | self._losses(trained, others)
            row |= self._shadows(trained, others) | self._online(control)
            self._write_occurrences(state.global_step, trained, others)
        if trainer.run is not None and state.global_step in trainer.keep_at:
            trainer.keep_checkpoint()
        every = trainer.evaluate_every
        if trainer.evaluator is not None and every is not None and self._due(state, every):
            row |= self._evaluate()
        ended = trainer.meter.now()
        row["seconds"], self._began = ended - self._began, ended  # what is saved after a step counts to the next one
        row["seconds_processor"] = trainer.meter.take_processor()
        row |= {f"seconds_{stage}": seconds for stage, seconds in trainer.meter.take().items()}
        trainer.record.add(row)
        row |= trainer.alarms.look(trainer.record, state.global_step)
        self._announce(row)
        self._stop_if_enough(state, control, row)
        if trainer.run is not None and args.should_save and self._due(state, WRITE_EVERY):
            trainer.record.write(trainer.run)

    @staticmethod
    def _due(state: TrainerState, every: int) -> bool:
        return state.global_step % every == 0 or state.global_step == state.max_steps

    def _observe(self) -> None:
        """Selectors with a memory see every rank's losses."""
        trainer = self.trainer
        watching = [s for s in (trainer.selector, *trainer.shadows.values()) if _observes(s)]
        if watching:
            monitor = trainer.monitor.gathered()
            for selector in watching:
                selector.observe(monitor)

    def _shares(self) -> Row:
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

    def _rollouts(self, trained: Rows) -> Row:
        """Lengths of the step's rollouts, how many have no end token, and the student's entropy, over all ranks."""
        trainer = self.trainer
        assert trainer.grid is not None
        mask_RC = trainer.grid.mask_RC
        token_RC = torch.zeros(mask_RC.shape, dtype=torch.long)
        token_RC[mask_RC] = trainer.grid.batch.token_N
        has_tokens_R = mask_RC.any(1)
        if not bool(has_tokens_R.any()):
            return {}
        last_R = (mask_RC * torch.arange(1, mask_RC.shape[1] + 1)).argmax(1, keepdim=True)
        ended_R = torch.isin(token_RC.gather(1, last_R).squeeze(1), torch.tensor(list(trainer.eos_token_ids)))
        entropy_K = trained.student_entropy_K[torch.isfinite(trained.student_entropy_K)].double()
        sums = torch.tensor([float(entropy_K.sum()), float(len(entropy_K))], dtype=torch.float64)
        total, count = trainer.accelerator.reduce(sums.to(trainer.accelerator.device), reduction="sum").tolist()
        return {
            "mean_length": float(mask_RC[has_tokens_R].sum(1).double().mean()),
            "truncated_share": float((~ended_R[has_tokens_R]).double().mean()),
            "entropy": total / count if count else None,
        }

    def _online(self, control: TrainerControl) -> Row:
        """Rocks as the monitor declares them without a scoring pass, at every log line."""
        trainer = self.trainer
        if not control.should_log:
            return {}
        rocks = trainer.monitor.gathered().rocks()
        if set(rocks) != set(self._rocks) and trainer.accelerator.is_main_process:
            names = ", ".join(repr(trainer._tokenizer.decode([id_])) for id_ in rocks[:20]) or "none"
            log.info("step %d: %d rocks so far: %s", trainer.state.global_step, len(rocks), names)
        self._rocks = rocks
        return {"rocks_online": len(rocks)}

    def _losses(self, trained: Rows, others: Rows) -> Row:
        """The step's loss, and apart from it the mean on rocks and on the rest where all of them were measured."""
        trainer = self.trainer
        assert trainer.grid is not None
        objective_K = trainer.row_loss(trained)
        token_K = torch.cat([trained.token_K, others.token_K])
        value_K = torch.cat([trained.value_K, others.value_K]).double()
        valid_K = torch.isfinite(value_K)
        rocks = torch.tensor(sorted(trainer.rocks), dtype=torch.long)
        rock_K = torch.isin(token_K, rocks)
        sums = [
            torch.nan_to_num(objective_K.double() * trained.weight_K, posinf=0.0).sum(),
            value_K[valid_K & rock_K].sum(),
            rock_K.sum(),
            value_K[valid_K & ~rock_K].sum(),
            (~rock_K).sum(),
            (~valid_K).sum(),
        ]
        total = torch.stack([torch.as_tensor(s, dtype=torch.float64) for s in sums])
        total = trainer.accelerator.reduce(total.to(trainer.accelerator.device), reduction="sum").cpu()
        loss, rock_loss, rocks_seen, rest_loss, rest_seen, invalid = total.tolist()
        rock_count = int(torch.isin(trainer.grid.batch.token_N, rocks).sum())
        rest_count = len(trainer.grid.batch) - rock_count
        row: Row = {"loss": loss / trainer.denominator, "invalid": int(invalid)}
        if trainer.rocks and rock_count and rocks_seen == rock_count:
            row["loss_rocks"] = rock_loss / rock_count
        if trainer.rocks and rest_count and rest_seen == rest_count:
            row["loss_rest"] = rest_loss / rest_count
        return row

    def _shadows(self, trained: Rows, others: Rows) -> dict[str, float]:
        trainer = self.trainer
        if not trainer.shadows:
            return {}
        assert trainer.grid is not None
        full = trainer.audited
        if trainer.audit_every is not None and full is None:
            return {}  # between two audits
        if full is None and any(shadow.needs_losses and not shadow.needs_top for shadow in trainer.shadows.values()):
            full = with_losses(trainer.accelerator, trainer.grid, Rows.joined([trained, others]))
        name = trainer.selector.name
        return compare_shadows(name, trainer.weight_N, trainer.shadows, trainer.grid.batch, full)

    def _write_occurrences(self, step: int, trained: Rows, others: Rows) -> None:
        trainer = self.trainer
        every = trainer.telemetry_every
        if trainer.run is None or every is None or step % every:
            return
        rows = Rows.joined([trained, others])
        order = np.lexsort((rows.position_K.numpy(), rows.rollout_K.numpy()))
        rows = Rows(*(column[torch.from_numpy(order)] for column in rows))
        assert trainer.grid is not None
        names = pa.array(trainer.prompt_names)
        rollouts = pa.array([f"{step}/{trainer.grid.first_row + i}" for i in range(len(trainer.prompt_names))])
        local = pa.array((rows.rollout_K - trainer.grid.first_row).numpy())
        table = pa.table(
            {
                "prompt_id": names.take(local),
                "rollout_id": rollouts.take(local),
                "position": rows.position_K.int().numpy(),
                "token_id": rows.token_K.int().numpy(),
                "kl": rows.value_K.numpy(),
                "log_ratio": rows.log_ratio_K.numpy(),
                "student_logprob": rows.student_logprob_K.numpy(),
                "teacher_logprob": rows.teacher_logprob_K.numpy(),
                "student_entropy": rows.student_entropy_K.numpy(),
                "teacher_entropy": rows.teacher_entropy_K.numpy(),
                "grad_norm": rows.grad_norm_K.numpy(),
                "is_eos": np.isin(rows.token_K.numpy(), list(trainer.eos_token_ids)),
            }
        )
        with trainer.run.telemetry_writer(step, part=f"rank{trainer.accelerator.process_index}") as writer:
            writer.write(table)

    def _evaluate(self) -> Row:
        trainer = self.trainer
        assert trainer.evaluator is not None
        with trainer.meter.stage("evaluate"):
            found = trainer.evaluator.accuracy(trainer.sample, trainer.accelerator)
        return {"accuracy": found.value, "accuracy_low": found.low, "accuracy_high": found.high}

    def _announce(self, row: Row) -> None:
        """To TRL's trackers, and to whoever watches."""
        trainer = self.trainer
        series = {
            "loss_rocks": "rocks/loss",
            "loss_rest": "rest/loss",
            "kept_share": "kept_share",
            "accuracy": "accuracy",
            "rocks_online": "rocks/online",
            **{f"alarm_{name}": f"alarm/{name}" for name in ALARMS},
        }
        for name, title in series.items():
            if row.get(name) is not None:
                trainer._metrics["train"][title].append(row[name])
        if trainer.on_step is not None and trainer.accelerator.is_main_process:
            trainer.on_step(row)

    def _stop_if_enough(self, state: TrainerState, control: TrainerControl, row: Row) -> None:
        """The loss no longer falls, the time is up, or the accuracy asked for is there."""
        trainer = self.trainer
        enough = trainer.hours is not None and self._is_any_out_of_time()
        enough |= trainer.alarms.stops
        enough |= trainer.budget is not None and trainer.budget.is_spent(trainer.record)
        if trainer.until_accuracy is not None and row.get("accuracy") is not None:
            enough |= row["accuracy"] >= trainer.until_accuracy
        if enough or state.global_step % SATURATION_EVERY == 0 or state.global_step == state.max_steps:
            plan = StepPlan.of(trainer.args, state.max_steps)
            trainer.saturation = saturation_of(trainer.record, trainer.saturation_on, plan)
            enough |= trainer.until_saturated and has_saturated(trainer.record, trainer.saturation_on, plan)
        if not enough:
            return
        control.should_training_stop = True
        control.should_save = trainer.args.save_strategy != SaveStrategy.NO
        if trainer.run is not None and trainer.keep_at and state.global_step not in trainer.keep_at:
            trainer.keep_checkpoint()  # where OPD ended

    def _is_any_out_of_time(self) -> bool:
        """Every rank has a clock of its own, but they must stop together."""
        accelerator = self.trainer.accelerator
        own = torch.tensor(float(is_out_of_time(self.trainer.record, self.trainer.hours)), device=accelerator.device)
        return float(accelerator.reduce(own, reduction="sum")) > 0


def _observes(selector: Any) -> bool:
    return type(selector).observe is not Selector.observe
