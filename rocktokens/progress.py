"""Progress for people: on a terminal one rich display with rate and time left, elsewhere a line now and then.

    with progress("sampling", 400, "rollouts") as advance:
        advance(16)

Inside `stages(...)` every piece of work is a row under one overall bar, and its stage counts to the whole. Everything
goes to standard error. This module knows names and counts; it does not know what they are of.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console

# Seconds between two lines where there is no terminal to draw a bar on.
LINE_EVERY = 15.0

_overall: Overall | None = None


@contextmanager
def progress(description: str, total: int, unit: str = "it") -> Iterator[Work]:
    """Yields `advance(n)` for one piece of work."""
    with _display() as bar:
        work = Work(description, total, unit, bar)
        yield work
        work.finish()


@contextmanager
def stages(shares: Mapping[str, float]) -> Iterator[Overall]:
    """One overall display for several stages; `shares` says how much of the whole each is expected to be."""
    global _overall
    with _display() as bar:
        _overall = Overall(shares, bar)
        try:
            yield _overall
        finally:
            _overall = None


def console(**options: Any) -> Console:
    """Where a stage prints its tables: standard output, or nowhere inside a study, whose report holds them."""
    return Console(quiet=_overall is not None, **options)


def clock(seconds: float) -> str:
    """Seconds as people read them: 48 s, 3:07 min, 2:05 h."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    return f"{whole // 60}:{whole % 60:02d} min" if whole < 6000 else f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def terminal_width() -> int:
    """Columns of the terminal that standard error draws on; 80 where there is none."""
    import shutil

    return shutil.get_terminal_size((80, 24)).columns if sys.stderr.isatty() else 80


class Work:
    """One piece of work with a known number of parts; call it with how many more are done."""

    def __init__(self, description: str, total: int, unit: str, bar: Any = None) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done = self.before = 0
        self.said = ""
        self._start = self._last = time.monotonic()
        self._bar = bar
        self._task = None if bar is None else bar.add_task(description, total=total or None, count="", now="")

    def __call__(self, count: int = 1) -> None:
        """So many more are done."""
        self.done += count
        self._show()

    def resumed(self, count: int) -> None:
        """So many were done by an earlier run: they count as done and not towards the rate."""
        self.before += count
        self(count)

    def say(self, text: str, *, now: bool = False) -> None:
        """What else there is to know at this moment; `now` writes a line where there is no bar."""
        self.said = text
        self._show(now=now)

    def finish(self) -> None:
        """Take the bar away and leave a line."""
        if self._bar is not None:
            self._bar.remove_task(self._task)
        _print(self._bar, f"{self.description}: {self.done}/{self.total} {self.unit} in {clock(self._seconds)}")

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._start

    def _show(self, *, now: bool = False) -> None:
        if _overall is not None:
            _overall.within(self.done / max(self.total, 1))
        new = self.done - self.before
        rate = f"{new / max(self._seconds, 1e-9):.1f} {self.unit}/s" if new else ""
        left = f"{clock(self._seconds / new * (self.total - self.done))} left" if new else ""
        text = ", ".join(part for part in (rate, self.said, left) if part)
        if self._bar is not None:
            shown = ", ".join(part for part in (left, rate, self.said) if part)
            self._bar.update(self._task, completed=self.done, count=f"{self.done}/{self.total}", now=shown)
        elif now or time.monotonic() - self._last >= LINE_EVERY:
            self._last = time.monotonic()
            _print(None, f"{self.description}: {self.done}/{self.total} {self.unit}, {text}")


class Overall:
    """Where a row of stages stands: which one runs, how much of the whole is done, how long the rest will take."""

    def __init__(self, shares: Mapping[str, float], bar: Any = None) -> None:
        self.shares = dict(shares)
        self._whole = max(sum(self.shares.values()), 1e-9)
        self._past = self._part = 0.0
        self._current: str | None = None
        self._start = time.monotonic()
        self._bar = bar
        self._task = None if bar is None else bar.add_task("", total=1.0, count="", now="")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside the block this stage is the one that runs."""
        self._current, self._part = name, 0.0
        _print(self._bar, f"— {self._title()}{self._outlook()}")
        self._show()
        yield
        self._past += self.shares[name]
        self._part = 0.0
        self._show()

    def say(self, line: str) -> None:
        """Leave a line above the bar, wrapped to the terminal."""
        import textwrap

        wide = terminal_width()
        for part in textwrap.wrap(line, wide, subsequent_indent="    ", break_long_words=False) or [""]:
            _print(self._bar, part)

    def within(self, share: float) -> None:
        """So much of the current work is done; several pieces in one stage never move the bar back."""
        if self._current is not None:
            self._part = max(self._part, min(share, 1.0) * self.shares[self._current])
            self._show()

    @property
    def done(self) -> float:
        """Share of the whole that is done."""
        return min((self._past + self._part) / self._whole, 1.0)

    @property
    def left(self) -> float | None:
        """Seconds the rest will take at the pace so far; None while there is no pace yet."""
        elapsed = time.monotonic() - self._start
        return None if self.done < 0.03 or elapsed < 3 else elapsed / self.done * (1 - self.done)

    def _title(self) -> str:
        names = list(self.shares)
        return f"stage {names.index(self._current) + 1} of {len(names)}: {self._current}" if self._current else ""

    def _outlook(self) -> str:
        left = self.left
        so_far = f"; {clock(time.monotonic() - self._start)} so far"
        return so_far + (f", about {clock(left)} left" if left is not None else "")

    def _show(self) -> None:
        if self._bar is not None:
            left = self.left
            now = f"about {clock(left)} left" if left is not None else ""
            title = f"[bold]{self._title()}[/bold]"
            self._bar.update(
                self._task, description=title, completed=self.done, count=f"{100 * self.done:.0f} %", now=now
            )


def _print(bar: Any, line: str) -> None:
    if bar is not None:
        bar.console.print(line, markup=False, highlight=False)
    else:
        print(line, file=sys.stderr, flush=True)


@contextmanager
def _display() -> Iterator[Any]:
    """The one live display on a terminal; None where there is none."""
    if not sys.stderr.isatty():
        yield None
    elif _overall is not None:
        yield _overall._bar
    else:
        with _live() as bar, _logging_through(bar):
            yield bar


def _live() -> Any:
    """Rows that fit 80 columns: what never loses its place is the bar and the count; words give way first."""
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    def text(field: str, most: int | None = None, *, ratio: int | None = None) -> TextColumn:
        column = Column(no_wrap=True, overflow="ellipsis", max_width=most, ratio=ratio)
        return TextColumn(field, table_column=column)

    wide = terminal_width() >= 100
    columns = (
        text("{task.description}", 44 if wide else 26),
        BarColumn(bar_width=24 if wide else 10),
        TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True, justify="right")),
        text("{task.fields[now]}", ratio=1),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True, expand=True)


@contextmanager
def _logging_through(bar: Any) -> Iterator[None]:
    """Log lines go above the bar instead of through it."""
    streams = [item for item in logging.getLogger().handlers if type(item) is logging.StreamHandler]
    handlers = [item for item in streams if not getattr(item.stream, "closed", False)]
    before = [item.setStream(sys.stderr) for item in handlers]  # rich stands in for it while the bar lives
    try:
        yield
    finally:
        for item, stream in zip(handlers, before):
            if stream is not None:
                item.setStream(stream)
