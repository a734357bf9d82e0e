"""Work that is shared out: a list of jobs, done in this process, in a pool of local processes, or on Ray.

    jobs = [Job(f"{n:05d}", folder / f"{n:05d}.parquet", {"start": n * 64}, size=64) for n in range(count)]
    run(jobs, work, Place(workers=4), what="sampling", unit="prompts")

`work(part, **arguments)` is a top-level function that writes its part whole (under a draft name, then renamed). A job
whose part exists is not done again, so a stopped command continues with the parts that are missing. What a part holds
must not depend on the place. This module knows neither models nor tables.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from rocktokens.errors import ConfigError, RockTokensError, RunError
from rocktokens.progress import Work, progress
from rocktokens.settings import granted, granting

log = logging.getLogger(__name__)

RETRIES = 2  # of a job whose worker died: more often, and the job itself is what kills it
MOST_WORKERS = 256  # on one machine
_workers = 1  # that share this command's work; a worker is told
_kept: dict[str, Any] = {}  # see `keep`
_staying = _holding = False  # workers, and what they have loaded: see `keeping_workers`
_advance: Callable[[int], None] = lambda count: None  # noqa: E731


@dataclass(frozen=True)
class Job:
    """One part to make."""

    name: str
    part: Path
    """The file, or folder, that the job writes whole."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keywords of the work function; plain values, paths and settings."""
    size: int = 1
    """How far it moves the progress bar."""


@dataclass(frozen=True)
class Place:
    """Where jobs are done: by default in this process, so that a debugger and a profiler work."""

    workers: int = 1
    """Processes; with Ray the largest number of actors, where 1 means as many as the cluster has GPUs or cores."""
    ray: str | None = None
    """Address of a Ray cluster, or auto: the one that RAY_ADDRESS or `ray start` on this machine names."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MOST_WORKERS:
            raise ConfigError(
                f"--workers must be a whole number from 1 to {MOST_WORKERS}, got {self.workers}; several machines are "
                "joined with --ray"
            )


def run(
    jobs: Iterable[Job], work: Callable[..., object], place: Place | None = None, *, what: str, unit: str = "jobs"
) -> None:
    """Do every job whose part is missing. An error of ours ends the rest and is raised; finished parts stay.

    Args:
        jobs: what to make; two jobs never share a part.
        work: a top-level function, called as `work(part, **arguments)`.
        place: where.
        what: the word before the progress bar.
        unit: what the jobs' sizes count.
    """
    refuse_torchrun()
    place, jobs = place or Place(), list(jobs)
    missing = [job for job in jobs if not job.part.exists()]
    with progress(what, sum(job.size for job in jobs), unit) as bar:
        bar.resumed(sum(job.size for job in jobs) - sum(job.size for job in missing))
        if not missing:
            return
        if place.ray is not None:
            missing = [replace(job, part=job.part.absolute()) for job in missing]
            _share_out(missing, work, _Ray(place, missing), bar)
        elif min(place.workers, len(missing)) == 1:
            _here(missing, work, bar)
        else:
            _share_out(missing, work, _Local(min(place.workers, len(missing))), bar)


def advance(count: int) -> None:
    """Called inside a job: this much of its size is done. Optional; the bar moves at the end of a job otherwise."""
    _advance(count)


def keep(key: object, make: Callable[[], Any]) -> Any:
    """Called inside a job: what an earlier job of this worker has made under the same key, such as a loaded model.

    Only the last thing made is kept, and only while `run` works, or inside `keeping_workers(loaded=True)`.
    """
    name = repr(key)
    if name not in _kept:
        _kept.clear()  # two models at once may not fit
        _kept[name] = make()
    return _kept[name]


def num_workers() -> int:
    """Workers among which the bounds of this command, on servers for example, have to be divided."""
    return _workers


def refuse_torchrun() -> None:
    """Refuse to work as one of several processes of torchrun: only training does."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "torchrun and accelerate launch are for `rocktokens distill`; run every other stage as one process, with "
            "--workers N on this machine or --ray ADDRESS on several"
        )


# ---------------------------------------------------------------- in this process


def _here(jobs: Sequence[Job], work: Callable[..., object], bar: Work) -> None:
    try:
        for job in jobs:
            end = bar.done + job.size
            with _advancing(bar):
                work(job.part, **job.arguments)
            bar(end - bar.done)
    finally:
        if not _holding:
            _kept.clear()


