"""Pieces of work on several threads: all are done, errors surface, and inner pieces do not multiply the threads."""

from __future__ import annotations

import os
import threading

import pytest
from threadpoolctl import threadpool_info

from rocktokens.parallel import for_each, num_threads


def test_every_item_is_worked_on_once():
    done: list[int] = []
    for_each(done.append, range(50), threads=3)
    assert sorted(done) == list(range(50))


def test_the_first_error_is_raised():
    def work(item: int) -> None:
        if item == 3:
            raise ValueError("piece 3")

    with pytest.raises(ValueError, match="piece 3"):
        for_each(work, range(10), threads=2)


def test_work_inside_work_adds_no_threads():
    seen: set[int] = set()
    done: list[tuple[int, int]] = []

    def outer(item: int) -> None:
        def inner(number: int) -> None:
            seen.add(threading.get_ident())
            done.append((item, number))

        for_each(inner, range(20), threads=2)

    for_each(outer, range(4), threads=2)
    assert sorted(done) == [(item, number) for item in range(4) for number in range(20)]
    assert len(seen) <= 2


def test_an_error_inside_comes_out_and_the_next_call_works():
    def inner(number: int) -> None:
        raise IndexError(f"inner {number}")

    with pytest.raises(IndexError, match="inner"):
        for_each(lambda _: for_each(inner, range(3), threads=2), range(4), threads=2)
    test_every_item_is_worked_on_once()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_has_threads_of_its_own():
    test_every_item_is_worked_on_once()
    child = os.fork()
    if child == 0:
        done: list[int] = []
        for_each(done.append, range(50), threads=3)
        os._exit(0 if sorted(done) == list(range(50)) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_products_use_one_thread_meanwhile():
    def blas() -> list[int]:
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    before, inside = blas(), []
    for_each(lambda _: inside.extend(blas()), range(2), threads=2)
    assert set(inside) == {1}
    assert blas() == before


def test_the_limit_of_threads_is_the_usual_variable(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert num_threads() == 1
