"""What a training leaves in a run: checkpoints that can be trusted.

Resume checkpoints are TRL's own, with our state added; one is complete when its trainer_state.json, which is written
last, can be read. Kept checkpoints are plain model directories for anyone to load, renamed into place when they are
whole. This module knows the trainer's saving hooks, not what is trained.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import TrainOutput

from rocktokens.errors import RunError
from rocktokens.run import failing

if TYPE_CHECKING:
    from trl import DistillationTrainer as _Base

    from rocktokens.divergence.monitor import TokenMonitor
    from rocktokens.run import Run
    from rocktokens.select.interface import Selector
    from rocktokens.train.record import TrainingRecord
    from rocktokens.train.step import Meter
else:
    _Base = object

STATE_NAME = "rocktokens.pt"
RESUME_FILES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")  # transformers reads them with weights_only, too
# What must agree between a model and a checkpoint for its weights to fit.
SHAPE_KEYS = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def last_complete_checkpoint(directory: str | Path) -> Path | None:
    """The newest checkpoint that was written to its end; half-written ones are passed over."""
    paths = [path for path in Path(directory).glob("checkpoint-*") if path.name[11:].isdigit() and _is_complete(path)]
    return max(paths, key=lambda path: int(path.name[11:]), default=None)


def _is_complete(path: Path) -> bool:
    try:
        json.loads((path / TRAINER_STATE_NAME).read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return True


def _load_resume_file(path: Path) -> Any:
    """What a resume file holds, tensors and plain values only; RunError where it is damaged or would run code."""
    try:
        with safe_globals():  # numpy's generator state, as transformers saves it
            return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        raise RunError(
            f"{path} is damaged or holds more than tensors ({reason}); remove {path.parent} to resume from an earlier "
            "checkpoint, or from the start"
        ) from error


class CheckpointMixin(_Base):
    """Saving and resuming for the trainer; every rank takes part."""

    args: Any
    model: Any
    optimizer: Any
    run: Run | None
    monitor: TokenMonitor
    selector: Selector
    shadows: dict[str, Selector]
    record: TrainingRecord
    meter: Meter

    def train(self, resume_from_checkpoint: str | bool | None = None, **settings: Any) -> Any:  # type: ignore[override]
        """Train; `resume_from_checkpoint=True` continues from the newest complete checkpoint."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = str(last_complete_checkpoint(self.args.output_dir) or "")
            if not resume_from_checkpoint:
                raise RunError(f"{self.args.output_dir} holds no complete checkpoint to resume from")
        if resume_from_checkpoint:
            path = Path(str(resume_from_checkpoint))
            self._restore(path)
            state = TrainerState.load_from_json(str(path / TRAINER_STATE_NAME))
            if 0 < self.args.max_steps <= state.global_step:  # transformers would take one more step
                return self._finished(path, state)
        return super().train(resume_from_checkpoint or None, **settings)

    def _finished(self, path: Path, state: TrainerState) -> TrainOutput:
        """Take weights and state of a checkpoint that is the end of the run; returns what `train` returned then."""
        self.state = state
        if not self.is_fsdp_enabled and not self.is_deepspeed_enabled:  # shards stay where they are
            self._load_from_checkpoint(str(path))
        losses = self.record.column("loss")
        loss = float(losses[np.isfinite(losses)].mean()) if np.isfinite(losses).any() else 0.0
        rates = dict.fromkeys(("train_runtime", "train_samples_per_second", "train_steps_per_second"), 0.0)
        metrics = {**rates, "total_flos": float(self.state.total_flos), "train_loss": loss}
        return TrainOutput(self.state.global_step, loss, metrics)

    def _restore(self, path: Path) -> None:
        """Take our state from a checkpoint; one of another model or selector is refused before a weight is touched."""
        if not _is_complete(path):
            raise RunError(f"{path} is no complete checkpoint; choose another, or resume_from_checkpoint=True")
        if (path / "config.json").exists():  # else an adapter: PEFT checks its own
            theirs, ours = json.loads((path / "config.json").read_text()), self.model.config.to_dict()
            for key in SHAPE_KEYS:
                if key in theirs and key in ours and theirs[key] != ours[key]:
                    raise RunError(
                        f"{path} is a checkpoint of another model: {key} is {theirs[key]!r} there and {ours[key]!r} "
                        "here. Choose the run's own checkpoint, or start a new run."
                    )

        for name in RESUME_FILES:
            if (path / name).exists():
                _load_resume_file(path / name)
        if not (path / STATE_NAME).exists():  # a stock TRL checkpoint has none: monitor and selector start anew
            return
        state = _load_resume_file(path / STATE_NAME)
        if state["selector_name"] != self.selector.name:
            raise RunError(
                f"{path} was trained with selector {state['selector_name']}, this run has {self.selector.name}; "
                "start a new run for another selector"
            )
        if not self.accelerator.is_main_process:  # the saved sums are of all ranks: only one may carry them on
            state["monitor"]["sums"].zero_()
        self.monitor.load_state_dict(state["monitor"])
        self.selector.load_state_dict(state["selector"])
        for name, shadow in self.shadows.items():
            if name in state["shadows"]:
                shadow.load_state_dict(state["shadows"][name])
        self.record.rows = [dict(row) for row in state["record"]["rows"]]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Transformers leaves the rate that was saved to the first step, also where the schedule has a new end."""
        super()._load_optimizer_and_scheduler(checkpoint)
        schedule: Any = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        if checkpoint is not None and hasattr(schedule, "lr_lambdas"):
            for group, factor, rate in zip(self.optimizer.param_groups, schedule.lr_lambdas, schedule.base_lrs):
                group["lr"] = rate * factor(schedule.last_epoch)

    def _save_rng_state(self, output_dir: str) -> None:
        """Our state, and a wait for every rank: only then is trainer_state.json written, which says "complete"."""
        super()._save_rng_state(output_dir)
        monitor = self.monitor.gathered()
        if self.args.should_save:
            state = {
                "monitor": monitor.state_dict(),
                "selector_name": self.selector.name,
                "selector": self.selector.state_dict(),
                "shadows": {name: shadow.state_dict() for name, shadow in self.shadows.items()},
                "record": {"rows": [dict(row) for row in self.record.rows]},
            }
            torch.save(state, Path(output_dir) / STATE_NAME)
        self.accelerator.wait_for_everyone()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        directory = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        with self.meter.stage("checkpoint"), _writing(directory):
            super()._save_checkpoint(model, trial)
            if self.run is not None and self.args.should_save:
                self.record.write(self.run)

    def keep_model(self, final: Path) -> None:
        """Save the student as a directory that anyone can load (with PEFT the adapter alone), whole or not at all."""
        draft = final.with_name(f".{final.name}.draft")
        with self.meter.stage("checkpoint"), _writing(draft):
            if self.is_fsdp_enabled:  # TRL skips this where FSDP saves shards; a kept checkpoint is always whole
                state_dict = self.accelerator.get_state_dict(self.model_wrapped)
                if self.args.should_save:
                    self._save(str(draft), state_dict=state_dict)
            else:
                self.save_model(str(draft), _internal_call=True)
            if self.args.should_save:
                # An adapter's directory says what model it is for; a pickle has no place in a model directory.
                self.accelerator.unwrap_model(self.model).config.save_pretrained(draft)
                (draft / TRAINING_ARGS_NAME).unlink(missing_ok=True)
                shutil.rmtree(final, ignore_errors=True)
                draft.rename(final)
        self.accelerator.wait_for_everyone()


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """A failed write ends in one clear sentence, and what was half-written is removed; earlier ones are intact."""
    try:
        with failing(directory):
            yield
    except RunError:
        shutil.rmtree(directory, ignore_errors=True)
        raise