@contextmanager
def _advancing(move: Callable[[int], None]) -> Iterator[None]:
    global _advance
    before, _advance = _advance, move
    try:
        yield
    finally:
        _advance = before


# ---------------------------------------------------------------- by workers: local processes, or Ray's actors


def _share_out(jobs: Sequence[Job], work: Callable[..., object], pool: _Local | _Ray, bar: Work) -> None:
    """Keep every worker busy until all jobs are done. A worker that dies costs its job only, which is done again."""
    left, moved, deaths = deque(jobs), Counter[str](), Counter[str]()
    busy: dict[Any, tuple[Job, Any]] = {}  # what a worker's reply comes by → its job, and the worker
    try:
        while left or busy:
            while left and len(busy) < pool.count:
                worker, job = pool.idle.pop() if pool.idle else pool.start(), left.popleft()
                busy[pool.give(worker, work, job)] = (job, worker)
            if isinstance(pool, _Ray):
                pool.end_idle()
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
                        raise RunError(
                            f"the worker of job {job.name} died {deaths[job.name]} times ({said}); finished parts stay "
                            "(memory ran out? repeat the command with fewer --workers)"
                        )
                    log.warning("a worker died (%s) during job %s; the job is done again", said, job.name)
                    left.appendleft(job)
    finally:
        for _, worker in busy.values():
            pool.kill(worker)
        pool.close()


def _do(work: Callable[..., object], job: Job, count: int, permissions: Sequence[Any]) -> tuple[str, Any]:
    """Do a job in a worker. Returns what to tell the driver; of an error that is not ours, its traceback."""
    global _workers
    _workers = count
    try:
        with granting(*permissions):
            if not job.part.exists():  # a worker that died may have written it first
                work(job.part, **job.arguments)
        return "done", None
    except Exception as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            said = f"memory ran out in job {job.name}; finished parts stay. Use fewer --workers or smaller batches"
            return "failed", RunError(said)
        # A full disk or a lost mount has its sentence at the command line; other libraries' own kinds may not unpickle.
        if isinstance(error, RockTokensError) or (isinstance(error, OSError) and type(error).__module__ == "builtins"):
            return "failed", error
        trace = "".join(traceback.format_exception(error))
        return "failed", RuntimeError(f"{type(error).__name__}: {error} in job {job.name}\n{trace}")


@contextmanager
def keeping_workers(*, loaded: bool = False) -> Iterator[None]:
    """Inside the block workers stay between calls of `run`, and Ray connected: a study imports torch once.

    Args:
        loaded: what `keep` keeps stays, too: for the steps of one stage.
    """
    global _staying, _holding
    before = _staying, _holding
    _staying, _holding = True, loaded or _holding
    try:
        yield
    finally:
        _staying, _holding = before
        if not _holding:
            _kept.clear()
        _Local(0).close()
        if "ray" in sys.modules and not _staying:
            sys.modules["ray"].shutdown()


class _Worker(NamedTuple):
    slot: int
    process: multiprocessing.process.BaseProcess
    pipe: Connection


class _Local:
    """Spawned processes. Not concurrent.futures: one killed worker would lose the jobs of all the others."""

    idle: ClassVar[list[_Worker]] = []
    taken: ClassVar[set[int]] = set()  # numbers of workers that live

    def __init__(self, count: int) -> None:
        self.count = count

    def start(self) -> _Worker:
        """Start a process with a GPU of its own, or one thread where there is none."""
        slot = next(number for number in range(len(self.taken) + 1) if number not in self.taken)
        listed = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus()))))
        devices = [device for device in listed.split(",") if device]
        own = {"PYTHONSAFEPATH": "1"}  # nothing is imported from the directory in which the command was given
        if devices:
            own["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
        else:
            own["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        before = {name: os.environ.get(name) for name in own}
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), name=f"rocktokens-{slot}")
        os.environ.update(own)
        try:
            process.start()
        finally:
            theirs.close()
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        self.taken.add(slot)
        return _Worker(slot, process, ours)

    def give(self, worker: _Worker, work: Callable[..., object], job: Job) -> _Worker:
        with suppress(OSError):  # it has died, as reading from it will tell
            worker.pipe.send((work, job, self.count, granted()))
        return worker.pipe  # type: ignore[return-value]

    def wait(self, replies: list[Any]) -> list[Any]:
        return wait(replies)

    def read(self, reply: Any) -> tuple[str, Any]:
        try:
            return reply.recv()
        except (EOFError, OSError):
            return "died", "killed, perhaps for want of memory"

    def kill(self, worker: _Worker) -> None:
        """End the worker and what it has started."""
        assert worker.process.pid is not None
        with suppress(ProcessLookupError, PermissionError):  # not yet the leader of a group, or ended
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        self.taken.discard(worker.slot)

    def close(self) -> None:
        """End the workers, or let them forget what they have loaded."""
        for worker in self.idle if _staying and not _holding else ():
            with suppress(OSError):
                worker.pipe.send(None)
        while self.idle and not _staying:
            self.kill(self.idle.pop())


