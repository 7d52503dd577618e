"""`stillroom bench structures`: the heap, the token cache and the frequency sketch against common alternatives, KV
accounting, and the time to schedule a step.

Every arm of a group runs the same seeded sequence of operations, generated before the clock starts. The alternatives do
the complete job: the heap on `heapq` re-keys and removes items, the plain cache has a token budget.
"""

import functools
import heapq
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from stillroom.core.count_min import CountMinSketch, SketchShape
from stillroom.core.indexed_heap import IndexedHeap
from stillroom.core.token_cache import TokenCache, gdsf, lru, tamm
from stillroom_bench.experiments.experiment_options import StructuresOptions
from stillroom_bench.experiments.prefix_sharing import TREE_NODES, prefix_sharing_arms
from stillroom_bench.experiments.scheduling import NUM_STEPS, NUM_WAITING, scheduling_arms
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, run_arms

OURS = "stillroom"

HeapOperation = tuple[str, int, float]
"""(operation, item, key), where operation is push, pop, update or remove."""


class LazyHeap:
    """A heap on `heapq` with lazy deletion: re-keyed or removed items leave dead entries that `pop` skips."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, int]] = []
        self._live: dict[int, tuple[float, int, int]] = {}
        self._arrivals: dict[int, int] = {}
        self._count = 0

    def __len__(self) -> int:
        """Number of entries, including dead ones."""
        return len(self._entries)

    def push(self, item: int, key: float) -> None:
        self._count += 1
        self._arrivals[item] = self._count
        self._put(item, key)

    def update(self, item: int, key: float) -> None:
        self._put(item, key)

    def remove(self, item: int) -> None:
        del self._live[item], self._arrivals[item]

    def pop(self) -> tuple[int, float]:
        while True:
            entry = heapq.heappop(self._entries)
            if self._live.get(entry[2]) is entry:
                del self._live[entry[2]], self._arrivals[entry[2]]
                return entry[2], entry[0]

    def _put(self, item: int, key: float) -> None:
        entry = (key, self._arrivals[item], item)
        self._live[item] = entry
        heapq.heappush(self._entries, entry)


@functools.lru_cache(
    maxsize=4
)  # every arm of a group runs the same sequence, and making it takes longer than running it
def heap_operations(seed: int, count: int, num_waiting: int, num_updates: int) -> list[HeapOperation]:
    """Generate operations on a queue of about `num_waiting` items; `num_updates` items are re-keyed per departure."""
    rng = np.random.default_rng(seed)
    operations: list[HeapOperation] = [("push", item, float(rng.random())) for item in range(num_waiting)]
    keys = {item: key for _, item, key in operations}
    newest = num_waiting
    while len(operations) < count:
        waiting = list(keys)
        for place in rng.integers(0, len(waiting), size=num_updates).tolist():
            keys[waiting[place]] = float(rng.random())
            operations.append(("update", waiting[place], keys[waiting[place]]))
        if rng.random() < 0.1:
            item = waiting[int(rng.integers(0, len(waiting)))]
            operations.append(("remove", item, 0.0))
        else:
            item = min(keys, key=lambda other: keys[other])
            operations.append(("pop", item, 0.0))
        del keys[item]
        keys[newest] = float(rng.random())
        operations.append(("push", newest, keys[newest]))
        newest += 1
    return operations


def drive_heap(heap: Any, operations: Sequence[HeapOperation]) -> Metrics:
    """Run the operations and check the item of each pop."""
    start = time.perf_counter()
    for what, item, key in operations:
        if what == "push":
            heap.push(item, key)
        elif what == "update":
            heap.update(item, key)
        elif what == "remove":
            heap.remove(item)
        elif heap.pop()[0] != item:
            raise AssertionError("the heap's order is wrong")
    seconds = time.perf_counter() - start
    return {"operation_seconds": seconds / len(operations), "entries_held": len(heap)}


class PlainLru:
    """A minimal LRU cache with a token budget on an OrderedDict."""

    def __init__(self, budget: int) -> None:
        self.budget, self.total = budget, 0
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, value: Any, num_tokens: int) -> None:
        while self.total + num_tokens > self.budget:
            self.total -= self._entries.popitem(last=False)[1][1]
        self._entries[key] = (value, num_tokens)
        self.total += num_tokens


def cache_requests(seed: int, count: int) -> list[tuple[int, int]]:
    """Return (key, tokens) pairs with Zipf popularity over 5,000 results, whose sizes are independent of it."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(100, 2000, size=5000)
    ranks = np.arange(1, 5001, dtype=float) ** -0.9
    keys = rng.choice(5000, size=count, p=ranks / ranks.sum())
    return [(int(key), int(sizes[key])) for key in keys]


def drive_cache(get: Callable[[int], Any], put: Callable[[int, int], Any], requests: list[tuple[int, int]]) -> Metrics:
    """Look up each result and store it on a miss."""
    num_hits = tokens_saved = 0
    start = time.perf_counter()
    for key, num_tokens in requests:
        if get(key) is not None:
            num_hits += 1
            tokens_saved += num_tokens
        else:
            put(key, num_tokens)
    seconds = time.perf_counter() - start
    total = sum(num_tokens for _, num_tokens in requests)
    return {
        "operation_seconds": seconds / len(requests),
        "hit_rate": num_hits / len(requests),
        "token_hit_rate": tokens_saved / total,
    }


