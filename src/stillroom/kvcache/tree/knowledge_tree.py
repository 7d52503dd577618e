"""The knowledge tree (RAGCache 5.1): which pieces of prompts have their KV kept on device, host or disk.

A node is a piece after one exact path of earlier pieces. `NodeIndex` holds the nodes, `TierState` accounts for their
copies and orders evictions, `Demoter` moves copies down; the `KVMover` moves the bytes, at once. A node is copied to
the host when it is first evicted from the device, and the host copy stays while the node is on the device again
("swap out only once"). Disk copies stay likewise. Worked example: docs/knowledge-tree.md
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from stillroom.core.ids import BlockId, ChunkId
from stillroom.core.kv import FULL_BITS, NO_TENANT, KVMover, Link, NodeKey, NodeRecord, OwnerTag, SharedKV, Tier
from stillroom.errors import NonFiniteError
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.stats import KVCacheStats
from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvcache.tree.demotion import Demoter
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.node_index import NodeIndex
from stillroom.kvcache.tree.pieces import Piece
from stillroom.kvcache.tree.provenance import Context
from stillroom.kvcache.tree.restore import restore_nodes
from stillroom.kvcache.tree.shared_nodes import SharedNodes
from stillroom.kvcache.tree.tier_state import TierState
from stillroom.kvcache.tree.tree_options import TreeOptions

_LEAST_OVERHEAD = 0.01
"""CFO counted for a copy that needs no recomputing, where 1 / CFO is summed (Cache-Craft 3.3)."""


class KnowledgeTree:
    """Maps pieces of prompts to their kept KV on device, host and disk.

    Not thread-safe: only the engine thread calls it.
    """

    def __init__(
        self,
        pool: BlockPool,
        mover: KVMover,
        profile: CostProfile,
        options: TreeOptions,
        now: Callable[[], float],
        shared: SharedKV | None = None,
    ) -> None:
        """
        Args:
            now: seconds, never decreasing; for frequencies.
            shared: the tier shared with other processes, if any.
        """
        self.pool = pool
        self.mover = mover
        self.profile = profile
        self.options = options
        self.stats = KVCacheStats()
        self.now = now
        self._num_uses = 0
        self._nodes = NodeIndex(profile, options.window_seconds, now)
        self._tiers = TierState(pool, options, now)
        self._demoter = Demoter(self._nodes, self._tiers, pool, mover, options, self.stats, now)
        self.shared = None if shared is None else SharedNodes(shared, self._nodes, self._tiers, self._demoter, now)

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    # Looking up

    def get(self, key: NodeKey) -> Node | None:
        return self._nodes.get(key)

    def match(self, pieces: Sequence[Piece]) -> list[Node]:
        """Return the longest path of nodes that these pieces begin with and that need not be waited for.

        O(length of the path).
        """
        path: list[Node] = []
        for piece in pieces:
            node = self._nodes.get(piece.key)
            if node is None or not (self.shared is None or self.shared.is_usable(node)):
                break
            path.append(node)
        return path

    def variants(self, content: bytes) -> list[Node]:
        """Return all nodes with the same tokens, model and tenant, whatever stood before them, that this process
        keeps."""
        return [node for node in self._nodes.variants(content) if node.tier is not Tier.NETWORK]

    def tier_of(self, name: bytes, *, only_prepared: bool = False) -> Tier | None:
        """Return the fastest tier that holds a node of this key, or any node of this content; None if none does.

        Args:
            only_prepared: count a content only where a copy in its document's context has it.
        """
        node = self._nodes.get(NodeKey(name))
        nodes = self._nodes.variants(name) if node is None else [node]
        if only_prepared and node is None:
            nodes = [one for one in nodes if one.document_path]
        return min((one.tier for one in nodes if one.tier is not None), default=None)

    def was_evicted(self, piece: Piece) -> bool:
        """Whether the node of this piece was dropped lately."""
        return self._nodes.was_dropped(piece.key)

    def has_failed(self, piece: Piece) -> bool:
        """Whether the node of this piece, or one that could be placed for it, was dropped lately because its copy was
        damaged."""
        return self._nodes.has_failed(piece.key) or self._nodes.has_failed_detached(piece.content)

    @property
    def tiers(self) -> TierState:
        """Sizes and budgets of the tiers, to read."""
        return self._tiers

    def num_bytes(self, tier: Tier) -> int:
        """Bytes of all copies in a tier."""
        return self._tiers.num_bytes(tier)

    def num_nodes(self, tier: Tier) -> int:
        """Nodes with a copy in a tier."""
        return self._tiers.num_nodes(tier)

    def unused_room(self) -> int:
        """Bytes that the disk can still take of KV that was prepared and never used; without a disk, the host."""
        return self._tiers.unused_room(self.prepared_tier)

    @property
    def prepared_tier(self) -> Tier:
        """Where prepared KV must find room: on disk, to last; without a disk, on the host."""
        return self._tiers.prepared_tier

    def num_unused_bytes(self, tier: Tier) -> int:
        """Bytes of the copies in a tier that were prepared and never used."""
        return self._tiers.num_unused_bytes(tier)

    @property
    def num_idle_blocks(self) -> int:
        """Device blocks that are kept and that no running sequence uses; eviction frees them."""
        return self._tiers.num_idle_blocks

    def chunk_ids(self, owner: OwnerTag = NO_TENANT) -> set[ChunkId]:
        """Return the chunks of a tenant that some kept KV has seen."""
        return {chunk_id for node in self._nodes if node.owner == owner for chunk_id in _own_chunks(node)}

    def watch_changes(self) -> set[bytes]:
        """Return a new set, which gets keys and contents of the nodes that gain or lose a copy from now on. The caller
        clears it."""
        return self._tiers.watch_changes()

    # Using

    def acquire(self, nodes: Iterable[Node]) -> None:
        """Add one user to each node; a node with users is not evicted."""
        self._tiers.acquire(nodes)

    def release(self, nodes: Iterable[Node]) -> None:
        """Remove one user from each node."""
        self._tiers.release(nodes)

    def touch(self, node: Node, cost_per_token: float | None = None, overhead: float = 0.0) -> None:
        """Count a request's use of a node (RAGCache Algorithm 1, UPDATE_NODE).

        Args:
            cost_per_token: seconds, if the request has to compute it; None if it does not.
            overhead: CFO; 0 where the copy is used as it is.
        """
        if not node.is_used:
            self._tiers.count_first_use(node)
            if node.is_in(Tier.DISK):
                self.mover.mark_used(node.key)
        elif self.shared is not None:
            self.shared.count_reuse(node)
        node.frequency.add(self.now())
        self._num_uses += 1
        node.recency = self._num_uses
        node.add_use(self._half_lives)
        self._demoter.count_use(node)
        if cost_per_token is not None:
            node.add_cost(cost_per_token)
        else:
            node.reusability += 1.0 / max(overhead, _LEAST_OVERHEAD)
        for tier in node.tiers:
            self._tiers.rank(node, tier)

    @property
    def _half_lives(self) -> float:
        return self._num_uses / self.options.half_life_uses

    def protect(self, keys: Iterable[NodeKey]) -> None:
        """Evict these nodes last, because a waiting request will use them."""
        for key in keys:
            self._tiers.protect(key, self._nodes.get(key))

    def unprotect(self, keys: Iterable[NodeKey]) -> None:
        for key in keys:
            self._tiers.unprotect(key, self._nodes.get(key))

    def prefetch(self, nodes: Iterable[Node], begun: list[NodeKey]) -> None:
        """Start reading those of these nodes that are on disk only, because a waiting sequence will use them.

        Args:
            begun: receives the key of each node that is read, for `cancel_prefetch`, also if this raises.
        """
        for node in nodes:
            if node.tier is Tier.DISK and self.mover.prefetch(node.key, node.num_tokens, node.bits):
                begun.append(node.key)

    def cancel_prefetch(self, keys: Iterable[NodeKey]) -> None:
        for key in keys:
            self.mover.cancel_prefetch(key)

    def update_link(self) -> bool:
        """Take over the costs of the shared tier as measured now; False if it cannot be used."""
        link = None if self.shared is None else self.shared.kv.link
        if link is None:
            return False
        links = self.profile.links
        if (host := links.get(Tier.HOST)) is not None:  # what was read goes on from host memory
            pace = 1 / link.bytes_per_second + 1 / host.bytes_per_second
            link = Link(link.latency_seconds + host.latency_seconds, 1 / pace)
        if link != links.get(Tier.NETWORK):
            self.profile = replace(self.profile, links={**links, Tier.NETWORK: link})
        return True

    # Growing

    def insert(
        self, piece: Piece, block_ids: Sequence[BlockId], cost_per_token: float, *, is_used: bool = True
    ) -> Node:
        """Keep a piece that was computed into these blocks: as a new node, or as the device copy of its node.

        The tree takes a reference of its own to the blocks. Precondition: the piece before it is on the device.

        Args:
            is_used: False: a preparing prompt computed it.

        Raises:
            NonFiniteError: the blocks hold NaN or an infinity; nothing is kept.
        """
        self._check_finite(piece, block_ids)
        node = self._nodes.get(piece.key)
        if node is None:
            node = self._add_node(piece, piece.key, None, cost_per_token, is_used=is_used)
        assert node.block_ids is None
        self.pool.acquire(block_ids)
        self._tiers.add_device_copy(node, list(block_ids))
        if self.options.replicates_system and piece.start == 0:
            self._demoter.copy_to_host(node)
        return node

    def insert_detached(
        self,
        piece: Piece,
        block_ids: Sequence[BlockId],
        context: Context,
        cost_per_token: float,
        *,
        is_passing: bool = False,
    ) -> Node:
        """Keep a chunk as a node without parent: computed after chunks whose KV was not exact, or for later prompts.

        Such a node is never part of an exact prefix; it can be placed. Its key names content, position and provenance,
        so an existing node of that key has seen the same chunks and is returned unchanged. A node in its document's
        context counts no use yet. The tree takes a reference of its own to the blocks. Raises as `insert`.

        Args:
            is_passing: kept for a preparing prompt that may be interrupted, so it is not copied to disk while idle.
        """
        assert piece.chunk_id in context.seen
        self._check_finite(piece, block_ids)
        key = context.key_of(piece.content, piece.start)
        existing = self._nodes.get(key)
        if existing is not None:
            return existing
        is_used = not context.document_path
        node = self._add_node(piece, key, context, cost_per_token, is_used=is_used, is_passing=is_passing)
        self.pool.acquire(block_ids)
        self._tiers.add_device_copy(node, list(block_ids))
        return node

    def _check_finite(self, piece: Piece, block_ids: Sequence[BlockId]) -> None:
        if not self.mover.is_finite(block_ids, piece.num_tokens):
            raise NonFiniteError

    def _add_node(
        self,
        piece: Piece,
        key: NodeKey,
        context: Context | None,
        cost_per_token: float,
        *,
        is_used: bool,
        is_passing: bool = False,
    ) -> Node:
        node = self._nodes.attach(
            key,
            piece.parent,
            content=piece.content,
            first_position=piece.start,
            num_tokens=piece.num_tokens,
            chunk_id=piece.chunk_id,
            owner=piece.owner,
            context=context,
            bits=self.options.prepared_bits if context is not None and context.document_path else FULL_BITS,
        )
        if is_used:
            self.touch(node, cost_per_token)
        else:
            node.add_cost(cost_per_token)
            self.stats.prepared += piece.chunk_id is not None and not is_passing
        if not is_passing:
            self._nodes.unstored[key] = None
        return node

    # Reading copies

    def place(self, node: Node, block_ids: Sequence[BlockId], first_position: int, overhead: float) -> bool:
        """Copy a node into a sequence's own blocks as if it began at this position; False if its copy failed.

        The tree does not depend on what happens to these blocks.

        Args:
            overhead: CFO of the node at that place.
        """
        if node not in self._nodes:  # dropped meanwhile, with its parent
            return False
        while (tier := node.tier) is not None:
            if self.mover.place(node.copy_in(tier), block_ids, first_position):
                self.stats.placed[tier] += 1
                self.touch(node, overhead=overhead)
                return True
            if not self._drop_failed_copy(node, tier):
                return False
        return False

    def load(self, node: Node) -> bool:
        """Copy a node to the device; False if there is no room, or every copy failed.

        A damaged copy is dropped with all that depends on it; a copy that could not be read just now stays.
        Preconditions: the node's parent is on the device, the node has a user, and its copies have `FULL_BITS`.
        """
        while (source := node.tier) is not None:
            if source is Tier.DEVICE:
                return True
            assert node.num_users > 0 and node.bits == FULL_BITS
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
            if is_loaded:
                self.stats.loads[source] += 1
                self._tiers.add_device_copy(node, block_ids)
                if source is Tier.NETWORK and self.shared is not None:
                    self.shared.count_load(node)
                return True
            self.pool.release(block_ids)
            if not self._drop_failed_copy(node, source):
                return False
        return False

    def _drop_failed_copy(self, node: Node, tier: Tier) -> bool:
        """Account for a copy that could not be read: drop it, and the node with its last copy.

        Returns:
            Whether another copy can be tried; False if this one is still there and may be readable later.
        """
        self.stats.failed_loads[tier] += 1
        if self.mover.has(node.key, tier):
            return False
        if node.document_path and tier is self._tiers.prepared_tier:
            self.stats.displaced_bytes += self._tiers.size(node, tier)
        self._tiers.remove_copy(node, tier)
        if node.tier is None:
            self._demoter.drop(node, has_failed=True)
            return False
        return True

    # Shrinking

    def has_room(self, num_blocks: int) -> bool:
        """Whether this many blocks are free or idle."""
        return self.pool.num_free + self.num_idle_blocks >= num_blocks

    def make_room(self, num_blocks: int) -> bool:
        """Evict from the device until this many blocks are free; False, and nothing is evicted, if it is impossible."""
        return self._demoter.make_room(num_blocks)

    def lose_device(self) -> None:
        """Forget all device copies after the device's memory was lost (RAGCache 6); nodes without others are dropped.

        Precondition: no node is in use.
        """
        self._demoter.drop_device()

    def forget_chunks(self, is_alive: Callable[[ChunkId], bool], owner: OwnerTag = NO_TENANT) -> int:
        """Drop a tenant's KV that has seen removed chunks; running sequences keep their blocks.

        Nodes below such a chunk have seen it and are dropped with it. Returns the number of nodes dropped.
        """
        nodes = [node for node in self._nodes if node.owner == owner]
        return self._drop_all(node for node in nodes if not all(map(is_alive, _own_chunks(node))))

    def forget_owner(self, owner: OwnerTag) -> int:
        """Drop all KV of a tenant; running sequences keep their blocks. Returns the number of nodes dropped."""
        return self._drop_all([node for node in self._nodes if node.owner == owner])

    def drop_suspect(self, nodes: Iterable[Node]) -> int:
        """Drop nodes whose KV may be wrong, with their subtrees, from every tier; running sequences keep their blocks.

        Returns the number of nodes dropped.
        """
        return self._drop_all(nodes, has_failed=True)

    def drop(self, nodes: Iterable[Node]) -> None:
        """Drop detached nodes that are not needed any more; running sequences keep their blocks."""
        self._drop_all(nodes)

    def clear(self) -> None:
        """Drop every path that no sequence uses."""
        self._drop_all([node for node in self._nodes if node.parent is None and node.num_users == 0])

    def _drop_all(self, nodes: Iterable[Node], *, has_failed: bool = False) -> int:
        before = len(self._nodes)
        for node in nodes:
            if node in self._nodes:  # else dropped with its parent
                self._demoter.drop(node, has_failed=has_failed)
        return before - len(self._nodes)

    # On disk, for the next process

    def store_next(self) -> bool:
        """Copy one node to disk that is not there yet; False if none is left or fits.

        Called while the engine is idle: nodes on disk survive a kill of the process.
        """
        while self._nodes.unstored:
            node = self._nodes.get(self._nodes.unstored.popitem(last=False)[0])
            if node is not None and self._demoter.fits_on_disk(node) and self._demoter.copy_to_disk(node):
                return True
        return False

    def flush(self) -> int:
        """Copy nodes to disk that are not there yet, most valuable first, as long as they fit; returns how many.

        Nodes that shall go to the shared tier are queued for it.
        """
        before = self.stats.stores
        waiting = [node for node in self._nodes if not node.is_in(Tier.DISK) and node.tier is not Tier.NETWORK]
        for node in sorted(waiting, key=lambda node: -self._tiers.priority(node, Tier.DISK)):
            if self._demoter.fits_on_disk(node):
                self._demoter.copy_to_disk(node)
        self._nodes.unstored.clear()
        while self.shared is not None and self.shared.share_next():
            pass
        return self.stats.stores - before

    def restore(self, records: Iterable[NodeRecord]) -> list[NodeKey]:
        """Add nodes from the records of a disk; returns the keys of the others: their path is incomplete, or they have
        fewer bits a number than the options say."""
        all_records = list(records)
        usable = [record for record in all_records if record.bits >= self.options.prepared_bits]
        orphans = restore_nodes(usable, self._nodes, self._tiers, half_lives=self._half_lives, now=self.now())
        if self.options.is_disk_read_only:
            self._tiers.allow_present_bytes(Tier.DISK)
        self._demoter.shrink_disk()
        return orphans + [record.key for record in all_records if record.bits < self.options.prepared_bits]

    def check_integrity(self) -> None:
        """Check all links between nodes, and that copies, bytes and eviction queues add up."""
        self._nodes.check_integrity()
        self._tiers.check_integrity(list(self._nodes))


def _own_chunks(node: Node) -> Iterable[ChunkId]:
    """The chunks that a node names itself: its own, or all it has seen if it is detached. Ancestors name the others."""
    return node.detached_seen or (() if node.chunk_id is None else (node.chunk_id,))
