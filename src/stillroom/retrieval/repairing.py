"""Brings index files that an interrupted writer left behind, or that are damaged, up to date when a search needs them.

Before the first search that is waited for; later it goes on beside the searches. Somebody else who writes will do it
himself, and a folder that cannot be written is searched as it is, with postings elsewhere if it has none.
"""

import contextlib
import logging
from pathlib import Path
from threading import Lock

from stillroom.core.clock import Clock
from stillroom.errors import IndexUnavailableError, KnowledgeBaseBusyError, StorageError
from stillroom.retrieval.background import Background
from stillroom.retrieval.index.indexes import Indexes
from stillroom.retrieval.store.folder import WriteLock
from stillroom.retrieval.tiers.hot_lists import Spawn

logger = logging.getLogger(__name__)

_PAUSE_S = 5.0
"""Between two looks whether postings are behind, or their files have changed and no longer match their checksums. A
vector index in memory is never behind."""


class Repairs:
    """Of one open knowledge base. Thread-safe."""

    def __init__(
        self, folder: Path, indexes: Indexes, lock: WriteLock, clock: Clock, spawn: Spawn | None = None
    ) -> None:
        """
        Args:
            folder: of the knowledge base, as messages name it.
            spawn: runs what goes on beside searches; None takes a thread.
        """
        self._folder = folder
        self._indexes, self._lock, self._clock = indexes, lock, clock
        self._background = Background("stillroom-repair")
        self._spawn = spawn or self._background.run
        self._is_checked = self._has_warned = False
        self._next_look = 0.0
        self._mending = Lock()

    def before_search(self, *, needs_vectors: bool) -> None:
        """Look whether there is something to do, and do it or have it done.

        Raises:
            IndexUnavailableError: vectors are needed, and on a server that cannot be reached.
        """
        now = self._clock.monotonic()
        if not self._is_checked:
            self._is_checked, self._next_look = True, now + _PAUSE_S
            try:
                self._repair()
            except IndexUnavailableError:
                self._is_checked = not needs_vectors  # words need no server
                if needs_vectors:
                    raise
        elif now >= self._next_look:
            self._next_look = now + _PAUSE_S
            if self._indexes.is_sparse_behind() or self._indexes.are_sparse_files_damaged():
                self._spawn(self._repair_beside)

    def mend_words(self) -> None:
        """Make the postings anew, after a search has found them damaged. Other searches that find the same wait here.

        Raises:
            StorageError: there is no room for them, nor among the system's temporary files.
        """
        with self._mending:
            if not self._indexes.is_sparse_damaged:
                return
            logger.warning("%s: the postings are damaged and are made anew; searches wait for them", self._folder)
            with contextlib.suppress(IndexUnavailableError):  # words need no server
                self._repair()
            if self._indexes.is_sparse_damaged:  # another process writes, or the folder cannot be written
                self._make_words_apart()

    def _make_words_apart(self) -> None:
        try:
            self._indexes.build_private_postings()
        except OSError as error:
            raise StorageError(
                f"{self._folder}: the postings are damaged, and there is no room to make them anew: "
                f"{error.strerror or error}. Free some space; the next search makes them"
            ) from error

    def close(self) -> None:
        """Wait for what goes on. Idempotent."""
        self._background.close()

    def _repair_beside(self) -> None:
        with contextlib.suppress(
            IndexUnavailableError
        ):  # words are written all the same, and who needs vectors is told
            self._repair()

    def _repair(self) -> None:
        try:
            if self._indexes.needs_write():
                with self._lock.held("repair"):
                    self._indexes.write()
        except KnowledgeBaseBusyError:
            pass
        except StorageError as error:
            until_then = self._make_do()
            if not self._has_warned:  # else every few seconds
                logger.warning("%s; until then %s", error, until_then)
            self._has_warned = True

    def _make_do(self) -> str:
        """Search without writing to the folder. Returns what that means."""
        with contextlib.suppress(OSError):
            if self._indexes.build_private_postings():
                return "each process brings the indexes up to date for itself"
        return "words find nothing" if not self._indexes.sparse_generation else "words may lack the last changes"
