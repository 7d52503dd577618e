"""A cache with a budget in tokens instead of entries, and a sort key as eviction policy (llmds 3.1).

Invariant, after every operation: the tokens of all entries add up to at most the budget. All operations are O(log n).
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from stillroom.core.indexed_heap import IndexedHeap

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class EntryUse:
    """Input of a policy: one entry at its last access."""

    recency: int
    """Number of that access over the whole cache, from 1: larger is more recent."""
    num_tokens: int
    num_uses: int
    """Accesses of this entry, its arrival included."""
    clock: float
    """Largest key evicted so far."""


Policy = Callable[[EntryUse], float]
"""Returns a key; the smallest is evicted first, among equals the earliest arrival."""


def tamm(use: EntryUse) -> float:
    """recency / tokens (llmds 3.1.1). With many accesses recencies become alike, and size alone decides."""
    return use.recency / use.num_tokens


def gdsf(use: EntryUse) -> float:
    """clock + uses / tokens (Greedy-Dual-Size-Frequency): hits per token of budget, aged by the rising clock."""
    return use.clock + use.num_uses / use.num_tokens


def lru(use: EntryUse) -> float:
    """Least recently used, for any size."""
    return float(use.recency)


@dataclass(slots=True)
class _CacheEntry(Generic[V]):
    value: V
    num_tokens: int
    num_uses: int = 0


class TokenCache(Generic[K, V]):
    """Maps keys to values of together at most `budget` tokens."""

    def __init__(self, budget: int, policy: Policy = gdsf) -> None:
        assert budget >= 0
        self.budget = budget
        self.total_tokens = 0
        self._policy = policy
        self._entries: dict[K, _CacheEntry[V]] = {}
        self._order: IndexedHeap[K] = IndexedHeap()
        self._num_accesses = 0
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        """Whether the key is present; not an access."""
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value or None. Counts as an access."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._order.update(key, self._use(entry))
        return entry.value

    def peek(self, key: K) -> V:
        """Return the value without an access. Raises KeyError if absent."""
        return self._entries[key].value

    def put(self, key: K, value: V, num_tokens: int) -> bool:
        """Store or replace a value, evicting others until it fits.

        Args:
            num_tokens: cost of the value; at least 1.

        Returns:
            False, with nothing changed, if the value exceeds the budget.
        """
        assert num_tokens > 0
        if num_tokens > self.budget:
            return False
        self.discard(key)
        while self.total_tokens + num_tokens > self.budget:
            victim, victim_key = self._order.peek()
            self._clock = max(self._clock, victim_key)
            self.discard(victim)
        self._entries[key] = entry = _CacheEntry(value, num_tokens)
        self._order.push(key, self._use(entry))
        self.total_tokens += num_tokens
        return True

    def discard(self, key: K) -> bool:
        """Remove an entry; return False if absent."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._order.remove(key)
        self.total_tokens -= entry.num_tokens
        return True

    def check_integrity(self) -> None:
        """Assert that the token counts add up and stay within the budget."""
        self._order.check_integrity()
        assert set(self._order) == set(self._entries)
        assert self.total_tokens == sum(entry.num_tokens for entry in self._entries.values())
        assert self.total_tokens <= self.budget, f"{self.total_tokens} tokens exceed the budget of {self.budget}"

    def _use(self, entry: _CacheEntry[V]) -> float:
        """Count an access; return the entry's new key."""
        self._num_accesses += 1
        entry.num_uses += 1
        return self._policy(EntryUse(self._num_accesses, entry.num_tokens, entry.num_uses, self._clock))
