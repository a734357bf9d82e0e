"""What training writes down: one row per optimiser step, whether the loss still falls, and what goes wrong.

Rows live in memory and in every resume checkpoint; training.parquet is rewritten whole from them, so that a resumed run
never holds a step twice. This module knows rows of numbers, not how they came about, and works without torch.

Shapes: S steps, T tokens of one rollout, N tokens of all rollouts, B blocks of steps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from rocktokens.progress import console
from rocktokens.show import Column, Table, number, percent, significant
from rocktokens.tables import FLOP_STAGES, STEP_STAGES, TABLES
from rocktokens.values import Row

if TYPE_CHECKING:
    from rocktokens.run import Run

# The slope test compares means of blocks of steps, so that a slow wave in the loss does not pass for many points.
BLOCKS = 12
# Student's quantiles for a line through the blocks: for the interval that is shown, and for the verdict.
T_95, T_VERDICT = (float(stdtrit(BLOCKS - 2, 1 - tail)) for tail in (0.025, 0.0025))
ALARMS = ("length", "entropy", "floor", "invalid")
WINDOW = 10  # steps that the alarms average at the start and at the end
LENGTH_GROWTH, TRUNCATED = 2.0, 0.2  # growth of rollouts, and the share of them that is cut
ENTROPY_LEFT, ENTROPY = 0.1, 0.05  # share of the student's entropy that is left, and its size in nats
INVALID = 0.001  # share of a step's tokens whose divergence is not a number
# Half the gap between 1 and the next larger number of each format.
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LOGIT_SIZE = 10.0  # of language models, nats; a divergence cannot fall below what rounding them makes
SUM_FLOOR = 1e-7  # float32 sums over a vocabulary are not better than this


class TrainingRecord:
    """One row per optimiser step; shadow selectors add columns of their own."""

    def __init__(self, name: str = "training") -> None:
        self.name = name
        self.rows: list[Row] = []

    def column(self, name: str) -> np.ndarray:
        """A column as floats; NaN where empty."""
        return np.array([np.nan if row.get(name) is None else row[name] for row in self.rows], float)

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
        names = [f"seconds_{stage}" for stage in STEP_STAGES] + [f"flops_{stage}" for stage in FLOP_STAGES]
        found = {name: float(np.nansum(self.column(name))) for name in (*names, "seconds", "tokens")}
        seconds, tokens = found["seconds"], found["tokens"]
        kept = float(np.nansum(self.column("kept_share") * self.column("tokens"))) / max(tokens, 1.0)
        found |= {"steps": float((self.column("step") > 0).sum()), "kept_share": kept, "ceiling": 1.0 / max(kept, 1e-9)}
        return found | {"tokens_per_second": tokens / max(seconds, 1e-9)}


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
    num_steps: int
    """Steps in the window."""
    horizon: int
    """Steps that the slope is carried over: those that remain, and no fewer than the window has."""
    still_high: float
    """99.75 % upper bound of what the slope would bring over the horizon."""


def saturation(
    loss_S: ArrayLike, *, remaining: int = 0, share: float = 1 / 3, tolerance: float = 0.10
) -> Saturation | None:
    """Slope test over the last `share` of the losses; None where that is too short to tell.

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
        return Saturation(True, 0.0, 0.0, 0.0, len(window), horizon, 0.0)
    # The least-squares line through the blocks' means, and the standard error of its slope.
    x_B = np.array([index.mean() for index in np.array_split(np.arange(len(window)), BLOCKS)])
    y_B = np.array([block.mean() for block in np.array_split(window, BLOCKS)])
    x_B = x_B - x_B.mean()
    spread = float(x_B @ x_B)
    slope = float(x_B @ y_B) / spread
    rest_B = y_B - y_B.mean() - slope * x_B
    stderr = float(np.sqrt(rest_B @ rest_B / (BLOCKS - 2) / spread))

    fall, error = -slope * len(window) / level, stderr * len(window) / level
    longer = horizon / len(window)
    above = longer * T_VERDICT * error
    # A noisy loss is not saturated for its noise, nor a slow fall for its slowness while there is time left for it.
    is_saturated = bool(longer * fall + above < tolerance and above < tolerance)
    reach = T_95 * error
    return Saturation(is_saturated, fall, fall - reach, fall + reach, len(window), horizon, longer * fall + above)


def alarms(record: TrainingRecord, dtype: str) -> dict[str, str]:
    """What is wrong after the last step, one sentence by alarm; `dtype` is the format of the training forwards."""
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
    losses, floor = record.column("loss"), numerical_floor(dtype)
    known = losses[np.isfinite(losses) & (record.column("kept_share") > 0)]
    if len(known) >= WINDOW and known[-WINDOW:].mean() < floor:
        found["floor"] = (
            f"the loss has been {known[-WINDOW:].mean():.1e} nats over {WINDOW} steps, below the {floor:.1e} that "
            f"rounding in {dtype} makes: its gradient is noise. The student has learned what this precision "
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


class Change(NamedTuple):
    """A value at the start and at the end of a series."""

    early: float
    late: float

    @property
    def ratio(self) -> float:
        """late / early; infinite where it began at 0."""
        return self.late / self.early if self.early > 0 else float("inf") if self.late > 0 else 1.0


def change(values_S: ArrayLike, window: int) -> Change | None:
    """Mean over the first and over the last `window` known values; None while the windows would overlap."""
    known_S = np.asarray(values_S, float)
    known_S = known_S[np.isfinite(known_S)]
    if len(known_S) < 2 * window:
        return None
    return Change(float(known_S[:window].mean()), float(known_S[-window:].mean()))


def numerical_floor(dtype: str) -> float:
    """The reverse KL, in nats, that rounding the logits once to this format makes between equal models.

    Second order of the KL in a relative error u of logits of size s: (u s)^2 / 2.
    """
    return max(SUM_FLOOR, 0.5 * (UNIT_ROUNDOFF[dtype] * LOGIT_SIZE) ** 2)


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
    rows = []
    for stage, own in seconds.items():
        flops = summary.get(f"flops_{stage}") or math.nan
        row = {"stage": stage, "seconds": own, "share": own / total}
        rows.append(row | {"tflop": flops / 1e12, "speed": flops / own / 1e9})
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
