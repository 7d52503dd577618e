"""The knowledge tree (RAGCache 5.1): which pieces of prompts have their KV kept, on device, host or disk.

A node is a piece after one exact path of earlier pieces; `tiered_nodes` has the books and their invariants,
`leaving_nodes` the ways out. Copies are made by the `KVMover`, at once. A node leaves the device by being offloaded,
the first time only: the copy on the host stays while it is on the device again ("swap out only once"). Copies on disk
stay likewise. Worked example: docs/knowledge-tree.md
"""

import math
from collections.abc import Callable, Iterable, Sequence

from stillroom.core.ids import BlockId, ChunkId
from stillroom.core.kv import NO_CONTENT, NO_TENANT, NodeCopy, NodeKey, NodeRecord, OwnerTag, Tier
from stillroom.errors import NonFiniteError
from stillroom.kvcache.tree.chunk_scores import ContextMass
from stillroom.kvcache.tree.leaving_nodes import LeavingNodes
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import Piece
from stillroom.kvcache.tree.provenance import Context, alone_key
from stillroom.kvcache.tree.tiered_nodes import TIERS

_LEAST_OVERHEAD = 0.01
"""CFO of a copy that needs no repair, where 1 / CFO counts (Cache-Craft 3.3)."""
_UNKNOWN_BEFORE = (NO_CONTENT,)
"""What stood before a chunk is not known: in no prompt is it there again."""


