"""Dense and sparse index of one knowledge base, both projections of its corpus.

Any process may read: the dense index is in memory and follows the corpus, the sparse one shows the writer's commits.
Only the holder of the write lock writes files (`write`). A missing, damaged or foreign file is rebuilt from the corpus
without embedding anything again.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig, PgvectorConfig, QdrantConfig
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId
from stillroom.core.private_files import make_folder
from stillroom.errors import ConfigError, CorruptKnowledgeBaseError, StorageError
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.index.bm25 import Bm25Index
from stillroom.retrieval.index.dense_store import DenseStore
from stillroom.retrieval.index.pgvector_index import PgvectorStore
from stillroom.retrieval.index.qdrant_index import CollectionStore
from stillroom.retrieval.index.search_batcher import OnFound, SearchBatcher
from stillroom.retrieval.index.tiered_index import TieredIvfPqIndex
from stillroom.retrieval.index.tuning import Tuner
from stillroom.retrieval.ranking import Ranking
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.vector_sets import VectorSource
from stillroom.retrieval.tiers.hot_lists import ListFigures, Spawn
from stillroom.retrieval.vector_index import SearchedIndex

_BATCH = 4096
"""Chunks per read from the corpus."""

_MAX_SHARE_REMOVED = 0.2

AnyStore = DenseStore | CollectionStore | PgvectorStore


@dataclass(frozen=True, slots=True)
class DenseFiles:
    """The vectors of a dense index, and the folder of its files."""

    vectors: VectorSource
    folder: Path


class Indexes:
    """Thread-safe."""

    def __init__(  # noqa: PLR0913  its parts
        self,
        folder: Path,
        corpus: Corpus,
        config: IndexConfig,
        dimension: int,
        spawn: Spawn | None = None,
        qdrant: QdrantConfig | None = None,
        dense: DenseFiles | None = None,
        pgvector: PgvectorConfig | None = None,
    ) -> None:
        """
        Args:
            folder: folder of the knowledge base.
            spawn: see `DenseStore`.
            qdrant: settings of a Qdrant collection; None takes the defaults.
            dense: vectors and folder of the dense index; None takes those of the corpus, and `folder`.
            pgvector: settings of a search in pgvector; None takes the defaults.
        """
        self._corpus = corpus
        self._vectors = dense.vectors if dense else corpus
        self.folder, self.dense_folder = folder, dense.folder if dense else folder
        if self.dense_folder != folder and folder.is_dir():
            with contextlib.suppress(OSError):  # writing reports the error
                make_folder(self.dense_folder)
        self._config, self._dimension = config, dimension
        self._sparse_folder = folder / "sparse"
        self._lock = Lock()
        """Guards the dense index."""
        self._sparse_lock = Lock()
        self._dense: AnyStore
        if config.kind == "qdrant":
            self._dense = CollectionStore(self.dense_folder, self._vectors, config, qdrant or QdrantConfig(), dimension)
        elif config.kind == "pgvector":
            self._dense = PgvectorStore(corpus, config, pgvector or PgvectorConfig(), dimension)
        else:
            self._dense = DenseStore(self.dense_folder, self._vectors, config, dimension, spawn)
        self._has_tiers = config.has_tiers
        self._batcher = SearchBatcher(self._lock, self._search_batch)
        self._sparse: Bm25Index | None = None
        self._tuner = Tuner(self.dense_folder / "tuning.json", config, self._vectors.corpus_id)

    def search_dense(self, query: NDArray[np.float32], k: int, allowed: AllowedIds | None = None) -> Ranking:
        """Return the k chunks nearest to a unit query [d]; the score is the cosine.

        Args:
            allowed: the only chunks that may be found; None allows all.

        Raises:
            ConfigError: the configured goal of recall or time cannot be reached.
        """
        return next(self.search_dense_staged(query, k, 1, allowed))

    def search_dense_staged(
        self, query: NDArray[np.float32], k: int, num_stages: int, allowed: AllowedIds | None = None
    ) -> Iterator[Ranking]:
        """Yield a ranking after each stage of `search_dense`; the last is that of `search_dense`.

        Between stages the lock is free. If the index changes there, one plain search of the new state ends the stages.
        With lists on disk, a search that would wait for the lock joins a batch and yields the last ranking only (see
        `search_batcher`). Raises as `search_dense`, with the first ranking.
        """
        if self._has_tiers and allowed is None and self._lock.locked():
            ranking = self._batcher.search(query, k)
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
        """Return the `nprobe` or `ef_search` for the configured goal, measured if needed; None without a goal.

        Raises:
            ConfigError: no effort reaches the goal.
        """
        with self._lock:
            return self._effort(self._current_dense())

    def search_sparse(self, text: str, k: int, allowed: AllowedIds | None = None) -> Ranking:
        """Return the k best chunks by BM25; `allowed` as of `search_dense`. Raises DamagedPostingsError."""
        return self._current_sparse().search(text, k, allowed)

    @property
    def sparse_generation(self) -> int:
        """Generation of the corpus that the sparse index shows; behind the corpus during a write."""
        return self._current_sparse().generation

    def complete(
        self, query: NDArray[np.float32], text: str, dense: Ranking, sparse: Ranking
    ) -> tuple[dict[ChunkId, float], dict[ChunkId, float]]:
        """Return cosine and BM25 score of each chunk of either ranking, computing missing ones; removed chunks are left
        out."""
        cosines, bm25 = dict(dense), dict(sparse)
        found, vectors = self._vectors.embeddings([chunk_id for chunk_id in bm25 if chunk_id not in cosines])
        if len(found):
            cosines |= zip(map(ChunkId, found.tolist()), (vectors @ query).tolist(), strict=True)
        index = self._current_sparse()
        missing = index.scores(text, [chunk_id for chunk_id in cosines if chunk_id not in bm25])
        return cosines, {chunk_id: bm25[chunk_id] if chunk_id in bm25 else missing[chunk_id] for chunk_id in cosines}

    def current(self) -> tuple[SearchedIndex, Bm25Index]:
        """Return both indexes, brought up to date, for verification. Precondition: no writer is active."""
        with self._lock:
            dense = self._current_dense()
        return dense, self._current_sparse()

    def needs_write(self) -> bool:
        """Whether a file is missing, damaged or behind the corpus, so that `write` has something to do."""
        sparse = self._current_sparse()
        if not self._is_sparse_current(sparse, self._corpus.generation) or sparse.damaged_files():
            return True
        with self._lock:
            return self._dense.needs_write()

    def is_sparse_behind(self) -> bool:
        """Whether the sparse index lacks changes of the corpus. Cheap."""
        return self.sparse_generation != self._corpus.generation

    def are_sparse_files_damaged(self) -> bool:
        """Whether files of the postings are damaged, after loading what another process may have rebuilt. Cheap: reads
        only changed files."""
        sparse = self._current_sparse()
        with self._sparse_lock:
            sparse.refresh()
        return bool(sparse.damaged_files())

    @property
    def is_sparse_damaged(self) -> bool:
        """Whether a search found the postings damaged and they are not rebuilt yet."""
        return self._current_sparse().is_damaged

    def write(self) -> None:
        """Bring both indexes up to date. Needs the write lock.

        Raises:
            IndexUnavailableError: the dense index is on a server that cannot be reached; the sparse one is written.
            StorageError: a file cannot be written; searches work as before.
        """
        try:
            with self._translating_errors():
                self._write_dense()
        finally:
            with self._translating_errors():
                self._write_sparse()

    def build_private_postings(self) -> bool:
        """Build private postings if the folder has none, for a process that cannot write there.

        Returns:
            Whether the sparse index is up to date now.

        Raises:
            OSError: the disk of the system's temporary files is full too.
        """
        sparse = self._current_sparse()
        if self.is_sparse_behind() and not (sparse.generation and sparse.saved_generation):
            changes = self._corpus.changes_since(0)
            sparse.build_private(self._chunks(changes.added), changes.generation)
        return not self.is_sparse_behind()

    def write_dense(self) -> None:
        """Bring the dense index up to date, and not the sparse one. Needs the write lock, unless no other process uses
        this dense index. Raises as `write`."""
        with self._translating_errors():
            self._write_dense()

    def write_sparse(self) -> None:
        """Bring the sparse index up to date, and not the dense one. Needs the write lock. Raises as `write`."""
        with self._translating_errors():
            self._write_sparse()

    def write_collection(self) -> None:
        """Bring a Qdrant collection up to date; no-op for other indexes. Needs the write lock. Raises as `write`.

        Called before and while documents are added, so that the collection does not fall far behind.
        """
        if isinstance(self._dense, CollectionStore):
            self._write_dense()

    def discard_dense(self) -> None:
        """Mark the dense index' file as damaged: the next use rebuilds the index."""
        with self._lock:
            self._dense.discard()

    def rebuild(self, *, dense: bool, sparse: bool) -> None:
        """Rebuild either index from the corpus. Needs the write lock. Raises as `write`."""
        with self._translating_errors():
            if dense:
                with self._lock:
                    self._dense.rebuild()
            if sparse:
                self._current_sparse().clear()
        self.write()

    @contextlib.contextmanager
    def reopened_dense(self) -> Iterator[AnyStore]:
        """Open the dense index as the next process would find it. Needs the write lock.

        An index of a server is yielded as it is; and only one process may have an embedded collection open.
        """
        if not isinstance(self._dense, DenseStore):
            with self._lock:
                yield self._dense
            return
        store = DenseStore(self.dense_folder, self._vectors, self._config, self._dimension)
        try:
            yield store
        finally:
            store.close()

    @property
    def list_figures(self) -> ListFigures | None:
        """Figures of the lists in each tier; None if the dense index has no tiers or is not loaded."""
        return self._dense.figures

    def close(self) -> None:
        """Wait for background work and close a collection. Idempotent."""
        if isinstance(self._dense, DenseStore):
            self._dense.close()
            return
        with self._lock:
            self._dense.close()

    # Dense

    def _current_dense(self) -> SearchedIndex:
        """Return the dense index, brought up to date. Raises StorageError: the disk is full."""
        with self._translating_errors():
            return self._dense.current()

    def _search_dense(self, query: NDArray[np.float32], k: int, allowed: AllowedIds | None = None) -> Ranking:
        try:
            dense = self._current_dense()
            return dense.search(query, k, self._effort(dense), allowed)
        except CorruptKnowledgeBaseError:
            return self._search_rebuilt(query, k, allowed)

    def _search_rebuilt(self, query: NDArray[np.float32], k: int, allowed: AllowedIds | None) -> Ranking:
        """Search after rebuilding a damaged index from the corpus."""
        self._dense.discard()
        dense = self._current_dense()
        return dense.search(query, k, self._effort(dense), allowed)

    def _search_batch(self, queries: Sequence[NDArray[np.float32]], k: int, on_found: OnFound) -> None:
        """Search a batch. Called under the lock."""
        try:
            dense = self._current_dense()
            assert isinstance(dense, TieredIvfPqIndex)
            dense.search_batch(np.stack(queries), k, on_found, self._effort(dense))
        except CorruptKnowledgeBaseError:
            self._dense.discard()
            for number, query in enumerate(queries):
                on_found(number, self._search_dense(query, k))

    def _effort(self, dense: SearchedIndex) -> int | None:
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
            write = self._dense.prepare_write()
            if isinstance(self._dense, DenseStore):
                dense = self._dense.current()
                # an impossible goal must not keep documents from being added
                with contextlib.suppress(ConfigError), _uncounted(dense):
                    self._tuner.save(dense)
        if write is not None:
            write()

    # Sparse

    def _current_sparse(self) -> Bm25Index:
        """Return the sparse index, up to date. Has its own lock, so that it never waits for the dense index."""
        with self._sparse_lock:
            if self._sparse is None:
                self._sparse = Bm25Index(self._sparse_folder, self._corpus.corpus_id, self._corpus.commit_id)
            elif self._sparse.generation != self._corpus.generation:
                self._sparse.refresh()
            return self._sparse

    def _strict_sparse(self) -> Bm25Index:
        """Return the sparse index with the state of its files, for writing."""
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
        if is_damaged or sparse.generation >= self._corpus.generation:  # or of another corpus
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
    def _translating_errors(self) -> Iterator[None]:
        """Turn OSError into StorageError."""
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"the indexes in {self.folder} cannot be written: {error.strerror or error}; the documents are safe. "
                "Free disk space or repair the disk: the next `stillroom add` or search then completes the indexes"
            ) from error


def _uncounted(dense: SearchedIndex) -> contextlib.AbstractContextManager[None]:
    """Return a context in which searches of the tuner do not count as user traffic."""
    return dense.uncounted() if isinstance(dense, TieredIvfPqIndex) else contextlib.nullcontext()
