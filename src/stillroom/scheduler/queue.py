"""The waiting requests, in a policy's order: an indexed heap, so that any of them can leave or be re-keyed in O(log
n)."""

from collections.abc import Iterator

from stillroom.core.ids import RequestId
from stillroom.core.indexed_heap import IndexedHeap
from stillroom.scheduler.policy import Policy
from stillroom.scheduler.sequence import Sequence


class WaitingQueue:
    """Sequences that wait for a seat and blocks."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._sequences: dict[RequestId, Sequence] = {}
        self._order: IndexedHeap[RequestId] = IndexedHeap()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return iter(self._sequences.values())

    def push(self, sequence: Sequence) -> None:
        self._sequences[sequence.request_id] = sequence
        self._order.push(sequence.request_id, self._policy(sequence))

    def first(self) -> Sequence | None:
        """Who is next, or None."""
        return self._sequences[self._order.peek()[0]] if self._sequences else None

    def remove(self, request_id: RequestId) -> Sequence | None:
        """Take one out, wherever it stands; None if it is not here."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._order.remove(request_id)
        return sequence
