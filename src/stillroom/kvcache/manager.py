"""Gives sequences their KV: blocks from the pool, kept KV from the knowledge tree. Works on ids, moves no bytes.

A sequence holds a `Lease`. A block that the lease shares with the tree or with other leases has a reference for each.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stillroom.core.batch import AttentionMasses, BlockCopy
from stillroom.core.ids import BlockId, ChunkId
from stillroom.core.kv import NO_TENANT, OwnerTag, Tier
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import MaySee
from stillroom.errors import PreparedFullError
from stillroom.kvcache import shared_wait
from stillroom.kvcache.apply_placements import keep_computed_chunks, record_recompute
from stillroom.kvcache.blocks.block_pool import BlockPool
from stillroom.kvcache.blocks.block_table import BlockTable, num_blocks_for
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.lease_admission import Reuse, plan_admission, prefetch, try_admit, try_take
from stillroom.kvcache.prepared import keep_prepared, missing_bytes, num_pieces_to_keep
from stillroom.kvcache.reuse_report import nothing_reused
from stillroom.kvcache.tree.pieces import Piece


@dataclass(frozen=True, slots=True)
class Appended:
    """A block table that has one slot more."""

    copy: BlockCopy | None
    """Copy to make before the slot is written."""


_NOTHING_COPIED = Appended(None)


class KVCacheManager:
    """Moves blocks between the pool, the tree and the block tables; nothing else does."""

    def __init__(self, pool: BlockPool, reuse: Reuse | None = None) -> None:
        self.pool = pool
        self.reuse = reuse
        self._changed: set[bytes] = set()

    def allow_anywhere(self, options: AnywhereOptions | None) -> None:
        """Place chunks by these options from the next admission on; None: place none. Does nothing without reuse."""
        if self.reuse is not None:
            self.reuse = replace(self.reuse, anywhere=options)

    def new_lease(  # noqa: PLR0913  what a request says of its KV
        self,
        prompt: SegmentedPrompt,
        max_tokens: int,
        salt: str = "",
        *,
        may_place: bool = True,
        most_exact: int | None = None,
        may_see: MaySee | None = None,
        before: Mapping[ChunkId, tuple[ChunkId, ...]] | None = None,
        prepares: frozenset[ChunkId] = frozenset(),
    ) -> Lease:
        """Return an empty lease for a sequence that will never hold more than `max_tokens` tokens.

        Args:
            may_place: whether KV of other contexts may be used.
            most_exact: as in `Request`.
            may_see: which chunks such KV may have seen; None: every chunk of the tenant.
            before: as in `Request`.
            prepares: as in `Request`.
        """
        pieces = self.reuse.keys.pieces(prompt, salt) if self.reuse else ()
        table = BlockTable(self.pool.block_size, max_tokens)
        lease = Lease(
            prompt,
            table,
            pieces,
            may_place=may_place and not prepares,
            most_exact=most_exact,
            may_see=may_see,
            before=before or {},
            prepares=prepares,
        )
        lease.watched = tuple(piece.key for piece in pieces)
        if may_place and self.reuse and self.reuse.anywhere is not None:
            lease.watched += tuple(dict.fromkeys(piece.content for piece in pieces))
        return lease

    def max_output_tokens(self, segment_lengths: Sequence[int]) -> int:
        """Return how many tokens fit behind segments of these lengths into an otherwise empty pool; may be negative."""
        *before, last = segment_lengths
        block_size = self.pool.block_size
        return (self.pool.num_blocks - num_blocks_for(before, block_size)) * block_size - last

    def num_reusable(self, lease: Lease, num_tokens: int) -> int:
        """Return how many tokens of a waiting sequence need not be computed, by what is kept now.

        Args:
            num_tokens: of prompt and answer so far.
        """
        if self.reuse is None:
            return 0
        plan = plan_admission(self.reuse, lease, num_tokens)
        num_cached = float(sum(node.num_tokens for node in plan.path))
        for placement in plan.placements:
            assert self.reuse.anywhere is not None
            num_cached += (1.0 - self.reuse.anywhere.share(placement.reusability)) * placement.node.num_tokens
        return min(int(num_cached), num_tokens - 1)

    def watch_changes(self) -> None:
        """Start to remember which nodes gain or lose copies, for `take_changes`."""
        if self.reuse is not None:
            self._changed = self.reuse.tree.watch_changes()

    @property
    def uses_prepared(self) -> bool:
        """Whether prompts take chunks from copies in their document's context."""
        return self.reuse is not None and self.reuse.anywhere is not None and self.reuse.anywhere.only_prepared

    def has_to_prepare(self, lease: Lease) -> bool:
        """Whether anything that a preparing lease is for is not kept yet.

        Raises:
            PreparedFullError: the budgets of prepared KV have no room for it.
        """
        if self.reuse is None:
            return False
        tree = self.reuse.tree
        num_bytes = missing_bytes(tree, lease, in_document=self.uses_prepared)
        if num_bytes > tree.unused_room():
            raise PreparedFullError("the budget of prepared KV is full")
        return num_bytes > 0

    def take_changes(self) -> set[bytes]:
        """Return keys and contents of the nodes that gained or lost a copy since the last call."""
        changed = set(self._changed)
        self._changed.clear()
        return changed

    def protect(self, lease: Lease) -> None:
        """Evict what a waiting sequence will use last, and start to read what is on disk or in the shared tier."""
        if self.reuse is None or lease.is_protected:
            return
        tree = self.reuse.tree
        lease.is_protected = True
        tree.protect(piece.key for piece in lease.pieces)
        if tree.num_nodes(Tier.DISK):
            prefetch(tree, lease, plan_admission(self.reuse, lease, lease.prompt.num_tokens))
        shared_wait.begin(self.reuse, lease)

    def unprotect(self, lease: Lease) -> None:
        if self.reuse and lease.is_protected:
            lease.is_protected = False
            self.reuse.tree.unprotect(piece.key for piece in lease.pieces)
        if self.reuse and lease.prefetched:
            self.reuse.tree.cancel_prefetch(lease.prefetched)
            lease.prefetched = []
        if self.reuse and lease.shared_wait is not None:
            shared_wait.end(self.reuse.tree, lease)

    def is_waiting_for_tier(self, lease: Lease) -> bool:
        """Whether a waiting sequence shall not be admitted yet, because KV of it is read from the shared tier."""
        return self.reuse is not None and lease.shared_wait is not None and shared_wait.is_waiting(self.reuse, lease)

    def try_admit(self, lease: Lease, segment_lengths: Sequence[int]) -> int | None:
        """Fill an empty lease with KV for all tokens of its sequence; see `lease_admission.try_admit`.

        Returns:
            The number of tokens that need not be computed; None, and nothing is taken, if there is no room.
        """
        if self.reuse is None:
            if lease.reuse is None:
                lease.reuse = nothing_reused(lease.prompt)
            blocks = self.pool.try_allocate(num_blocks_for(segment_lengths, self.pool.block_size))
            if blocks is None:
                return None
            lease.table.append_segments(blocks, segment_lengths)
            return 0
        try:
            num_cached = try_admit(self.reuse, lease, segment_lengths)
        except Exception:  # a device without memory, for example
            self.release(lease)
            raise
        if num_cached is not None:
            self.unprotect(lease)
        return num_cached

    def commit(self, lease: Lease, num_computed: int) -> None:
        """Make nodes of the pieces that are complete, given that the first `num_computed` tokens have their KV.

        Where another sequence has committed the same piece, the lease uses that node and releases its own blocks.

        Raises:
            NonFiniteError: a piece's KV holds NaN or an infinity. The piece is not kept.
        """
        if self.reuse is None:
            return
        tree = self.reuse.tree
        if lease.prepares and self.uses_prepared:
            keep_prepared(tree, lease, num_computed)
            return
        if lease.num_committed == len(lease.pieces):
            return
        end = min(lease.num_keepable, lease.placements[0].piece_index) if lease.placements else lease.num_keepable
        end = min(end, num_pieces_to_keep(lease) if lease.prepares else len(lease.pieces))
        while lease.num_committed < end and lease.pieces[lease.num_committed].end <= num_computed:
            piece = lease.pieces[lease.num_committed]
            parent = tree.get(piece.parent)
            if piece.start > 0 and (parent is None or parent.block_ids is None):
                lease.num_committed = len(lease.pieces)  # a document before it was removed meanwhile
                return
            own = lease.table.blocks_of(piece.start, piece.num_tokens)
            node = tree.get(piece.key)
            if node is None or node.block_ids is None:
                is_used = not lease.prepares or piece.chunk_id is None
                node = tree.insert(piece, own, lease.cost_per_token, is_used=is_used)
                node.mass = None if lease.mass_sampler is None else lease.mass_sampler.mass_of(lease.num_committed)
            else:
                self._use_instead(lease.table, piece, own, node.block_ids)
            tree.acquire([node])
            lease.nodes.append(node)
            lease.num_committed += 1

    def try_append_token(self, table: BlockTable) -> Appended | None:
        """Add a slot for one more token; None, and nothing is taken, if that needs a block and none can be had.

        Copy on write: where the last block is shared, the table continues in a copy of it.
        """
        shared = None if table.is_full else table.block_ids[-1]
        if shared is not None and self.pool.ref_count(shared) == 1:
            table.append_token()
            return _NOTHING_COPIED
        blocks = try_take(self.pool, self.reuse.tree if self.reuse else None, 1)
        if blocks is None:
            return None
        if shared is None:
            table.append_segment(blocks, 1)
            return _NOTHING_COPIED
        table.replace_last_block(blocks[0])
        table.append_token()
        self.pool.release([shared])
        return Appended(BlockCopy(shared, blocks[0]))

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        """Add slots for up to `num_tokens` tokens in all, as far as its own and free blocks reach."""
        while table.num_slots < num_tokens and self.pool.ref_count(table.block_ids[-1]) == 1:
            if not table.is_full:
                table.append_token()
            elif (blocks := self.pool.try_allocate(1)) is not None:
                table.append_segment(blocks, 1)
            else:
                return

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Remove the slots behind `num_tokens` tokens. Precondition: they were added by `extend`."""
        self.pool.release(table.truncate(num_tokens))

    def fork(self, lease: Lease, into: Lease) -> None:
        """Make an empty lease a copy of this one. Both read the same blocks and write into none of them."""
        into.table.copy_from(lease.table)
        self.pool.acquire(lease.table.block_ids)
        into.nodes, into.num_committed = list(lease.nodes), lease.num_committed
        into.reuse = None if lease.reuse is None else lease.reuse.shared()
        into.cost_per_token, into.num_keepable = lease.cost_per_token, lease.num_keepable
        into.placements, into.recompute, into.mass_sampler = lease.placements, lease.recompute, lease.mass_sampler
        if self.reuse:
            self.reuse.tree.acquire(into.nodes)

    def release(self, lease: Lease) -> None:
        """Give back everything that the lease holds; the tree keeps its nodes."""
        self.unprotect(lease)
        self.pool.release(lease.table.clear())
        if self.reuse:
            self.reuse.tree.release(reversed(lease.nodes))
        lease.nodes = []
        lease.num_committed = 0
        lease.placements = ()
        lease.recompute = None

    def take_attention(self, lease: Lease, attention_L2K: NDArray[np.float32]) -> None:
        """Take the result of a lease's query pass."""
        assert self.reuse is not None and lease.recompute is not None
        lease.recompute.take_attention(attention_L2K)
        record_recompute(self.reuse.tree, lease)

    def take_deviations(self, lease: Lease, deviation: NDArray[np.float32], num_tokens: int) -> None:
        """Take the result of a piece of a lease's deviation pass."""
        assert self.reuse is not None and lease.recompute is not None
        lease.recompute.take_deviations(deviation, num_tokens)
        if lease.recompute.is_planned:
            record_recompute(self.reuse.tree, lease)

    def take_masses(self, lease: Lease, positions: NDArray[np.int64], masses: AttentionMasses) -> None:
        """Take how tokens of a lease's prompt, computed in a step, attended to its pieces."""
        assert lease.mass_sampler is not None
        lease.mass_sampler.add(positions, masses)

    def end_recompute(self, lease: Lease) -> None:
        """End the recomputing of a prompt that has all its KV now, and keep its computed chunks. Raises as `commit`."""
        assert self.reuse is not None
        keep_computed_chunks(self.reuse.tree, lease)
        lease.recompute = None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be had: free ones, and kept ones that no sequence uses."""
        return self.pool.num_free + (self.reuse.tree.num_idle_blocks if self.reuse else 0)

    def store_next(self) -> bool:
        """Copy one kept node to disk or to the shared tier while the engine is idle; False if there is none to copy."""
        if self.reuse is None:
            return False
        tree = self.reuse.tree
        return tree.store_next() or (tree.shared is not None and tree.shared.share_next())

    @property
    def shares_kv(self) -> bool:
        """Whether KV is shared with other processes."""
        return self.reuse is not None and self.reuse.tree.shared is not None

    def forget_shared(self, owner: OwnerTag, removed: Collection[ChunkId] | None) -> None:
        """Delete a tenant's records in the shared tier that have seen removed chunks; None: all of the tenant's."""
        if self.reuse is not None and self.reuse.tree.shared is not None:
            self.reuse.tree.shared.kv.forget(owner, removed)

    def forget_chunks(
        self,
        existing: Callable[[set[ChunkId]], set[ChunkId]],
        leases: Iterable[Lease] = (),
        owner: OwnerTag = NO_TENANT,
    ) -> int:
        """Drop a tenant's KV that has seen removed chunks; return the number of nodes dropped.

        Args:
            existing: returns those of the given chunks that still exist.
            leases: of running sequences. Where they have seen a removed chunk they continue, and nothing computed
                behind it is kept.
        """
        if self.reuse is None:
            return 0
        tree = self.reuse.tree
        running = [lease for lease in leases if lease.pieces and lease.pieces[0].owner == owner]
        known = tree.chunk_ids(owner)
        for lease in running:
            known.update(*(seen for _, seen in lease.seen()))
        removed = known - existing(known)
        for lease in running:
            firsts = (index for index, seen in lease.seen() if not removed.isdisjoint(seen))
            lease.num_keepable = min([lease.num_keepable, *firsts])
        return tree.forget_chunks(lambda chunk_id: chunk_id not in removed, owner)

    def forget_owner(self, owner: OwnerTag, leases: Iterable[Lease] = ()) -> int:
        """Drop all KV of a tenant; return the number of nodes dropped. `leases` as of `forget_chunks`."""
        if self.reuse is None:
            return 0
        for lease in leases:
            if lease.pieces and lease.pieces[0].owner == owner:
                lease.num_keepable = 0
        return self.reuse.tree.forget_owner(owner)

    def drop_suspect(self, lease: Lease) -> int:
        """Drop all kept KV that a lease has used, with what depends on it; return the number of nodes dropped."""
        if self.reuse is None:
            return 0
        return self.reuse.tree.drop_suspect([*lease.nodes, *(placement.node for placement in lease.placements)])

    def lose_device(self) -> None:
        """Forget all device copies. Precondition: no lease holds anything."""
        if self.reuse:
            self.reuse.tree.lose_device()

    def check_integrity(self, leases: Iterable[Lease]) -> None:
        """Check that every block is free, held by a lease or kept by the tree, and that its references add up.

        Args:
            leases: all leases that may hold anything.
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

    def _use_instead(self, table: BlockTable, piece: Piece, own: list[BlockId], kept: list[BlockId]) -> None:
        """Use the kept blocks of a piece in place of the table's own, which are released."""
        table.replace_run(piece.start, own, kept, piece.num_tokens)
        self.pool.acquire(kept)
        self.pool.release(own)
