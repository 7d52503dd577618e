"""Searches that wait are made together: everyone gets his own result, and none waits for more than his own."""

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
    pool: ThreadPoolExecutor, together: SearchBatcher[str], asked: Sequence[tuple[int, str]]
) -> list[Future[Ranking | None]]:
    """One after the other, so that it is known who came first."""
    futures = []
    for count, (number, kind) in enumerate(asked, 1):
        futures.append(pool.submit(together.search, np.array([number], dtype=np.float32), kind))
        while together.num_waiting < count:
            threading.Event().wait(0.001)
    return futures


def run_while_held(
    search: Callable[[Queries, str, OnFound], None], asked: Sequence[tuple[int, str]]
) -> list[Future[Ranking | None]]:
    lock = threading.Lock()
    together = SearchBatcher(lock, search)
    with ThreadPoolExecutor(len(asked)) as pool, lock:
        futures = queued(pool, together, asked)
    return futures


def test_all_that_wait_are_one_batch_of_their_kind() -> None:
    batches: list[tuple[str, list[int]]] = []

    def search(queries: Queries, kind: str, on_found: OnFound) -> None:
        batches.append((kind, [int(query[0]) for query in queries]))
        for number, query in enumerate(queries):
            on_found(number, ranking_of(query, kind))

    asked = [(1, "a"), (2, "bb"), (3, "a"), (4, "a"), (5, "bb")]
    futures = run_while_held(search, asked)

    assert sorted(batches) == [("a", [1, 3, 4]), ("bb", [2, 5])]
    assert [future.result() for future in futures] == [[(number, float(len(kind)))] for number, kind in asked]


def test_a_result_is_there_before_the_rest_of_the_batch() -> None:
    may_go_on = threading.Event()

    def search(queries: Queries, kind: str, on_found: OnFound) -> None:
        on_found(1, ranking_of(queries[1], kind))
        assert may_go_on.wait(30)
        on_found(0, ranking_of(queries[0], kind))

    lock = threading.Lock()
    together = SearchBatcher(lock, search)
    with ThreadPoolExecutor(2) as pool:
        with lock:
            first, second = queued(pool, together, [(1, "a"), (2, "a")])
        assert second.result(30) == [(2, 1.0)] and not first.done()
        may_go_on.set()
        assert first.result(30) == [(1, 1.0)]


def test_an_error_reaches_those_who_have_no_result_yet() -> None:
    def search(queries: Queries, kind: str, on_found: OnFound) -> None:
        on_found(1, ranking_of(queries[1], kind))
        raise ValueError("damaged")

    first, second, third = run_while_held(search, [(1, "a"), (2, "a"), (3, "a")])

    assert second.result() == [(2, 1.0)]
    for future in (first, third):
        with pytest.raises(ValueError, match="damaged"):
            future.result()


def test_who_is_not_served_by_an_interrupted_leader_hears_of_it() -> None:
    def search(queries: Queries, kind: str, on_found: OnFound) -> None:
        raise KeyboardInterrupt

    first, second = run_while_held(search, [(1, "a"), (2, "a")])

    assert isinstance(first.exception(), KeyboardInterrupt)
    assert second.result() is None


def test_the_next_batch_has_a_leader_of_its_own() -> None:
    def search(queries: Queries, kind: str, on_found: OnFound) -> None:
        for number, query in enumerate(queries):
            on_found(number, ranking_of(query, kind))

    together = SearchBatcher(threading.Lock(), search)

    for number in range(3):
        assert together.search(np.array([number], dtype=np.float32), "a") == [(number, 1.0)]
    assert together.num_waiting == 0
