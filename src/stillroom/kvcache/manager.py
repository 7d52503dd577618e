"""Gives sequences their KV blocks and takes them back. Decides over block ids; the tensors live in `kvstore`."""

from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.core.batch import BlockCopy
from stillroom.kvcache.block_pool import BlockPool
from stillroom.kvcache.block_table import BlockTable, num_blocks_for


@dataclass(frozen=True, slots=True)
class Appended:
    """A table has one slot more."""

    copy: BlockCopy | None
    """What must be copied before the slot is written."""


class KVCacheManager:
    """The only one who moves blocks between the pool and the block tables."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    def new_table(self, max_tokens: int) -> BlockTable:
        """An empty table for a sequence that will never hold more than `max_tokens` tokens."""
        return BlockTable(self.pool.block_size, max_tokens)

    def can_ever_hold(self, segment_lengths: Sequence[int]) -> bool:
        """Whether segments of these lengths would fit into an otherwise empty pool."""
        return num_blocks_for(segment_lengths, self.pool.block_size) <= self.pool.num_blocks

    def try_allocate(self, table: BlockTable, segment_lengths: Sequence[int]) -> bool:
        """Blocks for all segments, each on a fresh block; False, and nothing taken, if too few are free."""
        size = self.pool.block_size
        blocks = self.pool.try_allocate(num_blocks_for(segment_lengths, size))
        if blocks is None:
            return False
        first = 0
        for length in segment_lengths:
            count = -(-length // size)
            table.append_segment(blocks[first : first + count], length)
            first += count
        return True

    def try_append_token(self, table: BlockTable) -> Appended | None:
        """A slot for one more token; None, and nothing taken, if that needs a block and none is free.

        Copy on write: a last block that others read too is left to them, and the table goes on in a copy of it.
        """
        shared = None if table.is_full or self.pool.ref_count(table.block_ids[-1]) == 1 else table.block_ids[-1]
        if not table.is_full and shared is None:
            table.append_token()
            return Appended(None)
        blocks = self.pool.try_allocate(1)
        if blocks is None:
            return None
        if shared is None:
            table.append_segment(blocks, 1)
            return Appended(None)
        table.replace_last_block(blocks[0])
        table.append_token()
        self.pool.release([shared])
        return Appended(BlockCopy(shared, blocks[0]))

    def fork(self, table: BlockTable, into: BlockTable) -> None:
        """Let an empty table go on where this one stands. Both read the same blocks and write into none of them."""
        into.copy_from(table)
        self.pool.acquire(table.block_ids)

    def release(self, table: BlockTable) -> None:
        """Give back everything the table holds."""
        self.pool.release(table.clear())
