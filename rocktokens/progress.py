"""Progress for people: a rich bar with rate and time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Seconds between two lines where there is no terminal to draw a bar on.
LINE_EVERY = 15.0


@contextmanager
def progress(description: str, total: int, unit: str = "it") -> Iterator[Callable[[int], None]]:
    """Yields `advance(n)`; everything goes to standard error."""
    if sys.stderr.isatty():
        with _bar(description, total, unit) as advance:
            yield advance
    else:
        lines = _Lines(description, total, unit)
        yield lines.advance
        lines.finish()


@contextmanager
def _bar(description: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    start = time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total, rate="")

        def advance(count: int = 1) -> None:
            bar.advance(task, count)
            done = bar.tasks[0].completed
            bar.update(task, rate=f"{done / max(time.monotonic() - start, 1e-9):.1f} {unit}/s")

        yield advance


class _Lines:
    def __init__(self, description: str, total: int, unit: str) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done = 0
        self.start = self.last = time.monotonic()

    def advance(self, count: int = 1) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.last >= LINE_EVERY:
            self.last = now
            left = (now - self.start) / max(self.done, 1) * (self.total - self.done)
            rate = self.done / (now - self.start)
            print(
                f"{self.description}: {self.done}/{self.total} {self.unit}, {rate:.1f}/s, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def finish(self) -> None:
        seconds = time.monotonic() - self.start
        print(
            f"{self.description}: {self.done}/{self.total} {self.unit} in {seconds:.1f} s", file=sys.stderr, flush=True
        )
