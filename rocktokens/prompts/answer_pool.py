"""Answers compared in processes of their own, each with a time limit that nothing can overrun.

sympy may take for ever over one formula, and the alarm that math-verify sets works in the main thread alone and not
inside compiled code. A process that does not reply in time is ended and replaced, and its answer counts as unreadable.
Where no process can be started, `NoProcess` tells the caller to compare the answers itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rocktokens.parallel import num_threads

SECONDS = 20.0  # of one answer: math-verify's own limits for reading both sides and comparing them, and some more
START_SECONDS = 120.0  # of a process's first answer: it has to import sympy
PROCESSES = 4  # at most
Verdict = tuple[str, bool]
"""How an answer was decided (math_verify, last_number or unreadable), and whether it is right."""
UNREADABLE: Verdict = ("unreadable", False)
WORKER = "rocktokens.prompts.answer_worker"


class NoProcess(Exception):
    """A process cannot be started here."""


class _Worker:
    """One process, started when it is first asked and again after it had to be ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, text: str, answer: str) -> Verdict:
        """The verdict; unreadable where it does not come in time or the process dies over it."""
        fresh = self.process is None or self.process.poll() is not None
        if fresh:
            self.start()
            # What it takes to start is not the answer's: the first reply is to something that is read at once.
            if self._reply("$1$", "1", START_SECONDS) is None:
                self.stop()
                raise NoProcess("the process that compares answers does not reply")
        found = self._reply(text, answer, self.seconds)
        if found is None:
            self.stop()
        return found or UNREADABLE

    def start(self) -> None:
        """Start the process."""
        package = str(Path(__file__).resolve().parents[2])
        known = os.environ.get("PYTHONPATH")
        path = package if not known else os.pathsep.join([package, known])
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        except (OSError, ValueError) as error:
            raise NoProcess(str(error)) from error

    def _reply(self, text: str, answer: str, seconds: float) -> Verdict | None:
        process = self.process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            process.stdin.write(json.dumps([text, answer]).encode() + b"\n")
            process.stdin.flush()
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                if not selector.select(seconds):
                    return None
            how, right = json.loads(process.stdout.readline())
            return str(how), bool(right)
        except (OSError, ValueError):  # it died over the answer
            return None

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.process.kill()
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            self.process.wait()
            self.process = None


class AnswerPool:
    """Some processes that compare answers; they end with the pool."""

    def __init__(self, processes: int | None = None, *, seconds: float = SECONDS) -> None:
        number = processes or min(PROCESSES, num_threads())
        self._workers = [_Worker(seconds) for _ in range(number)]
        self._idle: queue.Queue[_Worker] = queue.Queue()
        for worker in self._workers:
            self._idle.put(worker)
        self._end = weakref.finalize(self, _stop_all, self._workers)

    def check(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Verdicts on (text, reference answer), in their order; NoProcess where none can be started."""
        if len(pairs) == 1:
            return [self._one(pairs[0])]
        with ThreadPoolExecutor(len(self._workers)) as threads:
            return list(threads.map(self._one, pairs))

    def _one(self, pair: tuple[str, str]) -> Verdict:
        worker = self._idle.get()
        try:
            return worker.ask(*pair)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the processes."""
        self._end()


def _stop_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()
