"""What a filter leaves of inverted lists, and which of them a search has to look at then."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lists = NDArray[np.int64]
Nearness = NDArray[np.float32]

_CANDIDATES_PER_RESULT = 4

ENTRIES_PER_COMPARED = 4
"""So many entries of lists are passed in the time that comparing one whole vector takes (docs/filters.md)."""


@dataclass(frozen=True)
class ListsAmong:
    """What a filter leaves of the lists of an index."""

    counts: NDArray[np.int64]
    """[nlist]: entries that it allows."""
    sizes: NDArray[np.int64]
    """[nlist]: all entries."""
    selector: Any

    @property
    def num_allowed(self) -> int:
        return int(self.counts.sum())

    def probes(self, lists: Lists, nearness: Nearness, nprobe: int, num: int) -> tuple[Lists, Nearness]:
        """Which lists to scan to meet as many candidates as an unfiltered search of `nprobe` lists does, and at least
        four for each of `num` that are wanted; as many as there are where the filter leaves fewer.

        Lists without a candidate are passed over, and for each one passed over on the way to the `nprobe`-th that has
        some another is scanned: candidates far from a question are spread over more lists than near ones.

        Args:
            lists: all, the nearest first, and how near they are.
        """
        places = np.flatnonzero(self.counts[lists])
        wanted = max(nprobe * int(self.sizes.sum()) // len(self.sizes), _CANDIDATES_PER_RESULT * num)
        num_met = int(np.searchsorted(np.cumsum(self.counts[lists[places]]), wanted)) + 1
        num_passed = int(places[min(nprobe, len(places)) - 1]) + 1 if len(places) else 0
        places = places[: max(num_met, num_passed)]
        return lists[places], nearness[places]

    def is_better_compared(self, probed: Lists) -> bool:
        """Whether comparing the whole vectors of all that is allowed costs less than scanning these lists."""
        return self.num_allowed * ENTRIES_PER_COMPARED <= int(self.sizes[probed].sum())

    def are_few(self, nprobe: int) -> bool:
        """Whether that is so of any lists, `nprobe` or more: then there is no need to ask which are near."""
        return self.num_allowed * ENTRIES_PER_COMPARED <= nprobe * int(self.sizes.sum()) // len(self.sizes)
