"""Work shared out over the cores of this machine by threads: numpy releases the interpreter while it computes.

Results must not depend on the number of threads: each piece writes to a place of its own. This module knows nothing of
what is computed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import TypeVar

from threadpoolctl import threadpool_limits

Item = TypeVar("Item")
First = TypeVar("First")
Second = TypeVar("Second")


def num_threads() -> int:
    """Cores that this process may use; OMP_NUM_THREADS, where set, is the limit, as it is for other libraries."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdigit() and int(limit) > 0 else cores


def for_each(work: Callable[[Item], object], items: Iterable[Item], *, threads: int | None = None) -> None:
    """Call `work` for every item, several at a time; an error in one of them ends the rest and is raised.

    The calling thread works too, and threads that have nothing else to do help it. So `work` may call `for_each`
    again: there are never more threads than asked for, and none waits for another's items. Products of matrices use
    one thread each meanwhile.
    """
    number = num_threads() if threads is None else threads
    pieces = list(items)
    if number < 2 or len(pieces) < 2:
        for piece in pieces:
            work(piece)
        return
    left = deque(pieces)

    def take() -> None:
        while True:
            try:
                piece = left.popleft()
            except IndexError:
                return
            try:
                work(piece)
            except BaseException:
                left.clear()
                raise

    with _one_thread_for_products():
        helpers = [_pool(number).submit(take) for _ in range(min(number, len(pieces)) - 1)]
        try:
            take()
        finally:
            done = [helper for helper in helpers if not helper.cancel()]
            wait(done)
        for helper in done:
            helper.result()


def together(
    first: Callable[[], First], second: Callable[[], Second], *, threads: int | None = None
) -> tuple[First, Second]:
    """What both give, computed side by side."""
    firsts: list[First] = []
    seconds: list[Second] = []
    for_each(lambda task: task(), (lambda: firsts.append(first()), lambda: seconds.append(second())), threads=threads)
    return firsts[0], seconds[0]


@cache
def _pool(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number - 1, thread_name_prefix="rocktokens")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has none of the threads


class _Products:
    """How many calls want products on one thread, and what to undo when none does."""

    lock = Lock()
    callers = 0
    limit: threadpool_limits | None = None


@contextmanager
def _one_thread_for_products() -> Iterator[None]:
    with _Products.lock:
        _Products.callers += 1
        if _Products.limit is None:
            _Products.limit = threadpool_limits(1, user_api="blas")
    try:
        yield
    finally:
        with _Products.lock:
            _Products.callers -= 1
            if _Products.callers == 0 and _Products.limit is not None:
                _Products.limit.restore_original_limits()
                _Products.limit = None