def drive_counter(add: Callable[[bytes], Any], stream: Sequence[bytes]) -> float:
    start = time.perf_counter()
    for item in stream:
        add(item)
    return (time.perf_counter() - start) / len(stream)


def _seed(seed: int, repetition: int) -> int:
    """Return a non-negative seed per repetition; warm-up repetitions are negative."""
    return 1000 * seed + repetition + 100


def _heap_arms(group: str, seed: int, count: int, num_updates: int) -> list[Arm]:
    def arm(make: Callable[[], Any]) -> Callable[[int], Metrics]:
        num_waiting = min(1000, count // 2)
        return lambda repetition: drive_heap(
            make(), heap_operations(_seed(seed, repetition), count, num_waiting, num_updates)
        )

    return [Arm(f"{group}/{OURS}", arm(IndexedHeap)), Arm(f"{group}/heapq, lazy deletion", arm(LazyHeap))]


def _cache_arms(seed: int, count: int, budget: int, notes: list[str]) -> list[Arm]:
    def ours(policy: Any) -> Callable[[int], Metrics]:
        def run(repetition: int) -> Metrics:
            cache: TokenCache[int, bool] = TokenCache(budget, policy)
            return drive_cache(
                cache.get, lambda k, n: cache.put(k, True, n), cache_requests(_seed(seed, repetition), count)
            )

        return run

    def plain(repetition: int) -> Metrics:
        cache = PlainLru(budget)
        return drive_cache(
            cache.get, lambda k, n: cache.put(k, True, n), cache_requests(_seed(seed, repetition), count)
        )

    arms = [
        Arm(f"cache/{OURS}", ours(gdsf)),
        Arm("cache/same with TAMM's key", ours(tamm)),
        Arm("cache/same with an LRU key", ours(lru)),
        Arm("cache/OrderedDict", plain),
    ]
    try:
        import cachetools
    except ImportError:
        notes.append("cachetools is not installed, so it is left out; pip install 'stillroom[peers]'")
        return arms

    def peer(repetition: int) -> Metrics:
        cache: Any = cachetools.LRUCache(maxsize=budget, getsizeof=lambda num_tokens: num_tokens)
        return drive_cache(cache.get, cache.__setitem__, cache_requests(_seed(seed, repetition), count))

    return [*arms, Arm("cache/cachetools LRUCache", peer)]


def _sketch_arms(seed: int, count: int) -> list[Arm]:
    def stream(repetition: int) -> list[bytes]:
        values = np.random.default_rng(_seed(seed, repetition)).zipf(1.1, size=count)
        return [b"question %d" % value for value in values]

    def ours(repetition: int) -> Metrics:
        sketch, items = CountMinSketch(SketchShape()), stream(repetition)
        seconds = drive_counter(sketch.add, items)
        counts = Counter(items)
        errors = np.array([sketch.estimate(item) - true for item, true in counts.items()])
        assert errors.min() >= 0, "the sketch underestimates"
        return {
            "operation_seconds": seconds,
            "structure_bytes": sketch.shape.num_bytes,
            "mean_count_error": float(errors.mean()),
            "share_within_bound": float((errors <= sketch.shape.epsilon * count).mean()),
        }

    def exact(repetition: int) -> Metrics:
        counter: Counter[bytes] = Counter()
        items = stream(repetition)

        def add(item: bytes) -> None:
            counter[item] += 1

        seconds = drive_counter(add, items)
        held = sys.getsizeof(counter) + sum(sys.getsizeof(item) + 28 for item in counter)  # an int is 28 bytes
        return {"operation_seconds": seconds, "structure_bytes": held, "mean_count_error": 0.0}

    return [Arm(f"sketch/{OURS}", ours), Arm("sketch/Counter", exact)]


def run_structures(
    options: StructuresOptions | None = None, on_run: Callable[[str, int], None] | None = None
) -> BenchResult:
    """Run all arms."""
    options = options or StructuresOptions()
    repeat, seed, count = options.repeat, options.seed, options.operations
    environment = record_environment()
    notes: list[str] = []
    arms = [
        *_heap_arms("heap, 8 re-keyed per departure", seed, count, num_updates=8),
        *_heap_arms("heap, never re-keyed", seed, count, num_updates=0),
        *_cache_arms(seed, count, budget=500_000, notes=notes),
        *_sketch_arms(seed, count),
        *prefix_sharing_arms(seed, min(TREE_NODES, count)),
        *scheduling_arms(seed, min(NUM_WAITING, count // 20), min(NUM_STEPS, count // 100)),
    ]
    samples = run_arms(arms, repeat=repeat, on_run=on_run, only_own=True)
    parameters = {"repeat": repeat, "seed": seed, "operations": count}
    return BenchResult("stillroom bench structures", environment, parameters, samples, OURS, notes=notes)
