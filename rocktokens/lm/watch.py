"""What a person sees while a model trains: a bar with loss, rate and time left; elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any

from rocktokens.core.saturation import Saturation
from rocktokens.lm.record import TrainingRecord
from rocktokens.progress import LINE_EVERY


class StepProgress:
    """Called with the row of every step; everything goes to standard error."""

    def __init__(self, title: str, steps: int, *, show: bool = True) -> None:
        self.title, self.steps, self.show = title, steps, show
        self._bar: Any = None
        self._task: Any = None
        self._start = self._last = time.monotonic()
        self._first: int | None = None
        self._accuracy = ""

    def __enter__(self) -> StepProgress:
        if self.show and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[now]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.steps, now="")
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, row: dict[str, Any]) -> None:
        """Show one step."""
        if not self.show:
            return
        if self._first is None:
            self._first = row["step"] - 1
        if row.get("accuracy") is not None:
            self._accuracy = f", accuracy {row['accuracy']:.1%} [{row['accuracy_low']:.1%}, {row['accuracy_high']:.1%}]"
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], now=self._describe(row))
            return
        now = time.monotonic()
        if now - self._last >= LINE_EVERY or row["step"] == self.steps or row.get("accuracy") is not None:
            self._last = now
            left = (now - self._start) / max(row["step"] - self._first, 1) * (self.steps - row["step"])
            line = f"{self.title}: step {row['step']}/{self.steps}, {self._describe(row)}, {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)

    def _describe(self, row: dict[str, Any]) -> str:
        parts = "".join(
            f", {name} {row[key]:.3f}"
            for name, key in (("rocks", "loss_rocks"), ("rest", "loss_rest"))
            if row.get(key) is not None
        )
        rate = row["tokens"] / max(row["seconds"], 1e-9)
        return f"loss {row['loss']:.4f}{parts}, {rate:.0f} tokens/s{self._accuracy}"

    def close(self, record: TrainingRecord, saturation: Saturation | None) -> None:
        """The account at the end: one table, and whether the loss had stopped falling."""
        from rich.console import Console

        console = Console(stderr=True)
        if record.rows:
            console.print(record.summary_table(self.title))
        if saturation is not None:
            verdict = "the loss has stopped falling" if saturation.saturated else "the loss may still fall"
            console.print(
                f"saturation: {verdict}: over the last {saturation.num_steps} steps it fell by {saturation.fall:.1%} "
                f"[{saturation.low:.1%}, {saturation.high:.1%}] of its level"
            )
