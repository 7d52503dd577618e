"""The token cache against the paper's linear search (llmds B.1)."""

from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.token_cache import EntryUse, Policy, TokenCache, gdsf, lru, tamm


class SlowCache:
    """llmds B.1 as written: searches all entries for each eviction."""

    def __init__(self, budget: int, policy: Policy) -> None:
        self.budget, self.policy, self.accesses = budget, policy, 0
        self.entries: dict[int, tuple[str, int, int, float]] = {}  # value, tokens, uses, key
        self.arrivals: dict[int, int] = {}
        self.clock = 0.0

    def get(self, key: int) -> str | None:
        if key not in self.entries:
            return None
        value, tokens, uses, _ = self.entries[key]
        self.touch(key, value, tokens, uses)
        return value

    def put(self, key: int, value: str, tokens: int) -> bool:
        if tokens > self.budget:
            return False
        self.entries.pop(key, None)
        while sum(entry[1] for entry in self.entries.values()) + tokens > self.budget:
            victim = min(self.entries, key=lambda k: (self.entries[k][3], self.arrivals[k]))
            self.clock = max(self.clock, self.entries.pop(victim)[3])
        self.arrivals[key] = self.accesses
        self.touch(key, value, tokens, 0)
        return True

    def touch(self, key: int, value: str, tokens: int, uses: int) -> None:
        self.accesses += 1
        priority = self.policy(EntryUse(self.accesses, tokens, uses + 1, self.clock))
        self.entries[key] = (value, tokens, uses + 1, priority)


OPERATIONS = st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.integers(1, 12)), max_size=80)


@given(OPERATIONS, st.integers(0, 25), st.sampled_from([tamm, gdsf, lru]))
def test_cache_equals_the_papers_linear_search(
    operations: list[tuple[bool, int, int]], budget: int, policy: Policy
) -> None:
    fast: TokenCache[int, str] = TokenCache(budget, policy)
    slow = SlowCache(budget, policy)
    for step, (is_put, key, tokens) in enumerate(operations):
        if is_put:
            assert fast.put(key, str(step), tokens) == slow.put(key, str(step), tokens)
        else:
            assert fast.get(key) == slow.get(key)
        fast.check_integrity()
        assert set(fast) == set(slow.entries)


def test_tamm_keeps_small_recent_entries() -> None:
    cache: TokenCache[str, int] = TokenCache(100, tamm)
    cache.put("small", 1, 10)
    cache.put("large", 2, 80)
    assert cache.put("new", 3, 20), "evicts large: 2 / 80 < 1 / 10"
    assert set(cache) == {"small", "new"}


def test_gdsf_keeps_frequent_entries_until_they_age() -> None:
    cache: TokenCache[str, int] = TokenCache(20, gdsf)
    cache.put("often", 1, 10)
    for _ in range(3):
        cache.get("often")
    for step in range(3):
        cache.put(f"once {step}", 2, 10)
    assert "often" in cache, "4 uses against 1"
    for step in range(20):
        cache.put(f"later {step}", 3, 10)
    assert "often" not in cache, "the clock has passed it"


def test_entry_above_the_budget_changes_nothing() -> None:
    cache: TokenCache[str, int] = TokenCache(10)
    cache.put("a", 1, 10)
    assert not cache.put("a", 2, 11) and cache.get("a") == 1
    assert cache.discard("a") and not cache.discard("a") and cache.total_tokens == 0
