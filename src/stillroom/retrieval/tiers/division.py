"""Division of lists among devices, RAM and disk, and the work of each for a batch: counts for `search_model`."""

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
"""Bytes of an id, which RAM and disk store beside each code; devices store codes only."""


class Division:
    """Tier of each list, and its place in the file: one list after the other, by number (`list_file`)."""

    def __init__(self, sizes: Counts, bytes_per_vector: int, partition: Partition) -> None:
        """
        Args:
            sizes: vectors in each list, [nlist].
            bytes_per_vector: bytes of a code and its id.
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
        return int(self.bytes[self.partition.shard_of == RAM].sum())

    @property
    def disk_bytes(self) -> int:
        return int(self.bytes[self.partition.shard_of == DISK].sum())

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """Bytes of codes on each device."""
        return tuple(int(self._code_bytes[self.partition.of(device)].sum()) for device in self.devices)

    @property
    def devices(self) -> range:
        """Shard numbers of the devices."""
        return range(FIRST_DEVICE, self.partition.num_shards)

    def work(self, shard: int, probed: Lists, window_bytes: int) -> tuple[Counts, Floats]:
        """Return the queries of a batch [q, p] that RAM or disk scans for, in scan order, and the work of each [n, 5].

        The columns are: 1, lists, codes, windows of the file first touched by the query, and bytes of lists first
        touched by it. The last two are 0 in RAM.
        """
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
        """Return the queries of a batch [q, p] that a device scans for, and their total work [3].

        That is: launches, queries, and slots of codes. Within a launch each query has as many slots as the query with
        the most codes, as in `device_shard`.
        """
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
    """Return the division that `HotLists` chooses: the hottest lists that fit into `ram_bytes` are in RAM.

    Args:
        on_devices: lists of each device; RAM holds the next hottest.
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
    """Return the lists of each device, as `DeviceLists` first chooses them."""
    code_bytes = sizes * (bytes_per_vector - ID_BYTES)
    if not device_bytes:
        return [np.empty(0, dtype=np.int64)] * num_devices
    chosen = best_lists(num_accesses, code_bytes, device_bytes * num_devices)
    return spread(chosen, code_bytes, [np.empty(0, dtype=np.int64)] * num_devices, device_bytes)
