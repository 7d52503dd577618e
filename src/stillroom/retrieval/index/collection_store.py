"""The dense index of one knowledge base in a Qdrant collection: what `DenseStore` is for those in files."""

from collections.abc import Callable
from pathlib import Path

from stillroom.config.settings import IndexConfig, QdrantConfig
from stillroom.retrieval.index.qdrant_collection import QdrantCollection
from stillroom.retrieval.index.qdrant_index import QdrantIndex
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.vector_index import VectorIndex


class CollectionStore:
    """Not thread-safe, but for what `writing` returns."""

    def __init__(self, folder: Path, corpus: Corpus, config: IndexConfig, qdrant: QdrantConfig, dimension: int) -> None:
        """`folder`: of the knowledge base; an embedded collection is in it."""
        self._folder, self._corpus, self._config, self._qdrant = folder, corpus, config, qdrant
        self._dimension = dimension
        self._index: QdrantIndex | None = None
        self.generation = 0
        """Of what searches show."""

    def current(self) -> VectorIndex:
        """The index, showing what the corpus holds now. Raises as `QdrantIndex.follow`."""
        index = self._opened()
        self.generation = index.follow()
        return index

    def discard(self) -> None:
        """There is no file that could be damaged."""

    def needs_write(self) -> bool:
        """Whether the collection is missing, foreign or behind the corpus.

        Raises:
            IndexUnavailableError: it cannot be reached.
        """
        return self._opened().is_behind()

    def writing(self) -> Callable[[], None] | None:
        """What brings the collection up to date, to be called under the write lock while others search; None if it is.
        Raises (the call, too) as `needs_write`."""
        index = self._opened()
        return index.catch_up if index.is_behind() else None

    @property
    def figures(self) -> None:
        """There are no tiers."""
        return None

    def rebuild(self) -> None:
        """An empty collection, whatever there is; `writing` fills it."""
        self._opened().clear()

    def close(self) -> None:
        """Let go of the collection. Idempotent."""
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
