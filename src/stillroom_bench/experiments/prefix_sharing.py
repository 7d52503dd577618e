"""Arms of `bench structures`: blocks saved by prefix sharing, and the time of KV accounting (llmds Tables 2, 8, 11).

The KV manager admits 100 sequences of 1,000 tokens with a common prefix; another arm uses a tree of 10,000 nodes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import numpy as np

from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.blocks.block_table import BlockTable, num_blocks_for
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.lease_admission import Reuse
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import PrefixKeys
from stillroom.kvcache.tree.tree_options import TreeOptions
from stillroom_bench.instrument.harness import Arm, Metrics
from stillroom_bench.loads.policy_replay import PROFILE, NoMover

NUM_SEQUENCES = 100
NUM_TOKENS = 1000
PREFIXES = (100, 200, 500, 800)
BLOCK_SIZE = 16
"""Block size of the engine; the paper's pages hold 512 tokens."""
TREE_NODES = 10_000

P = ParamSpec("P")
T = TypeVar("T")


def prefix_sharing_arms(seed: int, num_nodes: int = TREE_NODES) -> list[Arm]:
    """Return an arm per length of the shared prefix, and an arm for a tree of `num_nodes` nodes."""
    arms = [Arm(f"prefix sharing/{prefix} of {NUM_TOKENS} tokens", sharing(prefix, seed)) for prefix in PREFIXES]
    return [
        *arms,
        Arm(f"knowledge tree/{num_nodes:,} nodes", lambda repetition: _large_tree(num_nodes, seed, repetition)),
    ]


def bound(num_shared: int) -> float:
    """Return the largest possible saving: (N - 1) / N of the prefix's share (llmds 5.7.3)."""
    return (NUM_SEQUENCES - 1) / NUM_SEQUENCES * num_shared / NUM_TOKENS


@dataclass
class CallTimes:
    """Durations of calls by name."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    def call(self, name: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        start = self.clock()
        result = function(*args, **kwargs)
        self.seconds.setdefault(name, []).append(self.clock() - start)
        return result

    def metrics(self) -> Metrics:
        return {
            f"{name}_p{percent}_seconds": float(np.percentile(values, percent))
            for name, values in self.seconds.items()
            for percent in (50, 95, 99)
        }


def _manager(num_blocks: int) -> tuple[KVCacheManager, KnowledgeTree]:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    tree = KnowledgeTree(pool, NoMover(), PROFILE, TreeOptions(), time.perf_counter)
    return KVCacheManager(pool, Reuse(tree, PrefixKeys(b"", tail_tokens=256))), tree


def _prompt(rng: np.random.Generator, *shared: Segment, num_tokens: int = NUM_TOKENS) -> SegmentedPrompt:
    """Return a prompt of the shared segments and random tokens up to `num_tokens`."""
    rest = num_tokens - sum(len(segment.token_ids) for segment in shared)
    own = Segment(SegmentKind.QUESTION, tuple(rng.integers(0, 50_000, rest).tolist()))
    return SegmentedPrompt((*shared, own))


def _lengths(lease: Lease) -> list[int]:
    return [len(segment.token_ids) for segment in lease.prompt.segments]


def sharing(num_shared: int, seed: int, clock: Callable[[], float] = time.perf_counter) -> Callable[[int], Metrics]:
    """Return an arm's function: 100 sequences whose first `num_shared` tokens are the same, timed by a clock."""

    def run(repetition: int) -> Metrics:
        rng = np.random.default_rng([seed, repetition + 100])
        manager, tree = _manager(NUM_SEQUENCES * (NUM_TOKENS // BLOCK_SIZE + 2))
        prefix = Segment(SegmentKind.SYSTEM, tuple(rng.integers(0, 50_000, num_shared).tolist()))
        leases = [manager.new_lease(_prompt(rng, prefix), NUM_TOKENS) for _ in range(NUM_SEQUENCES)]
        times = CallTimes(clock=clock)
        for lease in leases:
            times.call("match", tree.match, lease.pieces)
            table = BlockTable(BLOCK_SIZE, NUM_TOKENS)
            times.call("attach_blocks", _attach_blocks, table, tree.match(lease.pieces), manager.pool, _lengths(lease))
            manager.pool.release(table.clear())
            times.call("attach", manager.try_admit, lease, _lengths(lease))
            manager.commit(lease, num_shared)
        used = manager.pool.num_used
        for lease in leases:
            times.call("release", manager.release, lease)
        without = NUM_SEQUENCES * num_blocks_for([num_shared, NUM_TOKENS - num_shared], BLOCK_SIZE)
        unpadded = NUM_SEQUENCES * num_blocks_for([NUM_TOKENS], BLOCK_SIZE)
        return {
            "blocks": used,
            "blocks_without_sharing": without,
            "saved": 1 - used / without,
            "saved_of_bound": (1 - used / without) / bound(num_shared),
            "saved_of_bound_beside_unsegmented": (1 - used / unpadded) / bound(num_shared),
            **times.metrics(),
        }

    return run


def _attach_blocks(table: BlockTable, path: list[Node], pool: BlockPool, lengths: list[int]) -> None:
    """Run the part of `try_admit` that llmds calls attach: put cached and fresh blocks into a table."""
    for node in path:
        pool.acquire(node.block_ids or ())
        table.append_segment(node.block_ids or (), lengths.pop(0))
    blocks = pool.try_allocate(num_blocks_for(lengths, BLOCK_SIZE))
    assert blocks is not None
    for length in lengths:
        count = num_blocks_for([length], BLOCK_SIZE)
        table.append_segment(blocks[:count], length)
        del blocks[:count]


def _large_tree(num_nodes: int, seed: int, repetition: int, num_asks: int = 1000) -> Metrics:
    """Serve requests for cached and new paths of four documents in a full tree of `num_nodes` nodes.

    `lookup_and_update` is `match` and RAGCache's UPDATE_NODE for each node found. `request` is the complete accounting
    of a request: admission with evictions, commit and release.
    """
    rng = np.random.default_rng([seed, repetition + 100])
    manager, tree = _manager(num_nodes + 40)
    documents = [
        Segment(SegmentKind.CHUNK, tuple(rng.integers(0, 50_000, BLOCK_SIZE).tolist())) for _ in range(num_nodes)
    ]
    system = Segment(SegmentKind.SYSTEM, (0,) * BLOCK_SIZE)
    times = CallTimes()

    def serve(first: int) -> None:
        chosen = [documents[(first + 7 * place) % num_nodes] for place in range(4)]
        prompt = _prompt(rng, system, *chosen, num_tokens=6 * BLOCK_SIZE)
        lease = manager.new_lease(prompt, prompt.num_tokens)
        lengths = _lengths(lease)

        def look_up_and_update() -> None:
            for node in tree.match(lease.pieces):
                tree.touch(node)

        def request() -> None:
            assert manager.try_admit(lease, lengths) is not None
            manager.commit(lease, prompt.num_tokens)
            manager.release(lease)

        times.call("request", request)
        times.call("lookup_and_update", look_up_and_update)

    for number in range(num_nodes // 4 + 200):
        serve(number)
    times.seconds.clear()
    for first in rng.integers(0, num_nodes, min(num_asks, num_nodes // 10)).tolist():
        serve(first)
    return {"nodes": len(tree), **times.metrics()}
