"""Indexes leave no OpenMP team with threads that add or search."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from stillroom.config.settings import IndexConfig
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.index.hnsw import HnswIndex
from stillroom.retrieval.index.ivf_pq import IvfPqIndex
from stillroom.retrieval.vector_index import VectorIndex
from tests.ops.test_thread_pools import needs_teams, num_system_threads
from tests.server.fakes import until

DIMENSION = 32


@needs_teams
@pytest.mark.parametrize(
    "make",
    [
        lambda: FlatIndex(DIMENSION),
        lambda: HnswIndex(DIMENSION, IndexConfig(kind="hnsw")),
        lambda: IvfPqIndex(DIMENSION, IndexConfig(kind="ivf_pq", nbits=4)),
    ],
)
def test_no_openmp_team_stays_with_the_caller(make: Callable[[], VectorIndex]) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((1500, DIMENSION)).astype(np.float32)
    before, is_done, leave = num_system_threads(), threading.Event(), threading.Event()

    def use() -> None:
        index = make()
        for start in (0, 700):  # the second time ivf_pq is trained
            index.add(np.arange(start, start + 700, dtype=np.int64), vectors[start : start + 700])
        index.search(vectors[0], 5)
        index.exact(vectors[:200], 5)  # type: ignore[attr-defined]
        is_done.set()
        leave.wait(30)

    thread = threading.Thread(target=use)
    thread.start()
    try:
        assert is_done.wait(60)
        until(lambda: num_system_threads() <= before + 1)
    finally:
        leave.set()
        thread.join()
