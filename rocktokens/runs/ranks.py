"""Several processes on one run: who does which numbered part, and how they wait for each other.

Processes come from torchrun (RANK, WORLD_SIZE) or from `rocktokens --workers N` (ROCKTOKENS_RANK, ROCKTOKENS_WORLD).
They share the run's directory and nothing else: part `number` belongs to process `number % world`, a part that is
written is there for everybody, and only the first process writes the manifest. What they tell each other are empty
files in RUN/.ranks/LAUNCH; a launch has a name of its own, so that those of an earlier one mean nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rocktokens.errors import RunError

RANK, WORLD, LAUNCH = "ROCKTOKENS_RANK", "ROCKTOKENS_WORLD", "ROCKTOKENS_LAUNCH"
SIGNS = ".ranks"
# Seconds between two looks at the disk: soon at first, seldom later.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
_workers: list[subprocess.Popen[bytes]] = []
_parent = os.getppid()
_signed: set[Path] = set()


class FirstHasFinished(Exception):
    """The first process has completed the stage while this one waited for a part: there is nothing left to do."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of one command."""

    rank: int = 0
    world: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the manifest and prints."""
        return self.rank == 0

    def owns(self, number: int) -> bool:
        """Whether a numbered part is this process's."""
        return number % self.world == self.rank


_alone = 0


@contextmanager
def alone() -> Iterator[None]:
    """Inside the block this process works as if it were the only one: the others wait for it."""
    global _alone
    _alone += 1
    try:
        yield
    finally:
        _alone -= 1


def ranks() -> Ranks:
    """This process's place, from the environment."""
    if _alone:
        return Ranks()
    if WORLD in os.environ:
        return Ranks(int(os.environ.get(RANK, "0")), int(os.environ[WORLD]))
    return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


def launch() -> str:
    """A name for this launch of all processes."""
    if LAUNCH in os.environ:
        return os.environ[LAUNCH]
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return "-".join(os.environ.get(name, "0") for name in names)


def watch(workers: list[subprocess.Popen[bytes]]) -> None:
    """Processes that this one has started and waits for; one that fails ends every wait."""
    _workers.extend(workers)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until something that another process does is there."""
    pause = SHORTEST_PAUSE
    while not condition():
        _check_others(what, condition)
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)


def _check_others(what: str, condition: Callable[[], bool]) -> None:
    ended = [(number, worker.poll()) for number, worker in enumerate(_workers, start=1)]
    failed = [number for number, status in ended if status]
    if failed:
        raise RunError(f"worker {failed[0]} failed, see its message above; finished parts stay, repeat the command")
    if _workers and all(status == 0 for _, status in ended) and not condition():
        raise RunError(f"all workers have ended without {what}; repeat the command")
    if RANK in os.environ and os.environ[RANK] != "0" and os.getppid() != _parent:
        raise RunError("the process that started this worker has ended")


def sign(path: Path, name: str) -> None:
    """Tell the other processes something about a run; signs of earlier launches are removed."""
    if ranks().world == 1:
        return
    folder = path / SIGNS
    for old in folder.glob("*"):
        if old.name != launch():
            shutil.rmtree(old, ignore_errors=True)
    own = folder / launch()
    own.mkdir(parents=True, exist_ok=True)
    (own / name).touch()
    _signed.add(folder)


def remove_signs() -> None:
    """Remove what this process has told the others, once they have ended."""
    for folder in _signed:
        shutil.rmtree(folder, ignore_errors=True)
    _signed.clear()


def has_sign(path: Path, name: str) -> bool:
    """Whether another process of this launch has said it."""
    return (path / SIGNS / launch() / name).exists()


def signs(path: Path, prefix: str) -> list[str]:
    """What other processes of this launch have said that begins so."""
    return sorted(found.name for found in (path / SIGNS / launch()).glob(f"{prefix}*"))
