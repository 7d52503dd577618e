"""Which copies of nodes are on device, host and disk, the bytes they take, and the order in which they are evicted.

Accounting only: `demotion` and `knowledge_tree` decide and move KV. Invariants, which `check_integrity` verifies:
- each node has a copy in some tier, and its parent's fastest copy is never in a slower tier than its own;
- the copies of a tier fit into its capacity; the tree holds one reference to each of its device blocks;
- a node is in a tier's eviction queue exactly if it has a copy there, no child with a copy there, and no user.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from stillroom.core.ids import BlockId
from stillroom.core.indexed_heap import IndexedHeap
from stillroom.core.kv import FULL_BITS, NodeKey, Tier
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.tree.eviction import NodeUse
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.tree_options import TreeOptions

_DEVICE, _DISK = Tier.DEVICE, Tier.DISK  # looking a member up in its class takes as long as calling a function


class TierState:
    """Counts the bytes of each tier and orders its nodes for eviction.

    Not thread-safe: only the engine thread calls it.
    """

    def __init__(self, pool: BlockPool, options: TreeOptions, now: Callable[[], float]) -> None:
        """
        Args:
            now: seconds, never decreasing; for frequencies.
        """
        self._pool = pool
        self._options = options
        self._now = now
        self._watchers: list[set[bytes]] = []
        self._capacity = {Tier.HOST: options.host_bytes, Tier.DISK: options.disk_bytes}
        self._unused_capacity = {Tier.HOST: options.unused_host_bytes, Tier.DISK: options.unused_disk_bytes}
        self._used = dict.fromkeys(Tier, 0)
        self._unused = dict.fromkeys(Tier, 0)
        self._num_copies = dict.fromkeys(Tier, 0)
        self._in_document: Counter[Tier] = Counter()
        self._bytes_in_document: Counter[Tier] = Counter()
        self._queues: dict[Tier, IndexedHeap[Node]] = {tier: IndexedHeap() for tier in Tier}
        self._clocks = dict.fromkeys(Tier, 0.0)
        self._protected: dict[NodeKey, int] = {}
        """How often each protected key was protected."""
        self._shielded: Node | None = None
        self.num_idle_blocks = 0
        """Device blocks of nodes without users: they can be had by eviction."""

    # Sizes

    def num_bytes(self, tier: Tier) -> int:
        """Bytes of all copies in a tier."""
        return self._used[tier]

    def num_nodes(self, tier: Tier) -> int:
        """Nodes with a copy in a tier."""
        return self._num_copies[tier]

    def in_document(self, tier: Tier) -> tuple[int, int]:
        """Return number and bytes of the copies in a tier that were computed in their document's context."""
        return self._in_document[tier], self._bytes_in_document[tier]

    def num_unused_bytes(self, tier: Tier) -> int:
        """Bytes of the copies in a tier that were prepared and never used."""
        return self._unused[tier]

    def unused_room(self, tier: Tier) -> int:
        """Bytes that a tier can still take of KV that was prepared and never used; at least 0."""
        budget = self._unused_capacity[tier] - self._unused[tier]
        return max(0, min(budget, self._capacity[tier] - self._used[tier]))

    @property
    def prepared_tier(self) -> Tier:
        """Where prepared KV must find room: on disk, to last; without a disk, on the host."""
        return Tier.DISK if self._capacity[Tier.DISK] else Tier.HOST

    def prepared_size(self, num_tokens: int, bits: int, num_seen: int) -> int:
        """Return the bytes of prepared KV of this many tokens where it is to last.

        Args:
            num_seen: chunks that it has seen, its own included.
        """
        num_bytes = self._options.num_bytes(num_tokens, bits)
        is_on_disk = self.prepared_tier is Tier.DISK
        return self._options.size_on_disk(num_bytes, num_seen, 0) if is_on_disk else num_bytes

    def fits_again(self, num_displaced: int) -> bool:
        """Whether so many bytes of prepared KV that was evicted, or a quarter of its budget, have room."""
        tier = self.prepared_tier
        budget = min(self._unused_capacity[tier], self._capacity[tier])
        return self.unused_room(tier) >= min(num_displaced, budget // 4)

    def count_first_use(self, node: Node) -> None:
        """Count a node's copies as used from now on. Precondition: it was not used."""
        for tier in node.tiers:
            self._unused[tier] -= self.size(node, tier)

    def may_hold(self, node: Node, tier: Tier) -> bool:
        """Whether a node may take room on host or disk, by evictions if need be.

        KV that was prepared and never used has a budget, and takes free space only.
        """
        size = self.size(node, tier)
        if node.is_used:
            return size <= self._capacity[tier]
        return self.has_space(tier, size) and self._unused[tier] + size <= self._unused_capacity[tier]

    def capacity(self, tier: Tier) -> int:
        """Bytes of host or disk."""
        return self._capacity[tier]

    def has_space(self, tier: Tier, num_bytes: int) -> bool:
        """Whether host or disk hold this many bytes more without an eviction."""
        return self._used[tier] + num_bytes <= self._capacity[tier]

    def allow_present_bytes(self, tier: Tier) -> None:
        """Raise a tier's capacity to what its copies take now."""
        self._capacity[tier] = max(self._capacity[tier], self._used[tier])

    def size(self, node: Node, tier: Tier) -> int:
        """Bytes of a node's copy in a tier, present or not."""
        num_bytes = self._options.num_bytes(node.num_tokens, FULL_BITS if tier is _DEVICE else node.bits)
        if tier is not _DISK:
            return num_bytes
        if node.is_in(_DISK):  # as it was written, whatever was measured since
            return node.disk_bytes
        return self._options.size_on_disk(num_bytes, len(node.seen), 0 if node.mass is None else node.mass.num_bytes)

    # Users

    def acquire(self, nodes: Iterable[Node]) -> None:
        """Add one user to each node; a node with users is not evicted."""
        for node in nodes:
            node.num_users += 1
            if node.num_users == 1:
                self.num_idle_blocks -= len(node.block_ids or ())
                for tier in node.tiers:
                    self._queues[tier].discard(node)

    def release(self, nodes: Iterable[Node]) -> None:
        """Remove one user from each node."""
        for node in nodes:
            assert node.num_users > 0
            node.num_users -= 1
            if node.num_users == 0:
                self.num_idle_blocks += len(node.block_ids or ())
                for tier in node.tiers:
                    self._update_queue(node, tier)

    # Copies

    def add_device_copy(self, node: Node, block_ids: list[BlockId]) -> None:
        """Record the blocks of a node. The tree takes over the caller's reference to them."""
        node.block_ids = block_ids
        self.num_idle_blocks += 0 if node.num_users else len(block_ids)
        self._record_copy(node, _DEVICE)

    def remove_device_copy(self, node: Node) -> None:
        """Release the blocks of a node."""
        assert node.block_ids is not None
        block_ids, node.block_ids = node.block_ids, None
        self.num_idle_blocks -= 0 if node.num_users else len(block_ids)
        self._pool.release(block_ids)
        self.remove_copy(node, _DEVICE)

    def add_copy(self, node: Node, tier: Tier) -> None:
        """Record a copy on host or disk, or in the shared tier."""
        if tier is _DISK:
            node.disk_bytes = self.size(node, tier)
        self._record_copy(node, tier)

    def _record_copy(self, node: Node, tier: Tier) -> None:
        node.tiers = tuple(sorted((*node.tiers, tier)))
        self._count_copy(node, tier, 1)
        self.rank(node, tier)

    def remove_copy(self, node: Node, tier: Tier) -> None:
        """Record that a copy is gone."""
        self._count_copy(node, tier, -1)
        node.tiers = tuple(one for one in node.tiers if one is not tier)
        self._update_queue(node, tier)

    def watch_changes(self) -> set[bytes]:
        """Return a new set, which gets keys and contents of the nodes that gain or lose a copy from now on. The caller
        clears it."""
        changed: set[bytes] = set()
        self._watchers.append(changed)
        return changed

    def _count_copy(self, node: Node, tier: Tier, by: int) -> None:
        for changed in self._watchers:
            changed |= {node.key, node.content}
        num_bytes = by * self.size(node, tier)
        self._num_copies[tier] += by
        self._used[tier] += num_bytes
        if not node.is_used:
            self._unused[tier] += num_bytes
        if node.document_path:
            self._in_document[tier] += by
            self._bytes_in_document[tier] += num_bytes
        if node.parent is not None:
            node.parent.num_children_in[tier] += by
            self._update_queue(node.parent, tier)

    # Eviction order

    def has_victim(self, tier: Tier) -> bool:
        """Whether a copy in this tier can be evicted."""
        return bool(self._queues[tier])

    def next_victim(self, tier: Tier) -> Node:
        """Return the node that this tier evicts next. Precondition: `has_victim`."""
        return self._queues[tier].peek()[0]

    def advance_clock(self, victim: Node, tier: Tier) -> None:
        """Record that a node is evicted from a tier (RAGCache Eq. 2)."""
        self._clocks[tier] = max(self._clocks[tier], victim.priority[tier])

    def priority(self, node: Node, tier: Tier) -> float:
        """Value of a node to a tier by the eviction policy; the lowest is evicted first. A node that was never used is
        evicted before all others."""
        if not node.is_used:
            return float("-inf")
        return self._options.policy(
            NodeUse(
                node.key,
                node.num_tokens,
                self._clocks[tier],
                node.frequency.value(self._now()),
                node.avg_cost,
                node.cost_alone,
                node.cost_here,
                node.recency,
                node.heat,
                node.depth,
                node.reusability,
            )
        )

    def rank(self, node: Node, tier: Tier) -> None:
        """Recompute a node's priority in a tier, and its place in the tier's eviction queue."""
        node.priority[tier] = self.priority(node, tier)
        self._update_queue(node, tier)

    def shield(self, node: Node | None) -> None:
        """Do not evict this node from disk until another node, or None, is shielded."""
        before, self._shielded = self._shielded, node
        for changed in (before, node):
            if changed is not None:
                self._update_queue(changed, _DISK)

    def protect(self, key: NodeKey, node: Node | None) -> None:
        """Evict the node of this key last, while it is protected and if it exists; calls are counted."""
        self._change_protection(key, node, 1)

    def unprotect(self, key: NodeKey, node: Node | None) -> None:
        """Undo one `protect`."""
        self._change_protection(key, node, -1)

    def _change_protection(self, key: NodeKey, node: Node | None, by: int) -> None:
        count = self._protected.pop(key, 0) + by
        if count:
            self._protected[key] = count
        if node is not None and node.num_users == 0 and self._options.looks_ahead:
            for tier in node.tiers:
                self._update_queue(node, tier)

    def _is_evictable(self, node: Node, tier: Tier) -> bool:
        is_shielded = tier is _DISK and node is self._shielded
        return node.num_users == 0 and node.num_children_in[tier] == 0 and node.is_in(tier) and not is_shielded

    def _update_queue(self, node: Node, tier: Tier) -> None:
        """Make a tier's eviction queue agree with the node."""
        if not self._is_evictable(node, tier):
            self._queues[tier].discard(node)
            return
        is_protected = self._options.looks_ahead and node.key in self._protected
        self._queues[tier].put(node, float("inf") if is_protected else node.priority[tier])

    # Auditing

    def check_integrity(self, nodes: Collection[Node]) -> None:
        """Check every invariant of the module over all nodes of the tree."""
        assert self.num_idle_blocks == sum(len(node.block_ids or ()) for node in nodes if node.num_users == 0)
        used, unused, num_copies = (dict.fromkeys(Tier, 0) for _ in range(3))
        for node in nodes:
            self._check_node(node)
            for tier in Tier:
                size = self.size(node, tier) if node.is_in(tier) else 0
                used[tier] += size
                unused[tier] += 0 if node.is_used else size
                num_copies[tier] += node.is_in(tier)
        sums = (self._used, self._unused, self._num_copies)
        assert (used, unused, num_copies) == sums, "copies and their sums differ"
        assert all(used[tier] <= limit for tier, limit in self._capacity.items()), "a tier is over its capacity"
        for tier in Tier:
            sizes = [self.size(node, tier) for node in nodes if node.document_path and node.is_in(tier)]
            assert self.in_document(tier) == (len(sizes), sum(sizes)), "prepared copies and their sums differ"
        known = set(nodes)
        for queue in self._queues.values():
            queue.check_integrity()
            assert known.issuperset(queue), "a dropped node is in an eviction queue"

    def _check_node(self, node: Node) -> None:
        tier, parent = node.tier, node.parent
        assert tier is not None, "a node without any copy"
        if parent is not None:
            assert parent.tier is not None and parent.tier <= tier, "a parent in a slower tier than its child"
            assert parent.num_users >= node.num_users, "a child in use whose parent is not"
        assert node.tiers == tuple(sorted(set(node.tiers)))
        assert node.is_in(_DEVICE) == (node.block_ids is not None)
        if node.block_ids is not None:
            assert all(self._pool.ref_count(block_id) > 0 for block_id in node.block_ids)
        for where in Tier:
            assert node.num_children_in[where] == sum(child.is_in(where) for child in node.children.values())
            assert (node in self._queues[where]) == self._is_evictable(node, where), (node.key.hex(), where)
