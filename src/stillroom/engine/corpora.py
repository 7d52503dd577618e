"""Whose documents the prompts of an engine are made of, so that nothing is kept of those that are removed.

A change that this process makes is told; one that another process makes is noticed by the number of changes, before
anything is stored on disk and with the tenant's next question.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from stillroom.core.ids import ChunkId
from stillroom.errors import KnowledgeBaseNotFoundError

logger = logging.getLogger(__name__)

_GONE = -1
"""In place of a number of changes."""

_BLIND = "it cannot be seen which documents are gone; their KV stays for now"

Existing = Callable[[set[ChunkId]], set[ChunkId]]
"""Gives those of some chunks that are still there."""


class CorpusView(Protocol):
    """The documents of one tenant; thread-safe."""

    @property
    def num_changes(self) -> int:
        """Of documents so far, by any process; one cheap read.

        Raises:
            KnowledgeBaseNotFoundError: it was removed, or another one stands in its place.
        """
        ...

    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        """Those of the chunks that are there now."""
        ...


@dataclass(slots=True)
class _Followed:
    corpus: CorpusView
    seen: int | None = None
    """Its changes when it was last looked at; None: it is to be looked at in any case, `_GONE`: it was gone."""


class Corpora:
    """By the salt of the tenant's requests. Thread-safe; nobody asks a corpus any more once `leave` returns."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._followed: dict[str, _Followed] = {}

    def follow(self, salt: str, corpus: CorpusView) -> None:
        """This is the tenant's, and may have changed."""
        with self._lock:
            self._followed[salt] = _Followed(corpus)

    def leave(self, salt: str) -> bool:
        """It is about to be closed. Returns whether it is gone, so that nothing of it may be kept."""
        with self._lock:
            one = self._followed.pop(salt, None)
            try:
                return one is not None and _num_changes(one.corpus) == _GONE
            except Exception:
                logger.exception(_BLIND)
                return False

    def catch_up(self, forget: Callable[[Existing, str], object], forget_all: Callable[[str], object]) -> None:
        """Let the chunks be forgotten that are gone from what has changed since the last time.

        Args:
            forget: told what is there, and the salt.
            forget_all: told the salt of a tenant whose documents are all gone.
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
                    one.seen = num_changes
                except Exception:  # who asks something must still be answered
                    logger.exception(_BLIND)

    def check(self, salt: str, chunk_ids: set[ChunkId]) -> bool:
        """Whether nothing has to be forgotten before a prompt of these chunks runs: they are there, and no document has
        changed since the last `catch_up`. If not, the next one looks at the corpus again."""
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
                logger.exception(_BLIND)
                return True
            if not is_current:
                one.seen = None
            return is_current


def _num_changes(corpus: CorpusView) -> int:
    try:
        return corpus.num_changes
    except KnowledgeBaseNotFoundError:
        return _GONE
