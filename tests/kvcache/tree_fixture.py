"""A knowledge tree with a manager in front and a simulated memory behind, for tests of both."""

from collections.abc import Sequence

from stillroom.core.ids import ChunkId
from stillroom.core.kv import Tier
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.lease_admission import Reuse
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.cost_model import CostProfile, linear_profile
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import PrefixKeys
from stillroom.kvcache.tree.tree_options import TreeOptions
from tests.fakes import ManualClock
from tests.kvcache.prefix_memory import PrefixMemory, step

SIZE = 4
"""Tokens per block, per document here, and per tail piece."""
S, Q = 100, 101
"""The token of the system prompt and of questions; documents are named by their token."""


class TreeFixture:
    """A tree with a manager in front and a simulated memory behind."""

    def __init__(
        self, num_blocks: int = 8, *, profile: CostProfile | None = None, always_loads: bool = False, **options: object
    ) -> None:
        self.clock = ManualClock()
        self.memory = PrefixMemory(SIZE)
        self.pool = BlockPool(num_blocks, SIZE)
        self.profile = profile or linear_profile(0.0, 1.0, 0.0)
        self.always_loads = always_loads
        self.options = TreeOptions(**{"replicates_system": False, **options})  # type: ignore[arg-type]
        self.open()

    def open(self) -> None:
        self.tree = KnowledgeTree(self.pool, self.memory, self.profile, self.options, self.clock.monotonic)
        keys = PrefixKeys(b"m", tail_tokens=SIZE)
        self.manager = KVCacheManager(self.pool, Reuse(self.tree, keys, self.always_loads))

    def lease(self, *documents: int, question: int = 2) -> Lease:
        segments = [Segment(SegmentKind.SYSTEM, (S,) * SIZE)]
        segments += [Segment(SegmentKind.CHUNK, (d,) * SIZE, ChunkId(d)) for d in documents]
        prompt = SegmentedPrompt((*segments, Segment(SegmentKind.QUESTION, (Q,) * question)))
        return self.manager.new_lease(prompt, prompt.num_tokens + 8)

    def admit(self, lease: Lease) -> int | None:
        return self.manager.try_admit(lease, [len(segment.token_ids) for segment in lease.prompt.segments])

    def serve(self, *documents: int, question: int = 2, running: Sequence[Lease] = ()) -> Lease:
        """Run a request from beginning to end; return its lease, empty, with its report."""
        lease = self.lease(*documents, question=question)
        cached = self.admit(lease)
        assert cached is not None
        self.compute(lease)
        self.manager.release(lease)
        self.check(*running)
        return lease

    def compute(self, lease: Lease) -> None:
        tokens = lease.prompt.token_ids
        history = b""
        for token, slot in zip(tokens, lease.table.slots.tolist(), strict=True):
            history = self.memory.slots[slot] = step(history, token)
        self.manager.commit(lease, len(tokens))

    def check(self, *leases: Lease) -> None:
        self.manager.check_integrity(leases)

    def node(self, *documents: int) -> Node | None:
        return self.tree.get(self.lease(*documents).pieces[-1].key)

    def tier(self, *documents: int) -> Tier | None:
        node = self.node(*documents)
        return None if node is None else node.tier
