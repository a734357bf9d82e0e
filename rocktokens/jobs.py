"""Work that is shared out: a list of jobs, done in this process, in a pool of local processes, or on Ray.

    jobs = [Job(f"{n:05d}", folder / f"{n:05d}.parquet", {"start": n * 64}, size=64) for n in range(count)]
    run(jobs, work, Place(workers=4), what="sampling", unit="prompts")

`work(part, **arguments)` is a top-level function that writes its part whole (under a draft name, then renamed). A job
whose part exists is not done again, so a stopped command continues with the parts that are missing. What a part holds
must not depend on the place. This module knows neither models nor tables.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from rocktokens.errors import ConfigError, RockTokensError, RunError
from rocktokens.progress import Work, progress
from rocktokens.settings import Settings, granted, granting

log = logging.getLogger(__name__)

RETRIES = 2  # of a job whose worker died: more often, and the job itself is what kills it
_workers = 1  # that share this command's work; a worker is told
_kept: dict[str, Any] = {}  # see `keep`
_staying = False  # see `keeping_workers`
_advance: Callable[[int], None] = lambda count: None  # noqa: E731


@dataclass(frozen=True)
class Job:
    """One part to make."""

    name: str
    part: Path  # the file, or folder, that the job writes whole
    arguments: dict[str, Any] = field(default_factory=dict)  # of the work function: plain values, paths and settings
    size: int = 1  # how far it moves the progress bar


@dataclass(frozen=True)
class Place(Settings):
    """Where jobs are done: by default in this process, so that a debugger and a profiler work."""

    workers: Annotated[int, Meta(ge=1, le=256)] = 1
    """With Ray the largest number of actors, where 1 means as many as the cluster has GPUs or cores."""
    ray: str | None = None  # an address, or auto: the cluster of RAY_ADDRESS, or of `ray start` on this machine


def run(
    jobs: Iterable[Job], work: Callable[..., object], place: Place | None = None, *, what: str, unit: str = "jobs"
) -> None:
    """Do every job whose part is missing. A job that fails ends the rest and its error is raised; finished parts stay.

    `what` is the word before the progress bar, `unit` what the jobs' sizes count.
    """
    global _advance
    refuse_torchrun()
    place, jobs = place or Place(), list(jobs)
    missing = [job for job in jobs if not job.part.exists()]
    with progress(what, sum(job.size for job in jobs), unit) as bar:
        bar.resumed(sum(job.size for job in jobs) - sum(job.size for job in missing))
        if missing and place.ray is not None:
            missing = [replace(job, part=job.part.absolute()) for job in missing]  # actors have another directory
            _share_out(missing, work, _Ray(place, missing), bar)
        elif min(place.workers, len(missing)) > 1:
            _share_out(missing, work, _Local(min(place.workers, len(missing))), bar)
        else:
            before, _advance = _advance, bar
            try:
                for job in missing:
                    end = bar.done + job.size
                    work(job.part, **job.arguments)
                    bar(end - bar.done)
            finally:
                _advance = before
                if not _staying:
                    _kept.clear()


def advance(count: int) -> None:
    """Called inside a job: this much of its size is done. Optional; the bar moves at the end of a job otherwise."""
    _advance(count)


def keep(key: object, make: Callable[[], Any]) -> Any:
    """Called inside a job: what an earlier job of this worker has made under the same key, such as a loaded model.

    Only the last thing made is kept, until `run` ends, or `forget` is called inside `keeping_workers`.
    """
    name = repr(key)
    if name not in _kept:
        _kept.clear()  # two models at once may not fit
        _kept[name] = make()
    return _kept[name]


def forget() -> None:
    """Drop what `keep` holds, here and in workers that stay: a study calls it between stages."""
    _kept.clear()
    for _, pipe in _Local.idle:
        with suppress(OSError):
            pipe.send(None)


@contextmanager
def keeping_workers() -> Iterator[None]:
    """Inside the block workers, and what they have loaded, stay between calls of `run`, and Ray stays connected."""
    global _staying
    before, _staying = _staying, True
    try:
        yield
    finally:
        _staying = before
        if not _staying:
            _kept.clear()
            _end_idle(_Local(0))
            if "ray" in sys.modules:
                sys.modules["ray"].shutdown()


def num_workers() -> int:
    """Workers among which the bounds of this command, on servers for example, are divided."""
    return _workers


def torchrun_number(*, local: bool = False) -> int | None:
    """The number of this process among all that torchrun has started, or those on this machine; None without it."""
    number = os.environ.get("LOCAL_RANK" if local else "RANK")
    return None if number is None else int(number)


def refuse_torchrun() -> None:
    """Refuse to work as one of several processes of torchrun: only training does."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "torchrun and accelerate launch are for `rocktokens distill`; run every other stage as one process, with "
            "--workers N on this machine or --ray ADDRESS on several"
        )


