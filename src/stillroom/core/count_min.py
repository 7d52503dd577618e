"""Count-Min Sketch: counts in fixed memory that never underestimate (llmds 2.4).

Uses conservative update (only the smallest counters of an item grow) and ageing by halving. An estimate is at least the
true (aged) count, and with probability 1 - delta at most epsilon * (total count) above it.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np

_LIMIT = 2**32 - 1


@dataclass(frozen=True, slots=True)
class SketchShape:
    """Width and depth. The default is llmds's hot-query detector: 2,048 x 4 (32 KB)."""

    width: int = 2048
    depth: int = 4

    @property
    def epsilon(self) -> float:
        """Bound on the overestimate, as a share of the total count."""
        return math.e / self.width

    @property
    def num_bytes(self) -> int:
        return 4 * self.width * self.depth


class CountMinSketch:
    """Counts of byte strings. Deterministic: no random seeds, so the same stream gives the same estimates."""

    def __init__(self, shape: SketchShape | None = None, *, halve_every: int | None = None) -> None:
        """
        Args:
            halve_every: all counts are halved after this many additions; None: never.
        """
        self.shape = shape or SketchShape()
        self.total = 0
        """Additions so far, halved with the counters."""
        self._halve_every = halve_every
        self._since_halving = 0
        self._table = np.zeros((self.shape.depth, self.shape.width), dtype=np.uint32)
        self._cells = self._table.data  # a memoryview: scalar access at a third of numpy's cost

    def add(self, item: bytes) -> int:
        """Count one more occurrence; return the new estimate."""
        places = self._places(item)
        cells = self._cells
        estimate = min(cells[place] for place in places)
        grown = min(estimate + 1, _LIMIT)
        for place in places:
            if cells[place] < grown:
                cells[place] = grown
        self.total += 1
        self._since_halving += 1
        if self._since_halving == self._halve_every:
            self.halve()
        return grown

    def estimate(self, item: bytes) -> int:
        """Return an upper bound on the item's (aged) count."""
        cells = self._cells
        return int(min(cells[place] for place in self._places(item)))

    def halve(self) -> None:
        """Halve every count, rounded down."""
        np.right_shift(self._table, 1, out=self._table)
        self.total //= 2
        self._since_halving = 0

    def _places(self, item: bytes) -> list[tuple[int, int]]:
        """Return one cell per row, from disjoint parts of one digest: one hash instead of `depth`."""
        depth, width = self.shape.depth, self.shape.width
        digest = (
            hashlib.blake2b(item, digest_size=8 * depth).digest()
            if depth <= 8
            else hashlib.shake_128(item).digest(8 * depth)
        )
        return [(row, int.from_bytes(digest[8 * row : 8 * row + 8], "little") % width) for row in range(depth)]
