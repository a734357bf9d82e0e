"""Work shared out over the cores of this machine by threads: numpy releases the interpreter while it computes."""

from __future__ import annotations

import os
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
    """Call `work` for every item, several at a time; an error in one of them cancels the rest and is raised.

    Each item writes to a place of its own, so results do not depend on the number of threads. Products of matrices use
    one thread each meanwhile.
    """
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(threads or num_threads()) as pool:
        running = [pool.submit(work, item) for item in items]
        try:
            for each in running:
                each.result()
        finally:
            pool.shutdown(cancel_futures=True)
