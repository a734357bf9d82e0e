"""Progress for people: on a terminal one rich display with rate and time left, elsewhere a line now and then.

    with progress("sampling", 400, "rollouts") as advance:
        advance(16)

Inside `stages(...)` every piece of work is a row under one overall bar. Everything goes to standard error.
"""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
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
        if bar is not None:
            bar.remove_task(work.task)
        _print(bar, f"{description}: {work.done}/{total} {unit} in {clock(time.monotonic() - work.start)}")


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
    return shutil.get_terminal_size((80, 24)).columns if sys.stderr.isatty() else 80


class Work:
    """One piece of work with a known number of parts; call it with how many more are done."""

    def __init__(self, description: str, total: int, unit: str, bar: Any = None) -> None:
        self.description, self.total, self.unit, self.bar = description, total, unit, bar
        self.done = self.before = 0
        self.said = ""
        self.start = self.last = time.monotonic()
        self.task = None if bar is None else bar.add_task(description, total=total or None, count="", now="")

    def __call__(self, count: int = 1) -> None:
        """Report `count` more as done."""
        self.done += count
        self.say(self.said)

    def resumed(self, count: int) -> None:
        """Report what an earlier run did: it counts as done and not towards the rate."""
        self.before += count
        self(count)

    def say(self, text: str, *, now: bool = False) -> None:
        """Show the state and what else there is to know; `now` writes a line where there is no bar."""
        self.said, seconds, new = text, time.monotonic() - self.start, self.done - self.before
        if _overall is not None:
            _overall.within(self.done / max(self.total, 1))
        rate = f"{new / max(seconds, 1e-9):.1f} {self.unit}/s" if new else ""
        left = f"{clock(seconds / new * (self.total - self.done))} left" if new else ""
        if self.bar is not None:
            shown = ", ".join(part for part in (left, rate, text) if part)
            self.bar.update(self.task, completed=self.done, count=f"{self.done}/{self.total}", now=shown)
        elif now or time.monotonic() - self.last >= LINE_EVERY:
            self.last = time.monotonic()
            shown = ", ".join(part for part in (rate, text, left) if part)
            _print(None, f"{self.description}: {self.done}/{self.total} {self.unit}, {shown}")


class Overall:
    """Where a row of stages stands: which one runs, how much of the whole is done, how long the rest will take."""

    def __init__(self, shares: Mapping[str, float], bar: Any = None) -> None:
        self.shares, self.bar, self.start = dict(shares), bar, time.monotonic()
        self.past = self.part = 0.0
        self.title, self.current = "", ""
        self.task = None if bar is None else bar.add_task("", total=1.0, count="", now="")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside the block this stage is the one that runs."""
        self.current, self.part = name, 0.0
        self.title = f"stage {list(self.shares).index(name) + 1} of {len(self.shares)}: {name}"
        parts = (f"{clock(time.monotonic() - self.start)} so far", self._outlook())
        _print(self.bar, f"— {self.title}; {', '.join(filter(None, parts))}")
        self.within(0.0)
        yield
        self.past, self.part = self.past + self.shares[name], 0.0
        self.within(0.0)
        self.current = ""

    def say(self, line: str) -> None:
        """Leave a line above the bar, wrapped to the terminal."""
        for part in textwrap.wrap(line, terminal_width(), subsequent_indent="    ", break_long_words=False) or [""]:
            _print(self.bar, part)

    def within(self, share: float) -> None:
        """Report the share of the current work that is done; several pieces in one stage never move the bar back."""
        if self.current:
            self.part = max(self.part, min(share, 1.0) * self.shares[self.current])
        if self.bar is not None:
            count = f"{100 * self.done:.0f} %"
            title = f"[bold]{self.title}[/bold]"
            self.bar.update(self.task, description=title, completed=self.done, count=count, now=self._outlook())

    @property
    def done(self) -> float:
        """Share of the whole that is done."""
        return min((self.past + self.part) / max(sum(self.shares.values()), 1e-9), 1.0)

    @property
    def left(self) -> float | None:
        """Seconds the rest will take at the pace so far; None while there is no pace yet."""
        elapsed = time.monotonic() - self.start
        return None if self.done < 0.03 or elapsed < 3 else elapsed / self.done * (1 - self.done)

    def _outlook(self) -> str:
        return f"about {clock(self.left)} left" if self.left is not None else ""


def _print(bar: Any, line: str) -> None:
    if bar is not None:
        bar.console.print(line, markup=False, highlight=False)
    else:
        print(line, file=sys.stderr, flush=True)


@contextmanager
def _display() -> Iterator[Any]:
    """The one live display on a terminal; None where there is none. Log lines go above it instead of through it."""
    if _overall is not None or not sys.stderr.isatty():
        yield None if _overall is None else _overall.bar
        return
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    # Rows fit 80 columns: below 100 the description is cut first, never the bar and the count.
    wide = terminal_width() >= 100
    cut: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"}
    columns = (
        TextColumn("{task.description}", table_column=Column(**cut, max_width=44 if wide else 26)),
        BarColumn(bar_width=24 if wide else 10),
        TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True, justify="right")),
        TextColumn("{task.fields[now]}", table_column=Column(**cut, ratio=1)),
    )
    handlers = [item for item in logging.getLogger().handlers if type(item) is logging.StreamHandler]
    before = [item.stream for item in handlers]
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        for item in handlers:
            item.stream = sys.stderr  # rich stands in for it while the bar lives
        try:
            yield bar
        finally:
            for item, stream in zip(handlers, before):
                item.stream = stream
