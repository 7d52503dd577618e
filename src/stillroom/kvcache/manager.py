"""Gives sequences their KV: blocks from the pool, kept KV from the knowledge tree. Decides over ids, moves no bytes.

A sequence holds a `Lease`. Blocks that it shares with the tree or with other sequences have a reference for each.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from stillroom.core.batch import BlockCopy, Masses
from stillroom.core.ids import BlockId, ChunkId
from stillroom.core.kv import NO_TENANT, OwnerTag, Tier
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import MaySee
from stillroom.kvcache.apply_placements import account_repair, describe, keep_to_be_placed, place, plan_for
from stillroom.kvcache.blocks.pool import BlockPool
from stillroom.kvcache.blocks.table import BlockTable, num_blocks_for, runs_after
from stillroom.kvcache.chunk_reuse.attention_sampling import AttentionMassSampler
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions, Placement
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.reuse_plan import plan_reuse
from stillroom.kvcache.reuse_report import AdmissionReuse, Placed, account, nothing_reused
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import Piece, PrefixKeys


@dataclass(frozen=True, slots=True)
class Appended:
    """A table has one slot more."""

    copy: BlockCopy | None
    """What must be copied before the slot is written."""


_NOTHING_COPIED = Appended(None)


@dataclass(frozen=True, slots=True)
class Reuse:
    """What exact reuse needs; without it every prompt is computed."""

    tree: KnowledgeTree
    keys: PrefixKeys
    always_loads: bool = False
    """Load whatever is kept, even where computing would be faster."""
    anywhere: AnywhereOptions | None = None
    """Chunks behind the exact prefix may take their KV from other places; None: they may not."""
    weighs_every: int = 0
    """Measure how the chunks of prompts attend to each other, by one of so many tokens; 0: do not."""


class KVCacheManager:
    """The only one who moves blocks between the pool, the tree and the block tables."""

    def __init__(self, pool: BlockPool, reuse: Reuse | None = None) -> None:
        self.pool = pool
        self.reuse = reuse

    def allow_anywhere(self, options: AnywhereOptions | None) -> None:
        """From the next admission on, chunks are placed so, or not at all. Without reuse, nothing."""
        if self.reuse is not None:
            self.reuse = replace(self.reuse, anywhere=options)

    def new_lease(
        self,
        prompt: SegmentedPrompt,
        max_tokens: int,
        salt: str = "",
        *,
        may_place: bool = True,
        may_see: MaySee | None = None,
    ) -> Lease:
        """An empty lease for a sequence that will never hold more than `max_tokens` tokens.

        Args:
            may_place: whether KV of other places may be used for it.
            may_see: of which chunks; None: of all of its tenant's.
        """
        pieces = self.reuse.keys.pieces(prompt, salt) if self.reuse else ()
        table = BlockTable(self.pool.block_size, max_tokens)
        lease = Lease(prompt, table, pieces, may_place=may_place, may_see=may_see)
        lease.watched = tuple(piece.key for piece in pieces)
        if may_place and self.reuse and self.reuse.anywhere is not None:
            lease.watched += tuple(dict.fromkeys(piece.content for piece in pieces))
        return lease

    def can_ever_hold(self, segment_lengths: Sequence[int]) -> bool:
        """Whether segments of these lengths would fit into an otherwise empty pool."""
        return num_blocks_for(segment_lengths, self.pool.block_size) <= self.pool.num_blocks

    def max_output_tokens(self, segment_lengths: Sequence[int]) -> int:
        """Most tokens that fit behind segments of these lengths into an otherwise empty pool; may be negative."""
        *before, last = segment_lengths
        block_size = self.pool.block_size
        return (self.pool.num_blocks - num_blocks_for(before, block_size)) * block_size - last

    def num_reusable(self, lease: Lease, num_tokens: int) -> int:
        """Of a waiting sequence's tokens, how many need not be computed by what is kept now.

        Args:
            num_tokens: of its prompt and what it has generated.
        """
        if self.reuse is None:
            return 0
        path, placements = self._plan(self.reuse, lease, self.reuse.tree.match(lease.pieces), num_tokens)
        num_cached = float(sum(node.num_tokens for node in path))
        for one in placements:
            assert self.reuse.anywhere is not None
            num_cached += (1.0 - self.reuse.anywhere.share(one.reusability)) * one.node.num_tokens
        return min(int(num_cached), num_tokens - 1)

    def watch_changes(self) -> None:
        """From now on, remember what is kept and what is not any more."""
        if self.reuse is not None:
            self.reuse.tree.watch_changes()

    def take_changes(self) -> set[bytes]:
        """Keys and contents of those since the last call."""
        return set() if self.reuse is None else self.reuse.tree.take_changes()

    def protect(self, lease: Lease) -> None:
        """The sequence waits: what it will use is worth keeping, and what is on disk is read ahead."""
        if self.reuse is None or lease.is_protected:
            return
        tree = self.reuse.tree
        lease.is_protected = True
        tree.protect(piece.key for piece in lease.pieces)
        if tree.num_nodes(Tier.DISK):
            matched = tree.match(lease.pieces)
            self._read_ahead(lease, *self._plan(self.reuse, lease, matched, lease.prompt.num_tokens))

    def unprotect(self, lease: Lease) -> None:
        if self.reuse and lease.is_protected:
            lease.is_protected = False
            self.reuse.tree.unprotect(piece.key for piece in lease.pieces)
        if self.reuse and lease.prefetched:
            self.reuse.tree.cancel_prefetch(lease.prefetched)
            lease.prefetched = []

    def try_admit(self, lease: Lease, segment_lengths: Sequence[int]) -> int | None:
        """KV for all of a sequence's tokens: kept KV as far as it reaches, fresh blocks for the rest.

        Args:
            lease: an empty one.
            segment_lengths: of the prompt, the last one with what was generated since.

        Returns:
            The number of tokens that need not be computed; None, and nothing taken, if there is no room.
        """
        if self.reuse is None:
            if lease.reuse is None:
                lease.reuse = nothing_reused(lease.prompt)
            return 0 if self._try_allocate(lease.table, segment_lengths) else None
        num_cached = self._try_admit_along_tree(self.reuse, lease, segment_lengths)
        if num_cached is not None:
            self.unprotect(lease)
        return num_cached

    def commit(self, lease: Lease, num_computed: int) -> None:
        """The sequence's first `num_computed` tokens have their KV: pieces that are complete now become nodes.

        What another sequence has stored meanwhile is used, and the own blocks are given back.

        Raises:
            NonFiniteError: a piece's KV holds NaN or an infinity. It is not kept.
        """
        if self.reuse is None:
            return
        tree = self.reuse.tree
        end = min(lease.num_keepable, lease.placements[0].piece_index) if lease.placements else lease.num_keepable
        end = min(end, len(lease.pieces))
        while lease.num_committed < end and lease.pieces[lease.num_committed].end <= num_computed:
            piece = lease.pieces[lease.num_committed]
            parent = tree.get(piece.parent)
            if piece.start > 0 and (parent is None or parent.block_ids is None):
                lease.num_committed = len(lease.pieces)  # a document before it was removed while this ran
                return
            own = lease.table.blocks_of(piece.start, piece.num_tokens)
            node = tree.get(piece.key)
            if node is None or node.block_ids is None:
                node = tree.insert(piece, own, lease.cost_per_token)
                node.mass = None if lease.weigher is None else lease.weigher.mass_of(lease.num_committed)
            else:
                self._use_instead(lease.table, piece, own, node.block_ids)
            tree.acquire([node])
            lease.nodes.append(node)
            lease.num_committed += 1

    def try_append_token(self, table: BlockTable) -> Appended | None:
        """A slot for one more token; None, and nothing taken, if that needs a block and none can be had.

        Copy on write: a last block that others read too is left to them, and the table goes on in a copy of it.
        """
        shared = None if table.is_full or self.pool.ref_count(table.block_ids[-1]) == 1 else table.block_ids[-1]
        if not table.is_full and shared is None:
            table.append_token()
            return _NOTHING_COPIED
        blocks = self._try_take(1)
        if blocks is None:
            return None
        if shared is None:
            table.append_segment(blocks, 1)
            return _NOTHING_COPIED
        table.replace_last_block(blocks[0])
        table.append_token()
        self.pool.release([shared])
        return Appended(BlockCopy(shared, blocks[0]))

    def fork(self, lease: Lease, into: Lease) -> None:
        """Let an empty lease go on where this one stands. Both read the same blocks and write into none of them."""
        into.table.copy_from(lease.table)
        self.pool.acquire(lease.table.block_ids)
        into.nodes, into.num_committed = list(lease.nodes), lease.num_committed
        into.reuse = None if lease.reuse is None else lease.reuse.shared()
        into.cost_per_token, into.num_keepable = lease.cost_per_token, lease.num_keepable
        into.placements, into.repair, into.weigher = lease.placements, lease.repair, lease.weigher
        if self.reuse:
            self.reuse.tree.acquire(into.nodes)

    def release(self, lease: Lease) -> None:
        """Give back everything the lease holds; what the tree keeps stays."""
        self.unprotect(lease)
        self.pool.release(lease.table.clear())
        if self.reuse:
            self.reuse.tree.release(reversed(lease.nodes))
        lease.nodes = []
        lease.num_committed = 0
        lease.placements = ()
        lease.repair = None

    def see(self, lease: Lease, attention_L2K: NDArray[np.float32]) -> None:
        """The result of a lease's look."""
        assert self.reuse is not None and lease.repair is not None
        lease.repair.see(attention_L2K)
        account_repair(self.reuse.tree, lease)

    def probe(self, lease: Lease, deviation: NDArray[np.float32], num_tokens: int) -> None:
        """The result of a piece of a lease's probe."""
        assert self.reuse is not None and lease.repair is not None
        lease.repair.probe(deviation, num_tokens)
        if lease.repair.is_planned:
            account_repair(self.reuse.tree, lease)

    def weigh(self, lease: Lease, positions: NDArray[np.int64], masses: Masses) -> None:
        """How tokens of a lease's prompt, computed in a step, attended to its pieces."""
        assert lease.weigher is not None
        lease.weigher.take(positions, masses)

    def end_repair(self, lease: Lease) -> None:
        """All of a prompt with placed chunks has KV now. Raises as `commit`."""
        assert self.reuse is not None
        keep_to_be_placed(self.reuse.tree, lease)
        lease.repair = None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had: free ones, and kept ones that nobody uses now."""
        return self.pool.num_free + (self.reuse.tree.num_idle_blocks if self.reuse else 0)

    def store_next(self) -> bool:
        """Something to do in an idle moment; False if there is nothing."""
        return self.reuse is not None and self.reuse.tree.store_next()

    def forget_chunks(
        self,
        existing: Callable[[set[ChunkId]], set[ChunkId]],
        leases: Iterable[Lease] = (),
        owner: OwnerTag = NO_TENANT,
    ) -> int:
        """Drop a tenant's KV of chunks that are no more; returns how many nodes went.

        Args:
            existing: those of some of the tenant's chunks that are still there.
            leases: of sequences under way, whose prompts or placed copies may have seen such chunks: they go on, and
                nothing is kept of what is computed behind.
        """
        if self.reuse is None:
            return 0
        tree = self.reuse.tree
        under_way = [lease for lease in leases if lease.pieces and lease.pieces[0].owner == owner]
        known = tree.chunk_ids(owner)
        for lease in under_way:
            known.update(*(seen for _, seen in lease.seen()))
        dead = known - existing(known)
        for lease in under_way:
            firsts = (index for index, seen in lease.seen() if not dead.isdisjoint(seen))
            lease.num_keepable = min([lease.num_keepable, *firsts])
        return tree.forget_chunks(lambda chunk_id: chunk_id not in dead, owner)

    def forget_owner(self, owner: OwnerTag, leases: Iterable[Lease] = ()) -> int:
        """Drop all KV of a tenant; returns how many nodes went. `leases` as of `forget_chunks`."""
        if self.reuse is None:
            return 0
        for lease in leases:
            if lease.pieces and lease.pieces[0].owner == owner:
                lease.num_keepable = 0
        return self.reuse.tree.forget_owner(owner)

    def drop_suspect(self, lease: Lease) -> int:
        """Drop all kept KV that a lease has used, and what depends on it; returns the number of nodes dropped."""
        if self.reuse is None:
            return 0
        return self.reuse.tree.drop_suspect([*lease.nodes, *(placement.node for placement in lease.placements)])

    def lose_device(self) -> None:
        """Forget what was on the device only. No lease holds anything."""
        if self.reuse:
            self.reuse.tree.lose_device()

    def check_integrity(self, leases: Iterable[Lease]) -> None:
        """Every block is free, held by a lease or kept by the tree, as often as it is counted.

        Args:
            leases: all that may hold anything.
        """
        self.pool.check_integrity()
        holders: Counter[BlockId] = Counter()
        for lease in leases:
            holders.update(lease.table.block_ids)
            assert all(node.num_users > 0 for node in lease.nodes)
        if self.reuse:
            self.reuse.tree.check_integrity()
            for node in self.reuse.tree:
                holders.update(node.block_ids or ())
        assert len(holders) == self.pool.num_used, "blocks held and blocks in use differ"
        assert all(self.pool.ref_count(block_id) == count for block_id, count in holders.items()), "ref counts differ"

    def _try_admit_along_tree(self, reuse: Reuse, lease: Lease, segment_lengths: Sequence[int]) -> int | None:
        tree, num_tokens = reuse.tree, sum(segment_lengths)
        matched = tree.match(lease.pieces)
        path, placements = self._plan(reuse, lease, matched, num_tokens)
        tiers = [node.tier for node in matched]
        size = self.pool.block_size
        fresh = [node.num_tokens for node in path if node.block_ids is None]
        fresh += runs_after(sum(node.num_tokens for node in path), segment_lengths)
        tree.acquire(path)
        lease.nodes = list(path)
        sources = [one for placement in placements for one in _path_to(placement.node)]
        tree.acquire(sources)  # so that they do not make room for their own copies, nor count as such
        if sources and not tree.has_room(num_blocks_for(fresh, size)):
            tree.release(reversed(sources))
            sources, placements = [], []
        try:
            self._read_ahead(lease, path, placements)  # one is copied while the next one is read
            if not tree.make_room(num_blocks_for(fresh, size)):
                self._shorten(tree, lease, 0)
                return None
            self._shorten(tree, lease, len(list(takewhile(tree.load, path))))
            num_cached = self._fill(lease, segment_lengths)
            if reuse.weighs_every:  # anew: what was measured before a preemption is measured again
                lease.weigher = AttentionMassSampler.of(lease.pieces, lease.prompt.num_tokens, reuse.weighs_every)
            placed = place(tree, lease, placements, reuse.anywhere)
        except Exception:  # a device without memory, say
            self.release(lease)
            raise
        finally:
            tree.release(reversed(sources))
        if lease.reuse is None or lease.reuse.has_placed:  # what was placed the last time is what is repaired
            origins = {}
            for placement in placed:
                assert reuse.anywhere is not None
                variant = describe(tree, placement, reuse.anywhere)
                share = reuse.anywhere.share(placement.reusability)
                origins[placement.piece_index] = Placed(placement.tier, variant, share)
            account(tree, lease, AdmissionReuse(matched, tiers, len(path), num_tokens, origins))
        if lease.repair is not None and lease.repair.is_planned:
            account_repair(tree, lease)
        return num_cached

    def _shorten(self, tree: KnowledgeTree, lease: Lease, num_nodes: int) -> None:
        """Use only so many of the nodes that the lease holds."""
        tree.release(reversed(lease.nodes[num_nodes:]))
        lease.nodes = lease.nodes[:num_nodes]
        lease.num_committed = num_nodes

    def _fill(self, lease: Lease, segment_lengths: Sequence[int]) -> int:
        """Blocks of the lease's nodes, and fresh ones behind them, for which there is room; returns the tokens of the
        former."""
        for node in lease.nodes:
            assert node.block_ids is not None
            self.pool.acquire(node.block_ids)
            lease.table.append_segment(node.block_ids, node.num_tokens)
        num_cached = lease.table.num_slots
        has_room = self._try_allocate(lease.table, runs_after(num_cached, segment_lengths))
        assert has_room, "room was made for all of it, and a load that fails gives its blocks back"
        return num_cached

    def _plan(
        self, reuse: Reuse, lease: Lease, matched: Sequence[Node], num_tokens: int
    ) -> tuple[Sequence[Node], Sequence[Placement]]:
        """What to use of the path that a lease's prompt begins with, and what to place behind it."""
        tree, always_loads = reuse.tree, reuse.always_loads
        bytes_per_token = tree.options.bytes_per_token
        end = plan_reuse(matched, num_tokens, tree.profile, bytes_per_token, always_loads=always_loads)
        path = matched[:end]
        return path, plan_for(tree, lease, len(path), reuse.anywhere, always_loads=always_loads)

    def _read_ahead(self, lease: Lease, path: Sequence[Node], placements: Sequence[Placement]) -> None:
        assert self.reuse is not None
        if not self.reuse.tree.num_nodes(Tier.DISK):
            return
        nodes = [*path, *(placement.node for placement in placements)]
        self.reuse.tree.prefetch([node for node in nodes if node.key not in lease.prefetched], lease.prefetched)

    def _use_instead(self, table: BlockTable, piece: Piece, own: list[BlockId], kept: list[BlockId]) -> None:
        """[computed twice): free it, another sequence stored it first."""
        table.replace_run(piece.start, own, kept, piece.num_tokens)
        self.pool.acquire(kept)
        self.pool.release(own)

    def _try_take(self, num_blocks: int) -> list[BlockId] | None:
        if self.reuse and not self.reuse.tree.make_room(num_blocks):
            return None
        return self.pool.try_allocate(num_blocks)

    def _try_allocate(self, table: BlockTable, run_lengths: Sequence[int]) -> bool:
        """Blocks for runs of tokens, each on a fresh block; False, and nothing taken, if too few can be had."""
        blocks = self._try_take(num_blocks_for(run_lengths, self.pool.block_size))
        if blocks:
            table.append_segments(blocks, run_lengths)
        return blocks is not None


def _path_to(node: Node) -> list[Node]:
    """The node and those above it, which cannot leave before it does; from the top."""
    path = [node]
    while (parent := path[-1].parent) is not None:
        path.append(parent)
    return path[::-1]
