"""Replays a workload on the knowledge tree and the KV manager without KV data.

Requests run in order, one at a time. Look-ahead sees the next `queue` requests, which wait. The clock is the number of
the request.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stillroom.core.ids import BlockId
from stillroom.core.kv import FULL_BITS, Link, NodeCopy, NodeKey, NodeRecord, Tier
from stillroom.core.prompt import SegmentKind
from stillroom.core.reuse import PromptReuse
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.blocks.block_table import BlockTable
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.lease_admission import Reuse
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvcache.tree.eviction import NodeUse, Policy, pgdsf
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.pieces import PrefixKeys
from stillroom.kvcache.tree.tree_options import TreeOptions
from stillroom_bench.loads.reuse_workloads import Ask, ReuseWorkload

BYTES_PER_TOKEN = 131_072
"""Keys and values of Mistral-7B in 16 bits, RAGCache's main model: 2 x 32 layers x 8 heads x 128 x 2 bytes."""

_GRID = (1, *(2**power for power in range(5, 18)))
PROFILE = CostProfile(
    cached=(0, *_GRID[1:]),
    new=_GRID,
    seconds=tuple(
        tuple(0.02 + 2.5e-4 * new + 2e-8 * new * (cached + new / 2) for new in _GRID) for cached in (0, *_GRID[1:])
    ),
    links={Tier.HOST: Link(1e-4, 12e9), Tier.DISK: Link(2e-3, 4e8)},
)
"""Approximate costs of such a model on RAGCache's GPU (A10G): 1 s for 4,000 tokens, PCIe to the host, and a network
disk, from which loading a document may take longer than computing it."""


