"""Which KV blocks are free and which are in use, and by how many. No tensors here.

Free blocks are handed out lowest first: the memory of a block that nobody ever wrote to does not exist yet, so KV takes
as much as was in use at a time; and blocks side by side are read in place.

Invariant: a block is free exactly when its ref count is 0; `check_integrity` adds it up.
"""

import heapq
from collections.abc import Iterable

from stillroom.core.ids import BlockId


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens; each is handed out with one reference and freed with its last."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = [BlockId(i) for i in range(num_blocks)]  # a heap
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def ref_count(self, block_id: BlockId) -> int:
        return self._ref_counts[block_id]

    def try_allocate(self, num_blocks: int) -> list[BlockId] | None:
        """`num_blocks` blocks with one reference each, or None (and nothing taken) if too few are free."""
        if num_blocks > len(self._free):
            return None
        take, counts = heapq.heappop, self._ref_counts
        blocks = [take(self._free) for _ in range(num_blocks)]
        for block_id in blocks:
            counts[block_id] = 1
        return blocks

    def acquire(self, block_ids: Iterable[BlockId]) -> None:
        """One more user of blocks that are in use already."""
        counts = self._ref_counts
        for block_id in block_ids:
            assert counts[block_id] > 0, f"acquire of free block {block_id}"
            counts[block_id] += 1

    def release(self, block_ids: Iterable[BlockId]) -> None:
        """One user less; a block without users is free at once."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"release of free block {block_id}"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                heapq.heappush(self._free, block_id)

    def check_integrity(self) -> None:
        """Free and used blocks add up, no block is free twice, and free means ref count 0."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert all(count >= 0 for count in self._ref_counts), "negative ref count"
        unreferenced = {i for i, count in enumerate(self._ref_counts) if count == 0}
        assert free == unreferenced, f"free list and ref counts disagree on {free ^ unreferenced}"
