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
import pickle
import signal
import sys
import tempfile
import threading
import traceback
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rocktokens.errors import ConfigError, RockTokensError, RunError
from rocktokens.permissions import granted, granting
from rocktokens.progress import Work, progress

log = logging.getLogger(__name__)

RETRIES = 2  # of a job whose worker died: more often, and the job itself is what kills it
MOST_WORKERS = 256  # on one machine
_workers = 1  # that share this command's work; a worker is told
_kept: dict[str, Any] = {}  # see `keep`
_idle: list[_Worker] | None = None  # see `keeping_workers`
_holding = False  # see `keeping_loaded`
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
            _on_ray(missing, work, place, bar)
        elif min(place.workers, len(missing)) == 1:
            _here(missing, work, bar)
        else:
            _in_pool(missing, work, min(place.workers, len(missing)), bar)


def advance(count: int) -> None:
    """Called inside a job: this much of its size is done. Optional; the bar moves at the end of a job otherwise."""
    _advance(count)


def keep(key: object, make: Callable[[], Any]) -> Any:
    """Called inside a job: what an earlier job of this worker has made under the same key, such as a loaded model.

    Only the last thing made is kept, and only while `run` works, or inside `keeping_loaded`.
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


class _Bar:
    """The one progress bar, and how far each job under way has moved it."""

    def __init__(self, work: Work) -> None:
        self.work, self.moved = work, Counter[str]()

    def move(self, job: Job, count: int) -> None:
        count = min(count, job.size - self.moved[job.name])
        self.moved[job.name] += count
        self.work(count)


# ---------------------------------------------------------------- in this process


def _here(jobs: Sequence[Job], work: Callable[..., object], shown: Work) -> None:
    bar = _Bar(shown)
    try:
        for job in jobs:
            with _advancing(lambda count, job=job: bar.move(job, count)):  # type: ignore[misc]
                work(job.part, **job.arguments)
            bar.move(job, job.size)
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


# ---------------------------------------------------------------- a pool of local processes
#
# Not concurrent.futures: there one killed worker breaks the pool and loses the jobs of all the others.


@dataclass
class _Worker:
    slot: int
    process: multiprocessing.process.BaseProcess
    pipe: Connection

    def kill(self) -> None:
        """End the worker and what it has started."""
        assert self.process.pid is not None
        with suppress(ProcessLookupError, PermissionError):  # not yet the leader of a group, or ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


@contextmanager
def keeping_workers() -> Iterator[None]:
    """Inside the block workers stay between calls of `run`: a study's stages import torch once."""
    global _idle
    if _idle is not None:  # inside another such block
        yield
        return
    _idle = []
    try:
        yield
    finally:
        for worker in _idle:
            worker.kill()
        _idle = None


@contextmanager
def keeping_loaded() -> Iterator[None]:
    """Inside the block workers, and what `keep` keeps, stay between calls of `run`: the steps of one stage."""
    global _holding
    with keeping_workers():
        _holding = True
        try:
            yield
        finally:
            _holding = False
            _kept.clear()
            for worker in _idle or ():
                with suppress(OSError):
                    worker.pipe.send(None)


def _in_pool(jobs: Sequence[Job], work: Callable[..., object], count: int, shown: Work) -> None:
    bar, left, deaths = _Bar(shown), deque(jobs), Counter[str]()
    busy: dict[Connection, tuple[Job, _Worker]] = {}
    idle = [] if _idle is None else _idle
    try:
        while left or busy:
            while left and len(busy) < count:
                taken = {worker.slot for worker in [*idle, *(worker for _, worker in busy.values())]}
                free = next(slot for slot in range(len(taken) + 1) if slot not in taken)
                worker, job = idle.pop() if idle else _start(free), left.popleft()
                busy[worker.pipe] = (job, worker)
                with suppress(OSError):  # it has died, as reading from it will tell
                    worker.pipe.send((work, job, count))
            for pipe in wait(list(busy)):
                job, worker = busy[pipe]  # type: ignore[index]
                try:
                    kind, said = worker.pipe.recv()
                except (EOFError, OSError):
                    del busy[worker.pipe]
                    worker.kill()
                    bar.move(job, -bar.moved[job.name])
                    code = worker.process.exitcode or 0
                    cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                    left.appendleft(_once_more(job, deaths, cause))
                    continue
                if kind == "failed":
                    raise said
                bar.move(job, said)
                if kind == "done":
                    idle.append(busy.pop(worker.pipe)[1])
        for worker in idle if not _holding else ():
            worker.pipe.send(None)
    finally:
        for worker in [*(idle if _idle is None else ()), *(worker for _, worker in busy.values())]:
            worker.kill()


def _once_more(job: Job, deaths: Counter[str], cause: str) -> Job:
    """The job, to be done again; RunError where its worker died too often."""
    deaths[job.name] += 1
    if deaths[job.name] > RETRIES:
        raise RunError(
            f"the worker of job {job.name} died {deaths[job.name]} times ({cause}); finished parts stay. If memory ran "
            "out, repeat the command with fewer --workers"
        )
    log.warning("a worker died (%s) during job %s; the job is done again", cause, job.name)
    return job


