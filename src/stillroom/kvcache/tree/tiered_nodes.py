"""The nodes of the knowledge tree, their copies on device, host and disk, and the order in which these leave.

Books only: `knowledge_tree` decides what is kept and moves it. Invariants, which `check_integrity` adds up:
- a node has a copy somewhere, and its parent's fastest copy is never in a slower tier than its own;
- each tier's copies fit into its capacity; the device's are blocks of the pool, with one reference held here;
- a node is in a tier's order of eviction exactly if it has a copy there, no child with one, and no user.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from stillroom.core.count_min import CountMinSketch
from stillroom.core.ids import BlockId, ChunkId
from stillroom.core.indexed_heap import IndexedHeap
from stillroom.core.kv import KVMover, NodeKey, Tier
from stillroom.kvcache.blocks.pool import BlockPool
from stillroom.kvcache.stats import KVCacheStats
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvcache.tree.eviction import NodeUse, Policy, prefix_heat
from stillroom.kvcache.tree.node import Node, WindowedCount
from stillroom.kvcache.tree.provenance import Context

TIERS = tuple(Tier)
_NUM_REMEMBERED = 65_536
"""Nodes that are gone and remembered, some 200 bytes each: to say "evicted", not "never seen", and for their heat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """Each improvement over the paper is a switch."""

    host_bytes: int = 0
    disk_bytes: int = 0
    is_disk_read_only: bool = False
    """Another process writes to it: what is there is used, nothing is stored or removed."""
    bytes_per_token: int = 1
    size_on_disk: Callable[[int, int, int], int] = lambda payload_size, num_seen, notes_size: payload_size
    """Bytes that a record takes on disk, from those of its KV, the chunks it has seen and the bytes of its notes."""
    policy: Policy = prefix_heat
    window_seconds: float = float("inf")
    """Frequency counts uses this far back."""
    half_life_uses: float = 50_000.0
    """Uses of any nodes after which a use counts half (heat)."""
    looks_ahead: bool = True
    """Nodes that waiting requests will use leave last."""
    admits_by_frequency: bool = False
    """A full disk takes a node only if it was asked for at least as often as the one that must go. Saves writes,
    and loses hits (docs/policies-bench.md)."""
    replicates_system: bool = True
    """The first piece of every prompt is copied to the host at once, so that it survives the device (RAGCache 6)."""


@dataclass(frozen=True, slots=True)
class _Gone:
    """What is remembered of a node without copies."""

    has_failed: bool
    """Its record was damaged."""
    heat: float


