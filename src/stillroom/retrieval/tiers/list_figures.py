"""What the tiers of an index with lists in a file hold and did, for people and for metrics."""

from dataclasses import dataclass

from stillroom.retrieval.tiers.hot_lists import HotLists
from stillroom.retrieval.tiers.tiered_ivf import TieredLists
from stillroom.telemetry import catalogue
from stillroom.telemetry.catalogue import Readings


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
