"""The knowledge tree (RAGCache 5.1): which pieces of prompts have their KV kept, on device, host or disk.

A node is a piece after one exact path of earlier pieces. Invariants, which `check_integrity` adds up:
- a node has a copy somewhere, and its parent's fastest copy is never in a slower tier than its own;
- each tier's copies fit into its capacity; the device's are blocks of the pool, with one reference held by the tree;
- a node is in a tier's order of eviction exactly if it has a copy there, no child with one, and no user.

Copies are made by the `KVMover`, at once. A node leaves the device by being offloaded, the first time only: the copy on
the host stays while it is on the device again ("swap out only once"). Copies on disk stay likewise. Worked example:
docs/knowledge-tree.md
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from stillroom.core.count_min import CountMinSketch
from stillroom.core.ids import BlockId, ChunkId
from stillroom.core.indexed_heap import IndexedHeap
from stillroom.core.kv import KVMover, NodeKey, NodeRecord, Tier
from stillroom.kvcache.block_pool import BlockPool
from stillroom.kvcache.cost_model import CostProfile
from stillroom.kvcache.eviction import Policy, Use, prefix_heat
from stillroom.kvcache.node import Node, WindowedCount
from stillroom.kvcache.pieces import Piece
from stillroom.kvcache.stats import CacheStats

_TIERS = tuple(Tier)
_NUM_REMEMBERED = 65_536
"""Nodes that are gone and remembered, some 200 bytes each: to say "evicted", not "never seen", and for their heat."""


@dataclass(frozen=True, slots=True)
class _Gone:
    """What is remembered of a node without copies."""

    has_failed: bool
    """Its record was damaged."""
    heat: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """Each improvement over the paper is a switch."""

    host_bytes: int = 0
    disk_bytes: int = 0
    is_disk_read_only: bool = False
    """Another process writes to it: what is there is used, nothing is stored or removed."""
    bytes_per_token: int = 1
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


class KnowledgeTree:
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
        self.stats = CacheStats()
        self._now = now
        self._nodes: dict[NodeKey, Node] = {}
        self._capacity = {Tier.HOST: options.host_bytes, Tier.DISK: options.disk_bytes}
        self._used = dict.fromkeys(Tier, 0)
        self._num_copies = dict.fromkeys(Tier, 0)
        self._leaves: dict[Tier, IndexedHeap[NodeKey]] = {tier: IndexedHeap() for tier in Tier}
        self._clocks = dict.fromkeys(Tier, 0.0)
        self._expected: Counter[NodeKey] = Counter()
        self._contents: Counter[bytes] = Counter()
        self._gone: OrderedDict[NodeKey, _Gone] = OrderedDict()  # oldest first
        self._unstored: OrderedDict[NodeKey, None] = OrderedDict()  # what may not be on disk, oldest first
        self._popularity = CountMinSketch(halve_every=100_000)
        self._num_uses = 0
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

    # Looking up

    def match(self, pieces: Sequence[Piece]) -> list[Node]:
        """The longest path of nodes that these pieces begin with. O(length of the path)."""
        path: list[Node] = []
        for piece in pieces:
            node = self._nodes.get(piece.key)
            if node is None:
                break
            path.append(node)
        return path

    def has_content(self, piece: Piece) -> bool:
        """Whether the same tokens are kept somewhere, after whatever else."""
        return self._contents[piece.content] > 0

    def is_gone(self, piece: Piece) -> bool:
        """Whether a node of this name had to make room, not long ago."""
        return piece.key in self._gone

    def has_failed(self, piece: Piece) -> bool:
        """Whether a copy of it was damaged, not long ago."""
        gone = self._gone.get(piece.key)
        return gone is not None and gone.has_failed

    # Using

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

    def touch(self, node: Node, cost_per_token: float | None = None) -> None:
        """A request uses this node (RAGCache Algorithm 1, UPDATE_NODE).

        Args:
            cost_per_token: seconds, if the request has to compute it; None if it does not.
        """
        node.frequency.add(self._now())
        self._num_uses += 1
        node.recency = self._num_uses
        node.add_use(self._num_uses / self.options.half_life_uses)
        self._popularity.add(node.key)
        if cost_per_token is not None:
            node.add_cost(cost_per_token)
        for tier in _TIERS:
            if node.is_in(tier):
                self._rank(node, tier)

    def expect(self, keys: Iterable[NodeKey]) -> None:
        """A request waits that will use these; they leave last."""
        self._change_expected(keys, 1)

    def unexpect(self, keys: Iterable[NodeKey]) -> None:
        self._change_expected(keys, -1)

    # Growing

    def insert(self, piece: Piece, block_ids: Sequence[BlockId], cost_per_token: float) -> Node:
        """A piece was computed into these blocks: a new node, or a copy on the device for one that has none there.

        The piece before it is on the device. The tree takes a reference of its own to the blocks.
        """
        node = self._nodes.get(piece.key)
        if node is None:
            node = self._attach(piece.key, piece.parent, piece.content, piece.start, piece.num_tokens, piece.chunk_id)
            self.touch(node, cost_per_token)
            self._unstored[node.key] = None
        assert node.block_ids is None
        self.pool.acquire(block_ids)
        self._place_on_device(node, list(block_ids))
        if self.options.replicates_system and piece.start == 0:
            self._offload(node)
        return node

    def load(self, node: Node) -> bool:
        """Bring a node whose parent is on the device there too; False if there is no room, or its copy failed.

        A copy that fails is dropped with all that depends on it.
        """
        if node.block_ids is not None:
            return True
        source = node.tier
        assert source is not None and node.num_users > 0
        num_blocks = -(-node.num_tokens // self.pool.block_size)
        if not self.make_room(num_blocks):
            return False
        block_ids = self.pool.try_allocate(num_blocks)
        assert block_ids is not None
        if not self.mover.load(node.key, source, block_ids, node.num_tokens):
            self.pool.release(block_ids)
            self.stats.failed_loads[source] += 1
            self._remove_copy(node, source, is_dropped=True)
            return self._retry_slower(node)
        self.stats.loads[source] += 1
        self._place_on_device(node, block_ids)
        return True

    def _retry_slower(self, node: Node) -> bool:
        if node.tier is not None:
            return self.load(node)
        self._forget(node, has_failed=True)
        return False

    # Shrinking

    def make_room(self, num_blocks: int) -> bool:
        """Evict from the device until so many blocks are free (RAGCache Algorithm 1, EVICT_IN_GPU); False if it cannot,
        with what could be evicted gone."""
        leaves = self._leaves[Tier.DEVICE]
        while self.pool.num_free < num_blocks:
            if not leaves:
                return False
            node = self._pop_victim(Tier.DEVICE)
            self._leave_device(node)
        return True

    def lose_device(self) -> None:
        """The device's memory is gone (RAGCache 6): what has a lower copy is there, the rest is forgotten.

        Nobody may use any node."""
        for node in list(self._nodes.values()):
            assert node.num_users == 0
            if node.block_ids is not None:
                self._take_from_device(node)
        for node in [node for node in self._nodes.values() if node.parent is None]:
            self._sink(node)

    def forget_chunks(self, is_alive: Callable[[ChunkId], bool]) -> int:
        """Drop the KV of chunks that are no more, and what stands behind them in prompts; what runs keeps its blocks.

        Returns the number of nodes dropped."""
        before = len(self._nodes)
        for node in list(self._nodes.values()):
            if node.chunk_id is not None and node.key in self._nodes and not is_alive(node.chunk_id):
                self._forget(node)
        return before - len(self._nodes)

    def clear(self) -> None:
        """Drop everything that nobody uses."""
        for node in [node for node in self._nodes.values() if node.parent is None]:
            if node.num_users == 0:
                self._forget(node)

    def tend(self) -> bool:
        """Copy one node to disk that is not there yet, if there is room; False if nothing is left to do.

        For idle moments: what is on disk survives a kill."""
        while self._unstored:
            node = self._nodes.get(self._unstored.popitem(last=False)[0])
            if node is not None and self._fits_on_disk(node) and self._store(node):
                return True
        return False

    @property
    def chunk_ids(self) -> set[ChunkId]:
        """Of all chunks whose KV is kept."""
        return {node.chunk_id for node in self._nodes.values() if node.chunk_id is not None}

    def flush(self) -> int:
        """Copy to disk what is not there yet, most valuable first, as long as there is room; returns how many."""
        before = self.stats.stores
        waiting = [node for node in self._nodes.values() if not node.is_lower[Tier.DISK]]
        for node in sorted(waiting, key=lambda node: -self._priority(node, Tier.DISK)):
            if self._fits_on_disk(node):
                self._store(node)
        self._unstored.clear()
        return self.stats.stores - before

    def restore(self, records: Iterable[NodeRecord]) -> list[NodeKey]:
        """Nodes from the records of a disk; returns the keys of records that no path leads to any more."""
        orphans = []
        for record in sorted(records, key=lambda record: record.first_position):
            if record.key in self._nodes or not self._has_place(record):
                orphans.append(record.key)
                continue
            node = self._attach(
                record.key, record.parent, b"", record.first_position, record.num_tokens, record.chunk_id
            )
            node.frequency.add(self._now(), record.frequency)
            node.heat = self._num_uses / self.options.half_life_uses + math.log2(max(record.frequency, 1.0))
            node.avg_cost, node.num_computed = record.avg_cost, 1
            self._add_copy(node, Tier.DISK)
        if self.options.is_disk_read_only:
            self._capacity[Tier.DISK] = max(self._capacity[Tier.DISK], self._used[Tier.DISK])
        while self._used[Tier.DISK] > self._capacity[Tier.DISK]:
            self._leave_disk(self._pop_victim(Tier.DISK))
        return orphans

    def _has_place(self, record: NodeRecord) -> bool:
        if record.first_position == 0:
            return True
        parent = self._nodes.get(record.parent)
        return parent is not None and parent.first_position + parent.num_tokens == record.first_position

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
                used[where] += self._size(node) if node.is_in(where) else 0
                num_copies[where] += node.is_in(where)
                count = sum(child.is_in(where) for child in node.children.values())
                assert node.num_children_in[where] == count
                assert (node.key in self._leaves[where]) == self._is_leaf(node, where), (node.key.hex(), where)
        assert (used, num_copies) == (self._used, self._num_copies), "copies and their sums differ"
        assert all(used[tier] <= limit for tier, limit in self._capacity.items()), "a tier is over its capacity"
        for heap in self._leaves.values():
            heap.check_integrity()
            assert all(key in self._nodes for key in heap)

    # Copies and their order

    def _attach(
        self,
        key: NodeKey,
        parent_key: NodeKey,
        content: bytes,
        first_position: int,
        num_tokens: int,
        chunk_id: ChunkId | None,
    ) -> Node:
        parent = self._nodes.get(parent_key)
        assert (parent is None) == (first_position == 0)
        node = Node(
            key,
            parent,
            content=content,
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
        if content:
            self._contents[content] += 1
        gone = self._gone.pop(key, None)
        if gone is not None:
            node.heat = gone.heat
        return node

    def _cost_here(self, first_position: int, num_tokens: int) -> float:
        """What one more token after it takes with and without it, so that a step's fixed time does not count."""
        with_it = self.profile.prefill_seconds(first_position + num_tokens, 1)
        return max(self.profile.prefill_seconds(first_position, num_tokens + 1) - with_it, 1e-12) / num_tokens

    def _size(self, node: Node) -> int:
        return node.num_tokens * self.options.bytes_per_token

    def _priority(self, node: Node, tier: Tier) -> float:
        return self.options.policy(
            Use(
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
            )
        )

    def _rank(self, node: Node, tier: Tier) -> None:
        """A new priority in a tier, and with it a new place in its order."""
        node.priority[tier] = self._priority(node, tier)
        self._reorder(node, (tier,))

    def _is_leaf(self, node: Node, tier: Tier) -> bool:
        return node.is_in(tier) and node.num_users == 0 and node.num_children_in[tier] == 0

    def _reorder(self, node: Node, tiers: Iterable[Tier] = _TIERS) -> None:
        """Let each tier's order of eviction agree with the node."""
        for tier in tiers:
            leaves = self._leaves[tier]
            if not self._is_leaf(node, tier):
                if node.key in leaves:
                    leaves.remove(node.key)
                continue
            is_expected = self.options.looks_ahead and node.key in self._expected
            order = float("inf") if is_expected else node.priority[tier]
            if node.key in leaves:
                leaves.update(node.key, order)
            else:
                leaves.push(node.key, order)

    def _change_expected(self, keys: Iterable[NodeKey], by: int) -> None:
        for key in keys:
            self._expected[key] += by
            if self._expected[key] == 0:
                del self._expected[key]
            node = self._nodes.get(key)
            if node is not None:
                self._reorder(node)

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
        node.is_lower[tier] = True
        self._book(node, tier, 1)
        self._rank(node, tier)

    def _remove_copy(self, node: Node, tier: Tier, *, is_dropped: bool = False) -> None:
        """
        Args:
            is_dropped: the mover has done it already.
        """
        node.is_lower[tier] = False
        self._book(node, tier, -1)
        self._reorder(node, (tier,))
        if not is_dropped:
            self.mover.drop(node.key, tier)

    def _book(self, node: Node, tier: Tier, by: int) -> None:
        """One copy more or less in a tier."""
        self._num_copies[tier] += by
        self._used[tier] += by * self._size(node)
        if node.parent is not None:
            node.parent.num_children_in[tier] += by
            self._reorder(node.parent, (tier,))

    # Making room

    def _pop_victim(self, tier: Tier) -> Node:
        key, _ = self._leaves[tier].peek()
        node = self._nodes[key]
        self._clocks[tier] = max(self._clocks[tier], node.priority[tier])
        self.stats.evictions[tier] += 1
        return node

    def _leave_device(self, node: Node) -> None:
        """To the host, unless a copy is there; else to disk; else the node is gone, with what hangs from it."""
        if not (node.is_lower[Tier.HOST] or self._offload(node) or node.is_lower[Tier.DISK] or self._store(node)):
            self._forget(node)
            return
        self._take_from_device(node)
        if not node.is_lower[Tier.HOST]:
            self._sink(node)

    def _sink(self, node: Node) -> None:
        """A node that is not on the device may have lost its copy on the host: nothing below it may be faster than it
        is now."""
        if node.tier is None:
            self._forget(node)
            return
        for child in list(node.children.values()):
            if node.tier is Tier.DISK and child.is_lower[Tier.HOST]:
                self._remove_copy(child, Tier.HOST)
            self._sink(child)

    def _offload(self, node: Node) -> bool:
        if node.is_lower[Tier.HOST]:
            return True
        assert node.block_ids is not None
        if not self._has_host_room(node):
            return False
        if not self.mover.offload(node.key, node.block_ids, node.num_tokens):
            return False
        self.stats.offloads += 1
        self._add_copy(node, Tier.HOST)
        return True

    def _has_host_room(self, node: Node) -> bool:
        size, capacity, leaves = self._size(node), self._capacity[Tier.HOST], self._leaves[Tier.HOST]
        if size > capacity:
            return False
        while self._used[Tier.HOST] + size > capacity:
            if not leaves:
                return False
            self._leave_host(self._pop_victim(Tier.HOST))
        return True

    def _leave_host(self, node: Node) -> None:
        if not (node.is_lower[Tier.DISK] or self._store(node)) and node.block_ids is None:
            self._forget(node)
            return
        self._remove_copy(node, Tier.HOST)

    def _store(self, node: Node) -> bool:
        """A copy on disk, after one of its parent; False if the disk is full of what is asked for more often, or cannot
        be written."""
        if node.is_lower[Tier.DISK]:
            return True
        if self.options.is_disk_read_only or not self._capacity[Tier.DISK]:
            return False
        if node.parent is None:
            return self._store_alone(node)
        if not self._store(node.parent):
            return False
        self.acquire([node.parent])  # so that it does not make room for its own child
        is_stored = self._store_alone(node)
        self.release([node.parent])
        return is_stored

    def _store_alone(self, node: Node) -> bool:
        source = Tier.DEVICE if node.block_ids is not None else Tier.HOST
        if not self._has_disk_room(node) or not self.mover.store(self._record(node), source, node.block_ids or ()):
            return False
        self.stats.stores += 1
        self._add_copy(node, Tier.DISK)
        return True

    def _has_disk_room(self, node: Node) -> bool:
        size, capacity, leaves = self._size(node), self._capacity[Tier.DISK], self._leaves[Tier.DISK]
        if size > capacity:
            return False
        while self._used[Tier.DISK] + size > capacity:
            if not leaves:
                return False
            if self._is_less_popular(node, self._nodes[leaves.peek()[0]]):
                self.stats.rejected += 1
                return False
            self._leave_disk(self._pop_victim(Tier.DISK))
        return True

    def _fits_on_disk(self, node: Node) -> bool:
        """Whether there is room for it and those above it that are not there."""
        size, one = self._used[Tier.DISK], node
        while not one.is_lower[Tier.DISK]:
            size += self._size(one)
            if one.parent is None:
                break
            one = one.parent
        return size <= self._capacity[Tier.DISK]

    def _is_less_popular(self, node: Node, victim: Node) -> bool:
        """Admission: what is seldom asked for does not displace what is asked for more often."""
        popularity = self._popularity
        return self.options.admits_by_frequency and popularity.estimate(node.key) < popularity.estimate(victim.key)

    def _leave_disk(self, node: Node) -> None:
        if node.tier is Tier.DISK:
            self._forget(node)
        else:
            self._remove_copy(node, Tier.DISK)

    def _record(self, node: Node) -> NodeRecord:
        return NodeRecord(
            key=node.key,
            parent=node.key if node.parent is None else node.parent.key,
            first_position=node.first_position,
            num_tokens=node.num_tokens,
            chunk_id=node.chunk_id,
            avg_cost=node.avg_cost,
            frequency=node.frequency.value(self._now()),
        )

    def _forget(self, node: Node, *, has_failed: bool = False) -> None:
        """Drop a node and what hangs from it, wherever there are copies."""
        for child in list(node.children.values()):
            self._forget(child)
        if node.block_ids is not None:
            self._take_from_device(node)
        for tier in (Tier.HOST, Tier.DISK):
            if node.is_lower[tier]:
                self._remove_copy(node, tier)
        del self._nodes[node.key]
        if node.parent is not None:
            del node.parent.children[node.key]
        if node.content:
            self._contents[node.content] -= 1
            if not self._contents[node.content]:
                del self._contents[node.content]
        self.stats.lost += 1
        self._gone[node.key] = _Gone(has_failed, node.heat)
        if len(self._gone) > _NUM_REMEMBERED:
            self._gone.popitem(last=False)
