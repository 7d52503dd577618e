"""Choice of the lists of a tiered index in RAM and on devices, which follows the traffic (VectorLiteRAG 4.1).

Searches count accesses of lists, with exponential decay per query. After each window of queries its hit rate is
compared with that of the best choice by those counts. If it is lower by more than a margin, lists are exchanged in the
background, hottest first and a few at a time.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stillroom.errors import CorruptKnowledgeBaseError
from stillroom.retrieval.tiers.partition import Lists, best_lists, hottest_first
from stillroom.retrieval.tiers.tiered_ivf import TieredLists
from stillroom.telemetry import catalogue
from stillroom.telemetry.catalogue import Readings

if TYPE_CHECKING:  # it imports torch, which a sparse search does not need
    from stillroom.retrieval.tiers.device_lists import DeviceLists

logger = logging.getLogger(__name__)

Counts = NDArray[np.float64]
Spawn = Callable[[Callable[[], None]], None]
"""Runs a job, at once or later in another thread."""

_MOST = 1e100


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftRules:
    """When lists are exchanged, and how many at a time."""

    half_life: float = 1000.0
    """Queries after which the weight of an access has halved."""
    window: int = 256
    """Queries per hit rate."""
    margin: float = 0.02
    """Loss of hit rate against the best choice that is tolerated; smaller losses are noise."""
    num_lists: int = 16
    """Lists that enter RAM at a time, or a 64th of all lists if that is more."""
    is_exchanging: bool = True
    """False keeps the first choice, to measure the gain of exchanging."""


class ListHeat:
    """Decayed counts of accesses of lists. Not thread-safe."""

    def __init__(self, num_lists: int, half_life: float, counts: Counts | None = None) -> None:
        """`counts`: earlier counts, [num_lists]."""
        self._growth = 2.0 ** (1.0 / half_life)
        self._counts = np.zeros(num_lists) if counts is None else counts.astype(np.float64)
        self._weight = 1.0

    def record(self, lists: Lists) -> None:
        """Count one query's probes of distinct lists. New counts weigh more, instead of decaying all others."""
        self._weight *= self._growth
        self._counts[lists] += self._weight
        if self._weight > _MOST:
            self._counts /= self._weight
            self._weight = 1.0

    def counts(self) -> Counts:
        """Return counts [num_lists]: an access by the last query counts 1, one `half_life` queries earlier 0.5."""
        return self._counts / self._weight


class HotLists:
    """Keeps the hottest lists in RAM. Only one thread at a time may call `record`; the rest is thread-safe."""

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
            num_bytes: limit of lists in RAM; during an exchange, the lists that searches still use come on top.
            spawn: runs an exchange.
            counts: earlier accesses, [nlist].
            devices: devices for the hottest lists; RAM then holds the next hottest.
        """
        self._devices = devices
        self._tiers, self._num_bytes, self._rules, self._spawn = tiers, num_bytes, rules, spawn
        self._heat = ListHeat(len(tiers.file.sizes), rules.half_life, counts)
        self._lock = Lock()
        self._is_busy = self._is_stopped = self._has_failed = False
        self._num_noted = self._num_probes = self._num_hits = self._num_device_hits = 0
        self._window_start = (0, 0)
        self.hit_rate = 0.0
        """Hit rate of the last complete window."""
        self.num_exchanged = 0
        """Lists that replaced others in RAM or on a device."""

    @property
    def num_probes(self) -> int:
        """Probes of lists so far."""
        return self._num_probes

    @property
    def num_hits(self) -> int:
        """Probes of lists in RAM or on a device."""
        return self._num_hits

    @property
    def num_device_hits(self) -> int:
        """Probes of lists on a device."""
        return self._num_device_hits

    def record(self, probed: Lists) -> bool:
        """Count one query's probes of lists [p]. Returns whether a window ended with it."""
        self._heat.record(probed)
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
        """Start an exchange if this hit rate is too low and no exchange is running."""
        with self._lock:
            if self._is_busy:
                return
            self._is_busy = True
        counts = self._heat.counts()

        def run() -> None:
            try:
                self._exchange(counts, hit_rate)
            except CorruptKnowledgeBaseError:
                pass  # the next search that needs the list reports it, and the file is rebuilt
            except Exception:  # results do not depend on exchanges
                if not self._has_failed:  # log once, not per window
                    logger.exception("lists cannot be exchanged; results are right, but searches may be slower")
                self._has_failed = True
            finally:
                self._is_busy = False

        self._spawn(run)

    def stop(self) -> None:
        """Stop exchanging, also within a running exchange."""
        self._is_stopped = True

    def counts(self) -> Counts:
        """Return decayed accesses [nlist], to be stored."""
        return self._heat.counts()

    def _exchange(self, counts: Counts, hit_rate: float) -> None:
        if self._devices is not None:
            had_any = (self._tiers.device_of >= 0).any()
            num_came = self._devices.exchange(counts, self._rules.margin)
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
        leaving = hottest_first(counts)[::-1]  # coldest first
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
    """Content and traffic of the tiers. Counts restart when the quantizers are trained again."""

    num_lists: int
    num_lists_in_ram: int
    num_lists_on_devices: int
    list_bytes: int
    disk_bytes: int
    """Bytes of lists that are only in the file."""
    ram_bytes: int
    device_bytes: int
    num_probes: int
    num_hits: int
    """Probes of lists in RAM or on a device."""
    num_device_hits: int
    hit_rate: float
    """Hit rate of the last complete window."""
    num_exchanged: int

    @classmethod
    def of(cls, tiers: TieredLists, hot: HotLists, device_bytes: int) -> "ListFigures":
        """Take the present figures; `device_bytes` are the codes on devices."""
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
