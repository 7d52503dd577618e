"""Which lists of a tiered index are in RAM, as what people ask for drifts (VectorLiteRAG 4.1: "re-calibrated if access
patterns shift").

Accesses of lists are counted while searching, and every query makes what was before it count a little less. Once per
window of queries the hit rate of that window is compared with what the best choice by those counts would have. Where it
is lower by more than a margin, lists are exchanged, the hottest first and a few at a time, beside the searches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from stillroom.errors import CorruptKnowledgeBaseError
from stillroom.retrieval.partition import Lists, by_heat
from stillroom.retrieval.tiered_ivf import TieredLists

Counts = NDArray[np.float64]
Spawn = Callable[[Callable[[], None]], None]
"""Does a job soon, somewhere else; or here and now."""

_MOST = 1e100


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftRules:
    """When to exchange, and how much at a time."""

    half_life: float = 1000.0
    """Queries after which an access counts half."""
    window: int = 256
    """Queries over which a hit rate is taken."""
    margin: float = 0.02
    """Of the hit rate below the best possible one that is left as it is: less would be noise."""
    num_lists: int = 16
    """Lists that enter RAM at a time, or a 64th of all lists where those are more."""
    is_exchanging: bool = True
    """False keeps the first choice: for measuring what exchanging brings."""


class ListHeat:
    """Accesses of lists, the older the less. Not thread-safe."""

    def __init__(self, num_lists: int, half_life: float, counts: Counts | None = None) -> None:
        """`counts`: [num_lists], of before."""
        self._growth = 2.0 ** (1.0 / half_life)
        self._counts = np.zeros(num_lists) if counts is None else counts.astype(np.float64)
        self._weight = 1.0

    def note(self, lists: Lists) -> None:
        """One query probes these different lists. Instead of all others becoming less, these count more."""
        self._weight *= self._growth
        self._counts[lists] += self._weight
        if self._weight > _MOST:
            self._counts /= self._weight
            self._weight = 1.0

    def counts(self) -> Counts:
        """[num_lists]: an access by the last query counts 1, one `half_life` queries earlier 0.5."""
        return self._counts / self._weight


def best_lists(counts: Counts, list_bytes: NDArray[np.int64], num_bytes: int) -> Lists:
    """The lists to keep in so many bytes: each, from the hottest on, that still fits."""
    order = by_heat(counts)
    order = order[list_bytes[order] <= num_bytes]
    num_whole = int(np.searchsorted(np.cumsum(list_bytes[order]), num_bytes, side="right"))
    chosen = order[:num_whole].tolist()
    left = num_bytes - int(list_bytes[order[:num_whole]].sum())
    for number, size in zip(order[num_whole:].tolist(), list_bytes[order[num_whole:]].tolist(), strict=True):
        if size <= left:
            chosen.append(number)
            left -= size
    return np.array(chosen, dtype=np.int64)


class HotLists:
    """Keeps the hottest lists in RAM. `note` is for one thread at a time, the rest for any."""

    def __init__(
        self,
        tiers: TieredLists,
        num_bytes: int,
        rules: DriftRules,
        spawn: Spawn,
        counts: Counts | None = None,
    ) -> None:
        """
        Args:
            num_bytes: most that lists in RAM may take; while lists are exchanged, and searches still use the old ones,
                those few more.
            spawn: runs an exchange.
            counts: accesses before, [nlist].
        """
        self._tiers, self._num_bytes, self._rules, self._spawn = tiers, num_bytes, rules, spawn
        self._heat = ListHeat(len(tiers.file.sizes), rules.half_life, counts)
        self._lock = Lock()
        self._is_busy = self._is_stopped = False
        self._num_noted = self._num_probes = self._num_hits = 0
        self._window_start = (0, 0)
        self.hit_rate = 0.0
        """Of the last whole window."""
        self.num_exchanged = 0
        """Lists that came into RAM in place of others."""

    @property
    def num_probes(self) -> int:
        """Lists that were asked for so far."""
        return self._num_probes

    @property
    def num_hits(self) -> int:
        """Those of them that were in RAM."""
        return self._num_hits

    def note(self, probed: Lists) -> bool:
        """One query probes these lists [p]. Returns whether a window has ended with it."""
        self._heat.note(probed)
        self._num_noted += 1
        self._num_probes += len(probed)
        self._num_hits += int(np.count_nonzero(self._tiers.is_in_ram[probed]))
        if self._num_noted % self._rules.window:
            return False
        probes_before, hits_before = self._window_start
        self._window_start = self._num_probes, self._num_hits
        self.hit_rate = (self._num_hits - hits_before) / (self._num_probes - probes_before)
        if self._rules.is_exchanging:
            self.start(self.hit_rate)
        return True

    def start(self, hit_rate: float = 0.0) -> None:
        """Have lists exchanged, if such a hit rate calls for it and nobody is at it already."""
        with self._lock:
            if self._is_busy:
                return
            self._is_busy = True
        counts = self._heat.counts()

        def run() -> None:
            try:
                self._exchange(counts, hit_rate)
            except CorruptKnowledgeBaseError:
                pass  # a search that needs the list says so, and the file is made anew
            finally:
                self._is_busy = False

        self._spawn(run)

    def stop(self) -> None:
        """Exchange no more, not even the rest of what is being exchanged."""
        self._is_stopped = True

    def counts(self) -> Counts:
        """Accesses, [nlist]; for keeping."""
        return self._heat.counts()

    def _exchange(self, counts: Counts, hit_rate: float) -> None:
        list_bytes = self._tiers.list_bytes()
        best = best_lists(counts, list_bytes, self._num_bytes)
        is_held, total = self._tiers.is_in_ram, counts.sum()
        was_empty = not is_held.any()
        if not was_empty and (total == 0 or hit_rate >= counts[best].sum() / total - self._rules.margin):
            return
        coming = best[~is_held[best]]
        is_best = np.zeros(len(counts), dtype=bool)
        is_best[best] = True
        leaving = by_heat(counts)[::-1]  # coldest first
        leaving = leaving[(is_held & ~is_best)[leaving]].tolist()
        step = max(self._rules.num_lists, len(counts) // 64)
        for start in range(0, len(coming), step):
            if self._is_stopped:
                return
            into = coming[start : start + step]
            needed = self._tiers.ram_bytes + int(list_bytes[into].sum()) - self._num_bytes
            out = []
            while needed > 0:
                out.append(leaving.pop(0))
                needed -= int(list_bytes[out[-1]])
            self._tiers.exchange(out, into)
            self.num_exchanged += 0 if was_empty else len(into)
