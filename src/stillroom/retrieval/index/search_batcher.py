"""Batches searches that wait for the same busy index (VectorLiteRAG 4.2, the dispatcher).

The first search that arrives at a busy index leads a batch: it waits for the index, then searches for all that have
arrived by then. The others only wait for their own result, which each gets when its last list is scanned. The next
search to arrive leads the next batch.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from stillroom.retrieval.ranking import Ranking

Kind = TypeVar("Kind", bound=Hashable)
OnFound = Callable[[int, Ranking], None]


@dataclass(eq=False)
class _WaitingSearch(Generic[Kind]):
    query: NDArray[np.float32]
    kind: Kind
    is_ready: Event = field(default_factory=Event)
    ranking: Ranking | None = None
    """None when ready: the leader was interrupted."""
    error: Exception | None = None


class SearchBatcher(Generic[Kind]):
    """Thread-safe."""

    def __init__(self, lock: Lock, search: Callable[[Sequence[NDArray[np.float32]], Kind, OnFound], None]) -> None:
        """
        Args:
            lock: lock of the index; held while `search` runs.
            search: (queries [d], kind, on_found): searches for all; calls `on_found` once per query with its number and
                ranking.
        """
        self._lock, self._search = lock, search
        self._queue_lock = Lock()
        self._waiting: list[_WaitingSearch[Kind]] = []
        self._led_kinds: set[Kind] = set()
        """Kinds whose next batch has a leader."""

    @property
    def num_waiting(self) -> int:
        """Searches that have not begun."""
        return len(self._waiting)

    def search(self, query: NDArray[np.float32], kind: Kind) -> Ranking | None:
        """Search for a query [d], together with waiting searches of the same kind. Raises as `search`.

        Returns:
            None if the leader was interrupted.
        """
        own = _WaitingSearch(query, kind)
        with self._queue_lock:
            self._waiting.append(own)
            leads = kind not in self._led_kinds
            self._led_kinds.add(kind)
        if leads:
            self._lead(kind)
        own.is_ready.wait()
        if own.error is not None:
            raise own.error
        return own.ranking

    def _lead(self, kind: Kind) -> None:
        batch: list[_WaitingSearch[Kind]] = []

        def on_found(number: int, ranking: Ranking) -> None:
            batch[number].ranking = ranking
            batch[number].is_ready.set()

        try:
            with self._lock:
                batch += self._take(kind)
                self._search([one.query for one in batch], kind, on_found)
        except Exception as error:
            for one in batch:
                if not one.is_ready.is_set():
                    one.error = error
        finally:
            for one in batch or self._take(kind):
                one.is_ready.set()

    def _take(self, kind: Kind) -> list[_WaitingSearch[Kind]]:
        """Remove and return all waiting searches of a kind; the next to arrive leads the next batch."""
        with self._queue_lock:
            self._led_kinds.discard(kind)
            mine = [one for one in self._waiting if one.kind == kind]
            self._waiting = [one for one in self._waiting if one.kind != kind]
            return mine
