"""What a person sees while a model trains: a bar with loss, rate and time left; elsewhere a line now and then."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from rocktokens.progress import Work, progress
from rocktokens.values import Row


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def __call__(self, row: Row) -> None:
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

    def _describe(self, row: Row) -> str:
        parts = "".join(
            f", {name} {row[key]:.3f}"
            for name, key in (("rocks", "loss_rocks"), ("rest", "loss_rest"))
            if row.get(key) is not None
        )
        rate = row["tokens"] / max(row["seconds"], 1e-9)
        return f"loss {row['loss']:.4f}{parts}, {rate:.0f} tokens/s{self._accuracy}"
