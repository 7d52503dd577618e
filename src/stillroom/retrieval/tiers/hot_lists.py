"""Which lists of a tiered index are in RAM and on devices, as what people ask for drifts (VectorLiteRAG 4.1:
"re-calibrated if access patterns shift").

Accesses of lists are counted while searching, and every query makes what was before it count a little less. Once per
window of queries the hit rate of that window is compared with what the best choice by those counts would have. Where it
is lower by more than a margin, lists are exchanged, the hottest first and a few at a time, beside the searches.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stillroom.errors import CorruptKnowledgeBaseError
from stillroom.retrieval.tiers.partition import Lists, best_lists, by_heat
from stillroom.retrieval.tiers.tiered_ivf import TieredLists
from stillroom.telemetry import catalogue
from stillroom.telemetry.catalogue import Readings

if TYPE_CHECKING:  # it imports torch, which a search by words can do without
    from stillroom.retrieval.tiers.device_lists import DeviceLists

logger = logging.getLogger(__name__)

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


class HotLists:
    """Keeps the hottest lists in RAM. `note` is for one thread at a time, the rest for any."""

    def __init__(
        self,
        tiers: TieredLists,
        num_bytes: int,
        rules: DriftRules,
        spawn: Spawn,
        counts: Counts | None = None,
        devices: "DeviceLists | None" = None,
    ) -> None:
        """
        Args:
            num_bytes: most that lists in RAM may take; while lists are exchanged, and searches still use the old ones,
                those few more.
            spawn: runs an exchange.
            counts: accesses before, [nlist].
            devices: hold the hottest lists, and RAM the next.
        """
        self._devices = devices
        self._tiers, self._num_bytes, self._rules, self._spawn = tiers, num_bytes, rules, spawn
        self._heat = ListHeat(len(tiers.file.sizes), rules.half_life, counts)
        self._lock = Lock()
        self._is_busy = self._is_stopped = self._has_failed = False
        self._num_noted = self._num_probes = self._num_hits = self._num_device_hits = 0
        self._window_start = (0, 0)
        self.hit_rate = 0.0
        """Of the last whole window."""
        self.num_exchanged = 0
        """Lists that came into RAM or to a device in place of others."""

    @property
    def num_probes(self) -> int:
        """Lists that were asked for so far."""
        return self._num_probes

    @property
    def num_hits(self) -> int:
        """Those of them that were in RAM or on a device."""
        return self._num_hits

    @property
    def num_device_hits(self) -> int:
        """Those of them that were on a device."""
        return self._num_device_hits

    def note(self, probed: Lists) -> bool:
        """One query probes these lists [p]. Returns whether a window has ended with it."""
        self._heat.note(probed)
        self._num_noted += 1
        self._num_probes += len(probed)
        is_on_device = self._tiers.device_of[probed] >= 0
        self._num_device_hits += int(np.count_nonzero(is_on_device))
        self._num_hits += int(np.count_nonzero(is_on_device | self._tiers.is_in_ram[probed]))
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
            except Exception:  # what searches find does not depend on it
                if not self._has_failed:  # each window would say it again
                    logger.exception("lists cannot be exchanged; the index stays as fast as it is")
                self._has_failed = True
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
        if self._devices is not None:
            had_any = (self._tiers.device_of >= 0).any()
            num_came = self._devices.follow(counts, self._rules.margin)
            self.num_exchanged += num_came if had_any else 0
        list_bytes, is_on_device = self._tiers.list_bytes(), self._tiers.device_of >= 0
        best = best_lists(counts, np.where(is_on_device, self._num_bytes + 1, list_bytes), self._num_bytes)
        is_held, total = self._tiers.is_in_ram, counts.sum()
        was_empty = not is_held.any()
        possible = counts[best].sum() + counts[is_on_device].sum()
        if not was_empty and (total == 0 or hit_rate >= possible / total - self._rules.margin):
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


@dataclass(frozen=True, slots=True)
class ListFigures:
    """What the tiers of an index hold and did. Counts only grow, until the quantizers are trained anew."""

    num_lists: int
    num_lists_in_ram: int
    num_lists_on_devices: int
    list_bytes: int
    disk_bytes: int
    """Of lists that are in the file only."""
    ram_bytes: int
    device_bytes: int
    num_probes: int
    num_hits: int
    """In RAM or on a device."""
    num_device_hits: int
    hit_rate: float
    """Of the last window of queries."""
    num_exchanged: int

    @classmethod
    def of(cls, tiers: TieredLists, hot: HotLists, device_bytes: int) -> "ListFigures":
        """Of now.

        Args:
            device_bytes: that lists take on devices.
        """
        is_on_device = tiers.device_of >= 0
        return cls(
            num_lists=len(tiers.file.sizes),
            num_lists_in_ram=int(tiers.is_in_ram.sum()),
            num_lists_on_devices=int(is_on_device.sum()),
            list_bytes=int(tiers.list_bytes().sum()),
            disk_bytes=int(tiers.list_bytes()[~is_on_device & ~tiers.is_in_ram].sum()),
            ram_bytes=tiers.ram_bytes,
            device_bytes=device_bytes,
            num_probes=hot.num_probes,
            num_hits=hot.num_hits,
            num_device_hits=hot.num_device_hits,
            hit_rate=hot.hit_rate,
            num_exchanged=hot.num_exchanged,
        )

    def readings(self) -> Readings:
        """Return the same as metrics."""
        on_device = self.num_lists_on_devices
        num_lists = {"host": self.num_lists_in_ram, "disk": self.num_lists - self.num_lists_in_ram - on_device}
        num_bytes = {"host": self.ram_bytes, "disk": self.disk_bytes}
        probes = {"host": self.num_hits - self.num_device_hits, "disk": self.num_probes - self.num_hits}
        if on_device:
            num_lists["device"], num_bytes["device"] = on_device, self.device_bytes
            probes["device"] = self.num_device_hits
        return {
            catalogue.INDEX_LISTS: num_lists,
            catalogue.INDEX_LIST_BYTES: num_bytes,
            catalogue.INDEX_PROBES: probes,
            catalogue.INDEX_HIT_RATIO: self.hit_rate,
            catalogue.INDEX_EXCHANGED: self.num_exchanged,
        }