def _start(slot: int) -> _Worker:
    """Start a worker process with a GPU of its own, or one thread where there is none."""
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
    process = context.Process(target=_serve, args=(theirs, granted()), name=f"rocktokens-{slot}")
    os.environ.update(own)
    try:
        process.start()
    finally:
        theirs.close()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return _Worker(slot, process, ours)


def num_gpus() -> int:
    """GPUs of this machine, counted without loading torch."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _serve(pipe: Connection, permissions: Sequence[Any]) -> None:
    """A worker's life: take a job, do it, say so."""
    os.setpgrp()  # Ctrl-C is the driver's; it ends this process and what this process starts
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    threading.Thread(target=_end_with_driver, daemon=True).start()
    with suppress(EOFError, BrokenPipeError), granting(*permissions), _advancing(lambda n: pipe.send(("advance", n))):
        while True:
            asked = pipe.recv()
            if asked is None:
                _kept.clear()
                continue
            failed = _do(*asked)
            pipe.send(("failed", failed) if failed is not None else ("done", asked[1].size))


def _end_with_driver() -> None:
    """A driver that was killed leaves no worker behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _do(work: Callable[..., object], job: Job, count: int) -> Exception | None:
    """Do a job in a worker. Returns what went wrong as the driver can raise it: errors of ours as they are."""
    global _workers
    _workers = count
    try:
        if not job.part.exists():  # a worker that died may have written it first
            work(job.part, **job.arguments)
        return None
    except Exception as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return RunError(
                f"memory ran out in job {job.name}; finished parts stay. Use fewer --workers or smaller batches"
            )
        if not isinstance(error, RockTokensError):
            error.add_note(f"in job {job.name}:\n{''.join(traceback.format_exception(error))}")
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return RuntimeError(f"job {job.name} failed:\n{''.join(traceback.format_exception(error))}")
        return error


# ---------------------------------------------------------------- Ray


class _Actor:
    """A worker on Ray: does one job after another and keeps what they load."""

    def do(self, work: Callable[..., object], job: Job, count: int, permissions: Sequence[Any]) -> Exception | None:
        """None where the part is written, or the error that ended the job."""
        with granting(*permissions):
            return _do(work, job, count)


def _on_ray(jobs: Sequence[Job], work: Callable[..., object], place: Place, shown: Work) -> None:
    ray = _connected(str(place.ray))
    jobs = [Job(job.name, job.part.absolute(), job.arguments, job.size) for job in jobs]
    try:
        _probe(ray, jobs[0].part.parent)
        total = ray.cluster_resources()
        gpus = int(total.get("GPU", 0))
        most = place.workers if place.workers > 1 else gpus or int(total.get("CPU", 1))
        count = max(1, min(most, len(jobs)))
        kind = ray.remote(num_cpus=1, num_gpus=1 if gpus else 0)(_Actor)
        bar, left, deaths = _Bar(shown), deque(jobs), Counter[str]()
        busy: dict[Any, tuple[Job, Any]] = {}
        idle: list[Any] = []
        while left or busy:
            while left and len(busy) < count:
                actor, job = idle.pop() if idle else kind.remote(), left.popleft()
                busy[actor.do.remote(work, job, count, granted())] = (job, actor)
            while idle:  # its core may be what the job of a lost node waits for
                ray.kill(idle.pop())
            for reply in ray.wait(list(busy))[0]:
                job, actor = busy.pop(reply)
                try:
                    failed = ray.get(reply)
                except ray.exceptions.RayError as error:  # the actor or its node died: another one takes its place
                    ray.kill(actor)
                    left.append(_once_more(job, deaths, type(error).__name__))
                    continue
                if failed is not None:
                    raise failed
                bar.move(job, job.size)
                idle.append(actor)
    finally:
        ray.shutdown()  # ends the actors of this driver and leaves the cluster


def _connected(address: str) -> Any:
    """Ray, connected to the cluster; imported only here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == "local":
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    try:
        import ray
    except ImportError:
        raise ConfigError('--ray needs Ray: pip install "rocktokens[cluster]"') from None
    # Ray lets workers import from the driver's current directory, which may be a run somebody else made: show it none.
    with tempfile.TemporaryDirectory() as empty, chdir(empty):
        try:
            ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"there is no Ray cluster at {address!r} ({str(error).splitlines()[0]}); start one with `ray start "
                "--head`, or give its address"
            ) from error
    return ray


def _probe(ray: Any, folder: Path) -> None:
    """Every node must see the run directory, before any work begins."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".probe-{uuid.uuid4().hex[:12]}.tmp"
    mark.touch()
    try:
        look = ray.remote(num_cpus=0, max_retries=0)(os.path.exists)
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        found = [look.options(scheduling_strategy=OnNode(node["NodeID"], soft=False)).remote(mark) for node in nodes]
        for node, sees in zip(nodes, ray.get(found, timeout=300)):
            if not sees:
                raise RunError(
                    f"Ray's node {node['NodeManagerAddress']} does not see {folder}; put the run on a file system that "
                    "every node mounts at the same path"
                )
    finally:
        mark.unlink(missing_ok=True)
