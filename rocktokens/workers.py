"""`rocktokens --workers N`: the same command N times on this machine, sharing one run, without torchrun.

The process that was started is the first; the others are its children and are told their number by the environment
(runs/ranks.py). They say nothing unless they fail. Each has a GPU of its own where there are several, and one thread
where there is none, so that N tiny models do not fight for the cores.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rocktokens.errors import ConfigError, RunError
from rocktokens.ranks import LAUNCH, PROCESS, RANK, WORLD, remove_signs, watch

if TYPE_CHECKING:
    from rocktokens.study import StudyConfig

# Commands whose work is shared out; any other is done by the first process alone.
SHARED = ("study", "sample", "score", "knockout", "graft", "compare")
MOST = 4  # processes that a study starts by itself
MOST_ASKED = 256  # and that a user may ask for on one machine
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def number_of(text: str) -> int:
    """The value of --workers."""
    if not text.isdecimal() or (len(text) < 10 and int(text) < 1):
        raise ConfigError(f"--workers takes a whole number of processes, at least 1; got {text[:40]!r}")
    if len(text) > 9 or int(text) > MOST_ASKED:
        raise ConfigError(
            f"--workers must be at most {MOST_ASKED}, got {text[:40]}; several machines are started with torchrun"
        )
    return int(text)


def fitting(config: StudyConfig) -> int:
    """Processes for a study whose command does not say how many.

    A built-in pair is so small that one thread is enough for it: on a machine without GPUs every core, up to four,
    gets a process of its own. Any other pair wants its memory once, and the user's word.
    """
    from rocktokens.world import world_names

    is_one_of_several = WORLD in os.environ or "RANK" in os.environ
    is_built_in = config.prompts.source in world_names() and not (config.pair.student or config.pair.teacher)
    if is_one_of_several or not is_built_in or _gpus() or config.servers.student or config.servers.teacher:
        return 1
    return min(len(os.sched_getaffinity(0)), MOST) if hasattr(os, "sched_getaffinity") else 1


@contextmanager
def workers(command: str, arguments: list[str], count: int) -> Iterator[None]:
    """Inside the block `count - 1` other processes work on the same command; they are waited for at its end."""
    if count == 1 or command not in SHARED:
        yield
        return
    if "RANK" in os.environ:
        raise ConfigError("--workers and torchrun exclude each other; torchrun's processes share the work as they are")
    shared = {WORLD: str(count), LAUNCH: uuid.uuid4().hex[:12]}
    own = {**shared, RANK: "0", **_own_device(0, count)}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    children, outputs = [], []
    for rank in range(1, count):
        output = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {**os.environ, **shared, RANK: str(rank), **_own_device(rank, count)}
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", "rocktokens.cli", command, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
            )
        )
        outputs.append(output)
    watch(children)
    try:
        yield
        for child in children:
            child.wait()
        _say_failures(children, outputs)
    except BaseException as error:
        if isinstance(error, RunError):
            _say_failures(children, outputs, after=error)
        raise
    finally:
        for child in children:
            if child.poll() is None:
                child.terminate()
                child.wait()
        remove_signs()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _say_failures(
    children: list[subprocess.Popen[bytes]], outputs: Sequence[IO[bytes]], after: RunError | None = None
) -> None:
    for number, (child, output) in enumerate(zip(children, outputs), start=1):
        if child.poll():
            output.seek(0)
            said = output.read().decode(errors="replace").strip().splitlines()
            text = said[-1].removeprefix("rocktokens: ") if said else f"exit status {child.returncode}"
            raise RunError(f"worker {number} failed: {text}") from after


def _own_device(rank: int, count: int) -> dict[str, str]:
    """One GPU per process where there are any; one thread each where there is none."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = listed.split(",") if listed is not None else [str(n) for n in range(len(_gpus()))]
    devices = [device for device in devices if device]
    if devices:
        return {"CUDA_VISIBLE_DEVICES": devices[rank % len(devices)]}
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


def _gpus() -> list[Path]:
    return list(Path("/proc/driver/nvidia/gpus").glob("*"))


def apart_from_torchrun(work: Callable[..., object], *arguments: object, **settings: object) -> None:
    """Do the work in a child that does not know of torchrun: it trains by itself, though ranks share out what to train.

    accelerate would otherwise join the processes into one training.
    """
    import multiprocessing

    from rocktokens.ranks import launch, process_id, ranks

    own = ranks()
    changed = {RANK: str(own.rank), WORLD: str(own.world), LAUNCH: launch(), PROCESS: process_id()}
    kept = {name: os.environ.get(name) for name in (*TORCHRUN, *changed, "CUDA_VISIBLE_DEVICES")}
    local = os.environ.get("LOCAL_RANK", "0")
    try:
        os.environ.update(changed)
        os.environ.update({k: v for k, v in _own_device(int(local), own.world).items() if k == "CUDA_VISIBLE_DEVICES"})
        for name in TORCHRUN:
            os.environ.pop(name, None)
        child = multiprocessing.get_context("spawn").Process(target=_do, args=(work, arguments, settings))
        child.start()
        child.join()
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    if child.exitcode:
        raise RunError(f"a training failed (exit status {child.exitcode}); see its message above")


def _do(work: Callable[..., object], arguments: tuple[object, ...], settings: dict[str, object]) -> None:
    level = logging.INFO if os.environ.get(RANK, "0") == "0" else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    work(*arguments, **settings)
