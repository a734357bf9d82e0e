"""One command at a time works on a run; a second one is told who does.

The lock is RUN/.lock, held by the operating system for as long as the process lives, so that a killed process frees it;
the process id in it is for the message. Processes of ONE command share it: ranks under torchrun or --workers, and
children that inherit the command's environment. Where the directory cannot be written no lock is needed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rocktokens.errors import RockTokensError, RunError
from rocktokens.files import remove_left_drafts
from rocktokens.manifest import MANIFEST
from rocktokens.ranks import ranks

log = logging.getLogger(__name__)

LOCK = ".lock"
SHARED = "ROCKTOKENS_LOCK"  # environment variable: the directories that this command and its children have locked
_held: dict[str, int] = {}


@contextmanager
def working_on(path: Path) -> Iterator[None]:
    """Hold the run at `path` inside the block; RunError where another process works on it."""
    own = str(path.resolve())
    inherited = own in os.environ.get(SHARED, "").split(os.pathsep)
    if own in _held or inherited or not ranks().is_first:
        yield
        return
    is_new = not path.exists()
    descriptor = _take(path)
    if descriptor is None:
        yield
        return
    before = os.environ.get(SHARED)
    _held[own] = descriptor
    os.environ[SHARED] = os.pathsep.join([*filter(None, [before]), own])
    refused = False
    try:
        yield
    except (RockTokensError, OSError):
        refused = True
        raise
    finally:
        del _held[own]
        _restore(before)
        _release(path, descriptor)
        if is_new:
            _remove_if_unused(path, refused)


def _remove_if_unused(path: Path, refused: bool) -> None:
    """A command that was refused before it made anything leaves no directory, and no manifest for the next to obey."""
    with suppress(OSError):
        if refused and [item.name for item in path.iterdir()] == [MANIFEST]:
            (path / MANIFEST).unlink()
        path.rmdir()


def _restore(before: str | None) -> None:
    if before is None:
        os.environ.pop(SHARED, None)
    else:
        os.environ[SHARED] = before


def _take(path: Path) -> int | None:
    """The locked file's descriptor; None where the directory is read-only: nobody can change such a run."""
    file = path / LOCK
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return None  # what writes next says why
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = _read(descriptor)
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise RunError(_in_use(path, owner)) from None
            return None  # a file system without locks
        if _is_same(descriptor, file):
            break
        os.close(descriptor)  # its owner removed it between our opening and locking it: try again
    left = _read(descriptor)
    if left:
        log.info("%s: a lock of process %s, which has ended, is taken over", path, left.get("process", "unknown"))
        with suppress(OSError):
            remove_left_drafts(path)
    text = json.dumps(
        {"process": os.getpid(), "host": socket.gethostname(), "since": time.time(), "command": _command()}
    )
    with suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
    return descriptor


def _release(path: Path, descriptor: int) -> None:
    with suppress(OSError):
        if _is_same(descriptor, path / LOCK):
            (path / LOCK).unlink()
    os.close(descriptor)


def _is_same(descriptor: int, file: Path) -> bool:
    try:
        there, ours = file.stat(), os.fstat(descriptor)
    except OSError:
        return False
    return (there.st_ino, there.st_dev) == (ours.st_ino, ours.st_dev)


def _read(descriptor: int) -> dict[str, object]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
    except (OSError, ValueError):
        return {"process": "unknown"}
    return found if isinstance(found, dict) else {}


def _command() -> str:
    return " ".join(sys.argv[1:])[:200]


def _in_use(path: Path, owner: dict[str, object]) -> str:
    who = f"process {owner.get('process', 'unknown')}"
    if owner.get("host") not in (None, socket.gethostname()):
        who += f" on {owner['host']}"
    if owner.get("command"):
        who += f" (rocktokens {owner['command']})"
    return f"{path} is in use: {who} works on it. Wait until it has ended, or choose another directory for this run."
