"""Step-by-step search of a faiss HNSW graph, for staged searches of `hnsw`.

The walk is that of faiss: from the entry point down to level 0, then from the nearest row not yet expanded, with
`ef_search` candidates. Steps are compiled (`ops/cpu_graph_walk.py`). The result is that of faiss with two exceptions:
among equal scores faiss keeps an arbitrary row and this walk the row added first, and scores that differ by less than
rounding may be visited in another order. faiss computes the scores of results, so they are bit-identical.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.ops.cpu_graph_walk import HIDDEN, enter, rows_of, walk
from stillroom.retrieval.lazy_faiss import faiss
from stillroom.retrieval.vector_index import exact_scores


class WalkableGraph:
    """Views of a graph's arrays, valid until the graph changes."""

    def __init__(self, graph: Any, hidden: NDArray[np.int64]) -> None:
        """
        Args:
            graph: an IndexHNSWFlat that holds vectors.
            hidden: rows to walk through and never to return.
        """
        hnsw, self._storage = graph.hnsw, faiss.downcast_index(graph.storage)
        size, dimension = graph.ntotal, graph.d
        view = faiss.rev_swig_ptr
        self.arrays = (
            view(self._storage.get_xb(), size * dimension).reshape(size, dimension),
            view(hnsw.neighbors.data(), hnsw.neighbors.size()),
            view(hnsw.offsets.data(), hnsw.offsets.size()).view(np.int64),
            faiss.vector_to_array(hnsw.cum_nneighbor_per_level).astype(np.int64),
        )
        """Vectors [n, d]; neighbours of all rows and levels; start of each row's neighbours; start of each level's."""
        self.entry = (int(hnsw.entry_point), int(hnsw.max_level))
        """Row and level."""
        self.hidden = hidden

    def scores(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the scores of rows, computed as faiss does in a search."""
        return exact_scores(self._storage, query, rows)


class GraphWalk:
    """A search in progress."""

    def __init__(self, graph: WalkableGraph, query: NDArray[np.float32], k: int, ef_search: int) -> None:
        """
        Args:
            k: results, at most `ef_search`.
        """
        self._graph = graph
        self._query = np.array(query, dtype=np.float32)
        """A copy: the compiled code does not accept read-only arrays."""
        num_found = k if len(graph.hidden) else 0  # without hidden rows the results are the head of the beam
        self._k = k
        self._lists = (
            np.empty(ef_search, dtype=np.int64),
            np.empty(num_found, dtype=np.int64),
            np.zeros(2, dtype=np.int64),
        )
        """The beam, the results, and the lengths of both."""
        self._marks = np.zeros(len(graph.arrays[0]), dtype=np.uint8)
        self._marks[graph.hidden] = HIDDEN
        enter(self._query, graph.arrays, graph.entry, self._lists, self._marks)

    def advance(self, num_steps: int) -> bool:
        """Expand up to `num_steps` more rows. Returns whether the walk has ended."""
        return walk(self._query, self._graph.arrays, self._lists, self._marks, num_steps)

    def best(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return rows and scores of the best results so far, at most k, best first."""
        beam, found, (num_beam, num_found) = self._lists
        rows = rows_of(found[:num_found] if len(self._graph.hidden) else beam[: min(num_beam, self._k)])
        return rows, self._graph.scores(self._query, rows)
