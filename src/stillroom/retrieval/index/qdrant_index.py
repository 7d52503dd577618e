"""Dense index in a Qdrant collection, for more vectors than one machine should hold (docs/outgrowing.md).

The collection is a projection of the corpus like the index files. It has a generation, which the holder of the write
lock brings up to that of the corpus, commit by commit; its mark moves after each commit, so an interrupted `catch_up`
continues where it stopped, and repeating a commit changes nothing. Readers write nothing. They search chunks that the
collection does not have yet in memory beside it, up to `MOST_BEHIND`.

Qdrant selects the near chunks. Scores are computed here from the vectors in SQLite, as a `flat` index does, so scores
and the order of ties do not depend on the server.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig, QdrantConfig
from stillroom.errors import KnowledgeBaseBusyError
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.index.qdrant_collection import QdrantCollection
from stillroom.retrieval.ranking import Ranking, ranked, top_k
from stillroom.retrieval.store.vector_sets import VectorSource
from stillroom.retrieval.vector_index import VectorIndex

logger = logging.getLogger(__name__)

_BATCH = 256
"""Points per request: about a megabyte at 384 dimensions."""

_STEP = 2048
"""Chunks between two moves of the mark, rounded to commits: the work lost by an interruption."""

MOST_COMPARED = 2000
"""Most allowed chunks that are compared with vectors from the corpus; with more, the server searches their ids."""

MOST_BEHIND = 10_000
"""Most changes that a reader holds in memory. A writer is at most one commit ahead."""


class QdrantIndex(VectorIndex):
    """A `VectorIndex` that reads changes from the corpus (`refresh`, `catch_up`)."""

    def __init__(self, collection: QdrantCollection, corpus: VectorSource, dimension: int, ef_search: int) -> None:
        self._collection = collection
        self._corpus = corpus
        self._dimension = dimension
        self._ef_search = ef_search
        self._is_counted = False
        """Whether collection and corpus had the same number of chunks at the same generation."""
        self._shown: tuple[int | None, int] | None = None
        """Generations of collection (None: there is none) and corpus that searches show; None before `refresh`."""
        self._recent = FlatIndex(dimension)
        """Chunks that the collection does not have yet."""
        self._hidden: Sequence[int] = ()
        """Changed chunks that the collection must not return."""

    def __len__(self) -> int:
        return self._corpus.num_chunks

    def close(self) -> None:
        """Idempotent."""
        self._collection.close()

    # Searching

    def refresh(self) -> int:
        """Make searches show the present corpus and return its generation.

        Raises:
            KnowledgeBaseBusyError: the collection is too far behind.
            IndexUnavailableError: it cannot be reached.
        """
        at = self._generation()  # read first: the corpus is never behind the collection
        generation = self._corpus.generation
        if self._shown != (at, generation):
            changes = self._corpus.changes_since(at or 0, MOST_BEHIND)
            changed = [*changes.removed, *changes.added]
            if changes.generation < generation or len(changed) > MOST_BEHIND:
                raise KnowledgeBaseBusyError(
                    f"{self._collection.where} is more than {MOST_BEHIND:,} chunks behind the knowledge base; if "
                    "no documents are being added, `stillroom add` of any document brings it up to date. "
                    "--mode sparse searches by words alone"
                )
            recent = FlatIndex(self._dimension)
            ids, vectors = self._corpus.embeddings(changes.added)
            if len(ids):
                recent.add(ids, vectors)
            self._recent, self._hidden, self._shown = recent, changed, (at, changes.generation)
        return self._shown[1]

    def search_staged(
        self,
        query: NDArray[np.float32],
        k: int,
        num_stages: int,
        effort: int | None = None,
        allowed: AllowedIds | None = None,
    ) -> Iterator[Ranking]:
        """See `VectorIndex`; after `refresh`. `effort` is the server's `hnsw_ef`. Yields one list: a server answers
        once."""
        assert self._shown is not None
        if allowed is not None and len(allowed) <= MOST_COMPARED:
            yield self._scored(allowed.ids.tolist(), query)[:k]
            return
        wanted = None if allowed is None else allowed.ids.tolist()

        def fetch(num: int) -> Ranking:
            near = self._collection.nearest(query, num, max(effort or self._ef_search, num), self._hidden, wanted)
            return self._scored(near, query)

        total = len(self) if allowed is None else min(len(self), len(allowed))
        found = top_k(fetch, k, total) if self._shown[0] is not None else []
        yield ranked([*found, *self._recent.search(query, k, None, allowed)])[:k]

    def _scored(self, chunk_ids: Sequence[int], query: NDArray[np.float32]) -> Ranking:
        ids, vectors = self._corpus.embeddings(chunk_ids)
        if not len(ids):
            return []
        exact = FlatIndex(self._dimension)
        exact.add(ids, vectors)
        return exact.search(query, len(ids))

    # Changes; need the write lock

    def is_behind(self) -> bool:
        """Whether the collection lacks changes of the corpus."""
        return (self._generation() or 0) != self._corpus.generation

    def catch_up(self) -> None:
        """Bring the collection to the generation of the corpus. A missing or foreign collection is created anew."""
        at = self._generation()
        generation = self._corpus.generation
        total = self._corpus.num_added_since(at or 0) if at != generation else 0
        if at is None:
            if total:
                logger.warning("%s is missing or outdated; sending %d chunks", self._collection.where, total)
            self._collection.clear()
            self._is_counted, at = False, 0
        done = 0
        while at < generation:
            changes = self._corpus.changes_since(at, _STEP)
            self.remove(changes.removed)
            for start in range(0, len(changes.added), _BATCH):
                ids, vectors = self._corpus.embeddings(changes.added[start : start + _BATCH])
                if len(ids):
                    self.add(ids, vectors)
            self._collection.mark(changes.generation, self._corpus.commit_id(changes.generation) or "")
            at, done = changes.generation, done + len(changes.added)
            log = logger.warning if total > MOST_BEHIND else logger.info  # a user waits
            log("%s: %d of %d chunks", self._collection.where, done, total)

    def clear(self) -> None:
        """Empty the collection."""
        self._collection.clear()
        self._is_counted = False
        self._shown = None

    def delete(self) -> None:
        """Delete the collection, if it exists."""
        self._collection.delete()

    def add(self, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self._collection.put(ids.tolist(), vectors)

    def remove(self, ids: Sequence[int]) -> None:
        for start in range(0, len(ids), _BATCH):
            self._collection.drop([int(chunk_id) for chunk_id in ids[start : start + _BATCH]])

    def in_order(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32] | None]]:
        """See `VectorIndex`; includes chunks that the collection does not have yet. Precondition: `refresh`."""
        hidden = np.array(self._hidden, dtype=np.int64)
        assert self._shown is not None
        for ids, vectors in self._collection.points() if self._shown[0] is not None else ():
            is_shown = ~np.isin(ids, hidden)
            yield ids[is_shown], vectors[is_shown]
        yield from self._recent.in_order()

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return nothing: the server owns its graph."""
        return {}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Do nothing: the collection keeps all vectors."""

    def _generation(self) -> int | None:
        """Return the generation of the collection; None if it is not usable.

        That is: missing, of another corpus, of commits that were undone (a backup of the corpus was restored), or
        incomplete.
        """
        shown = self._collection.read_mark()
        if shown is None or self._corpus.commit_id(shown[0]) != shown[1]:
            return None
        at, generation = shown[0], self._corpus.generation
        if at == generation and not self._is_counted:
            num_there, num_wanted = self._collection.count(), self._corpus.num_chunks
            if self._corpus.generation == generation:  # otherwise documents are being added
                if num_there != num_wanted:
                    return None
                self._is_counted = True
        return at


class CollectionStore:
    """Counterpart of `DenseStore` for a collection. Not thread-safe, except for the function of `prepare_write`."""

    def __init__(
        self, folder: Path, corpus: VectorSource, config: IndexConfig, qdrant: QdrantConfig, dimension: int
    ) -> None:
        """`folder`: folder of the knowledge base, which contains an embedded collection."""
        self._folder, self._corpus, self._config, self._qdrant = folder, corpus, config, qdrant
        self._dimension = dimension
        self._index: QdrantIndex | None = None
        self.generation = 0
        """Generation of the corpus that searches show."""

    def current(self) -> VectorIndex:
        """Return the index with the present corpus. Raises as `QdrantIndex.refresh`."""
        index = self._opened()
        self.generation = index.refresh()
        return index

    def discard(self) -> None:
        """Do nothing: there is no file that could be damaged."""

    def needs_write(self) -> bool:
        """Whether the collection is missing, foreign or behind the corpus.

        Raises:
            IndexUnavailableError: the server cannot be reached.
        """
        return self._opened().is_behind()

    def prepare_write(self) -> Callable[[], None] | None:
        """Return a function that brings the collection up to date; None if it is. Both raise as `needs_write`.

        The function needs the write lock.
        """
        index = self._opened()
        return index.catch_up if index.is_behind() else None

    @property
    def figures(self) -> None:
        """None: there are no tiers."""
        return None

    def rebuild(self) -> None:
        """Empty the collection; `prepare_write` fills it."""
        self._opened().clear()

    def delete(self) -> None:
        """Delete the collection, if it exists, and close. Raises as `needs_write`."""
        self._opened().delete()
        self.close()

    def close(self) -> None:
        """Close the collection. Idempotent."""
        if self._index is not None:
            self._index.close()
            self._index = None

    def _opened(self) -> QdrantIndex:
        if self._index is None:
            place = QdrantCollection(
                self._qdrant, self._config, self._folder / "qdrant", self._corpus.corpus_id, self._dimension
            )
            self._index = QdrantIndex(place, self._corpus, self._dimension, self._config.ef_search)
        return self._index