# ---------------------------------------------------------------- by workers: local processes, or Ray's actors


def _share_out(jobs: Sequence[Job], work: Callable[..., object], pool: _Local | _Ray, bar: Work) -> None:
    """Keep every worker busy until all jobs are done. A worker that dies costs its job only, which is done again."""
    left, moved, deaths = deque(jobs), Counter[str](), Counter[str]()
    busy: dict[Any, tuple[Job, Any]] = {}  # what a worker's reply comes by → its job, and the worker
    try:
        if isinstance(pool, _Ray):
            pool.probe(jobs[0].part.parent)
        while left or busy:
            while left and len(busy) < pool.count:
                worker, job = pool.idle.pop() if pool.idle else pool.start(), left.popleft()
                busy[pool.give(worker, (work, job, pool.count, granted()))] = (job, worker)
            if isinstance(pool, _Ray):
                _end_idle(pool)  # their core may be what the job of a lost node waits for
            for reply in pool.wait(list(busy)):
                job, worker = busy[reply]
                kind, said = pool.read(reply)
                if kind == "failed":
                    raise said
                step = said if kind == "advance" else job.size * (kind == "done") - moved[job.name]
                moved[job.name] += step
                bar(step)
                if kind != "advance":
                    del busy[reply]
                if kind == "done":
                    pool.idle.append(worker)
                elif kind == "died":
                    pool.kill(worker)
                    deaths[job.name] += 1
                    if deaths[job.name] > RETRIES:
                        died = f"the worker of job {job.name} died {RETRIES + 1} times ({said}); finished parts stay"
                        raise RunError(f"{died} (memory ran out? repeat the command with fewer --workers)")
                    log.warning("a worker died (%s) during job %s; the job is done again", said, job.name)
                    left.appendleft(job)
    finally:
        for _, worker in busy.values():
            pool.kill(worker)
        if isinstance(pool, _Ray) or not _staying:
            _end_idle(pool)
        if isinstance(pool, _Ray) and not _staying:
            pool.ray.shutdown()


def _end_idle(pool: _Local | _Ray) -> None:
    while pool.idle:
        pool.kill(pool.idle.pop())


def _do(work: Callable[..., object], job: Job, count: int, permissions: Sequence[Any]) -> tuple[str, Any]:
    """Do a job in a worker. Returns what to tell the driver; of an error that is not ours, its traceback."""
    global _workers
    _workers = count
    try:
        if not job.part.exists():  # a worker that died may have written it first
            with granting(*permissions):
                work(job.part, **job.arguments)
        return "done", None
    except Exception as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # the second is torch's
            return "failed", RunError(f"memory ran out in job {job.name}; finished parts stay. Use fewer --workers")
        # A full disk has its sentence at the command line; errors of other libraries may not unpickle.
        if isinstance(error, RockTokensError) or (isinstance(error, OSError) and type(error).__module__ == "builtins"):
            return "failed", error
        said = f"{type(error).__name__}: {error} in job {job.name}\n"
        return "failed", RuntimeError(said + "".join(traceback.format_exception(error)))


