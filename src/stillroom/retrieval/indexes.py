"""The dense and the sparse index of one knowledge base, as projections of its corpus.

Everyone may read: the dense index lives in memory and follows the corpus by itself, the sparse one shows what the
writer has committed. Only the holder of the write lock writes the files (`write`), so a reader never fights the writer.
A dense index of the kind `qdrant` is a collection in place of a file (`qdrant_index`).
A missing, damaged or foreign file is rebuilt from the corpus; nothing is embedded again.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig, QdrantConfig
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId
from stillroom.errors import ConfigError, CorruptKnowledgeBaseError
from stillroom.retrieval.bm25 import Bm25Index
from stillroom.retrieval.corpus import Corpus
from stillroom.retrieval.flat import FlatIndex
from stillroom.retrieval.hnsw import HnswIndex
from stillroom.retrieval.index_file import load_arrays, save_arrays
from stillroom.retrieval.ivf_pq import IvfPqIndex
from stillroom.retrieval.qdrant_collection import QdrantCollection
from stillroom.retrieval.qdrant_index import QdrantIndex
from stillroom.retrieval.ranking import Ranking
from stillroom.retrieval.tuning import Tuner
from stillroom.retrieval.vector_index import VectorIndex

_BATCH = 4096
"""Chunks read from the corpus at a time."""

_MAX_SHARE_REMOVED = 0.2


class Indexes:
    """Thread-safe."""

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        config: IndexConfig,
        dimension: int,
        qdrant: QdrantConfig | None = None,
    ) -> None:
        self._folder = folder
        self._qdrant = qdrant or QdrantConfig()
        self._collection: QdrantIndex | None = None
        """The dense index, if it is of this kind and was needed."""
        self._corpus = corpus
        self._config = config
        self._dimension = dimension
        self._dense_path = folder / "dense.npz"
        self._sparse_folder = folder / "sparse"
        self._lock = Lock()
        self._dense: VectorIndex | None = None
        self._dense_generation = 0
        self._saved_generation = 0
        """Of the dense index file when it was last read or written here."""
        self._sparse: Bm25Index | None = None
        self._tuner = Tuner(folder / "tuning.json", config, corpus.corpus_id)

    def search_dense(self, query: NDArray[np.float32], k: int) -> Ranking:
        """The k chunks nearest to a query [d] of length 1; the score is the cosine.

        Raises:
            ConfigError: the recall or the time that the configuration asks for cannot be had.
        """
        with self._lock:
            return self._search_dense(query, k)

    def search_dense_staged(self, query: NDArray[np.float32], k: int, num_stages: int) -> Iterator[Ranking]:
        """`search_dense` in stages (see `staged`). Between two of them nobody waits for this search; where the index
        has changed there, the rest is one plain search. Raises as `search_dense`, with the first list."""
        with self._lock:
            dense = self._current_dense()
            generation = self._dense_generation
            lists = dense.search_staged(query, k, num_stages, self._tuner.effort(dense))
        is_same = True
        while is_same:
            with self._lock:
                is_same = self._dense_generation == generation
                found = next(lists, None) if is_same else self._search_dense(query, k)
            if found is None:
                return
            yield found

    def search_sparse(self, text: str, k: int) -> Ranking:
        """The k best chunks by BM25."""
        with self._lock:
            sparse = self._current_sparse()
        return sparse.search(text, k)

    def complete(
        self, query: NDArray[np.float32], text: str, dense: Ranking, sparse: Ranking
    ) -> tuple[dict[ChunkId, float], dict[ChunkId, float]]:
        """Cosine and BM25 score of each chunk of either ranking, computed where it is missing; those that are gone are
        left out."""
        cosines, bm25 = dict(dense), dict(sparse)
        found, vectors = self._corpus.embeddings([chunk_id for chunk_id in bm25 if chunk_id not in cosines])
        if len(found):
            cosines |= zip(map(ChunkId, found.tolist()), (vectors @ query).tolist(), strict=True)
        with self._lock:
            index = self._current_sparse()
        missing = index.scores(text, [chunk_id for chunk_id in cosines if chunk_id not in bm25])
        return cosines, {chunk_id: bm25[chunk_id] if chunk_id in bm25 else missing[chunk_id] for chunk_id in cosines}

    def current(self) -> tuple[VectorIndex, Bm25Index]:
        """The dense and the sparse index, brought up to date; for looking at, while nobody writes."""
        with self._lock:
            return self._current_dense(), self._current_sparse()

    def needs_write(self) -> bool:
        """Whether a file is missing, damaged or behind the corpus, so that `write` would help who comes next."""
        with self._lock:
            generation = self._corpus.generation
            if not self._is_sparse_current(self._current_sparse(), generation):
                return True
            if self._config.kind == "qdrant":
                return self._open_collection().is_behind()
            self._current_dense()
            return self._saved_generation != generation

    def write(self) -> None:
        """Bring both files up to date. Only under the write lock.

        Raises:
            IndexUnavailableError: the dense index is on a server that cannot be reached; the sparse one is written.
        """
        if self._config.kind == "qdrant":
            try:
                self.write_collection()
            finally:
                self._write_sparse_if_behind()
            return
        with self._lock:
            dense = self._current_dense()
            generation = self._dense_generation
            arrays = dense.to_arrays() if generation != self._saved_generation else None
            with contextlib.suppress(ConfigError):  # an impossible wish must not keep documents from being added
                self._tuner.save(dense)
        if arrays is not None:
            arrays["generation"] = np.array(generation)
            arrays["corpus_id"] = np.array(self._corpus.corpus_id)
            save_arrays(self._dense_path, arrays)
            self._saved_generation = generation
        self._write_sparse_if_behind()

    def write_collection(self) -> None:
        """Bring the collection up to date, if the dense index is one; while documents are added, so that it does not
        fall far behind. Only under the write lock. Raises as `write`."""
        if self._config.kind == "qdrant":
            with self._lock:
                collection = self._open_collection()
            collection.catch_up()  # others may search meanwhile

    def close(self) -> None:
        """Let go of the collection. Idempotent."""
        with self._lock:
            if self._collection is not None:
                self._collection.close()
                self._collection = self._dense = None

    # Dense

    def _search_dense(self, query: NDArray[np.float32], k: int) -> Ranking:
        dense = self._current_dense()
        return dense.search(query, k, self._tuner.effort(dense))

    def _current_dense(self) -> VectorIndex:
        """The dense index, brought up to date in memory."""
        if self._config.kind == "qdrant":
            self._dense = self._open_collection()
            self._dense_generation = self._dense.follow()
            return self._dense
        if self._dense is None:
            self._dense = self._load_dense()
        generation = self._corpus.generation
        if generation != self._dense_generation:
            changes = self._corpus.changes_since(self._dense_generation)
            self._dense.remove([*changes.removed, *changes.added])
            for start in range(0, len(changes.added), _BATCH):
                ids, vectors = self._corpus.embeddings(changes.added[start : start + _BATCH])
                if len(ids):
                    self._dense.add(ids, vectors)
            self._dense_generation = changes.generation
        return self._dense

    def _load_dense(self) -> VectorIndex:
        index = self._empty_dense()
        try:
            arrays = load_arrays(self._dense_path)
            generation = int(arrays["generation"])
            is_ours = str(arrays["corpus_id"]) == self._corpus.corpus_id and generation <= self._corpus.generation
            if is_ours:
                index.restore(arrays)
                self._dense_generation = self._saved_generation = generation
                return index
        except (FileNotFoundError, CorruptKnowledgeBaseError, ValueError, KeyError, RuntimeError):
            pass  # rebuilt from the corpus
        return self._empty_dense()

    def _empty_dense(self) -> VectorIndex:
        self._dense_generation = self._saved_generation = 0
        if self._config.kind == "hnsw":
            return HnswIndex(self._dimension, self._config)
        if self._config.kind == "ivf_pq":
            return IvfPqIndex(self._dimension, self._config)
        return FlatIndex(self._dimension)

    def _open_collection(self) -> QdrantIndex:
        if self._collection is None:
            place = QdrantCollection(
                self._qdrant, self._config, self._folder / "qdrant", self._corpus.corpus_id, self._dimension
            )
            self._collection = QdrantIndex(place, self._corpus, self._dimension, self._config.ef_search)
        return self._collection

    # Sparse

    def _current_sparse(self) -> Bm25Index:
        if self._sparse is None:
            self._sparse = Bm25Index(self._sparse_folder, self._corpus.corpus_id)
        elif self._sparse.generation != self._corpus.generation:
            self._sparse.refresh()
        return self._sparse

    def _is_sparse_current(self, sparse: Bm25Index, generation: int) -> bool:
        return sparse.generation == generation and len(sparse) == self._corpus.num_chunks

    def _write_sparse_if_behind(self) -> None:
        with self._lock:
            sparse = self._current_sparse()
        if not self._is_sparse_current(sparse, self._corpus.generation):
            self._write_sparse(sparse)

    def _write_sparse(self, sparse: Bm25Index) -> None:
        if sparse.generation >= self._corpus.generation:  # from another corpus, or damaged
            sparse.clear()
        is_rebuild = sparse.share_removed > _MAX_SHARE_REMOVED
        changes = self._corpus.changes_since(0 if is_rebuild else sparse.generation)
        try:
            removed = () if is_rebuild else changes.removed
            sparse.apply(removed, self._chunks(changes.added), changes.generation, is_rebuild=is_rebuild)
        except ValueError:  # damaged
            sparse.clear()
            changes = self._corpus.changes_since(0)
            sparse.apply((), self._chunks(changes.added), changes.generation)

    def _chunks(self, chunk_ids: Sequence[ChunkId]) -> Iterator[Chunk]:
        for start in range(0, len(chunk_ids), _BATCH):
            batch = chunk_ids[start : start + _BATCH]
            found = self._corpus.chunks(batch)
            yield from (found[chunk_id] for chunk_id in batch if chunk_id in found)
