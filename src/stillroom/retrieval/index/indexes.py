"""The dense and the sparse index of one knowledge base, as projections of its corpus.

Everyone may read: the dense index lives in memory and follows the corpus by itself, the sparse one shows what the
writer has committed. Only the holder of the write lock writes the files (`write`), so a reader never fights the writer.
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
from stillroom.errors import ConfigError, CorruptKnowledgeBaseError, StorageError
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.index.bm25 import Bm25Index
from stillroom.retrieval.index.dense_store import DenseStore
from stillroom.retrieval.index.qdrant_index import CollectionStore
from stillroom.retrieval.index.search_batcher import OnFound, SearchBatcher
from stillroom.retrieval.index.tiered_index import TieredIvfPqIndex
from stillroom.retrieval.index.tuning import Tuner
from stillroom.retrieval.ranking import Ranking
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.tiers.hot_lists import ListFigures, Spawn
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
        spawn: Spawn | None = None,
        qdrant: QdrantConfig | None = None,
    ) -> None:
        """
        Args:
            spawn: see `DenseStore`.
            qdrant: where the collection is, if the dense index is of that kind; None takes the defaults.
        """
        self._corpus = corpus
        self._folder = folder
        self._config, self._dimension = config, dimension
        self._sparse_folder = folder / "sparse"
        self._lock = Lock()
        """Of the dense index."""
        self._sparse_lock = Lock()
        self._dense: DenseStore | CollectionStore = (
            CollectionStore(folder, corpus, config, qdrant or QdrantConfig(), dimension)
            if config.kind == "qdrant"
            else DenseStore(folder, corpus, config, dimension, spawn)
        )
        self._has_tiers = config.has_tiers
        self._together = SearchBatcher(self._lock, self._search_together)
        self._sparse: Bm25Index | None = None
        self._tuner = Tuner(folder / "tuning.json", config, corpus.corpus_id)

    def search_dense(self, query: NDArray[np.float32], k: int, allowed: AllowedIds | None = None) -> Ranking:
        """The k chunks nearest to a query [d] of length 1; the score is the cosine. `allowed`: the only ones.

        Raises:
            ConfigError: the recall or the time that the configuration asks for cannot be had.
        """
        return next(self.search_dense_staged(query, k, 1, allowed))

    def search_dense_staged(
        self, query: NDArray[np.float32], k: int, num_stages: int, allowed: AllowedIds | None = None
    ) -> Iterator[Ranking]:
        """`search_dense` in stages (see `staged`). Between two of them nobody waits for this search; where the index
        has changed there, the rest is one plain search. With lists on disk, who would have to wait gets the last list
        only, from a search for all who wait without a filter (see `together`). Raises as `search_dense`, with the first
        list."""
        if self._has_tiers and allowed is None and self._lock.locked():
            ranking = self._together.search(query, k)
            if ranking is not None:
                yield ranking
                return
        with self._lock:
            dense = self._current_dense()
            generation = self._dense.generation
            lists = dense.search_staged(query, k, num_stages, self._effort(dense), allowed)
        is_same = True
        while is_same:
            with self._lock:
                is_same = self._dense.generation == generation
                try:
                    found = next(lists, None) if is_same else self._search_dense(query, k, allowed)
                except CorruptKnowledgeBaseError:
                    is_same, found = False, self._search_rebuilt(query, k, allowed)
            if found is None:
                return
            yield found

    def effort(self) -> int | None:
        """With which the dense index (its `nprobe` or `ef_search`) keeps the goal of the configuration, measured first
        where no measurement holds; None without a goal.

        Raises:
            ConfigError: no effort reaches the goal.
        """
        with self._lock:
            return self._effort(self._current_dense())

    def search_sparse(self, text: str, k: int, allowed: AllowedIds | None = None) -> Ranking:
        """The k best chunks by BM25. `allowed`: the only ones. Raises DamagedPostingsError."""
        return self._current_sparse().search(text, k, allowed)

    @property
    def sparse_generation(self) -> int:
        """Of the corpus, as far as words find it: behind while somebody writes."""
        return self._current_sparse().generation

    def complete(
        self, query: NDArray[np.float32], text: str, dense: Ranking, sparse: Ranking
    ) -> tuple[dict[ChunkId, float], dict[ChunkId, float]]:
        """Cosine and BM25 score of each chunk of either ranking, computed where it is missing; those that are gone are
        left out."""
        cosines, bm25 = dict(dense), dict(sparse)
        found, vectors = self._corpus.embeddings([chunk_id for chunk_id in bm25 if chunk_id not in cosines])
        if len(found):
            cosines |= zip(map(ChunkId, found.tolist()), (vectors @ query).tolist(), strict=True)
        index = self._current_sparse()
        missing = index.scores(text, [chunk_id for chunk_id in cosines if chunk_id not in bm25])
        return cosines, {chunk_id: bm25[chunk_id] if chunk_id in bm25 else missing[chunk_id] for chunk_id in cosines}

    def current(self) -> tuple[VectorIndex, Bm25Index]:
        """The dense and the sparse index, brought up to date; for looking at, while nobody writes."""
        with self._lock:
            dense = self._current_dense()
        return dense, self._current_sparse()

    def needs_write(self) -> bool:
        """Whether a file is missing, damaged or behind the corpus, so that `write` would help who comes next."""
        sparse = self._current_sparse()
        if not self._is_sparse_current(sparse, self._corpus.generation) or sparse.damaged_files():
            return True
        with self._lock:
            return self._dense.needs_write()

    def are_words_behind(self) -> bool:
        """Whether what words find lacks changes; cheap."""
        return self.sparse_generation != self._corpus.generation

    def are_word_files_damaged(self) -> bool:
        """Whether files of the postings are damaged, once what another process made anew is seen; cheap, as only files
        that have changed are read."""
        sparse = self._current_sparse()
        with self._sparse_lock:
            sparse.refresh()
        return bool(sparse.damaged_files())

    @property
    def are_words_damaged(self) -> bool:
        """Whether a search has found the postings damaged, and they have not been made anew yet."""
        return self._current_sparse().is_damaged

    def write(self) -> None:
        """Bring both up to date. Only under the write lock.

        Raises:
            IndexUnavailableError: the dense index is on a server that cannot be reached; the sparse one is written.
            StorageError: a file cannot be written. What is searched is as good as before.
        """
        try:
            with self._reporting():
                self._write_dense()
        finally:
            with self._reporting():
                self._write_sparse()

    def make_words_apart(self) -> bool:
        """Make postings for this process alone if there are none in the folder; for whoever may not write there.

        Returns:
            Whether what words find is all there now.

        Raises:
            OSError: there is no room among the system's temporary files either.
        """
        sparse = self._current_sparse()
        if self.are_words_behind() and not (sparse.generation and sparse.saved_generation):
            changes = self._corpus.changes_since(0)
            sparse.make_apart(self._chunks(changes.added), changes.generation)
        return not self.are_words_behind()

    def write_collection(self) -> None:
        """Bring the collection up to date, if the dense index is one; before and while documents are added, so that it
        does not fall far behind. Only under the write lock. Raises as `write`."""
        if isinstance(self._dense, CollectionStore):
            self._write_dense()

    def discard_dense(self) -> None:
        """The dense index has turned out to be damaged in its file: whoever needs it next gets it made anew."""
        with self._lock:
            self._dense.discard()

    def rebuild(self, *, dense: bool, sparse: bool) -> None:
        """Make either anew from the corpus. Only under the write lock. Raises as `write`."""
        with self._reporting():
            if dense:
                with self._lock:
                    self._dense.rebuild()
            if sparse:
                self._current_sparse().clear()
        self.write()

    @contextlib.contextmanager
    def opened_anew(self) -> Iterator[DenseStore | CollectionStore]:
        """The dense index as the next process would find it; an embedded collection, which only one may have open, as
        it is. Only under the write lock."""
        if isinstance(self._dense, CollectionStore):
            with self._lock:
                yield self._dense
            return
        store = DenseStore(self._folder, self._corpus, self._config, self._dimension)
        try:
            yield store
        finally:
            store.close()

    @property
    def list_figures(self) -> ListFigures | None:
        """Of lists in RAM and in a file; None where the dense index has no such tiers, or is not loaded."""
        return self._dense.figures

    def close(self) -> None:
        """Wait for what goes on beside searches, and let go of a collection. Idempotent."""
        if isinstance(self._dense, DenseStore):
            self._dense.close()
            return
        with self._lock:
            self._dense.close()

    # Dense

    def _current_dense(self) -> VectorIndex:
        """Raises: StorageError: it needs room on a disk, and there is none."""
        with self._reporting():
            return self._dense.current()

    def _search_dense(self, query: NDArray[np.float32], k: int, allowed: AllowedIds | None = None) -> Ranking:
        try:
            dense = self._current_dense()
            return dense.search(query, k, self._effort(dense), allowed)
        except CorruptKnowledgeBaseError:
            return self._search_rebuilt(query, k, allowed)

    def _search_rebuilt(self, query: NDArray[np.float32], k: int, allowed: AllowedIds | None) -> Ranking:
        """After a damaged file: all of it from the corpus."""
        self._dense.discard()
        dense = self._current_dense()
        return dense.search(query, k, self._effort(dense), allowed)

    def _search_together(self, queries: Sequence[NDArray[np.float32]], k: int, on_found: OnFound) -> None:
        """Under the lock."""
        try:
            dense = self._current_dense()
            assert isinstance(dense, TieredIvfPqIndex)
            dense.search_batch(np.stack(queries), k, on_found, self._effort(dense))
        except CorruptKnowledgeBaseError:
            self._dense.discard()
            for number, query in enumerate(queries):
                on_found(number, self._search_dense(query, k))

    def _effort(self, dense: VectorIndex) -> int | None:
        with _uncounted(dense):
            return self._tuner.effort(dense)

    def _write_dense(self) -> None:
        try:
            self._write_dense_as_it_is()
        except CorruptKnowledgeBaseError:
            self.discard_dense()
            self._write_dense_as_it_is()

    def _write_dense_as_it_is(self) -> None:
        with self._lock:
            write = self._dense.writing()
            if isinstance(self._dense, DenseStore):
                dense = self._dense.current()
                # an impossible wish must not keep documents from being added
                with contextlib.suppress(ConfigError), _uncounted(dense):
                    self._tuner.save(dense)
        if write is not None:
            write()

    # Sparse

    def _current_sparse(self) -> Bm25Index:
        """Nobody who searches by words waits for the dense index, which may be on a server."""
        with self._sparse_lock:
            if self._sparse is None:
                self._sparse = Bm25Index(self._sparse_folder, self._corpus.corpus_id, self._corpus.commit_id)
            elif self._sparse.generation != self._corpus.generation:
                self._sparse.refresh()
            return self._sparse

    def _strict_sparse(self) -> Bm25Index:
        """As it is on disk, for whoever is about to write there."""
        sparse = self._current_sparse()
        sparse.refresh(is_strict=True)
        return sparse

    def _is_sparse_current(self, sparse: Bm25Index, generation: int) -> bool:
        return sparse.generation == generation and len(sparse) == self._corpus.num_chunks

    def _write_sparse(self) -> None:
        sparse = self._strict_sparse()
        is_damaged = bool(sparse.damaged_files())
        if self._is_sparse_current(sparse, self._corpus.generation) and not is_damaged:
            return
        if is_damaged or sparse.generation >= self._corpus.generation:  # or from another corpus
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

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """A disk's errors in our words."""
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"the indexes in {self._folder} cannot be written: {error.strerror or error}; the documents are safe. "
                "Free some space or see to the disk: the next `stillroom add` or search then completes the indexes"
            ) from error


def _uncounted(dense: VectorIndex) -> contextlib.AbstractContextManager[None]:
    """Where the tuner searches, which is nothing that anybody asked for."""
    return dense.uncounted() if isinstance(dense, TieredIvfPqIndex) else contextlib.nullcontext()
