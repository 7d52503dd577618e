"""The queue of waiting requests.

Order: preempted requests, then tenants in turn; within a tenant by priority, then by the policy.

Invariant: at most `window` requests are admitted before a waiting request that arrived earlier. The order depends on
the order of calls alone. Each call costs O(log n) for each request that it changes.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush

from stillroom.core.ids import RequestId
from stillroom.core.indexed_heap import IndexedHeap
from stillroom.scheduler.policy import AdmissionCandidate, Policy, first_come
from stillroom.scheduler.sequence import Sequence, Status


class WaitingQueue:
    """Sequences that wait for blocks and for a place in the running set."""

    def __init__(self, policy: Policy, candidate: Callable[[Sequence], AdmissionCandidate], window: int) -> None:
        """
        Args:
            candidate: returns what the policy reads of a sequence, by the KV that is kept now.
            window: how many later requests may be admitted before a waiting one; 0 admits in order of arrival.
        """
        self._policy = policy
        self._candidate = candidate
        self._window = window
        self._sequences: dict[RequestId, Sequence] = {}
        self._arrivals: list[tuple[int, RequestId]] = []  # a heap; removed requests are dropped when they reach the top
        self._preempted: IndexedHeap[RequestId] = IndexedHeap()
        """Preempted requests of all tenants, oldest first: a client reads their answers already."""
        self._orders: dict[str, dict[int, IndexedHeap[RequestId]]] = {}
        """Other requests by tenant and priority, in the policy's order."""
        self._turns: IndexedHeap[str] = IndexedHeap()
        """Waiting tenants, by the tokens computed for them, least first."""
        self._served: dict[str, float] = {}  # tokens computed by tenant; at least the least of the waiting tenants
        self._overtaking: list[int] = []  # sorted arrivals of admitted requests later than the oldest waiting one
        self._watchers: dict[bytes, set[RequestId]] = {}  # by node key or content

    @property
    def depends_on_cache(self) -> bool:
        """Whether the order depends on kept KV, so that `reorder` must be called when that changes."""
        return self._policy is not first_come

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def snapshot(self) -> list[Sequence]:
        """Return the waiting sequences in no particular order. Thread-safe."""
        return list(self._sequences.values())

    def push(self, sequence: Sequence) -> None:
        request_id = sequence.request_id
        self._sequences[request_id] = sequence
        heappush(self._arrivals, (sequence.arrival, request_id))
        self._order_for_new(sequence).push(request_id, self._key(sequence))
        for name in self._watched_keys(sequence):
            self._watchers.setdefault(name, set()).add(request_id)

    @property
    def oldest(self) -> Sequence:
        """The sequence that arrived first. Raises IndexError if the queue is empty."""
        while True:
            arrival, request_id = self._arrivals[0]
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.arrival == arrival:
                return sequence
            heappop(self._arrivals)

    def first(self) -> Sequence | None:
        """Return the sequence to admit next; None if the queue is empty."""
        if not self._sequences:
            return None
        oldest = self.oldest
        if len(self._overtaking) - bisect_right(self._overtaking, oldest.arrival) >= self._window:
            return oldest
        if self._preempted:
            return self._sequences[self._preempted.peek()[0]]
        orders = self._orders[self._turns.peek()[0]]
        return self._sequences[orders[min(orders)].peek()[0]]

    def admit(self, sequence: Sequence) -> None:
        """Remove a sequence that starts to run, and count it for its tenant and the window."""
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
        """Remove and return a sequence; None if it does not wait."""
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
        for name in self._watched_keys(sequence):
            self._watchers[name].discard(request_id)
            if not self._watchers[name]:
                del self._watchers[name]
        return sequence

    def reorder(self, changed: Iterable[bytes]) -> None:
        """Recompute the keys of the requests that use these nodes.

        Args:
            changed: keys or contents of nodes of which copies were stored or dropped.
        """
        concerned: dict[RequestId, None] = {}
        for name in changed:
            concerned |= dict.fromkeys(self._watchers.get(name, ()))
        for request_id in concerned:
            sequence = self._sequences[request_id]
            self._order_of(sequence).update(request_id, self._key(sequence))

    def check_integrity(self) -> None:
        """Assert that each sequence stands once, with the key of now. Precondition: `reorder` was called."""
        orders = [order for of_tenant in self._orders.values() for order in of_tenant.values()]
        assert all(orders) and all(self._orders.values()) and set(self._turns) == set(self._orders)
        assert len(self._preempted) + sum(map(len, orders)) == len(self._sequences)
        assert not self._sequences or self.oldest.arrival == min(one.arrival for one in self)
        for sequence in self:
            assert self._order_of(sequence).key_of(sequence.request_id) == self._key(sequence), sequence.request_id

    def _order_of(self, sequence: Sequence) -> IndexedHeap[RequestId]:
        if _has_run(sequence):
            return self._preempted
        return self._orders[sequence.request.cache_salt][sequence.request.priority]

    def _order_for_new(self, sequence: Sequence) -> IndexedHeap[RequestId]:
        """Return the heap for a sequence that begins to wait, created if need be."""
        if _has_run(sequence):
            return self._preempted
        tenant = sequence.request.cache_salt
        if tenant not in self._orders:  # a tenant without requests accumulates no turns
            least = self._turns.peek()[1] if self._turns else 0.0
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
            self._turns.push(tenant, self._served[tenant])
        return self._orders.setdefault(tenant, {}).setdefault(sequence.request.priority, IndexedHeap())

    def _key(self, sequence: Sequence) -> float:
        if not self.depends_on_cache or _has_run(sequence):
            return float(sequence.arrival)
        return self._policy(self._candidate(sequence))

    def _watched_keys(self, sequence: Sequence) -> tuple[bytes, ...]:
        """Nodes that the key of a sequence depends on."""
        return sequence.lease.watched if self.depends_on_cache else ()


def _has_run(sequence: Sequence) -> bool:
    return sequence.status is Status.PREEMPTED
