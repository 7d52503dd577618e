"""Interfaces of dense indexes (`flat`, `hnsw`, `ivf_pq`, `tiered_index`, and those of servers), and shared helpers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.lazy_faiss import faiss
from stillroom.retrieval.ranking import Ranking

NUM_STAGES = 4
"""Default number of stages of a search, as in RAGCache's figure 11."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit faiss to one thread.

    A single search is too short to parallelise: while the cores generate, faiss' threads wait for each other at
    barriers, and a search of 50 us was seen to take 12 ms. Training is a long series of such short loops.
    """
    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(num_threads)


def exact_scores(storage: Any, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return scores [r] of a query [d] against rows [r] of an index of full vectors, computed as faiss' search does."""
    scores, query = np.empty(len(rows), dtype=np.float32), np.ascontiguousarray(query, dtype=np.float32)
    if len(rows):
        vectors, pointer = faiss.downcast_index(storage), faiss.swig_ptr
        rows = np.ascontiguousarray(rows)
        with one_thread():
            vectors.compute_distance_subset(1, pointer(query), len(rows), pointer(scores), pointer(rows))
    return scores


def stages(count: int, num_stages: int) -> list[range]:
    """Split `count` items into at most `num_stages` ranges of nearly equal length, none empty unless `count` is 0."""
    num = max(1, min(count, num_stages))
    return [range(count * stage // num, count * (stage + 1) // num) for stage in range(num)]


class SearchedIndex(Protocol):
    """Unit vectors by chunk id; the score is the inner product, so the cosine. Not thread-safe.

    A staged search gives a ranking after each stage: the first ones are provisional, the last is that of the plain
    search. So a model can begin to read likely documents while the search continues (RAGCache 5.3).
    """

    def __len__(self) -> int: ...

    def search(
        self, query: NDArray[np.float32], k: int, effort: int | None = None, allowed: AllowedIds | None = None
    ) -> Ranking:
        """Return the k best for a query [d], or fewer if the index holds fewer.

        Args:
            effort: `ef_search` or `nprobe` of an approximate index; None takes the configured one.
            allowed: the only chunks that may be found; None allows all. An approximate index compares all allowed
                chunks if they are few, and otherwise searches as much wider as fewer are allowed.
        """
        return next(self.search_staged(query, k, 1, effort, allowed))

    def search_staged(
        self,
        query: NDArray[np.float32],
        k: int,
        num_stages: int,
        effort: int | None = None,
        allowed: AllowedIds | None = None,
    ) -> Iterator[Ranking]:
        """Yield the k best after each stage; the last ranking is that of `search` (for `hnsw` see `graph_walk`).

        The caller may stop at any stage. Precondition: the index does not change meanwhile.

        Args:
            num_stages: most rankings; an index with little to search yields fewer, but at least one.
        """
        ...

    def in_order(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32] | None]]:
        """Yield ids [n] and full vectors [n, d] of all entries in batches, for verification; None in place of vectors
        if the index keeps none.

        Raises:
            CorruptKnowledgeBaseError: a part of the index' file is damaged.
        """
        ...

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the whole index as arrays for a file."""
        ...


class VectorIndex(SearchedIndex, Protocol):
    """An index that is filled and stored by its owner."""

    def add(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Add vectors [n, d] under ids [n], none of which is in the index."""
        ...

    def remove(self, ids: Sequence[int]) -> None:
        """Remove those of these ids that are in the index."""
        ...

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Replace the content by that of `to_arrays`.

        Raises:
            ValueError: the arrays do not describe such an index.
        """
        ...
