"""Processes forked from the test process, which has loaded the libraries: each costs only what it does.

A fresh interpreter needs seconds of processor time before it has imported torch and transformers. A forked one starts
at once, with its own environment, its own output files and none of this process's distributed state.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

FAILED = 70


def fork(work: Callable[[], object], log: Path, environment: Mapping[str, str] | None = None) -> int:
    """Do the work in a child whose output goes to `log` (errors to the same name with .err); returns its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    number = os.fork()
    if number:
        return number
    status = FAILED
    try:
        os.environ.update(environment or {})
        _begin_anew(log)
        work()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _begin_anew(log: Path) -> None:
    """Undo what a forked process inherits and a fresh one would not have."""
    from accelerate.state import AcceleratorState, GradientState

    sys.stdout, sys.stderr = (path.open("w", buffering=1) for path in (log, log.with_name(f"{log.name}.err")))
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        os.dup2(stream.fileno(), number)
    logging.getLogger().handlers.clear()
    logging.getLogger().setLevel(logging.WARNING)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def ending(number: int, timeout: float = 900) -> int:
    """How a child ended: its exit status, or minus the signal that killed it. One that takes too long is killed."""
    pause, deadline = 0.005, time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    os.kill(number, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def together(works: Sequence[Callable[[], object]], folder: Path, environments: Sequence[Mapping[str, str]]) -> str:
    """Do the works side by side, each in its own child; all must succeed. Returns what they wrote, errors aside."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"rank{rank}.log" for rank in range(len(works))]
    children = [fork(*each) for each in zip(works, logs, environments, strict=True)]
    statuses = [ending(child) for child in children]
    said = "".join(log.with_name(f"{log.name}.err").read_text()[-3000:] for log in logs)
    assert set(statuses) == {0}, f"{statuses}\n{said}"
    return "".join(log.read_text() for log in logs)


def as_torchrun(work: Callable[[], object], folder: Path, world: int = 2) -> str:
    """Do the work in processes that know each other as those of torchrun do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    everybody = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "GROUP_RANK": "0"}
    everybody |= {"LOCAL_WORLD_SIZE": str(world), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    own = [everybody | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return together([work] * world, folder, own)
