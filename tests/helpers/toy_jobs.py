"""Jobs of milliseconds that go wrong on request; every attempt leaves a line in `log`."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

from rocktokens.errors import DataError


def work(part: Path, *, number: int, log: str, fault: str = "", times: int = 10**9) -> None:
    """Write the number's square as a part; the first `times` attempts meet the fault."""
    with open(log, "a") as file:
        file.write(f"{part.name} {os.getpid()}\n")
    attempts = sum(line.startswith(f"{part.name} ") for line in Path(log).read_text().splitlines())
    draft = part.with_name(f".{part.name}.{os.getpid()}.tmp")
    draft.write_text(f"{number * number}")
    if attempts <= times:
        meet(fault, log)
    draft.replace(part)
    if attempts <= times and fault == "killed afterwards":
        os.kill(os.getpid(), signal.SIGKILL)


def meet(fault: str, log: str) -> None:
    """What goes wrong before the part is written."""
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "ours":
        raise DataError("prompt 7 is broken")
    elif fault == "full disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), log)
    elif fault == "a bug":
        raise KeyError("no such column")
    elif fault == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
        bytearray(2**34)
    elif fault == "sleeps":
        child = subprocess.Popen(["sleep", "60"])
        with open(log, "a") as file:
            file.write(f"child {child.pid}\n")
        time.sleep(60)
    elif fault == "slow":
        time.sleep(0.3)
