"""Several processes on one run: who does which numbered part, and how they wait for each other.

Processes come from torchrun (RANK, WORLD_SIZE) or from `rocktokens --workers N` (ROCKTOKENS_RANK, ROCKTOKENS_WORLD).
They share the run's directory and nothing else: part `number` belongs to process `number % world`, a part that is
written is there for everybody, and only the first process writes the manifest.

What the first process tells the others are empty files in RUN/.ranks/LAUNCH.ID. With a fixed port an earlier launch had
the same name, so the first process of each has an id of its own; the others do not know it, but leave a mark in every
folder they read. A folder in which an earlier process of the same rank has left one is an earlier launch's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rocktokens.errors import RunError

RANK, WORLD, LAUNCH = "ROCKTOKENS_RANK", "ROCKTOKENS_WORLD", "ROCKTOKENS_LAUNCH"
PROCESS = "ROCKTOKENS_PROCESS"  # environment variable: the id of the process that a child works for
SIGNS, MARK = ".ranks", ".here"
# Seconds between two looks at the disk: soon at first, seldom later.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
_workers: list[subprocess.Popen[bytes]] = []
_parent = os.getppid()
_signed: set[Path] = set()
# Folders of signs that this process has looked at → whether they are this launch's.
_known: dict[Path, bool] = {}
_began, _id = time.monotonic(), uuid.uuid4().hex[:12]


def _begin() -> None:
    """A forked process is another one than its parent."""
    global _began, _id
    _began, _id = time.monotonic(), uuid.uuid4().hex[:12]
    _known.clear()


os.register_at_fork(after_in_child=_begin)


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
    """A name for this launch of all processes; with a fixed port an earlier one had the same."""
    if LAUNCH in os.environ:
        return os.environ[LAUNCH]
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return "-".join(os.environ.get(name, "0") for name in names).replace("/", "-")


def process_id() -> str:
    """What tells this process, and the children that work for it, from those of every other launch."""
    return os.environ.get(PROCESS, _id)


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


def greet(path: Path) -> None:
    """At the beginning of a stage: the first process removes earlier launches' signs, the others leave their marks."""
    if ranks().world == 1 or not path.is_dir():
        return
    if ranks().is_first:
        _own_folder(path)
    else:
        _folders(path)


def sign(path: Path, name: str) -> None:
    """Tell the other processes something about a run."""
    if ranks().world > 1:
        (_own_folder(path) / name).touch()


def remove_signs() -> None:
    """Remove what this process has told the others, once they have ended."""
    for folder in _signed:
        shutil.rmtree(folder, ignore_errors=True)
    _signed.clear()


def has_sign(path: Path, name: str) -> bool:
    """Whether the first process of this launch has said it."""
    return any((folder / name).exists() for folder in _folders(path))


def signs(path: Path, prefix: str) -> list[str]:
    """What the first process of this launch has said that begins so."""
    return sorted({found.name for folder in _folders(path) for found in folder.glob(f"{prefix}*")})


def _own_folder(path: Path) -> Path:
    """Where this process signs; the folders of earlier launches are removed."""
    home = path / SIGNS
    own = home / f"{launch()}.{process_id()}"
    for old in home.glob("*"):
        if old != own:
            shutil.rmtree(old, ignore_errors=True)
    own.mkdir(parents=True, exist_ok=True)
    _signed.add(home)
    return own


def _folders(path: Path) -> list[Path]:
    """Where the first process of this launch signs: one folder, or none before it has come there."""
    home = path / SIGNS
    if ranks().is_first:
        return [home / f"{launch()}.{process_id()}"]
    named = [folder for folder in home.glob("*") if folder.name.rpartition(".")[0] == launch()]
    return [folder for folder in named if _is_this_launch(folder)]


def _is_this_launch(folder: Path) -> bool:
    """Whether no process of this rank had read the folder before this one began; leaves this process's mark in it.

    Times are those of the file system alone: machines that share it need not agree on theirs.
    """
    if folder not in _known:
        rank = ranks().rank
        own = folder / f"{MARK}-{rank}-{process_id()}"
        try:
            own.touch()
            began = own.stat().st_mtime - (time.monotonic() - _began)
            others = [mark for mark in folder.glob(f"{MARK}-{rank}-*") if mark != own]
            _known[folder] = all(mark.stat().st_mtime > began for mark in others)
        except FileNotFoundError:  # the first process is just removing it
            return False
    return _known[folder]