class KnowledgeTree(LeavingNodes):
    """Not thread-safe: the engine's loop is its only caller."""

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

    def variants(self, content: bytes) -> list[Node]:
        """All nodes of the same tokens, for the same model and tenant, after whatever else."""
        return list(self._by_content.get(content, {}).values())

    def is_gone(self, piece: Piece) -> bool:
        """Whether a node of this name had to make room, not long ago."""
        return piece.key in self._gone

    def has_failed(self, piece: Piece) -> bool:
        """Whether a copy of it was damaged, not long ago."""
        gone = self._gone.get(piece.key)
        return gone is not None and gone.has_failed

    # Using

    def touch(self, node: Node, cost_per_token: float | None = None, overhead: float = 0.0) -> None:
        """A request uses this node (RAGCache Algorithm 1, UPDATE_NODE).

        Args:
            cost_per_token: seconds, if the request has to compute it; None if it does not.
            overhead: CFO; 0 where it is used as it is.
        """
        node.frequency.add(self._now())
        self._num_uses += 1
        node.recency = self._num_uses
        node.add_use(self._num_uses / self.options.half_life_uses)
        if self.options.admits_by_frequency:
            self._popularity.add(node.key)
        if cost_per_token is not None:
            node.add_cost(cost_per_token)
        else:
            node.reusability += 1.0 / max(overhead, _LEAST_OVERHEAD)
        for tier in TIERS:
            if node.is_in(tier):
                self._rank(node, tier)

    def protect(self, keys: Iterable[NodeKey]) -> None:
        """A request waits that will use these; they leave last."""
        self._change_protected(keys, 1)

    def unprotect(self, keys: Iterable[NodeKey]) -> None:
        self._change_protected(keys, -1)

    def prefetch(self, nodes: Iterable[Node], begun: list[NodeKey]) -> None:
        """A sequence that waits will load or place these: have those read that are on disk only.

        Args:
            begun: takes the key of each that is, to be given back to `cancel_prefetch`, also where this raises.
        """
        for node in nodes:
            if node.tier is Tier.DISK and self.mover.prefetch(node.key, node.num_tokens):
                begun.append(node.key)

    def cancel_prefetch(self, keys: Iterable[NodeKey]) -> None:
        for key in keys:
            self.mover.cancel_prefetch(key)

    # Growing

    def insert(self, piece: Piece, block_ids: Sequence[BlockId], cost_per_token: float) -> Node:
        """A piece was computed into these blocks: a new node, or a copy on the device for one that has none there.

        The piece before it is on the device. The tree takes a reference of its own to the blocks.

        Raises:
            NonFiniteError: these blocks hold NaN or an infinity; nothing is kept.
        """
        self._check_finite(piece, block_ids)
        node = self._nodes.get(piece.key)
        if node is None:
            node = self._attach(piece.key, piece.parent, piece.content, piece.start, piece.num_tokens, piece.chunk_id)
            node.owner = piece.owner
            self.touch(node, cost_per_token)
            self._unstored[node.key] = None
        assert node.block_ids is None
        self.pool.acquire(block_ids)
        self._place_on_device(node, list(block_ids))
        if self.options.replicates_system and piece.start == 0:
            self._offload(node)
        return node

    def insert_alone(self, piece: Piece, block_ids: Sequence[BlockId], context: Context, cost_per_token: float) -> Node:
        """A chunk was computed behind others whose KV was not exact: a node that hangs from none, and can be placed.

        Its key names content, position and provenance, so a node of that key has seen the same; it then stays as it is.
        Another process that reads the records turns keys by where they say that they stood. The tree takes a reference
        of its own to the blocks. Raises as `insert`.
        """
        assert piece.chunk_id in context.seen
        self._check_finite(piece, block_ids)
        key = alone_key(piece.content, piece.start, context.seen, context.system)
        if key in self._nodes:
            return self._nodes[key]
        node = self._attach(key, key, piece.content, piece.start, piece.num_tokens, piece.chunk_id, context)
        node.owner = piece.owner
        self.touch(node, cost_per_token)
        self._unstored[key] = None
        self.pool.acquire(block_ids)
        self._place_on_device(node, list(block_ids))
        return node

    def _check_finite(self, piece: Piece, block_ids: Sequence[BlockId]) -> None:
        if not self.mover.is_finite(block_ids, piece.num_tokens):
            raise NonFiniteError

    def place(self, node: Node, block_ids: Sequence[BlockId], first_position: int, overhead: float) -> bool:
        """Copy a node into a sequence's own blocks as if it stood from this position on; False if its copy failed.

        Nothing here depends on what is done with these blocks.

        Args:
            overhead: its CFO there.
        """
        if self._nodes.get(node.key) is not node:  # dropped meanwhile, with what it hung from
            return False
        while (tier := node.tier) is not None:
            copy = NodeCopy(node.key, tier, node.block_ids or (), node.first_position, node.num_tokens)
            if self.mover.place(copy, block_ids, first_position):
                self.stats.placed[tier] += 1
                self.touch(node, overhead=overhead)
                return True
            self.stats.failed_loads[tier] += 1
            if self.mover.has(node.key, tier):
                return False
            self._remove_copy(node, tier, is_dropped=True)
        self._forget(node, has_failed=True)
        return False

    def load(self, node: Node) -> bool:
        """Bring a node whose parent is on the device there too; False if there is no room, or its copy failed.

        A copy that fails is dropped with all that depends on it, unless it could only not be read just now.
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
        try:
            is_loaded = self.mover.load(node.key, source, block_ids, node.num_tokens)
        except Exception:
            self.pool.release(block_ids)
            raise
        if not is_loaded:
            self.pool.release(block_ids)
            self.stats.failed_loads[source] += 1
            if self.mover.has(node.key, source):
                return False
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

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks are free, or would be with everything evicted that nobody uses."""
        return self.pool.num_free + self.num_idle_blocks >= num_blocks

    def make_room(self, num_blocks: int) -> bool:
        """Evict from the device until so many blocks are free (RAGCache Algorithm 1, EVICT_IN_GPU); False, and nothing
        evicted, if that is not possible."""
        if not self.has_room(num_blocks):
            return False
        while self.pool.num_free < num_blocks:
            self._leave_device(self._pop_victim(Tier.DEVICE))
        return True

    def lose_device(self) -> None:
        """The device's memory is gone (RAGCache 6): what has a lower copy is there, the rest is forgotten.

        Nobody may use any node."""
        for node in self._nodes.values():
            if node.block_ids is not None:
                self._take_from_device(node)
        for node in [node for node in self._nodes.values() if node.parent is None]:
            self._sink(node)
        assert all(node.num_users == 0 for node in self._nodes.values())

    def forget_chunks(self, is_alive: Callable[[ChunkId], bool], owner: OwnerTag = NO_TENANT) -> int:
        """Drop a tenant's KV that has seen chunks that are no more; what runs keeps its blocks.

        What stands behind such a chunk on a path has seen it, and goes with it. Returns the number of nodes dropped.
        """
        before = len(self._nodes)
        for node in list(self._nodes.values()):
            if node.owner == owner and node.key in self._nodes and not all(map(is_alive, _named(node))):
                self._forget(node)
        return before - len(self._nodes)

    def forget_owner(self, owner: OwnerTag) -> int:
        """Drop all KV of a tenant; what runs keeps its blocks. Returns the number of nodes dropped."""
        before = len(self._nodes)
        for node in list(self._nodes.values()):
            if node.owner == owner and node.key in self._nodes:
                self._forget(node)
        return before - len(self._nodes)

    def distrust(self, nodes: Iterable[Node]) -> int:
        """Drop nodes whose KV may be wrong, and what hangs from them, in every tier; what runs keeps its blocks.
        Returns the number of nodes dropped."""
        before = len(self._nodes)
        for node in nodes:
            if self._nodes.get(node.key) is node:
                self._forget(node, has_failed=True)
        return before - len(self._nodes)

    def clear(self) -> None:
        """Drop everything that nobody uses."""
        for node in [node for node in self._nodes.values() if node.parent is None]:
            if node.num_users == 0:
                self._forget(node)

    def chunk_ids(self, owner: OwnerTag = NO_TENANT) -> set[ChunkId]:
        """Of a tenant's chunks that some kept KV has seen."""
        return {chunk_id for node in self._nodes.values() if node.owner == owner for chunk_id in _named(node)}

    # On disk, for the next process

    def tend(self) -> bool:
        """Copy one node to disk that is not there yet, if there is room; False if nothing is left to do.

        For idle moments: what is on disk survives a kill."""
        while self._unstored:
            node = self._nodes.get(self._unstored.popitem(last=False)[0])
            if node is not None and self._fits_on_disk(node) and self._store(node):
                return True
        return False

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
            mass = None if not record.notes else ContextMass.from_bytes(record.notes)
            before = _UNKNOWN_BEFORE if mass is None else mass.prefix
            node = self._attach(
                record.key,
                record.parent,
                record.content,
                record.first_position,
                record.num_tokens,
                record.chunk_id,
                Context(before, frozenset(record.seen)) if _is_alone(record) else None,
            )
            node.mass, node.owner = mass, record.owner
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
        if _is_alone(record):
            return record.chunk_id in record.seen  # of unknown provenance otherwise
        if record.parent == record.key:
            return True
        parent = self._nodes.get(record.parent)
        return parent is not None and parent.first_position + parent.num_tokens == record.first_position


def _is_alone(record: NodeRecord) -> bool:
    """Whether it hangs from no path: it is not at the beginning, and no piece before it is named."""
    return record.parent == record.key and record.first_position > 0


def _named(node: Node) -> Iterable[ChunkId]:
    """The chunks that a node has seen by itself; its path names the others."""
    return node.seen_alone or (() if node.chunk_id is None else (node.chunk_id,))
