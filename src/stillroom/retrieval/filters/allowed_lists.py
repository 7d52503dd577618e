"""Which inverted lists a filtered search scans, and when comparing all allowed vectors is cheaper."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Lists = NDArray[np.int64]
Nearness = NDArray[np.float32]

_CANDIDATES_PER_RESULT = 4

ENTRIES_PER_COMPARED = 4
"""List entries skipped in the time of one comparison of full vectors; measured, see docs/filters.md."""


@dataclass(frozen=True)
class AllowedLists:
    """Entries of an index's inverted lists that a filter allows."""

    counts: NDArray[np.int64]
    """[nlist]: allowed entries."""
    sizes: NDArray[np.int64]
    """[nlist]: all entries."""
    selector: Any

    @property
    def num_allowed(self) -> int:
        return int(self.counts.sum())

    def probes(self, lists: Lists, nearness: Nearness, nprobe: int, num: int) -> tuple[Lists, Nearness]:
        """Return the lists to scan, with their nearness.

        They hold at least as many allowed entries as an unfiltered search of `nprobe` lists meets, and at least four
        per wanted result, if there are that many. Lists without an allowed entry are skipped, and each list skipped
        before the `nprobe`-th useful one adds another: entries far from a question are spread over more lists.

        Args:
            lists: all lists, nearest first; `nearness` is that of their centres.
            num: results wanted.
        """
        places = np.flatnonzero(self.counts[lists])
        wanted = max(nprobe * int(self.sizes.sum()) // len(self.sizes), _CANDIDATES_PER_RESULT * num)
        num_met = int(np.searchsorted(np.cumsum(self.counts[lists[places]]), wanted)) + 1
        num_passed = int(places[min(nprobe, len(places)) - 1]) + 1 if len(places) else 0
        places = places[: max(num_met, num_passed)]
        return lists[places], nearness[places]

    def is_comparing_cheaper(self, probed: Lists) -> bool:
        """Whether comparing all allowed full vectors costs less than scanning these lists."""
        return self.num_allowed * ENTRIES_PER_COMPARED <= int(self.sizes[probed].sum())

    def is_comparing_always_cheaper(self, nprobe: int) -> bool:
        """Whether comparing is cheaper for any `nprobe` or more lists, so that no coarse search is needed."""
        return self.num_allowed * ENTRIES_PER_COMPARED <= nprobe * int(self.sizes.sum()) // len(self.sizes)
