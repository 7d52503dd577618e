"""Searches that wait for the same index are made together: a batch of those that came while it was busy, each of which
has its result as soon as its own last list is scanned (VectorLiteRAG 4.2, the dispatcher).

Who comes first to a busy index leads: waits for it, then searches for all that have come by then. The others wait for
their results only. Whoever comes after that leads the next batch.
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
class _Waiting(Generic[Kind]):
    query: NDArray[np.float32]
    kind: Kind
    is_ready: Event = field(default_factory=Event)
    ranking: Ranking | None = None
    """None when ready: whoever led was interrupted."""
    error: Exception | None = None


class SearchBatcher(Generic[Kind]):
    """Thread-safe."""

    def __init__(self, lock: Lock, search: Callable[[Sequence[NDArray[np.float32]], Kind, OnFound], None]) -> None:
        """
        Args:
            lock: of the index; held while `search` runs.
            search: the searches of one kind for queries [d] each; tells each one's number and ranking, once.
        """
        self._lock, self._search = lock, search
        self._desk = Lock()
        self._waiting: list[_Waiting[Kind]] = []
        self._is_led: set[Kind] = set()
        """Kinds of which somebody leads the next batch."""

    @property
    def num_waiting(self) -> int:
        """Of whom no search has begun."""
        return len(self._waiting)

    def search(self, query: NDArray[np.float32], kind: Kind) -> Ranking | None:
        """What `search` finds for a query [d], made together with those of the same kind that wait too; None if whoever
        led was interrupted. Raises as `search`."""
        own = _Waiting(query, kind)
        with self._desk:
            self._waiting.append(own)
            leads = kind not in self._is_led
            self._is_led.add(kind)
        if leads:
            self._lead(kind)
        own.is_ready.wait()
        if own.error is not None:
            raise own.error
        return own.ranking

    def _lead(self, kind: Kind) -> None:
        batch: list[_Waiting[Kind]] = []

        def on_found(number: int, ranking: Ranking) -> None:
            batch[number].ranking = ranking
            batch[number].is_ready.set()

        try:
            with self._lock:
                batch += self._taken(kind)
                self._search([one.query for one in batch], kind, on_found)
        except Exception as error:
            for one in batch:
                if not one.is_ready.is_set():
                    one.error = error
        finally:
            for one in batch or self._taken(kind):
                one.is_ready.set()

    def _taken(self, kind: Kind) -> list[_Waiting[Kind]]:
        """All that wait for searches of a kind; who comes now leads the next batch."""
        with self._desk:
            self._is_led.discard(kind)
            mine = [one for one in self._waiting if one.kind == kind]
            self._waiting = [one for one in self._waiting if one.kind != kind]
            return mine
