"""What `add` and `remove` need beside the corpus: indexes that keep up."""

import contextlib
import logging
from collections.abc import Callable, Iterator

from stillroom.core.cancellation import Cancellation
from stillroom.errors import ChangeCancelledError, KnowledgeBaseError
from stillroom.retrieval.index.indexes import Indexes
from stillroom.retrieval.ingest import AddProgress
from stillroom.retrieval.store.corpus import Corpus

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def keeping_up(indexes: Indexes) -> Iterator[None]:
    """Change documents in here, under the lock. Afterwards the indexes show what was committed, however it ended; after
    a cancelled change the next search brings them up to date."""
    indexes.write_collection()
    try:
        yield
    except ChangeCancelledError:
        raise
    except BaseException:
        try:
            indexes.write()
        except (KnowledgeBaseError, OSError) as error:  # what comes first says more
            logger.warning("%s", error)
        raise
    indexes.write()


class Following:
    """Told how far an `add` is, keeps a collection close behind each commit: readers hold the rest in memory. Ends the
    `add` between two pieces of its work where it was cancelled."""

    def __init__(
        self,
        corpus: Corpus,
        indexes: Indexes,
        progress: Callable[[AddProgress], None] | None,
        stop: Cancellation | None,
    ) -> None:
        self._stop = stop or Cancellation()
        self._corpus = corpus
        self._indexes = indexes
        self._progress = progress
        self._generation = corpus.generation

    def check(self) -> None:
        """Raises ChangeCancelledError: the `add` was cancelled."""
        self._stop.check()

    def __call__(self, done: AddProgress) -> None:
        generation = self._corpus.generation
        if generation != self._generation:
            self._indexes.write_collection()
            self._generation = generation
        if self._progress is not None:
            self._progress(done)
