"""Batches of waiting searches: each search gets its own result and waits for nothing else."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from stillroom.core.ids import ChunkId
from stillroom.retrieval.index.search_batcher import OnFound, SearchBatcher
from stillroom.retrieval.ranking import Ranking

Queries = Sequence[NDArray[np.float32]]


def ranking_of(query: NDArray[np.float32], kind: str) -> Ranking:
    return [(ChunkId(int(query[0])), float(len(kind)))]


def queued(
    pool: ThreadPoolExecutor, batcher: SearchBatcher[str], asked: Sequence[tuple[int, str]]
) -> list[Future[Ranking | None]]:
    """Start searches one after the other, so that the order of arrival is known."""
    futures = []
    for count, (number, kind) in enumerate(asked, 1):
        futures.append(pool.submit(batcher.search, np.array([number], dtype=np.float32), kind))
        while batcher.num_waiting < count:
            threading.Event().wait(0.001)
    return futures


def run_while_held(
    search: Callable[[Queries, str, OnFound], None], asked: Sequence[tuple[int, str]]
) -> list[Future[Ranking | None]]:
    lock = threading.Lock()
    batcher = SearchBatcher(lock, search)
    with ThreadPoolExecutor(len(asked)) as pool, lock:
        futures = queued(pool, batcher, asked)
    return futures


def test_waiting_searches_of_a_kind_are_one_batch() -> None:
    batches: list[tuple[str, list[int]]] = []

    def search(queries: Queries, kind: str, on_found: OnFound) -> None:
        batches.append((kind, [int(query[0]) for query in queries]))
        for number, query in enumerate(queries):
            on_found(number, ranking_of(query, kind))

    asked = [(1, "a"), (2, "bb"), (3, "a"), (4, "a"), (5, "bb")]
    futures = run_while_held(search, asked)

    assert sorted(batches) == [("a", [1, 3, 4]), ("bb", [2, 5])]
    assert [future.result() for future in futures] == [[(number, float(len(kind)))] for number, kind in asked]


def test_result_is_returned_before_the_rest_of_the_batch() -> None:
    may_go_on = threading.Event()

    def search(queries: Queries, kind: str, on_found: OnFound) -> None:
        on_found(1, ranking_of(queries[1], kind))
        assert may_go_on.wait(30)
        on_found(0, ranking_of(queries[0], kind))

    lock = threading.Lock()
    batcher = SearchBatcher(lock, search)
    with ThreadPoolExecutor(2) as pool:
        with lock:
            first, second = queued(pool, batcher, [(1, "a"), (2, "a")])
        assert second.result(30) == [(2, 1.0)] and not first.done()
        may_go_on.set()
        assert first.result(30) == [(1, 1.0)]


def test_error_reaches_searches_without_a_result() -> None:
    def search(queries: Queries, kind: str, on_found: OnFound) -> None:
        on_found(1, ranking_of(queries[1], kind))
        raise ValueError("damaged")

    first, second, third = run_while_held(search, [(1, "a"), (2, "a"), (3, "a")])

    assert second.result() == [(2, 1.0)]
    for future in (first, third):
        with pytest.raises(ValueError, match="damaged"):
            future.result()


def test_searches_of_an_interrupted_leader_return_none() -> None:
    def search(queries: Queries, kind: str, on_found: OnFound) -> None:
        raise KeyboardInterrupt

    first, second = run_while_held(search, [(1, "a"), (2, "a")])

    assert isinstance(first.exception(), KeyboardInterrupt)
    assert second.result() is None


def test_next_batch_has_its_own_leader() -> None:
    def search(queries: Queries, kind: str, on_found: OnFound) -> None:
        for number, query in enumerate(queries):
            on_found(number, ranking_of(query, kind))

    batcher = SearchBatcher(threading.Lock(), search)

    for number in range(3):
        assert batcher.search(np.array([number], dtype=np.float32), "a") == [(number, 1.0)]
    assert batcher.num_waiting == 0
