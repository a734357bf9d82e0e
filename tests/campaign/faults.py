"""Faults at file operations: counted by Python's audit events, met by a kill, a full disk or a size limit.

An operation is anything that Python does to change a directory below the one that is watched: opening a file for
writing, making, renaming or removing a file or directory. Writers in C++ and Rust (Parquet, safetensors, torch) are not
seen where they open their file; a limit on the size of files makes their writes fail instead.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from attacks import SEED, Account, chosen, disagreement, escaped, run_stages, small_study

from rocktokens.errors import RockTokensError
from rocktokens.run import open_run
from rocktokens.study import STAGES

# Tables that hold no clock: a resumed run must have them byte for byte as the uninterrupted one.
TABLES = ("rollouts", "types", "geometry", "persistence", "baseline", "knockouts", "census", "grafts")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Event → the place of the path among its arguments, and of the directory's descriptor where there is one.
EVENTS = {
    "open": (0, None),
    "os.rename": (0, 2),
    "os.remove": (0, 1),
    "os.mkdir": (0, 2),
    "os.rmdir": (0, 1),
    "os.link": (1, 3),
    "os.symlink": (1, 2),
    "os.truncate": (0, None),
}
NEEDS_SPACE = ("open", "os.mkdir", "os.link", "os.symlink")


Act = Callable[[int, str], None]  # called with the number of an operation and its kind
_watched: list[tuple[str, Act, list[str]]] = []  # directory, what happens at an operation, operations so far


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched or event not in EVENTS:
        return
    at, directory = EVENTS[event]
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITING):
        return
    try:
        path = os.fsdecode(arguments[at])
        fd = -1 if directory is None else arguments[directory]
        if not os.path.isabs(path):
            path = os.path.join(os.readlink(f"/proc/self/fd/{fd}") if fd is not None and fd >= 0 else os.getcwd(), path)
    except (TypeError, OSError):
        return
    for root, act, events in _watched:
        if path == root or path.startswith(root + os.sep):
            events.append(event)
            act(len(events), event)


sys.addaudithook(_hook)  # there is no way to take it away; it does nothing outside `watching`


@contextmanager
def watching(root: Path, act: Act = lambda number, event: None) -> Iterator[list[str]]:
    """Inside the block `act` is called before every operation below `root`; yields their kinds."""
    _watched.append((str(root.resolve()), act, []))
    try:
        yield _watched[-1][2]
    finally:
        _watched.pop()


def killed(root: Path, at: int, work: Callable[[], None]) -> str | None:
    """Do the work in a child that is killed before operation `at`; returns what is wrong if it was not."""

    def act(number: int, event: str) -> None:
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            with watching(root, act):
                work()
        finally:
            os._exit(3)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if status == -signal.SIGKILL else f"not killed: {status}"


def without_space(root: Path, at: int, work: Callable[[], None]) -> str | None:
    """Do the work while nothing new can be made from operation `at` on; returns what is wrong with what it said."""

    def act(number: int, event: str) -> None:
        if number >= at and event in NEEDS_SPACE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    try:
        with watching(root, act):
            work()
    except RockTokensError as error:
        return None if "No space left" in str(error) else f"said: {error}"
    except Exception as error:
        return escaped(error)
    return None  # what could not be written was not needed; the stage's result is compared all the same


def with_small_files(bytes_: int, work: Callable[[], None], said: Path) -> str | None:
    """Do the work in a child in which no file may grow beyond this number of bytes; returns what is wrong."""
    child = os.fork()
    if child == 0:
        code = 3
        try:
            descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, resource.RLIM_INFINITY))
            try:
                work()
                code, words = 0, ""
            except RockTokensError as error:
                code, words = 1, str(error)
            except BaseException as error:
                words = escaped(error)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            os.write(descriptor, words.encode())
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    words = said.read_text()
    if status == 1 and "File too large" not in words and "does not hold files" not in words:
        return f"said: {words}"
    return None if status in (0, 1) else f"status {status}: {words}"


class StageStates(NamedTuple):
    """The run before and after a stage that nobody disturbed, and the file operations it takes."""

    before: Path
    after: Path
    events: list[str]


class Faults:
    """A small study, stage by stage, and the copy on which attempts work."""

    def __init__(self, home: Path) -> None:
        self.home, self.config = home, small_study(home)
        self.path = self.config.path
        self.states: dict[str, StageStates] = {}
        for name in STAGES:
            before, after = home / f"before-{name}", home / f"after-{name}"
            self.copy(self.path, before)
            with watching(self.path) as events:
                run_stages(self.config, name)
            self.copy(self.path, after)
            self.states[name] = StageStates(before, after, events)

    @staticmethod
    def copy(source: Path, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        if source.exists():
            shutil.copytree(source, target)

    def try_one(self, case: dict[str, Any]) -> str | None:
        """Disturb a stage, repeat it, and compare with the undisturbed one; returns what is wrong."""
        stage, at = case["stage"], case["at"]
        self.copy(self.states[stage].before, self.path)
        work = partial(run_stages, self.config, stage)
        if case["kind"] == "files that may not grow":
            problem = with_small_files(at, work, self.home / "said")
        else:
            at = min(at, len(self.states[stage].events))  # a kept case, of a stage that takes fewer operations by now
            problem = (killed if case["kind"] == "kills" else without_space)(self.path, at, work)
        try:
            work()
        except Exception as error:
            return problem or f"after it: {type(error).__name__}: {error}"
        return problem or differs(self.path, self.states[stage].after)

    def points(self, kind: str) -> list[dict[str, Any]]:
        """Every operation of every stage; for a full disk, those that need space.

        The trainings of a comparison are the code of `distill`, whose operations are all tried: of its many, every
        third is, beginning where the seed says.
        """
        found = []
        for stage, own in self.states.items():
            wanted = [at for at, event in enumerate(own.events, 1) if kind == "kills" or event in NEEDS_SPACE]
            found += [(stage, at) for at in (wanted[SEED % 3 :: 3] if stage == "compare" else wanted)]
        return [{"kind": kind, "stage": stage, "at": at} for stage, at in found]


def differs(path: Path, whole: Path) -> str | None:
    missing = set(open_run(whole).manifest["stages"]) - set(open_run(path).manifest["stages"])
    if missing:
        return f"not complete: {sorted(missing)}"
    for name in TABLES:
        if (whole / f"{name}.parquet").exists() and not pq.read_table(path / f"{name}.parquet").equals(
            pq.read_table(whole / f"{name}.parquet")
        ):
            return f"{name}.parquet differs from the uninterrupted run's"
    left = sorted(str(file.relative_to(path)) for pattern in ("*.parts", ".*.tmp") for file in path.glob(pattern))
    return f"left behind: {left}" if left else disagreement(path)


def attack(faults: Faults, kind: str, cases: list[dict[str, Any]]) -> None:
    """Try the campaign's share of the cases, and give the account."""
    account = Account(kind)
    counted = ", ".join(f"{name} {len(own.events)}" for name, own in faults.states.items())
    print(f"\n{kind}: {len(cases)} points; file operations by stage: {counted}")
    for case in chosen(cases, kind):
        account.note({"stage": case["stage"], "at": case["at"]}, faults.try_one(case))
    account.close()
