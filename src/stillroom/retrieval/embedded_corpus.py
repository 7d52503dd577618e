"""A corpus with the vectors of one embedding model: the embedder, the indexes and the search over them.

A search uses one `EmbeddedCorpus` from beginning to end, so that a question is always embedded by the model whose index
it searches. `ActiveCorpus` opens another one when this or another process has changed the model.
"""

import contextlib
from collections.abc import Callable, Iterator
from threading import Lock, RLock

from stillroom.config.settings import EmbedderConfig, StillroomConfig
from stillroom.errors import IncompatibleKnowledgeBaseError
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.hybrid import HybridSearch
from stillroom.retrieval.index.indexes import Indexes
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.manifest import Manifest
from stillroom.retrieval.store.vector_sets import VectorSetRecord, VectorSets


class EmbeddedCorpus:
    """Thread-safe."""

    def __init__(
        self,
        record: VectorSetRecord,
        config: StillroomConfig,
        embedder: Embedder,
        indexes: Indexes,
        search: HybridSearch,
    ) -> None:
        """
        Args:
            record: The set of vectors.
            config: Settings of the knowledge base.
        """
        self.record, self.config = record, config
        self.embedder, self.indexes, self.search = embedder, indexes, search
        self._lock, self._checking = Lock(), Lock()
        self._num_users = 0
        self._is_retired = self._is_checked = False

    def checked_embedder(self) -> Embedder:
        """Return the embedder after comparing its files with those that made the vectors, once.

        Raises:
            IncompatibleKnowledgeBaseError: They differ.
        """
        with self._checking:
            if not self._is_checked:
                if self.embedder.fingerprint != self.record.fingerprint:
                    raise IncompatibleKnowledgeBaseError(
                        f"the files of embedder {self.record.model!r} are not those that this knowledge base was made "
                        "with; put the old files back, or embed all documents with the new ones: stillroom reembed"
                    )
                self._is_checked = True
        return self.embedder

    @contextlib.contextmanager
    def in_use(self) -> Iterator["EmbeddedCorpus"]:
        """Keep the indexes open in this context."""
        with self._lock:
            self._num_users += 1
        try:
            yield self
        finally:
            with self._lock:
                self._num_users -= 1
                is_last = self._is_retired and not self._num_users
            if is_last:
                self.indexes.close()

    def retire(self) -> None:
        """Close the indexes when their last user has finished."""
        with self._lock:
            self._is_retired = True
            is_unused = not self._num_users
        if is_unused:
            self.indexes.close()


class ActiveCorpus:
    """Keeps the corpus open with the active vectors. Thread-safe."""

    def __init__(
        self,
        corpus: Corpus,
        manifest: Manifest,
        asked: StillroomConfig,
        open_vectors: Callable[[VectorSetRecord, StillroomConfig], EmbeddedCorpus],
    ) -> None:
        """
        Args:
            manifest: Settings that the knowledge base was made with.
            asked: Settings of the user.
            open_vectors: Opens a set with the settings that apply to it, and loads nothing yet.
        """
        self._manifest, self._asked, self._open_vectors = manifest, asked, open_vectors
        self._sets = VectorSets(corpus)
        self._lock = RLock()
        self._hides_folders = self._avoids_torch = False
        self.opened = self._open()
        """The vectors that were active at the last call of `current`."""

    def current(self) -> EmbeddedCorpus:
        """Return the corpus with the vectors that are active now; one cheap read."""
        with self._lock:
            if self.opened.record.number != self._sets.active_number:
                before, self.opened = self.opened, self._open()
                before.retire()
            return self.opened

    @contextlib.contextmanager
    def in_use(self) -> Iterator[EmbeddedCorpus]:
        """Keep `current` open in this context."""
        with contextlib.ExitStack() as stack:
            with self._lock:
                current = stack.enter_context(self.current().in_use())
            yield current

    @property
    def config(self) -> StillroomConfig:
        """The settings in use."""
        return self.opened.config

    @property
    def manifest(self) -> Manifest:
        """The fixed settings, with the embedder of the active vectors."""
        return self._manifest.with_vectors(self.current().record)

    @property
    def wanted_model(self) -> str | None:
        """The embedder in the user's settings, if it is another one than that of the vectors; else None."""
        asked, current = self._asked.embedder.model, self.current()
        is_same = asked in (EmbedderConfig().model, current.record.model, current.config.embedder.model)
        return None if is_same else asked

    def hide_folders(self) -> None:
        """Let no filter reveal folders of this machine from now on."""
        with self._lock:
            self._hides_folders = True
            self.opened.search.hide_folders()

    def avoid_torch(self) -> None:
        """See `Embedder.avoid_torch`."""
        with self._lock:
            self._avoids_torch = True
            self.opened.embedder.avoid_torch()

    def _open(self) -> EmbeddedCorpus:
        record = self._sets.record("active") or self._manifest.first_vectors
        opened = self._open_vectors(record, self._manifest.with_vectors(record).applied_to(self._asked))
        if self._avoids_torch:
            opened.embedder.avoid_torch()
        if self._hides_folders:
            opened.search.hide_folders()
        return opened
