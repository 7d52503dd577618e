"""The waiting requests and their order: those that have run already, then tenants in turn, of each by priority, then
by the policy. No request is overtaken without end.

Invariant: of the requests that came after a waiting one, at most `window` are admitted before it, whatever else holds.
Decisions follow from the order of calls alone. O(log n) for each request, and for each that a change of what is kept
concerns.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush

from stillroom.core.ids import RequestId
from stillroom.core.indexed_heap import IndexedHeap
from stillroom.scheduler.policy import AdmissionCandidate, Policy, first_come
from stillroom.scheduler.sequence import Sequence, Status


class WaitingQueue:
    """Sequences that wait for a seat and blocks."""

    def __init__(self, policy: Policy, outlook: Callable[[Sequence], AdmissionCandidate], window: int) -> None:
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
        self._resumed: IndexedHeap[RequestId] = IndexedHeap()
        """Who was preempted, whoever it is for: somebody reads its answer already. The oldest goes on first."""
        self._orders: dict[str, dict[int, IndexedHeap[RequestId]]] = {}
        """All others by tenant and priority, in the policy's order."""
        self._turns: IndexedHeap[str] = IndexedHeap()
        """Tenants that wait, who was served least first."""
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

    def snapshot(self) -> list[Sequence]:
        """All of them, in no particular order. Any thread may ask."""
        return list(self._sequences.values())

    def push(self, sequence: Sequence) -> None:
        request_id = sequence.request_id
        self._sequences[request_id] = sequence
        heappush(self._arrivals, (sequence.arrival, request_id))
        self._order_with(sequence).push(request_id, self._key(sequence))
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
        if self._resumed:
            return self._sequences[self._resumed.peek()[0]]
        orders = self._orders[self._turns.peek()[0]]
        return self._sequences[orders[min(orders)].peek()[0]]

    def admit(self, sequence: Sequence) -> None:
        """It runs from now on."""
        self.remove(sequence.request_id)
        if not _has_run(sequence):
            tenant = sequence.request.cache_salt
            self._served[tenant] += sequence.num_to_compute
            if tenant in self._turns:
                self._turns.update(tenant, self._served[tenant])
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
        order = self._order_of(sequence)
        order.remove(request_id)
        if not order and not _has_run(sequence):
            tenant = sequence.request.cache_salt
            del self._orders[tenant][sequence.request.priority]
            if not self._orders[tenant]:
                del self._orders[tenant]
                self._turns.remove(tenant)
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
            self._order_of(sequence).update(request_id, self._key(sequence))

    def check_integrity(self) -> None:
        """Everybody stands once, where he belongs by what is kept now. After `reorder`."""
        orders = [order for of_tenant in self._orders.values() for order in of_tenant.values()]
        assert all(orders) and all(self._orders.values()) and set(self._turns) == set(self._orders)
        assert len(self._resumed) + sum(map(len, orders)) == len(self._sequences)
        assert not self._sequences or self.oldest.arrival == min(one.arrival for one in self)
        for sequence in self:
            assert self._order_of(sequence).key_of(sequence.request_id) == self._key(sequence), sequence.request_id

    def _order_of(self, sequence: Sequence) -> IndexedHeap[RequestId]:
        """Where one that waits stands."""
        if _has_run(sequence):
            return self._resumed
        return self._orders[sequence.request.cache_salt][sequence.request.priority]

    def _order_with(self, sequence: Sequence) -> IndexedHeap[RequestId]:
        """Where one belongs that begins to wait."""
        if _has_run(sequence):
            return self._resumed
        tenant = sequence.request.cache_salt
        if tenant not in self._orders:  # nobody saves turns while he has nothing to ask
            least = self._turns.peek()[1] if self._turns else 0.0
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
            self._turns.push(tenant, self._served[tenant])
        return self._orders.setdefault(tenant, {}).setdefault(sequence.request.priority, IndexedHeap())

    def _key(self, sequence: Sequence) -> float:
        """Of who was preempted the arrival."""
        if not self.depends_on_cache or _has_run(sequence):
            return float(sequence.arrival)
        return self._policy(self._outlook(sequence))

    def _watched(self, sequence: Sequence) -> tuple[bytes, ...]:
        """What its place in the order depends on."""
        return sequence.lease.watched if self.depends_on_cache else ()


def _has_run(sequence: Sequence) -> bool:
    return sequence.status is Status.PREEMPTED
