"""Which lists of an index are on devices, in RAM and on disk, and what each of them has to do for a batch of queries:
counts that `search_model` multiplies with costs. Arithmetic only.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stillroom.retrieval.tiers.device_lists import spread
from stillroom.retrieval.tiers.device_shard import launches
from stillroom.retrieval.tiers.list_file import capacity
from stillroom.retrieval.tiers.partition import Lists, Partition, best_lists
from stillroom.retrieval.tiers.tiered_ivf import DISK, FIRST_DEVICE, RAM

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

ID_BYTES = 8
"""Of a vector's bytes in RAM and on disk; on a device there are codes only."""


class Division:
    """Which lists are where, and where all of them lie in their file: one after the other, by number (`list_file`)."""

    def __init__(self, sizes: Counts, bytes_per_vector: int, partition: Partition) -> None:
        """
        Args:
            sizes: vectors in each list, [nlist].
            bytes_per_vector: its code and its id.
            partition: into `RAM`, `DISK` and, from `FIRST_DEVICE` on, devices.
        """
        self.partition = partition
        self.sizes = sizes
        self.bytes = sizes * bytes_per_vector
        self._code_bytes = sizes * (bytes_per_vector - ID_BYTES)
        room = capacity(sizes) * bytes_per_vector
        self._begins = np.cumsum(room) - room
        self._ends = self._begins + self.bytes

    @property
    def ram_bytes(self) -> int:
        """Of the lists in RAM."""
        return int(self.bytes[self.partition.shard_of == RAM].sum())

    @property
    def disk_bytes(self) -> int:
        return int(self.bytes[self.partition.shard_of == DISK].sum())

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """Of the codes on each device."""
        return tuple(int(self._code_bytes[self.partition.of(device)].sum()) for device in self.devices)

    @property
    def devices(self) -> range:
        """Their shards."""
        return range(FIRST_DEVICE, self.partition.num_shards)

    def work(self, shard: int, probed: Lists, window_bytes: int) -> tuple[Counts, Floats]:
        """Queries of a batch [q, p] that RAM or the disk scans for, in its order, and for each [n, 5]: 1, lists, codes,
        and of the file windows and bytes of lists that nobody before it in the batch has touched; 0 in RAM."""
        num_in = self.partition.num_in(probed)[:, shard]
        asked = np.flatnonzero(num_in)
        order = asked[np.argsort(num_in[asked], kind="stable")]
        rows = np.zeros((len(order), 5))
        windows: set[int] = set()
        touched: set[int] = set()
        for row, query in enumerate(order.tolist()):
            numbers = probed[query][probed[query] >= 0]
            mine = numbers[self.partition.shard_of[numbers] == shard]
            rows[row, :3] = 1, len(mine), self.sizes[mine].sum()
            if shard == DISK:
                fresh = [number for number in mine.tolist() if number not in touched and self.bytes[number]]
                touched.update(fresh)
                before = len(windows)
                for number in fresh:
                    first, last = int(self._begins[number]), int(self._ends[number]) - 1
                    windows.update(range(first // window_bytes, last // window_bytes + 1))
                rows[row, 3:] = len(windows) - before, self.bytes[fresh].sum()
        return order, rows

    def device_work(self, device: int, probed: Lists) -> tuple[Counts, Floats]:
        """Queries of a batch [q, p] that a device scans for, and for all of them together [3]: launches, queries, and
        places of codes: as many for each query as the one has that has most, as `device_shard` scans them."""
        is_here = (probed >= 0) & (self.partition.shard_of[probed] == device)
        asked = np.flatnonzero(is_here.any(axis=1))
        if not len(asked):
            return asked, np.zeros(3)
        num_codes = np.where(is_here, self.sizes[probed], 0).sum(axis=1)[asked]
        places = [len(num_codes[part]) * int(num_codes[part].max()) for part in launches(num_codes)]
        return asked, np.array([len(places), len(asked), sum(places)], dtype=np.float64)


def hottest_in_ram(
    num_accesses: Floats,
    sizes: Counts,
    bytes_per_vector: int,
    ram_bytes: int,
    on_devices: Sequence[Lists] = (),
) -> Division:
    """The hottest lists that fit into so many bytes, in RAM, as `HotLists` chooses them.

    Args:
        on_devices: lists that each device has; RAM holds the next ones.
    """
    shard_of = np.full(len(sizes), DISK)
    for number, held in enumerate(on_devices):
        shard_of[held] = FIRST_DEVICE + number
    left = np.flatnonzero(shard_of == DISK)
    shard_of[left[best_lists(num_accesses[left], sizes[left] * bytes_per_vector, ram_bytes)]] = RAM
    return Division(sizes, bytes_per_vector, Partition(shard_of, FIRST_DEVICE + len(on_devices)))


def hottest_on_devices(
    num_accesses: Floats, sizes: Counts, bytes_per_vector: int, device_bytes: int, num_devices: int
) -> list[Lists]:
    """The lists on each of some devices that have so many bytes each, as `DeviceLists` chooses them at first."""
    code_bytes = sizes * (bytes_per_vector - ID_BYTES)
    if not device_bytes:
        return [np.empty(0, dtype=np.int64)] * num_devices
    chosen = best_lists(num_accesses, code_bytes, device_bytes * num_devices)
    return spread(chosen, code_bytes, [np.empty(0, dtype=np.int64)] * num_devices, device_bytes)
