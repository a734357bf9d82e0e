"""What a person sees while a model trains: a bar with loss, rate and time left; elsewhere a line now and then."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

from rocktokens.core.saturation import Saturation
from rocktokens.lm.training.step_record import TrainingRecord
from rocktokens.progress import Work, console, progress


class StepProgress:
    """Called with the row of every step; everything goes to standard error."""

    def __init__(self, title: str, steps: int, *, show: bool = True) -> None:
        self.title, self.steps, self.show = title, steps, show
        self._work: Work | None = None
        self._open = ExitStack()
        self._accuracy = ""

    def __enter__(self) -> StepProgress:
        if self.show:
            self._work = self._open.enter_context(progress(self.title, self.steps, "steps"))
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def __call__(self, row: dict[str, Any]) -> None:
        """Show one step."""
        work = self._work
        if work is None:
            return
        if not work.done and row["step"] > 1:  # an earlier run took the steps before
            work.resumed(row["step"] - 1)
        if row.get("accuracy") is not None:
            self._accuracy = f", accuracy {row['accuracy']:.1%} [{row['accuracy_low']:.1%}, {row['accuracy_high']:.1%}]"
        work(row["step"] - work.done)
        work.say(self._describe(row), now=row.get("accuracy") is not None)

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
        out = console(stderr=True)
        if record.rows:
            out.print(record.summary_table(self.title))
        if saturation is not None:
            verdict = "the loss has stopped falling" if saturation.saturated else "the loss may still fall"
            print(
                f"saturation: {verdict}: over the last {saturation.num_steps} steps it fell by {saturation.fall:.1%} "
                f"[{saturation.low:.1%}, {saturation.high:.1%}] of its level; over {saturation.horizon} more its slope "
                f"would bring at most {max(saturation.still_high, 0.0):.1%}",
                file=sys.stderr,
            )
