"""Work shared out over the cores of this machine by threads: numpy releases the interpreter while it computes.

Results must not depend on the number of threads: each piece writes to a place of its own. This module knows nothing of
what is computed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from threadpoolctl import threadpool_limits

Item = TypeVar("Item")


def num_threads() -> int:
    """Cores that this process may use; OMP_NUM_THREADS, where set, is the limit, as it is for other libraries."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdigit() and int(limit) > 0 else cores


def for_each(work: Callable[[Item], object], items: Iterable[Item], *, threads: int | None = None) -> None:
    """Call `work` for every item, several at a time; the first error is raised.

    Products of matrices use one thread each meanwhile, and a `for_each` inside `work` runs one item after another:
    more threads than cores would only wait for each other.
    """
    number = num_threads() if threads is None else threads
    pieces = list(items)
    if number < 2 or len(pieces) < 2 or getattr(_here, "inside", False):
        for piece in pieces:
            work(piece)
        return
    with (
        threadpool_limits(1, user_api="blas"),
        ThreadPoolExecutor(min(number, len(pieces)), initializer=_enter) as pool,
    ):
        for done in [pool.submit(work, piece) for piece in pieces]:
            done.result()


_here = threading.local()


def _enter() -> None:
    _here.inside = True
