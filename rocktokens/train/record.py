"""What training writes down: one row per optimiser step, whether the loss still falls, and alarms.

Rows live in memory and in every resume checkpoint; training.parquet is rewritten whole from them, so that a resumed run
never holds a step twice. This module knows rows of numbers, not how they came about.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike
from scipy.special import stdtr, stdtrit

from rocktokens.progress import console
from rocktokens.show import Column, Table, number, percent, significant
from rocktokens.tables import FLOP_STAGES, STEP_STAGES, TABLES
from rocktokens.train.health import change, numerical_floor
from rocktokens.values import Json, Row

if TYPE_CHECKING:
    from rocktokens.run import Run

log = logging.getLogger(__name__)

# Saturation is tested at these intervals of steps, and believed when it holds this often in a row.
SATURATION_EVERY, SATURATION_TIMES = 10, 3
# A run is tested many times while it trains, and any test may stop it: each has a tenth of the usual 2.5 %.
STOP_TAIL = 0.0025
# Means of blocks of steps are compared, so that a slow wave in the loss is not taken for many independent points.
BLOCKS = 12
# Student's quantiles for a line through the blocks.
T_95, T_STOP = (float(stdtrit(BLOCKS - 2, 1 - tail)) for tail in (0.025, STOP_TAIL))
ALARMS = ("length", "entropy", "floor", "invalid")
# Limits of the alarms: steps averaged at the start and at the end; growth of rollouts, and the share of them that is
# cut; what is left of the student's entropy, and its size in nats; the share of a step's tokens that are no numbers.
WINDOW = 10
LENGTH_GROWTH, TRUNCATED = 2.0, 0.2
ENTROPY_LEFT, ENTROPY = 0.1, 0.05
INVALID = 0.001


class TrainingRecord:
    """One row per optimiser step; shadow selectors add columns of their own."""

    def __init__(self, name: str = "training") -> None:
        self.name = name
        self.rows: list[Row] = []

    def column(self, name: str) -> np.ndarray:
        """A column as floats; NaN where empty."""
        return np.array([np.nan if row.get(name) is None else row[name] for row in self.rows], float)

    def total(self, name: str) -> float:
        """The sum of a column, empty places left out."""
        return float(np.nansum(self.column(name)))

    def write(self, run: Run) -> None:
        """Write the table, the documented columns first, in place of what was there."""
        kinds = {column.name: column.type for column in TABLES["training"].columns}
        kinds |= dict.fromkeys(sorted({key for row in self.rows for key in row} - kinds.keys()), pa.float64())
        columns = {name: pa.array([row.get(name) for row in self.rows], kind) for name, kind in kinds.items()}
        run.write(self.name, pa.table(columns))

    def summary(self) -> dict[str, float]:
        """Totals over the run: where time and work went."""
        if not self.rows:
            return {}
        found = {f"seconds_{stage}": self.total(f"seconds_{stage}") for stage in STEP_STAGES}
        found |= {f"flops_{stage}": self.total(f"flops_{stage}") for stage in FLOP_STAGES}
        seconds, tokens = self.total("seconds"), self.total("tokens")
        kept = float(np.nansum(self.column("kept_share") * self.column("tokens"))) / max(tokens, 1.0)
        found |= {"steps": float((self.column("step") > 0).sum()), "seconds": seconds, "tokens": tokens}
        found |= {"kept_share": kept, "ceiling": 1.0 / max(kept, 1e-9)}
        return found | {"tokens_per_second": tokens / max(seconds, 1e-9)}

    def saturation(self, args: Any, max_steps: int, back: int = 0) -> Saturation | None:
        """The slope test on the steps after the warm-up, leaving out the last `back` of them.

        Args:
            args: the trainer's arguments, which say how long the learning rate rises.
            max_steps: the most steps that the training may take.
            back: steps to leave out.
        """
        step_S, total = self.column("step"), max(int(max_steps), 0)
        last = (float(step_S.max()) if len(step_S) else 0.0) - back
        seen_S = (step_S > int(args.get_warmup_steps(total))) & (step_S <= last)
        return saturation(self.column("loss")[seen_S], remaining=max(total - int(last), 0))

    def has_saturated(self, args: Any, max_steps: int) -> bool:
        """Whether the loss no longer falls, now and at the tests before: one test alone is believed too easily."""
        tests = (self.saturation(args, max_steps, SATURATION_EVERY * back) for back in range(SATURATION_TIMES))
        return all(found is not None and found.saturated for found in tests)

    def is_out_of_time(self, hours: float | None) -> bool:
        """Whether the training has taken this many hours, those before an interruption included."""
        return hours is not None and self.total("seconds") >= 3600 * hours


class Saturation(NamedTuple):
    """How far the loss falls over the window, and what its slope would still bring, as shares of its mean there."""

    saturated: bool
    """Even the upper bound of what the slope would still bring is below the tolerance, and so is the bound's distance
    from the estimate: a slope that is not known that well says nothing."""
    fall: float
    """Fall over the window divided by the mean loss in it; negative where the loss rises."""
    low: float
    high: float
    """95 % interval of `fall`."""
    p_value: float
    """One-sided p of "the loss does not fall"."""
    num_steps: int
    """Steps in the window."""
    horizon: int
    """Steps that the slope is carried over: those that remain, and no fewer than the window has."""
    still: float
    still_high: float
    """What the slope would bring over the horizon, and its 99.75 % upper bound."""


def saturation(
    loss_S: ArrayLike, *, remaining: int = 0, share: float = 1 / 3, tolerance: float = 0.10
) -> Saturation | None:
    """Slope test over the last `share` of the losses; None where that is too short to tell.

    Saturated means: the slope would lower the loss by less than `tolerance` of its level over all the steps that
    remain (and over as many as the window has), by a 99.75 % upper bound that is itself known to less than the
    tolerance. A noisy loss is therefore not called saturated for its noise, a slow fall not for its slowness while
    there is time left for it, and looking often does not stop a run by chance.

    Args:
        loss_S: the loss of every step after the warm-up.
        remaining: steps that may still be taken.
        share: length of the window, as a share of the steps.
        tolerance: fall that is not worth the remaining steps.
    """
    loss = np.asarray(loss_S, float)
    loss = loss[np.isfinite(loss)]
    window = loss[len(loss) - round(share * len(loss)) :]
    if len(window) < 2 * BLOCKS:
        return None
    horizon = max(int(remaining), len(window))
    level = float(window.mean())
    if level <= 0 or np.ptp(window) == 0:  # nothing left to fall, or nothing that moves
        return Saturation(True, 0.0, 0.0, 0.0, 1.0, len(window), horizon, 0.0, 0.0)
    # The least-squares line through the blocks' means, and the standard error of its slope.
    x_B = np.array([index.mean() for index in np.array_split(np.arange(len(window)), BLOCKS)])
    y_B = np.array([block.mean() for block in np.array_split(window, BLOCKS)])
    x_B = x_B - x_B.mean()
    spread = float(x_B @ x_B)
    slope = float(x_B @ y_B) / spread
    rest_B = y_B - y_B.mean() - slope * x_B
    stderr = float(np.sqrt(rest_B @ rest_B / (BLOCKS - 2) / spread))

    fall, error = -slope * len(window) / level, stderr * len(window) / level
    reach, longer = T_95 * error, horizon / len(window)
    above = longer * T_STOP * error
    statistic = slope / stderr if stderr > 0 else np.sign(slope) * np.inf
    p_value = float(stdtr(BLOCKS - 2, statistic)) if np.isfinite(statistic) else float(statistic > 0)
    return Saturation(
        saturated=bool(longer * fall + above < tolerance and above < tolerance),
        fall=float(fall),
        low=float(fall - reach),
        high=float(fall + reach),
        p_value=p_value,
        num_steps=len(window),
        horizon=horizon,
        still=float(longer * fall),
        still_high=float(longer * fall + above),
    )


class Alarms:
    """Which alarms a training run has raised: each once, as a line in the log and a number for the trackers."""

    def __init__(self, mode: Literal["warn", "stop"] | None, dtype: str) -> None:
        self.mode, self.dtype = mode, dtype
        self.raised: dict[str, int] = {}
        """Alarm → the step at which it was raised first."""

    def look(self, record: TrainingRecord, step: int) -> Json:
        """Test the record up to this step; returns columns for its row, one per alarm that holds now."""
        if self.mode is None or not record.rows:
            return {}
        found = {}
        for name, sentence in self._sentences(record).items():
            found[f"alarm_{name}"] = 1
            if name not in self.raised:
                self.raised[name] = step
                log.warning("alarm at step %d, %s: %s", step, name, sentence)
        return found

    def _sentences(self, record: TrainingRecord) -> dict[str, str]:
        """What is wrong now, by alarm."""
        found, names = {}, ("mean_length", "truncated_share", "entropy")
        length, cut, entropy = (change(record.column(name), WINDOW) for name in names)
        if length and cut and length.ratio >= LENGTH_GROWTH and cut.late >= TRUNCATED:
            found["length"] = (
                f"rollouts have grown from {length.early:.0f} to {length.late:.0f} tokens and {cut.late:.0%} of them "
                "are cut at the length limit: is the end token trained on (weight above 0), and the same for student, "
                "teacher and template? `rocktokens check` compares them"
            )
        if entropy and entropy.late < ENTROPY and entropy.ratio < ENTROPY_LEFT:
            found["entropy"] = (
                f"the student's entropy has fallen from {entropy.early:.3f} to {entropy.late:.4f} nats: it hardly "
                "explores any more. Lower the learning rate, or look at rollouts for repeated text"
            )
        losses, floor = record.column("loss"), numerical_floor(self.dtype)
        known = losses[np.isfinite(losses) & (record.column("kept_share") > 0)]
        if len(known) >= WINDOW and known[-WINDOW:].mean() < floor:
            found["floor"] = (
                f"the loss has been {known[-WINDOW:].mean():.1e} nats over {WINDOW} steps, below the {floor:.1e} that "
                f"rounding in {self.dtype} makes: its gradient is noise. The student has learned what this precision "
                "can show, or teacher and student are the same model"
            )
        row = record.rows[-1]
        share = (row.get("invalid") or 0) / max(row.get("tokens") or 0, 1)
        if share >= INVALID:
            found["invalid"] = (
                f"{share:.2%} of the step's tokens have a divergence that is not a number: a model's logits overflow. "
                "Lower the learning rate, or use bfloat16 or float32 in place of float16"
            )
        return found

    @property
    def stops(self) -> bool:
        """Whether training is to end because of an alarm."""
        return self.mode == "stop" and bool(self.raised)


def show_account(title: str, record: TrainingRecord, saturation: Saturation | None) -> None:
    """Print to standard error where time and work of a training went, and whether the loss had stopped falling."""
    if record.rows:
        console(stderr=True).print(account_table(title, record.summary()))
    if saturation is not None:
        verdict = "the loss has stopped falling" if saturation.saturated else "the loss may still fall"
        print(
            f"saturation: {verdict}: over the last {saturation.num_steps} steps it fell by {percent(saturation.fall)} "
            f"[{percent(saturation.low)}, {percent(saturation.high)}] of its level; over {saturation.horizon} more its "
            f"slope would bring at most {percent(max(saturation.still_high, 0.0))}",
            file=sys.stderr,
        )


def account_table(title: str, summary: Mapping[str, float]) -> Table:
    """Seconds and floating-point operations by stage of a step."""
    total = summary["seconds"]
    seconds = {stage: summary[f"seconds_{stage}"] for stage in STEP_STAGES if summary[f"seconds_{stage}"] > 0}
    seconds |= {"other": total - sum(summary[f"seconds_{stage}"] for stage in STEP_STAGES), "all": total}
    flops = {stage: summary.get(f"flops_{stage}") or math.nan for stage in seconds}
    rows = [
        {
            "stage": stage,
            "seconds": own,
            "share": own / total,
            "tflop": flops[stage] / 1e12,
            "speed": flops[stage] / own / 1e9,
        }
        for stage, own in seconds.items()
    ]
    columns = [
        Column("stage", "stage"),
        Column("seconds", "seconds", number, {"digits": 1}),
        Column("share of time", "share", percent),
        Column("TFLOP", "tflop", significant),
        Column("GFLOP/s", "speed", number, {"digits": 1}),
    ]
    caption = (
        f"{summary['steps']:.0f} steps, {summary['tokens']:.0f} rollout tokens, {summary['tokens_per_second']:.0f} per "
        f"second; {percent(summary['kept_share'])} of them carried loss, which allows at most "
        f"{summary['ceiling']:.2f}× the speed"
    )
    return Table(columns, rows, title, [caption])
