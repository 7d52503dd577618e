"""Gives sequences their KV blocks and takes them back. Decides over block ids; the tensors live in `kvstore`."""

from collections.abc import Sequence

from stillroom.kvcache.block_pool import BlockPool
from stillroom.kvcache.block_table import BlockTable, num_blocks_for


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

    def try_append_token(self, table: BlockTable) -> bool:
        """A slot for one more token; False, and nothing taken, if that needs a block and none is free."""
        if not table.is_full:
            table.append_token()
            return True
        blocks = self.pool.try_allocate(1)
        if blocks is None:
            return False
        table.append_segment(blocks, 1)
        return True

    def release(self, table: BlockTable) -> None:
        """Give back everything the table holds."""
        self.pool.release(table.clear())
