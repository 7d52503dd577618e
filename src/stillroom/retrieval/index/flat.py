"""Exact dense index: compares every vector. For up to about 100,000 chunks, and the oracle of approximate indexes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.core.ids import ChunkId
from stillroom.ops.thread_pools import run_in_short_lived_thread
from stillroom.retrieval.filters.allowed import AllowedIds, FilterMemo
from stillroom.retrieval.lazy_faiss import faiss
from stillroom.retrieval.ranking import Ranking, best_of, ranked, top_k
from stillroom.retrieval.vector_index import VectorIndex, exact_scores, one_thread, stages

_BLOCK = 4096
"""Vectors per batch of `in_order`."""


class FlatIndex(VectorIndex):
    """A `VectorIndex` on faiss' IndexFlatIP."""

    def __init__(self, dimension: int) -> None:
        self._dimension = dimension
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))
        self._rows: FilterMemo[NDArray[np.int64]] = FilterMemo()

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def add(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self._rows.clear()
        self._index.add_with_ids(np.ascontiguousarray(vectors, dtype=np.float32), ids)

    def remove(self, ids: Sequence[int]) -> None:
        if len(ids):
            self._rows.clear()
            self._index.remove_ids(np.asarray(ids, dtype=np.int64))

    def search_staged(
        self,
        query: NDArray[np.float32],
        k: int,
        num_stages: int,
        effort: int | None = None,
        allowed: AllowedIds | None = None,
    ) -> Iterator[Ranking]:
        """See `VectorIndex`. A stage compares a run of the vectors."""
        found: Ranking = []
        chosen = None if allowed is None else self.rows_of(allowed)
        for rows in stages(len(self) if chosen is None else len(chosen), num_stages):
            more = (
                self._best(query, k, rows)
                if chosen is None
                else self._compared(query, k, chosen[rows.start : rows.stop])
            )
            found = ranked([*found, *more])[:k]
            yield found

    def rows_of(self, allowed: AllowedIds) -> NDArray[np.int64]:
        """Return the rows of the allowed chunks that are in the index, ascending."""
        return self._rows.get(allowed, lambda: np.flatnonzero(allowed.has(self.ids())))

    def ids(self) -> NDArray[np.int64]:
        """Return chunk ids [n] in the order of the vectors."""
        return np.array(faiss.vector_to_array(self._index.id_map), dtype=np.int64)

    def vectors(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return vectors [n, d] of ids [n]. Precondition: all ids are in the index."""
        found: NDArray[np.float32] = self._index.reconstruct_batch(ids)
        return found

    def in_order(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32] | None]]:
        ids = self.ids()
        for start in range(0, len(ids), _BLOCK):
            rows = ids[start : start + _BLOCK]
            yield rows, self._index.index.reconstruct_n(start, len(rows))

    def exact(self, queries: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """Return the ids [q, k] nearest to queries [q, d], padded with -1."""
        ids: NDArray[np.int64] = run_in_short_lived_thread(lambda: self._index.search(queries, k))[1]
        return ids

    def sample(self, num: int, rng: np.random.Generator) -> NDArray[np.float32]:
        """Return up to `num` distinct vectors [num, d]."""
        ids = self.ids()
        return self.vectors(np.sort(rng.choice(ids, min(num, len(ids)), replace=False)))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        return {"flat": faiss.serialize_index(self._index)}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if "flat" not in arrays:
            raise ValueError("not a flat index")
        index = faiss.deserialize_index(arrays["flat"])
        if index.d != self._dimension:
            raise ValueError(f"the index has {index.d} dimensions, the embedder {self._dimension}")
        self._index = index
        self._rows.clear()

    def _compared(self, query: NDArray[np.float32], k: int, rows: NDArray[np.int64]) -> Ranking:
        """Return the k best among these rows, scored as a search does."""
        scores = exact_scores(self._index.index, query, rows)
        return best_of(self.ids()[rows], scores, k)

    def _best(self, query: NDArray[np.float32], k: int, rows: range) -> Ranking:
        """Return the k best among a range of rows."""
        selector = faiss.IDSelectorRange(rows.start, rows.stop)  # the name keeps it alive: faiss stores a pointer
        parameters = faiss.SearchParameters(sel=selector)
        id_at = self._index.id_map.at

        def fetch(n: int) -> Ranking:
            with one_thread():
                scores, found = self._index.index.search(query.reshape(1, -1), n, params=parameters)
            pairs = zip(found[0].tolist(), scores[0].tolist(), strict=True)
            return [(ChunkId(id_at(row)), score) for row, score in pairs if row >= 0]

        return top_k(fetch, k, len(rows))