def num_gpus() -> int:
    """GPUs of this machine, counted without loading torch."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _serve(pipe: Connection) -> None:
    """The life of a local worker: take a job, do it, say so."""
    os.setpgrp()  # Ctrl-C is the driver's; it ends this process and what this process starts
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    threading.Thread(target=_end_with_driver, daemon=True).start()
    with suppress(EOFError, BrokenPipeError), _advancing(lambda count: pipe.send(("advance", count))):
        while True:
            asked = pipe.recv()
            if asked is None:
                _kept.clear()
            else:
                pipe.send(_do(*asked))


def _end_with_driver() -> None:
    """A driver that was killed leaves no worker behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


class _Actor:
    """A worker on Ray: does one job after another and keeps what they load."""

    def do(self, *asked: Any) -> tuple[str, Any]:
        return _do(*asked)


class _Ray:
    """Actors of a Ray cluster; Ray is imported here only."""

    def __init__(self, place: Place, jobs: Sequence[Job]) -> None:
        address = str(place.ray)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if address == "local":
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        try:
            import ray
        except ImportError:
            raise ConfigError('--ray needs Ray: pip install "rocktokens[cluster]"') from None
        self.ray = ray
        self.idle: list[Any] = []
        try:
            if not ray.is_initialized():
                # Ray lets workers import from the driver's current directory, which may be a run somebody else made.
                with tempfile.TemporaryDirectory() as empty, chdir(empty):
                    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
                    ray.init(address=address, logging_level=logging.ERROR, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"there is no Ray cluster at {address!r} ({str(error).splitlines()[0]}); start one with `ray start "
                "--head`, or give its address"
            ) from error
        try:
            self._probe(jobs[0].part.parent)
        except BaseException:
            ray.shutdown()
            raise
        total = ray.cluster_resources()
        gpus = int(total.get("GPU", 0))
        most = place.workers if place.workers > 1 else gpus or int(total.get("CPU", 1))
        self.count = max(1, min(most, len(jobs)))
        self.kind = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0)(_Actor)

    def _probe(self, folder: Path) -> None:
        """Every node must see the run directory, before any work begins."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-", suffix=".tmp") as mark:
            look = self.ray.remote(num_cpus=0, max_retries=0)(os.path.exists)
            nodes = [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
            on = [OnNode(node["NodeID"], soft=False) for node in nodes]
            found = [look.options(scheduling_strategy=node).remote(mark.name) for node in on]
            for node, sees in zip(nodes, self.ray.get(found, timeout=300)):
                if not sees:
                    raise RunError(
                        f"Ray's node {node['NodeManagerAddress']} does not see {folder}; put the run on a file system "
                        "that every node mounts at the same path"
                    )

    def start(self) -> Any:
        return self.kind.remote()

    def give(self, worker: Any, work: Callable[..., object], job: Job) -> Any:
        return worker.do.remote(work, job, self.count, granted())

    def wait(self, replies: list[Any]) -> list[Any]:
        return self.ray.wait(replies)[0]

    def read(self, reply: Any) -> tuple[str, Any]:
        try:
            return self.ray.get(reply)
        except self.ray.exceptions.RayError as error:  # the actor or its node died: another one takes its place
            return "died", type(error).__name__

    def end_idle(self) -> None:
        """End actors without a job: their core may be what the job of a lost node waits for."""
        while self.idle:
            self.kill(self.idle.pop())

    def kill(self, worker: Any) -> None:
        self.ray.kill(worker)

    def close(self) -> None:
        """End the actors of this driver, and leave the cluster unless more is to come."""
        self.end_idle()
        if not _staying:
            self.ray.shutdown()