class TieredNodes:
    """Not thread-safe: the engine's loop is its only caller."""

    def __init__(
        self, pool: BlockPool, mover: KVMover, profile: CostProfile, options: TreeOptions, now: Callable[[], float]
    ) -> None:
        """
        Args:
            now: seconds, never going back; for frequencies.
        """
        self.pool = pool
        self.mover = mover
        self.profile = profile
        self.options = options
        self.stats = KVCacheStats()
        self._now = now
        self._nodes: dict[NodeKey, Node] = {}
        self._changed: set[bytes] | None = None
        self._capacity = {Tier.HOST: options.host_bytes, Tier.DISK: options.disk_bytes}
        self._used = dict.fromkeys(Tier, 0)
        self._num_copies = dict.fromkeys(Tier, 0)
        self._leaves: dict[Tier, IndexedHeap[NodeKey]] = {tier: IndexedHeap() for tier in Tier}
        self._clocks = dict.fromkeys(Tier, 0.0)
        self._protected: Counter[NodeKey] = Counter()
        self._by_content: dict[bytes, dict[NodeKey, Node]] = {}
        self._gone: OrderedDict[NodeKey, _Gone] = OrderedDict()  # oldest first
        self._unstored: OrderedDict[NodeKey, None] = OrderedDict()  # what may not be on disk, oldest first
        self._popularity = CountMinSketch(halve_every=100_000)
        self._num_uses = 0
        self._shielded: Node | None = None
        self.num_idle_blocks = 0
        """Blocks on the device that are kept and that no running sequence uses: as good as free."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def get(self, key: NodeKey) -> Node | None:
        return self._nodes.get(key)

    def num_bytes(self, tier: Tier) -> int:
        """Of all copies in a tier."""
        return self._used[tier]

    def num_nodes(self, tier: Tier) -> int:
        """With a copy in a tier."""
        return self._num_copies[tier]

    def watch_changes(self) -> None:
        """From now on, remember which copies come and go, for `take_changes`."""
        self._changed = set()

    def take_changes(self) -> set[bytes]:
        """Keys and contents of the nodes whose copies have come or gone since the last call."""
        changed, self._changed = self._changed or set(), None if self._changed is None else set()
        return changed

    # Users

    def acquire(self, nodes: Iterable[Node]) -> None:
        """One more user of each; they cannot be evicted."""
        for node in nodes:
            node.num_users += 1
            if node.num_users == 1:
                self.num_idle_blocks -= len(node.block_ids or ())
                self._reorder(node)

    def release(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            assert node.num_users > 0
            node.num_users -= 1
            if node.num_users == 0 and self._nodes.get(node.key) is node:  # else it was forgotten meanwhile
                self.num_idle_blocks += len(node.block_ids or ())
                self._reorder(node)

    # Auditing

    def check_integrity(self) -> None:
        """Every invariant of the module's first lines."""
        idle = [node.block_ids or () for node in self._nodes.values() if node.num_users == 0]
        assert self.num_idle_blocks == sum(map(len, idle))
        used, num_copies = dict.fromkeys(Tier, 0), dict.fromkeys(Tier, 0)
        for node in self._nodes.values():
            tier, parent = node.tier, node.parent
            assert tier is not None, "a node without any copy"
            if parent is not None:
                assert self._nodes.get(parent.key) is parent and parent.children[node.key] is node
                assert parent.tier is not None and parent.tier <= tier, "a parent in a slower tier than its child"
                assert parent.num_users >= node.num_users, "a child in use whose parent is not"
            if node.block_ids is not None:
                assert all(self.pool.ref_count(block_id) > 0 for block_id in node.block_ids)
            for where in Tier:
                used[where] += self._size(node, where) if node.is_in(where) else 0
                num_copies[where] += node.is_in(where)
                count = sum(child.is_in(where) for child in node.children.values())
                assert node.num_children_in[where] == count
                assert (node.key in self._leaves[where]) == self._is_leaf(node, where), (node.key.hex(), where)
        assert (used, num_copies) == (self._used, self._num_copies), "copies and their sums differ"
        assert all(used[tier] <= limit for tier, limit in self._capacity.items()), "a tier is over its capacity"
        for node in self._nodes.values():
            assert not node.seen_alone or (
                node.parent is None and not node.children and node.chunk_id in node.seen_alone
            )
        by_content = [node for same in self._by_content.values() for node in same.values()]
        assert len(by_content) == len(self._nodes) and all(self._nodes.get(node.key) is node for node in by_content)
        for heap in self._leaves.values():
            heap.check_integrity()
            assert all(key in self._nodes for key in heap)

    # Nodes

    def _attach(  # noqa: PLR0913  plain values, given once
        self,
        key: NodeKey,
        parent_key: NodeKey,
        content: bytes,
        first_position: int,
        num_tokens: int,
        chunk_id: ChunkId | None,
        context: Context | None = None,
    ) -> Node:
        """
        Args:
            context: of a node that hangs from none, as its KV is not exactly that of any path.
        """
        parent = self._nodes.get(parent_key) if context is None else None
        assert context is not None or (parent is None) == (first_position == 0)
        if context is not None:
            before = context.before
        else:
            before = parent.before if parent is not None else ()
            before += () if parent is None or parent.chunk_id is None else (parent.content,)
        node = Node(
            key,
            parent,
            content=content,
            before=before,
            seen_alone=frozenset() if context is None else context.seen,
            first_position=first_position,
            num_tokens=num_tokens,
            chunk_id=chunk_id,
            frequency=WindowedCount(self.options.window_seconds, self._now()),
            cost_alone=self.profile.prefill_seconds(0, num_tokens) / num_tokens,
            cost_here=self._cost_here(first_position, num_tokens),
        )
        self._nodes[key] = node
        if parent is not None:
            parent.children[key] = node
        self._by_content.setdefault(content, {})[key] = node
        gone = self._gone.pop(key, None)
        if gone is not None:
            node.heat = gone.heat
        return node

    def _forget(self, node: Node, *, has_failed: bool = False) -> None:
        """Drop a node and what hangs from it, wherever there are copies."""
        found, left = [], [node]
        while left:  # a path may be deeper than the stack
            found.append(left.pop())
            left += found[-1].children.values()
        for one in reversed(found):
            self._forget_leaf(one, has_failed=has_failed and one is node)

    def _forget_leaf(self, node: Node, *, has_failed: bool) -> None:
        if node.block_ids is not None:
            self._take_from_device(node)
        for tier in (Tier.HOST, Tier.DISK):
            if node.is_lower[tier]:
                self._remove_copy(node, tier)
        del self._nodes[node.key]
        if node.parent is not None:
            del node.parent.children[node.key]
        same = self._by_content[node.content]
        del same[node.key]
        if not same:
            del self._by_content[node.content]
        self._unstored.pop(node.key, None)
        self.stats.lost += 1
        self._gone[node.key] = _Gone(has_failed, node.heat)
        if len(self._gone) > _NUM_REMEMBERED:
            self._gone.popitem(last=False)

    # Priorities, and the order in which nodes leave

    def _cost_here(self, first_position: int, num_tokens: int) -> float:
        """What one more token after it takes with and without it, so that a step's fixed time does not count."""
        with_it = self.profile.prefill_seconds(first_position + num_tokens, 1)
        return max(self.profile.prefill_seconds(first_position, num_tokens + 1) - with_it, 1e-12) / num_tokens

    def _size(self, node: Node, tier: Tier) -> int:
        num_bytes = node.num_tokens * self.options.bytes_per_token
        if tier is not Tier.DISK:
            return num_bytes
        if node.is_lower[Tier.DISK]:  # what was written then, whatever was measured since
            return node.disk_bytes
        return self.options.size_on_disk(num_bytes, len(node.seen), 0 if node.mass is None else node.mass.num_bytes)

    def _priority(self, node: Node, tier: Tier) -> float:
        return self.options.policy(
            NodeUse(
                key=node.key,
                num_tokens=node.num_tokens,
                clock=self._clocks[tier],
                frequency=node.frequency.value(self._now()),
                avg_cost=node.avg_cost,
                cost_alone=node.cost_alone,
                cost_here=node.cost_here,
                recency=node.recency,
                heat=node.heat,
                depth=node.depth,
                reusability=node.reusability,
            )
        )

    def _rank(self, node: Node, tier: Tier) -> None:
        """A new priority in a tier, and with it a new place in its order."""
        node.priority[tier] = self._priority(node, tier)
        self._reorder(node, (tier,))

    def _is_leaf(self, node: Node, tier: Tier) -> bool:
        is_shielded = tier is Tier.DISK and node is self._shielded
        return node.is_in(tier) and node.num_users == 0 and node.num_children_in[tier] == 0 and not is_shielded

    def _shield(self, node: Node | None) -> None:
        """Nothing evicts this one node from disk, until another is shielded, or none."""
        before, self._shielded = self._shielded, node
        for one in (before, node):
            if one is not None:
                self._reorder(one, (Tier.DISK,))

    def _reorder(self, node: Node, tiers: Iterable[Tier] = TIERS) -> None:
        """Let each tier's order of eviction agree with the node."""
        for tier in tiers:
            leaves = self._leaves[tier]
            if not self._is_leaf(node, tier):
                if node.key in leaves:
                    leaves.remove(node.key)
                continue
            is_protected = self.options.looks_ahead and node.key in self._protected
            order = float("inf") if is_protected else node.priority[tier]
            if node.key in leaves:
                leaves.update(node.key, order)
            else:
                leaves.push(node.key, order)

    def _change_protected(self, keys: Iterable[NodeKey], by: int) -> None:
        for key in keys:
            self._protected[key] += by
            if self._protected[key] == 0:
                del self._protected[key]
            node = self._nodes.get(key)
            if node is not None:
                self._reorder(node)

    # Copies

    def _place_on_device(self, node: Node, block_ids: list[BlockId]) -> None:
        """The reference that comes with the blocks is the tree's."""
        node.block_ids = block_ids
        self.num_idle_blocks += 0 if node.num_users else len(block_ids)
        self._book(node, Tier.DEVICE, 1)
        self._rank(node, Tier.DEVICE)

    def _take_from_device(self, node: Node) -> None:
        assert node.block_ids is not None
        block_ids, node.block_ids = node.block_ids, None
        self.num_idle_blocks -= 0 if node.num_users else len(block_ids)
        self.pool.release(block_ids)
        self._book(node, Tier.DEVICE, -1)
        self._reorder(node, (Tier.DEVICE,))

    def _add_copy(self, node: Node, tier: Tier) -> None:
        if tier is Tier.DISK:
            node.disk_bytes = self._size(node, tier)
        node.is_lower[tier] = True
        self._book(node, tier, 1)
        self._rank(node, tier)

    def _remove_copy(self, node: Node, tier: Tier, *, is_dropped: bool = False) -> None:
        """
        Args:
            is_dropped: the mover has done it already.
        """
        self._book(node, tier, -1)
        node.is_lower[tier] = False
        self._reorder(node, (tier,))
        if not is_dropped:
            self.mover.drop(node.key, tier)

    def _book(self, node: Node, tier: Tier, by: int) -> None:
        """One copy more or less in a tier."""
        if self._changed is not None:
            self._changed |= {node.key, node.content}
        self._num_copies[tier] += by
        self._used[tier] += by * self._size(node, tier)
        if node.parent is not None:
            node.parent.num_children_in[tier] += by
            self._reorder(node.parent, (tier,))
