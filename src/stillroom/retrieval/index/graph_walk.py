"""One search of an HNSW graph of faiss, step by step: what `hnsw` does in stages.

The walk is that of faiss: from the entry down to level 0, then always on from the nearest row that was not expanded
yet, with as many candidates as `ef_search` says. The steps are compiled (`ops/cpu_graph_walk.py`). It ends with the
results of faiss, with two exceptions: of equal scores faiss keeps whichever its heaps happen to keep, and this the row
that was added first; and scores that differ by less than rounding may be taken in another order on the way. The scores
of results are computed by faiss: for the same rows they are the same to the last bit.
"""

from typing import Any

import faiss as _faiss
import numpy as np
from numpy.typing import NDArray

from stillroom.ops.cpu_graph_walk import HIDDEN, enter, rows_of, walk
from stillroom.retrieval.vector_index import compared

faiss: Any = _faiss  # its type information lacks what is made at import


class WalkableGraph:
    """Views of a graph's arrays. They are good until the graph changes."""

    def __init__(self, graph: Any, hidden: NDArray[np.int64]) -> None:
        """
        Args:
            graph: an IndexHNSWFlat that holds vectors.
            hidden: rows that are walked over and never results.
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
        """Vectors [n, d]; neighbours of all rows and levels; where each row's begin; where each level's begin in it."""
        self.entry = (int(hnsw.entry_point), int(hnsw.max_level))
        """Row and level."""
        self.hidden = hidden

    def scores(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Of these rows, computed as faiss does in a search."""
        return compared(self._storage, query, rows)


class GraphWalk:
    """A search that is under way."""

    def __init__(self, graph: WalkableGraph, query: NDArray[np.float32], k: int, ef_search: int) -> None:
        """
        Args:
            k: results, at most `ef_search`.
        """
        self._graph = graph
        self._query = np.array(query, dtype=np.float32)
        """A copy: the compiled code knows no arrays that are read-only."""
        num_found = k if len(graph.hidden) else 0  # else the beam begins with them
        self._k = k
        self._lists = (
            np.empty(ef_search, dtype=np.int64),
            np.empty(num_found, dtype=np.int64),
            np.zeros(2, dtype=np.int64),
        )
        """The beam, the results, and how many there are in both."""
        self._marks = np.zeros(len(graph.arrays[0]), dtype=np.uint8)
        self._marks[graph.hidden] = HIDDEN
        enter(self._query, graph.arrays, graph.entry, self._lists, self._marks)

    def go_on(self, num_steps: int) -> bool:
        """Expand up to so many more rows; whether the walk is at its end."""
        return walk(self._query, self._graph.arrays, self._lists, self._marks, num_steps)

    def best(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows and scores of up to k results so far, best first."""
        beam, found, (num_beam, num_found) = self._lists
        rows = rows_of(found[:num_found] if len(self._graph.hidden) else beam[: min(num_beam, self._k)])
        return rows, self._graph.scores(self._query, rows)
