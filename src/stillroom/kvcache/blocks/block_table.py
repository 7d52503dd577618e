"""Block table: one sequence's map from token position to slot. Each segment starts on a fresh block.

Invariant: `slots[p]` is the slot of position p for p < `num_slots`; slots are distinct, and each lies in one of
`block_ids`. A segment may leave its last block part-empty. Nothing addresses those slots, so padding is never attended
to, and a chunk's blocks can be shared at any depth. Design: docs/runtime.md
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from stillroom.core.ids import BlockId


def num_blocks_for(segment_lengths: Sequence[int], block_size: int) -> int:
    """Return how many blocks segments of these lengths take."""
    return sum(-(-length // block_size) for length in segment_lengths)


def runs_after(position: int, segment_lengths: Sequence[int]) -> list[int]:
    """Return the lengths of what is left of segments from a position on, which lies at a block boundary."""
    runs, end = [], 0
    for length in segment_lengths:
        end += length
        if end > position:
            runs.append(min(length, end - position))
    return runs


class BlockTable:
    def __init__(self, block_size: int, max_tokens: int) -> None:
        self.block_size = block_size
        self.block_ids: list[BlockId] = []
        self.num_slots = 0
        self._slots: NDArray[np.int64] = np.empty(max_tokens, dtype=np.int64)
        self._room = 0
        """Unused slots at the end of the last block."""

    @property
    def slots(self) -> NDArray[np.int64]:
        """A view of shape [num_slots], in order of position."""
        return self._slots[: self.num_slots]

    @property
    def is_full(self) -> bool:
        """Whether the next token needs a fresh block."""
        return self._room == 0

    def blocks_of(self, start: int, num_tokens: int) -> list[BlockId]:
        """Return the blocks of these tokens, which begin at a block boundary."""
        firsts = self._slots[start : start + num_tokens : self.block_size]
        blocks: list[BlockId] = (firsts // self.block_size).tolist()
        return blocks

    def append_segment(self, block_ids: Sequence[BlockId], num_tokens: int) -> None:
        """Append slots for `num_tokens` tokens from the beginning of the first of these blocks."""
        self.append_segments(block_ids, (num_tokens,))

    def append_segments(self, block_ids: Sequence[BlockId], lengths: Sequence[int]) -> None:
        """Append slots for segments of these lengths, each from the beginning of one of these blocks."""
        size, first = self.block_size, 0
        slots = _slots_of(block_ids, len(block_ids) * size, size)
        for length in lengths:
            self._slots[self.num_slots : self.num_slots + length] = slots[first : first + length]
            self.num_slots += length
            end, first = first + length, first + -(-length // size) * size
            self._room = first - end
        assert first == len(slots), (len(block_ids), lengths)
        self.block_ids.extend(block_ids)

    def append_token(self) -> None:
        """Append a slot for one token. Precondition: the last block is not full."""
        assert self._room > 0, "the last block is full"
        self._slots[self.num_slots] = (self.block_ids[-1] + 1) * self.block_size - self._room
        self.num_slots += 1
        self._room -= 1

    def truncate(self, num_tokens: int) -> list[BlockId]:
        """Remove the slots behind `num_tokens` tokens; return the emptied blocks for the caller to release.

        Precondition: the removed slots were appended token by token.
        """
        emptied: list[BlockId] = []
        while self.num_slots > num_tokens:
            self.num_slots -= 1
            self._room += 1
            if self._room == self.block_size:
                emptied.append(self.block_ids.pop())
                self._room = 0
        return emptied

    def copy_from(self, other: "BlockTable") -> None:
        """Take the blocks and slots of another table; the caller acquires the blocks. Precondition: this is empty."""
        assert not self.block_ids, "a table that holds blocks cannot take over others"
        self.block_ids = list(other.block_ids)
        self.num_slots = other.num_slots
        self._slots[: self.num_slots] = other.slots
        self._room = other._room

    def replace_last_block(self, block_id: BlockId) -> None:
        """Point the tokens of the last block to another block, at the same offsets."""
        num_tokens = self.block_size - self._room
        self.block_ids[-1] = block_id
        first = block_id * self.block_size
        self._slots[self.num_slots - num_tokens : self.num_slots] = np.arange(first, first + num_tokens)

    def replace_run(self, start: int, old: Sequence[BlockId], new: Sequence[BlockId], num_tokens: int) -> None:
        """Point the `num_tokens` tokens from position `start` on, which filled `old` in order, to `new`."""
        first_block = self.block_ids.index(old[0])
        assert self.block_ids[first_block : first_block + len(old)] == list(old) and len(old) == len(new)
        self.block_ids[first_block : first_block + len(old)] = new
        self._slots[start : start + num_tokens] = _slots_of(new, num_tokens, self.block_size)

    def clear(self) -> list[BlockId]:
        """Empty the table; return its blocks for the caller to release."""
        block_ids, self.block_ids = self.block_ids, []
        self.num_slots = 0
        self._room = 0
        return block_ids


def _slots_of(block_ids: Sequence[BlockId], num_tokens: int, block_size: int) -> NDArray[np.int64]:
    """Return the first `num_tokens` slots of these blocks."""
    first = block_ids[0]
    if block_ids == list(range(first, first + len(block_ids))):  # adjacent blocks, the usual case
        return np.arange(first * block_size, first * block_size + num_tokens)
    firsts = np.array(block_ids, dtype=np.int64) * block_size
    return (firsts[:, None] + _offsets(block_size)).ravel()[:num_tokens]


@cache
def _offsets(block_size: int) -> NDArray[np.int64]:
    return np.arange(block_size)
