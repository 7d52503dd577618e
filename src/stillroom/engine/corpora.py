"""The corpora that an engine's prompts come from, by tenant, so that KV of removed documents is dropped.

This process reports its own changes. Changes of other processes are noticed by the corpus's number of changes: before
KV is stored on disk, with the tenant's next question, and every two seconds while the engine is idle.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId
from stillroom.errors import KnowledgeBaseNotFoundError

logger = logging.getLogger(__name__)

_GONE = -1
"""Number of changes of a corpus that was removed."""

_UNREADABLE = "removed documents cannot be determined; their KV stays for now"

Existing = Callable[[set[ChunkId]], set[ChunkId]]
"""Returns which of some chunks still exist."""


class CorpusView(Protocol):
    """The documents of one tenant; thread-safe."""

    @property
    def num_changes(self) -> int:
        """Changes of documents so far, by any process; one cheap read.

        Raises:
            KnowledgeBaseNotFoundError: the knowledge base was removed or replaced.
        """
        ...

    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        """Return which of the chunks exist now."""
        ...

    def removed_since(self, num_changes: int) -> tuple[ChunkId, ...]:
        """Return the chunks that were removed after so many changes, and that do not exist now."""
        ...

    def chunks_before(self, chunk_ids: Collection[ChunkId], limit: int) -> dict[ChunkId, tuple[ChunkId, ...]]:
        """Return the chunks before each of these in its document now, in order, at most the last `limit`."""
        ...

    def chunks(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, Chunk]:
        """Return the chunks of these ids; removed chunks are absent."""
        ...


@dataclass(slots=True)
class _Followed:
    corpus: CorpusView
    seen: int | None = None
    """Number of changes when it was last read; None: read it in any case, `_GONE`: it was removed."""
    is_unreadable: bool = False
    """Whether the last attempt to read it failed, which was logged."""
    num_reported: int = 0
    """Number of changes whose removed chunks were reported by name (`removed_since`)."""


class Corpora:
    """Corpora by the cache salt of their tenants' requests.

    Thread-safe. No corpus is read after `unfollow` has returned for it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._followed: dict[str, _Followed] = {}

    @property
    def has_any(self) -> bool:
        return bool(self._followed)

    def follow(self, salt: str, corpus: CorpusView) -> None:
        """Set the corpus of a salt, and read it at the next `catch_up`."""
        with self._lock:
            before = self._followed.get(salt)
            self._followed[salt] = _Followed(corpus, num_reported=0 if before is None else before.num_reported)

    def unfollow(self, salt: str) -> bool:
        """Stop reading a corpus; returns whether it was removed, so that its KV must be dropped."""
        with self._lock:
            one = self._followed.pop(salt, None)
            try:
                return one is not None and _num_changes(one.corpus) == _GONE
            except Exception:
                logger.exception(_UNREADABLE)
                return False

    def catch_up(
        self,
        forget: Callable[[Existing, str], object],
        forget_all: Callable[[str], object],
        forget_named: Callable[[Collection[ChunkId], str], object] | None = None,
    ) -> None:
        """Report removed chunks of corpora that have changed since the last call.

        Args:
            forget: called with the corpus's `existing_chunks` and the salt.
            forget_all: called with the salt of a removed corpus.
            forget_named: called with removed chunks and the salt: at first with all that the corpus remembers, so that
                a process which was killed before it had dropped KV elsewhere does so when it starts again.
        """
        with self._lock:
            for salt, one in self._followed.items():
                try:
                    num_changes = _num_changes(one.corpus)
                    if num_changes == one.seen:
                        continue
                    if num_changes == _GONE:
                        logger.warning("a knowledge base was removed while it was in use; its KV is dropped")
                        forget_all(salt)
                    else:
                        forget(one.corpus.existing_chunks, salt)
                        if forget_named is not None:
                            since = one.num_reported if one.num_reported <= num_changes else 0  # a restored backup
                            forget_named(one.corpus.removed_since(since), salt)
                            one.num_reported = num_changes
                    one.seen, one.is_unreadable = num_changes, False
                except Exception:  # requests must still be answered
                    if not one.is_unreadable:
                        logger.exception(_UNREADABLE)
                    one.is_unreadable = True

    def check(self, salt: str, chunk_ids: set[ChunkId]) -> bool:
        """Return whether these chunks exist and no document has changed since the last `catch_up`.

        If not, the next `catch_up` reads the corpus, and must run before the prompt of these chunks.
        """
        with self._lock:
            one = self._followed.get(salt)
            if one is None or not (chunk_ids or one.seen == _GONE):
                return True
            try:
                is_current = (
                    one.seen != _GONE
                    and one.corpus.num_changes == one.seen
                    and one.corpus.existing_chunks(chunk_ids) == chunk_ids
                )
            except KnowledgeBaseNotFoundError:
                is_current = False
            except Exception:
                logger.exception(_UNREADABLE)
                return True
            if not is_current:
                one.seen = None
            return is_current

    def chunks_before(self, salt: str, chunk_ids: set[ChunkId], limit: int) -> dict[ChunkId, tuple[ChunkId, ...]]:
        """As `CorpusView.chunks_before`, of the corpus of a salt; empty if that cannot be read."""
        with self._lock:
            one = self._followed.get(salt)
            if one is None or one.seen == _GONE:
                return {}
            try:
                return one.corpus.chunks_before(chunk_ids, limit)
            except Exception:  # the question is answered without prepared KV
                logger.exception("the documents of a question's chunks cannot be read; no prepared KV is used for it")
                return {}

    def chunks(self, salt: str, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, Chunk]:
        """As `CorpusView.chunks`, of the corpus of a salt; empty if that cannot be read."""
        with self._lock:
            one = self._followed.get(salt)
            if one is None or one.seen == _GONE:
                return {}
            try:
                return one.corpus.chunks(chunk_ids)
            except Exception:  # the audit leaves the documents out
                logger.exception("the documents of an audited answer cannot be read")
                return {}


def _num_changes(corpus: CorpusView) -> int:
    try:
        return corpus.num_changes
    except KnowledgeBaseNotFoundError:
        return _GONE
