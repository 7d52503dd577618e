"""Block pool: which KV blocks are free, and the reference count of each. Holds no tensors.

Free blocks are allocated lowest first. The operating system provides the memory of a block when it is first written, so
KV takes only the peak of what was in use; and adjacent blocks are read in place.

Invariant: a block is free exactly when its reference count is 0; `check_integrity` verifies it.
"""

from collections.abc import Iterable
from typing import cast

from stillroom.core.ids import BlockId

_USED, _FREE = 0, 1


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. A block is allocated with one reference and freed with its last."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._states = bytearray([_FREE]) * num_blocks  # searched at the speed of memory
        self._num_free = num_blocks
        self._lowest = 0
        """No block below it is free."""

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._num_free

    def ref_count(self, block_id: BlockId) -> int:
        return self._ref_counts[block_id]

    def try_allocate(self, num_blocks: int) -> list[BlockId] | None:
        """Take `num_blocks` blocks with one reference each; None, and nothing is taken, if too few are free.

        Time grows with the number of runs of adjacent free blocks, not of blocks.
        """
        if num_blocks > self._num_free:
            return None
        blocks: list[BlockId] = []
        states, end = self._states, self._lowest
        while (missing := num_blocks - len(blocks)) > 0:
            first = states.find(_FREE, end)
            end = states.find(_USED, first, first + missing)
            if end < 0:
                end = min(first + missing, self.num_blocks)
            states[first:end] = bytes(end - first)
            self._ref_counts[first:end] = [1] * (end - first)
            blocks.extend(cast("Iterable[BlockId]", range(first, end)))
        self._lowest = end
        self._num_free -= num_blocks
        return blocks

    def acquire(self, block_ids: Iterable[BlockId]) -> None:
        """Add a reference to blocks that are in use."""
        counts = self._ref_counts
        for block_id in block_ids:
            assert counts[block_id] > 0, f"acquire of free block {block_id}"
            counts[block_id] += 1

    def release(self, block_ids: Iterable[BlockId]) -> None:
        """Remove a reference; a block without references is free at once."""
        counts, states, freed = self._ref_counts, self._states, 0
        for block_id in block_ids:
            count = counts[block_id]
            assert count > 0, f"release of free block {block_id}"
            counts[block_id] = count - 1
            if count == 1:
                states[block_id] = _FREE
                freed += 1
                if block_id < self._lowest:
                    self._lowest = block_id
        self._num_free += freed

    def check_integrity(self) -> None:
        """Check that free blocks are those with reference count 0, and that they add up."""
        assert all(count >= 0 for count in self._ref_counts), "negative ref count"
        free = {i for i, state in enumerate(self._states) if state == _FREE}
        unreferenced = {i for i, count in enumerate(self._ref_counts) if count == 0}
        assert free == unreferenced, f"free blocks and ref counts disagree on {free ^ unreferenced}"
        assert len(free) == self._num_free, "free blocks and their number disagree"
        assert all(block_id >= self._lowest for block_id in free), "a free block below the lowest one"