class _Local:
    """Spawned processes. Not concurrent.futures: one killed worker would lose the jobs of all the others."""

    idle: ClassVar[list[tuple[BaseProcess, Connection]]] = []  # of the class: workers stay between calls of `run`
    wait = staticmethod(wait)

    def __init__(self, count: int) -> None:
        self.count = count

    def start(self) -> tuple[BaseProcess, Connection]:
        """Start a process with a GPU of its own, or one thread where there is none."""
        alive = {child.name for child in multiprocessing.active_children()}
        slot = next(number for number in itertools.count() if f"rocktokens-{number}" not in alive)
        listed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus()))))
        devices = [device for device in listed.split(",") if device]
        own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        if devices:
            own = {"CUDA_VISIBLE_DEVICES": devices[slot % len(devices)]}
        os.environ["PYTHONSAFEPATH"] = "1"  # no child imports from the directory in which the command was given
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, own), name=f"rocktokens-{slot}")
        process.start()
        theirs.close()
        return process, ours

    def give(self, worker: tuple[BaseProcess, Connection], asked: tuple[Any, ...]) -> Any:
        with suppress(OSError):  # it has died, as reading from it will tell
            worker[1].send(asked)
        return worker[1]

    def read(self, reply: Any) -> tuple[str, Any]:
        try:
            return reply.recv()
        except (EOFError, OSError):
            return "died", "killed, perhaps because memory ran out"

    def kill(self, worker: tuple[BaseProcess, Connection]) -> None:
        """End the worker and what it has started."""
        process, pipe = worker
        with suppress(ProcessLookupError, PermissionError):  # not yet the leader of a group, or ended
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
        pipe.close()


def num_gpus() -> int:
    """GPUs of this machine, counted without loading torch."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    """The life of a local worker: take a job, do it, say so."""
    global _advance
    os.environ.update(environment)  # before torch is loaded
    os.setpgrp()  # Ctrl-C is the driver's; it ends this process and what this process starts
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)

    def end_with_driver() -> None:
        """A driver that was killed leaves no worker behind."""
        multiprocessing.parent_process().join()  # type: ignore[union-attr]
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_driver, daemon=True).start()
    _advance = lambda count: pipe.send(("advance", count))  # noqa: E731
    with suppress(EOFError, BrokenPipeError):
        while True:
            asked = pipe.recv()
            if asked is None:
                _kept.clear()
            else:
                pipe.send(_do(*asked))


class _Actor:
    """A worker on Ray: does one job after another and keeps what they load."""

    def do(self, *asked: Any) -> tuple[str, Any]:
        return _do(*asked)


class _Ray:
    """Actors of a Ray cluster; Ray is imported here only."""

    def __init__(self, place: Place, jobs: Sequence[Job]) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray  # where it is missing, the command line names the extra

        self.ray: Any = ray
        self.kill, self.idle = self.ray.kill, list[Any]()
        quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        try:
            # Ray lets workers import from the driver's current directory, which may be a downloaded run.
            with tempfile.TemporaryDirectory() as empty, chdir(empty):
                ray.init(address=place.ray, ignore_reinit_error=True, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            said = f"there is no Ray cluster at {place.ray!r} ({str(error).splitlines()[0]})"
            raise ConfigError(f"{said}; start one with `ray start --head`, or give its address") from error
        total = ray.cluster_resources()
        gpus = int(total.get("GPU", 0))
        most = place.workers if place.workers > 1 else gpus or int(total.get("CPU", 1))
        self.count = max(1, min(most, len(jobs)))
        self.start = self.ray.remote(num_cpus=1, num_gpus=1 if gpus else 0)(_Actor).remote

    def probe(self, folder: Path) -> None:
        """Every node must see the run directory, before any work begins."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-", suffix=".tmp") as mark:
            look = self.ray.remote(num_cpus=0, max_retries=0)(os.path.exists)
            nodes = [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
            on = [OnNode(node["NodeID"], soft=False) for node in nodes]
            seen = self.ray.get([look.options(scheduling_strategy=node).remote(mark.name) for node in on], timeout=300)
        blind = [node["NodeManagerAddress"] for node, sees in zip(nodes, seen) if not sees]
        if blind:
            said = f"Ray's nodes {', '.join(blind)} do not see {folder}; put the run on a file system"
            raise RunError(f"{said} that every node mounts at the same path")

    def give(self, worker: Any, asked: tuple[Any, ...]) -> Any:
        return worker.do.remote(*asked)

    def read(self, reply: Any) -> tuple[str, Any]:
        try:
            return self.ray.get(reply)
        except self.ray.exceptions.RayError as error:  # the actor or its node died: another one takes its place
            return "died", type(error).__name__

    def wait(self, replies: list[Any]) -> list[Any]:
        return self.ray.wait(replies)[0]
