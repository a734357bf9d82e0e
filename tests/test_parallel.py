"""Pieces of work on several threads: all are done, errors surface, and inner pieces do not multiply the threads."""

from __future__ import annotations

import pytest
from threadpoolctl import threadpool_info

from rocktokens.detect.parallel import for_each, num_threads


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
