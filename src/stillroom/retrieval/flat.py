"""Exact dense search: every vector is compared. Right up to 100,000 chunks, and the oracle of approximate indexes."""

from collections.abc import Mapping, Sequence
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from stillroom.core.ids import ChunkId
from stillroom.retrieval.ranking import Ranking, top_k


class FlatIndex:
    """A `VectorIndex` on faiss' IndexFlatIP."""

    def __init__(self, dimension: int) -> None:
        self._dimension = dimension
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dimension))

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def add(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self._index.add_with_ids(np.ascontiguousarray(vectors, dtype=np.float32), ids)

    def remove(self, ids: Sequence[int]) -> None:
        if len(ids):
            self._index.remove_ids(np.asarray(ids, dtype=np.int64))

    def search(self, query: NDArray[np.float32], k: int) -> Ranking:
        def fetch(n: int) -> Ranking:
            scores, ids = self._index.search(query.reshape(1, -1), n)
            found = zip(ids[0].tolist(), scores[0].tolist(), strict=True)
            return [(ChunkId(chunk_id), score) for chunk_id, score in found if chunk_id >= 0]

        return top_k(fetch, k, len(self))

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        return {"flat": faiss.serialize_index(self._index)}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        if "flat" not in arrays:
            raise ValueError("not a flat index")
        index = faiss.deserialize_index(arrays["flat"])
        if index.d != self._dimension:
            raise ValueError(f"the index has {index.d} dimensions, the embedder {self._dimension}")
        self._index = index
