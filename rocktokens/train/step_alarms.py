"""Alarms while a model trains: lengths explode, entropy collapses, the loss is below rounding, numbers are invalid.

Each is raised once, as a line in the log and a number for the trackers, and stops the training where that is asked for.
They look at the record's rows alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np

from rocktokens.train.alarm_settings import AlarmConfig
from rocktokens.train.health import change, numerical_floor
from rocktokens.train.step_record import TrainingRecord
from rocktokens.values import Json

log = logging.getLogger(__name__)

Rows = TrainingRecord
Sentence = str | None


def _length(record: Rows, config: AlarmConfig, dtype: str) -> Sentence:
    length, cut = (
        change(record.column("mean_length"), config.window),
        change(record.column("truncated_share"), config.window),
    )
    if length is None or length.ratio < config.length_growth or cut is None or cut.late < config.truncated:
        return None
    return (
        f"rollouts have grown from {length.early:.0f} to {length.late:.0f} tokens and {cut.late:.0%} of them are cut "
        "at the length limit: is the end token trained on (weight above 0), and the same for student, teacher and "
        "template? `rocktokens check` compares them"
    )


def _entropy(record: Rows, config: AlarmConfig, dtype: str) -> Sentence:
    found = change(record.column("entropy"), config.window)
    if found is None or found.late >= config.entropy or found.ratio >= config.entropy_left:
        return None
    return (
        f"the student's entropy has fallen from {found.early:.3f} to {found.late:.4f} nats: it hardly explores any "
        "more. Lower the learning rate, or look at rollouts for repeated text"
    )


def _floor(record: Rows, config: AlarmConfig, dtype: str) -> Sentence:
    losses = record.column("loss")
    kept = record.column("kept_share") > 0
    known = losses[np.isfinite(losses) & kept]
    floor = numerical_floor(dtype)
    if len(known) < config.window or float(known[-config.window :].mean()) >= floor:
        return None
    return (
        f"the loss has been {known[-config.window :].mean():.1e} nats over {config.window} steps, below the "
        f"{floor:.1e} that rounding in {dtype} makes: its gradient is noise. The student has learned what this "
        "precision can show, or teacher and student are the same model"
    )


def _invalid(record: Rows, config: AlarmConfig, dtype: str) -> Sentence:
    row = record.rows[-1]
    share = (row.get("invalid") or 0) / max(row.get("tokens") or 0, 1)
    if share < config.invalid:
        return None
    return (
        f"{share:.2%} of the step's tokens have a divergence that is not a number: a model's logits overflow. Lower "
        "the learning rate, or use bfloat16 or float32 in place of float16"
    )


ALARMS: Mapping[str, Callable[[Rows, AlarmConfig, str], Sentence]] = {
    "length": _length,
    "entropy": _entropy,
    "floor": _floor,
    "invalid": _invalid,
}


class Alarms:
    """Which alarms a training run has raised."""

    def __init__(self, config: AlarmConfig | None, dtype: str) -> None:
        self.config, self.dtype = config, dtype
        self.raised: dict[str, int] = {}
        """Alarm → the step at which it was raised first."""

    def look(self, record: TrainingRecord, step: int) -> Json:
        """Test the record up to this step; returns columns for its row, one per alarm that holds now."""
        if self.config is None or not record.rows:
            return {}
        found = {}
        for name, test in ALARMS.items():
            sentence = test(record, self.config, self.dtype)
            if sentence is None:
                continue
            found[f"alarm_{name}"] = 1
            if name not in self.raised:
                self.raised[name] = step
                log.warning("alarm at step %d, %s: %s", step, name, sentence)
        return found

    @property
    def stops(self) -> bool:
        """Whether training is to end because of an alarm."""
        return self.config is not None and self.config.stop and bool(self.raised)
