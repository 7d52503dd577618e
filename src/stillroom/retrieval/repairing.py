"""Keeps index files up to date with the corpus: after changes of documents, and before searches.

A search waits for the first repair after opening; later repairs run in the background. If another process holds the
write lock, that process does the repair. If the folder cannot be written, searches use the indexes as they are, and
missing postings are made for this process only.

In a copy of a database, other machines change the documents. There the postings follow each look at the database
(`follow_look`), so that words find what vectors find; a dense index in memory follows by itself.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock

from stillroom.core.clock import Clock
from stillroom.errors import (
    ChangeCancelledError,
    IndexUnavailableError,
    KnowledgeBaseBusyError,
    KnowledgeBaseError,
    StorageError,
)
from stillroom.retrieval.background import Background
from stillroom.retrieval.index.indexes import Indexes
from stillroom.retrieval.store.folder import REPAIR, WriteLock
from stillroom.retrieval.tiers.hot_lists import Spawn

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 5.0
"""Interval of checks whether the postings are behind or damaged. A vector index in memory is never behind."""


class Repairs:
    """Index updates of one open knowledge base. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        indexes: Callable[[], Indexes],
        lock: WriteLock,
        clock: Clock,
        spawn: Spawn | None = None,
        *,
        follows: bool = False,
    ) -> None:
        """
        Args:
            folder: Folder of the knowledge base, for messages.
            indexes: Returns the indexes of the active vectors.
            spawn: Runs background repairs; None uses a thread.
            follows: Whether the folder is a copy of a database, and `follow_look` is called. Then every process of this
                machine repairs after a look, and the first search waits for another one that is doing it.
        """
        self._follows = follows
        self._folder = folder
        self._current_indexes, self._lock, self._clock = indexes, lock, clock
        self._background = Background("stillroom-repair")
        self._spawn = spawn or self._background.run
        self._is_checked = self._has_warned = False
        self._is_dense_file_late = False
        """Whether only the postings were written since the last check."""
        self._next_check = 0.0
        self._repairing_words = Lock()

    @property
    def _indexes(self) -> Indexes:
        return self._current_indexes()

    @contextlib.contextmanager
    def updating_indexes(self) -> Iterator[None]:
        """Write the indexes after documents were changed in this context, also after an error.

        After a cancelled change, the next search does it. Precondition: the caller holds the write lock.
        """
        self._indexes.write_collection()
        try:
            yield
        except ChangeCancelledError:
            raise
        except BaseException:
            try:
                self._indexes.write()
            except (KnowledgeBaseError, OSError) as error:  # the first error is raised
                logger.warning("%s", error)
            raise
        self._indexes.write()

    def before_search(self, *, needs_vectors: bool) -> None:
        """Repair the indexes if needed: before the first search at once, later in the background.

        Raises:
            IndexUnavailableError: The search needs vectors, and their server cannot be reached.
        """
        now = self._clock.monotonic()
        if not self._is_checked:
            self._is_checked, self._next_check = True, now + _CHECK_INTERVAL_S
            try:
                self._repair(joins_repair=self._follows)
            except IndexUnavailableError:
                self._is_checked = not needs_vectors  # a sparse search needs no server
                if needs_vectors:
                    raise
        elif now >= self._next_check:
            self._next_check = now + _CHECK_INTERVAL_S
            is_late, self._is_dense_file_late = self._is_dense_file_late, False
            if is_late or self._indexes.is_sparse_behind() or self._indexes.are_sparse_files_damaged():
                self._spawn(self._repair_in_background)

    def follow_look(self) -> None:
        """Bring the postings up to date after a look at the database; cheap if they are.

        Nothing happens before the first search, which waits for a repair itself. If the lock is held, the holder writes
        them, or the next look does.
        """
        if not self._is_checked or not self._indexes.is_sparse_behind():
            return
        try:
            with self._lock.held(REPAIR):
                if self._indexes.is_sparse_behind():
                    self._indexes.write_sparse()
                    self._is_dense_file_late = True
        except StorageError as error:
            self._go_on_without_files(error)
        except KnowledgeBaseError:  # the lock is held; or a search finds the same error, and reports it
            pass

    def repair_words(self) -> None:
        """Rebuild the postings after a search has found them damaged. Concurrent callers wait.

        Raises:
            StorageError: Neither the folder nor the system's temporary folder has space for them.
        """
        with self._repairing_words:
            if not self._indexes.is_sparse_damaged:
                return
            logger.warning("%s: the postings are damaged and are rebuilt; searches wait", self._folder)
            with contextlib.suppress(IndexUnavailableError):  # postings need no server
                self._repair()
            if self._indexes.is_sparse_damaged:  # another process writes, or the folder cannot be written
                self._rebuild_words_for_this_process()

    def _rebuild_words_for_this_process(self) -> None:
        try:
            self._indexes.build_private_postings()
        except OSError as error:
            raise StorageError(
                f"{self._folder}: the postings are damaged and cannot be rebuilt: {error.strerror or error}. "
                "Free some space; the next search rebuilds them"
            ) from error

    def close(self) -> None:
        """Wait for the background repair. Idempotent."""
        self._background.close()

    def _repair_in_background(self) -> None:
        with contextlib.suppress(IndexUnavailableError):  # the postings are written; dense searches get the error
            self._repair()

    def _repair(self, *, joins_repair: bool = False) -> None:
        try:
            if self._indexes.needs_write():
                with self._lock.held(REPAIR, joins_repair=joins_repair):
                    self._indexes.write()
        except KnowledgeBaseBusyError:
            pass
        except StorageError as error:
            self._go_on_without_files(error)

    def _go_on_without_files(self, error: StorageError) -> None:
        consequence = self._update_in_memory()
        if not self._has_warned:
            logger.warning("%s; until then %s", error, consequence)
        self._has_warned = True

    def _update_in_memory(self) -> str:
        """Make missing postings without writing to the folder. Returns the consequence for searches."""
        with contextlib.suppress(OSError):
            if self._indexes.build_private_postings():
                return "each process updates the indexes for itself"
        if not self._indexes.sparse_generation:
            return "sparse searches find nothing"
        return "sparse searches may miss the last changes"
