"""What a dense index does. Implementations: `flat` (exact), `hnsw` and `ivf_pq` (approximate), `qdrant_index`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import faiss as _faiss
import numpy as np
from numpy.typing import NDArray

from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.ranking import Ranking

faiss: Any = _faiss  # its type information lacks what is made at import

NUM_STAGES = 4
"""Lists of a search where nothing else is asked for, as in RAGCache's figure 11."""


@contextmanager
def one_thread() -> Iterator[None]:
    """faiss with one thread, for whoever calls.

    A single search is too short to share out: where the cores are busy with generating, faiss' threads wait for each
    other at barriers, and a search of 50 us was seen to take 12 ms. Training is a long row of such short loops.
    """
    num_threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(num_threads)


def compared(storage: Any, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Scores [r] of a query [d] and rows [r] of an index of whole vectors, computed as a search of faiss does."""
    scores, query = np.empty(len(rows), dtype=np.float32), np.ascontiguousarray(query, dtype=np.float32)
    if len(rows):
        vectors, pointer = faiss.downcast_index(storage), faiss.swig_ptr
        rows = np.ascontiguousarray(rows)
        with one_thread():
            vectors.compute_distance_subset(1, pointer(query), len(rows), pointer(scores), pointer(rows))
    return scores


def stages(count: int, num_stages: int) -> list[range]:
    """At most `num_stages` runs of nearly equal length that cover `count` things; none is empty unless all are."""
    num = max(1, min(count, num_stages))
    return [range(count * stage // num, count * (stage + 1) // num) for stage in range(num)]


class VectorIndex(Protocol):
    """Vectors of length 1 by chunk id; the score is the inner product, so the cosine. Not thread-safe."""

    def __len__(self) -> int:
        """Chunks that can be found."""
        ...

    def add(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Add vectors [n, d] under ids [n], none of which is in the index."""
        ...

    def remove(self, ids: Sequence[int]) -> None:
        """Remove what there is of these ids."""
        ...

    def search(
        self, query: NDArray[np.float32], k: int, effort: int | None = None, allowed: AllowedIds | None = None
    ) -> Ranking:
        """The k best for a query [d], best first; fewer where the index holds fewer.

        Args:
            effort: how hard an approximate index looks (`ef_search`, `nprobe`); None as configured. Exact ones ignore
                it.
            allowed: the only chunks that may be found; None allows all. Those of an approximate index that are few are
                all compared, and for others it looks as much harder as they are fewer.
        """
        ...

    def search_staged(
        self,
        query: NDArray[np.float32],
        k: int,
        num_stages: int,
        effort: int | None = None,
        allowed: AllowedIds | None = None,
    ) -> Iterator[Ranking]:
        """The same search in stages: the k best of what has been looked at after each. The last is what `search` gives
        (of `hnsw` with two exceptions, see `graph_walk`).

        Whoever iterates may stop at any stage. Until then the index must not change.

        Args:
            num_stages: at most so many lists; fewer where there is less to look at, at least one.
        """
        ...

    def in_order(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32] | None]]:
        """Ids [n] and full vectors [n, d] of all that is in it, a few thousand at a time, for checking it; None where
        it keeps no full vectors.

        Raises:
            CorruptKnowledgeBaseError: a part of its file is damaged that nobody had asked for yet.
        """
        ...

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Everything, to be stored."""
        ...

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Become what `to_arrays` described.

        Raises:
            ValueError: these arrays are not of such an index.
        """
        ...