class NoMover:
    """A `KVMover` that moves no data and always succeeds."""

    def prefetch(self, key: NodeKey, num_tokens: int, bits: int = FULL_BITS) -> bool:
        return False

    def cancel_prefetch(self, key: NodeKey) -> None:
        pass

    def is_finite(self, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        return True

    def place(self, copy: NodeCopy, block_ids: Sequence[BlockId], first_position: int) -> bool:
        return True

    def offload(self, copy: NodeCopy) -> bool:
        return True

    def load(self, key: NodeKey, source: Tier, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        return True

    def store(self, record: NodeRecord, source: Tier, block_ids: Sequence[BlockId]) -> bool:
        return True

    def mark_used(self, key: NodeKey) -> None:
        pass

    def has(self, key: NodeKey, tier: Tier) -> bool:
        return True

    def drop(self, key: NodeKey, tier: Tier) -> None:
        pass


class Farthest:
    """Belady's offline rule as a sort key: the piece whose next use is latest, or never, is evicted first.

    A piece's parent is used no later than the piece, so the first victim is always a leaf. With pieces of equal size in
    one tier this maximises hits. With different sizes the optimum is NP-hard, and an online policy may beat this rule.
    """

    def __init__(self, workload: ReuseWorkload) -> None:
        self.now = 0
        """Number of the running request; set by the replay."""
        self._uses: dict[NodeKey, list[int]] = defaultdict(list)
        for number, ask in enumerate(workload.asks):
            for piece in ask.pieces:
                self._uses[piece.key].append(number)

    def __call__(self, use: NodeUse) -> float:
        uses = self._uses[use.key]
        place = bisect_right(uses, self.now)
        return -float(uses[place]) if place < len(uses) else float("-inf")


class FirstIn:
    """First in, first out as a sort key: the piece that was computed first is evicted first, however often it is used.

    Stateful, because the statistics of a node tell its last use only: one per replay, for one tier.
    """

    def __init__(self) -> None:
        self._arrivals: dict[NodeKey, int] = {}

    def __call__(self, use: NodeUse) -> float:
        if use.frequency <= 1:  # a node that was evicted and computed again starts with one use
            self._arrivals[use.key] = use.recency
        return float(self._arrivals[use.key])


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """An eviction policy with its options."""

    policy: Policy | None = pgdsf
    """None: Belady's rule, computed from the workload."""
    makes_policy: Callable[[], Policy] | None = None
    """Makes a policy with a state of its own for each replay, in place of `policy`."""
    queue: int = 0
    """Waiting requests that look-ahead sees; 0 disables it."""
    admits_by_frequency: bool = False
    always_loads: bool = True
    anywhere: AnywhereOptions | None = None
    """Reuse documents behind the exact prefix at other positions too; None: exact prefixes only."""
    half_life_uses: float = TreeOptions().half_life_uses


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of each tier, as a share of the blocks that hold every piece of the workload."""

    device: float
    host: float = 0.0
    disk: float = 0.0

    def num_blocks(self, workload: ReuseWorkload) -> int:
        """Return the device blocks: at least what the largest request needs."""
        return max(round(self.device * workload.num_distinct_blocks), workload.num_blocks_of_largest)

    def num_bytes(self, share: float, workload: ReuseWorkload) -> int:
        return round(share * workload.num_distinct_blocks) * workload.block_size * BYTES_PER_TOKEN


@dataclass(slots=True)
class PolicyOutcome:
    """The result of one policy on one workload."""

    num_document_tokens: int
    num_hit_tokens: int = 0
    saved_seconds: float = 0.0
    """Modelled seconds of a full prefill, minus those of loading and of computing the rest."""
    total_seconds: float = 0.0
    """Modelled seconds without reuse."""
    hits: list[int] = field(default_factory=list)
    """Reused document tokens of each request."""
    num_documents: int = 0
    num_hit_documents: int = 0
    """Documents whose KV was reused, recomputed tokens or not."""

    @property
    def hit_rate(self) -> float:
        """Share of document tokens that were reused."""
        return self.num_hit_tokens / self.num_document_tokens

    @property
    def saved_share(self) -> float:
        return self.saved_seconds / self.total_seconds

    @property
    def document_hit_rate(self) -> float:
        """Share of documents that were reused: the hit rate of RAGCache 7.3; 0 where prompts have no documents."""
        return self.num_hit_documents / self.num_documents if self.num_documents else 0.0


def replay(workload: ReuseWorkload, capacity: Capacity, setup: Setup, profile: CostProfile = PROFILE) -> PolicyOutcome:
    """Run all requests of a workload."""
    oracle = Farthest(workload) if setup.policy is None else None
    own = None if setup.makes_policy is None else setup.makes_policy()
    options = TreeOptions(
        host_bytes=capacity.num_bytes(capacity.host, workload),
        disk_bytes=capacity.num_bytes(capacity.disk, workload),
        bytes_per_token=BYTES_PER_TOKEN,
        policy=own or oracle or setup.policy or pgdsf,
        looks_ahead=setup.queue > 0,
        admits_by_frequency=setup.admits_by_frequency,
        half_life_uses=setup.half_life_uses,
    )
    number = 0
    pool = BlockPool(capacity.num_blocks(workload), workload.block_size)
    tree = KnowledgeTree(pool, NoMover(), profile, options, lambda: float(number))
    keys = PrefixKeys(b"", tail_tokens=workload.block_size)
    manager = KVCacheManager(pool, Reuse(tree, keys, setup.always_loads, setup.anywhere))
    leases = [_lease(ask, workload.block_size) for ask in workload.asks[: setup.queue]]
    for lease in leases:
        manager.protect(lease)
    waiting = dict(enumerate(leases))
    outcome = PolicyOutcome(workload.num_document_tokens)
    for number, ask in enumerate(workload.asks):
        if oracle is not None:
            oracle.now = number
        lease = waiting.pop(number) if setup.queue else _lease(ask, workload.block_size)
        _serve(manager, lease, ask, outcome)
        arriving = number + setup.queue
        if setup.queue and arriving < len(workload.asks):
            waiting[arriving] = _lease(workload.asks[arriving], workload.block_size)
            manager.protect(waiting[arriving])
        outcome.total_seconds += profile.prefill_seconds(0, ask.num_tokens)
    return outcome


def _lease(ask: Ask, block_size: int) -> Lease:
    return Lease(ask.prompt, BlockTable(block_size, ask.num_tokens), ask.pieces)


def _serve(manager: KVCacheManager, lease: Lease, ask: Ask, outcome: PolicyOutcome) -> None:
    reuse, _ = serve(manager, lease, ask)
    documents = [one for one in reuse.segments if one.kind is SegmentKind.CHUNK]
    outcome.num_documents += len(documents)
    outcome.num_hit_documents += sum(one.source is not None for one in documents)
    outcome.hits.append(max(0, reuse.num_cached_tokens - ask.free_tokens))
    outcome.num_hit_tokens += outcome.hits[-1]
    outcome.saved_seconds += reuse.saved_seconds


def serve(manager: KVCacheManager, lease: Lease, ask: Ask) -> tuple[PromptReuse, int]:
    """Serve one request. Returns its reuse and the number of tokens of its query pass."""
    num_cached = manager.try_admit(lease, ask.segment_lengths)
    assert num_cached is not None, "the device holds every single request"
    num_query_pass = 0
    if lease.recompute is not None and lease.recompute.needs_query_pass:
        num_query_pass = len(lease.recompute.query_pass_positions(ask.num_tokens, ask.num_tokens))
        num_keys = len(lease.recompute.context) + num_query_pass
        seen_L2K = np.zeros((1, 2, num_keys), np.float32)  # the values change which tokens are recomputed, not how many
        manager.take_attention(lease, seen_L2K)
    manager.commit(lease, ask.num_tokens)
    if lease.recompute is not None:
        manager.end_recompute(lease)
    reuse = lease.reuse
    assert reuse is not None
    manager.release(lease)
    return reuse, num_query_pass
