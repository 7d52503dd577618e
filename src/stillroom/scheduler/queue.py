"""The waiting requests, and who is next: those that have run already, then by priority, then tenants in turn, then by
the policy; and nobody is overtaken without end.

Invariant: of the requests that came after a waiting one, at most `window` are admitted before it, whatever else holds.
Decisions follow from the order of calls alone. O(log n) for each request, and for each that a change of what is kept
concerns.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from stillroom.core.ids import RequestId
from stillroom.core.indexed_heap import IndexedHeap
from stillroom.scheduler.policy import Outlook, Policy, first_come
from stillroom.scheduler.sequence import Sequence, Status

_RESUMED = -math.inf
"""Priority of who was preempted: somebody reads its answer already."""


_NOBODY = "\0"


@dataclass(slots=True)
class _Level:
    """Requests of one priority."""

    orders: dict[str, IndexedHeap[RequestId]] = field(default_factory=dict)
    """By tenant, the policy's order."""
    turns: IndexedHeap[str] = field(default_factory=IndexedHeap)
    """Tenants that wait, who was served least first."""


class WaitingQueue:
    """Sequences that wait for a seat and blocks."""

    def __init__(self, policy: Policy, outlook: Callable[[Sequence], Outlook], window: int) -> None:
        """
        Args:
            outlook: of a sequence, by what is kept now.
            window: how many later requests may be admitted before one that waits; 0 admits in order of arrival.
        """
        self._policy = policy
        self._outlook = outlook
        self._window = window
        self._sequences: dict[RequestId, Sequence] = {}
        self._arrivals: list[tuple[int, RequestId]] = []  # a heap; who does not wait any more is dropped on top
        self._levels: dict[float, _Level] = {}
        self._served: dict[str, float] = {}  # by tenant, tokens computed for it; equal when it begins to wait
        self._overtaking: list[int] = []  # arrivals that were admitted and are later than the oldest that waits, sorted
        self._interested: dict[bytes, set[RequestId]] = {}

    @property
    def depends_on_cache(self) -> bool:
        """Whether the order follows what is kept, so that changes of that must be told."""
        return self._policy is not first_come

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In no particular order."""
        return iter(self._sequences.values())

    def push(self, sequence: Sequence) -> None:
        request_id, tenant = sequence.request_id, _tenant(sequence)
        if tenant not in self._served:
            self._served[tenant] = 0.0
        if not any(tenant in level.orders for level in self._levels.values()):
            self._served[tenant] = max(self._served[tenant], self._least_served())
        self._sequences[request_id] = sequence
        heappush(self._arrivals, (sequence.arrival, request_id))
        level = self._levels.setdefault(_priority(sequence), _Level())
        if tenant not in level.orders:
            level.orders[tenant] = IndexedHeap()
            level.turns.push(tenant, self._served[tenant])
        level.orders[tenant].push(request_id, self._key(sequence))
        for name in self._watched(sequence):
            self._interested.setdefault(name, set()).add(request_id)

    @property
    def oldest(self) -> Sequence:
        """Who came first. Raises IndexError when nobody waits."""
        while True:
            arrival, request_id = self._arrivals[0]
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.arrival == arrival:
                return sequence
            heappop(self._arrivals)

    def first(self) -> Sequence | None:
        """Who is next, or None."""
        if not self._sequences:
            return None
        oldest = self.oldest
        if len(self._overtaking) - bisect_right(self._overtaking, oldest.arrival) >= self._window:
            return oldest
        level = self._levels[min(self._levels)]
        return self._sequences[level.orders[level.turns.peek()[0]].peek()[0]]

    def admit(self, sequence: Sequence) -> None:
        """It runs from now on."""
        self.remove(sequence.request_id)
        tenant = _tenant(sequence)
        self._served[tenant] += sequence.num_to_compute
        for level in self._levels.values():
            if tenant in level.turns:
                level.turns.update(tenant, self._served[tenant])
        if self._sequences:
            insort(self._overtaking, sequence.arrival)
            del self._overtaking[: bisect_right(self._overtaking, self.oldest.arrival)]
        else:
            self._overtaking.clear()
            self._served.clear()

    def remove(self, request_id: RequestId) -> Sequence | None:
        """Take one out, wherever it stands; None if it is not here."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return None
        priority, tenant = _priority(sequence), _tenant(sequence)
        level = self._levels[priority]
        level.orders[tenant].remove(request_id)
        if not level.orders[tenant]:
            del level.orders[tenant]
            level.turns.remove(tenant)
        if not level.orders:
            del self._levels[priority]
        for name in self._watched(sequence):
            self._interested[name].discard(request_id)
            if not self._interested[name]:
                del self._interested[name]
        return sequence

    def reorder(self, changed: Iterable[bytes]) -> None:
        """Copies of nodes of these keys or contents have come or gone."""
        concerned: dict[RequestId, None] = {}
        for name in changed:
            concerned |= dict.fromkeys(self._interested.get(name, ()))
        for request_id in concerned:
            sequence = self._sequences[request_id]
            order = self._levels[_priority(sequence)].orders[_tenant(sequence)]
            order.update(request_id, self._key(sequence))

    def check_integrity(self) -> None:
        """Everybody stands once, where he belongs by what is kept now. After `reorder`."""
        standing = [
            (priority, tenant, request_id)
            for priority, level in self._levels.items()
            for tenant, order in level.orders.items()
            for request_id in order
        ]
        assert len(standing) == len(self._sequences)
        assert not standing or self.oldest.arrival == min(one.arrival for one in self)
        for priority, tenant, request_id in standing:
            sequence = self._sequences[request_id]
            assert (priority, tenant) == (_priority(sequence), _tenant(sequence))
            assert self._levels[priority].orders[tenant].key_of(request_id) == self._key(sequence), request_id
        for level in self._levels.values():
            assert set(level.turns) == set(level.orders) and all(level.orders.values())

    def _key(self, sequence: Sequence) -> float:
        """Of who was preempted the arrival, so that the oldest goes on first."""
        if not self.depends_on_cache or sequence.status is Status.PREEMPTED:
            return float(sequence.arrival)
        return self._policy(self._outlook(sequence))

    def _watched(self, sequence: Sequence) -> tuple[bytes, ...]:
        """What its place in the order depends on."""
        return sequence.lease.watched if self.depends_on_cache else ()

    def _least_served(self) -> float:
        """Of the tenants that wait: what one counts as served at least that begins to, so that nobody saves turns while
        he has nothing to ask."""
        return min((level.turns.peek()[1] for level in self._levels.values()), default=0.0)


def _priority(sequence: Sequence) -> float:
    return _RESUMED if sequence.status is Status.PREEMPTED else sequence.request.priority


def _tenant(sequence: Sequence) -> str:
    """Who has run already is not made to wait for another tenant's turn."""
    return _NOBODY if sequence.status is Status.PREEMPTED else sequence.request.cache_salt
