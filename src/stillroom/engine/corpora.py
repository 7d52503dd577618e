"""Whose documents the prompts of an engine are made of, so that nothing is kept of those that are removed.

A change that this process makes is told; one that another process makes is noticed by the number of changes, before
anything is stored on disk and with the next question.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from stillroom.core.ids import ChunkId

logger = logging.getLogger(__name__)

_BLIND = "it cannot be seen which documents are gone; their KV stays for now"

Existing = Callable[[set[ChunkId]], set[ChunkId]]
"""Gives those of some chunks that are still there."""


class Corpus(Protocol):
    """The documents of one tenant; thread-safe."""

    @property
    def num_changes(self) -> int:
        """Of documents so far, whoever made them; one cheap read."""
        ...

    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        """Those of the chunks that are there now."""
        ...


@dataclass(slots=True)
class _Followed:
    corpus: Corpus
    seen: int | None = None
    """Its changes when it was last looked at; None: it is to be looked at in any case."""


class Corpora:
    """By the salt of the tenant's requests. Thread-safe; nobody asks a corpus any more once `leave` returns."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._followed: dict[str, _Followed] = {}

    def follow(self, salt: str, corpus: Corpus) -> None:
        """This is the tenant's, and may have changed."""
        with self._lock:
            self._followed[salt] = _Followed(corpus)

    def leave(self, salt: str) -> None:
        """It is about to be closed."""
        with self._lock:
            self._followed.pop(salt, None)

    def catch_up(self, forget: Callable[[Existing, str], object]) -> None:
        """Let the chunks be forgotten that are gone from what has changed since the last time.

        Args:
            forget: told what is there, and the salt.
        """
        with self._lock:
            for salt, one in self._followed.items():
                try:
                    num_changes = one.corpus.num_changes
                    if num_changes != one.seen:
                        forget(one.corpus.existing_chunks, salt)
                        one.seen = num_changes
                except Exception:  # who asks something must still be answered
                    logger.exception(_BLIND)

    def check(self, salt: str, chunk_ids: set[ChunkId]) -> bool:
        """Whether all of the chunks are there; if not, the corpus is looked at again with the next `catch_up`."""
        with self._lock:
            one = self._followed.get(salt)
            if one is None or not chunk_ids:
                return True
            try:
                are_there = one.corpus.existing_chunks(chunk_ids) == chunk_ids
            except Exception:
                logger.exception(_BLIND)
                return True
            if not are_there:
                one.seen = None
            return are_there
