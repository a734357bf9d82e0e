"""Problems of reasoning-gym that are the same in every process: made in one of their own, with fixed hashes.

Some tasks follow the order of sets, which Python shuffles anew in every process, and some draw from Python's shared
random numbers. Which tasks do is nobody's promise, so all problems are made by lm/gym_worker.py: a process that is
started at the first request, serves all that follow (importing the package takes seconds), and ends with this one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from rocktokens.errors import ConfigError

WORKER = "rocktokens.prompts.gym_worker"
ATTEMPTS = 2  # a process that was not asked for long has ended, and another is started


class CannotMake(Exception):
    """The task could not make a problem; says what the task said."""


def make_problem(
    name: str, settings: Mapping[str, object], *, seed: int, size: int, number: int
) -> Mapping[str, object]:
    """One problem of a block as the task makes it; CannotMake where the task fails.

    Args:
        name: The task.
        settings: Its own settings.
        seed: Seed of the block.
        size: Problems in the block.
        number: Which of them, from 0.
    """
    process = _PROCESSES.get(os.getpid())
    if process is None:  # also after a fork: two processes cannot share one conversation
        process = _PROCESSES[os.getpid()] = _Process()
        atexit.register(process.stop)
    found, said = process.ask((name, dict(settings), seed, size, number))
    if found is None:
        raise CannotMake(said)
    return found


class _Process:
    """The process that makes problems, started when it is first asked and again after it ended."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: tuple[object, ...]) -> tuple[Mapping[str, object] | None, str]:
        """The reply to a request."""
        with self._lock:
            for _ in range(ATTEMPTS):
                try:
                    return self._reply(request)
                except (OSError, EOFError):
                    self.stop()
                except BaseException:
                    self.stop()  # its reply would be taken for the next one's
                    raise
        raise ConfigError(
            f"reasoning-gym:{request[0]}: the process that makes its problems ended without a reply; most likely "
            "memory is short, or `python -m rocktokens.prompts.gym_worker` cannot start here"
        )

    def _reply(self, request: tuple[object, ...]) -> tuple[Mapping[str, object] | None, str]:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._process = _start()
        asked, replies = self._process.stdin, self._process.stdout
        assert asked is not None
        assert replies is not None
        asked.write(pickle.dumps(request))
        asked.flush()
        # From a process that was started here, over its own pipe: nothing that lies on a disk is unpickled.
        found, said = pickle.load(replies)
        return found, said

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        process.wait()


_PROCESSES: dict[int, _Process] = {}


def _start() -> subprocess.Popen[bytes]:
    package = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH")
    path = package if not known else os.pathsep.join([package, known])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
