"""Placement of the hottest lists of a tiered index on devices, balanced by bytes (VectorLiteRAG 4.1).

Lists are exchanged device by device as the traffic changes. A list stays on its device or leaves it, and never moves to
another device. While a device is refilled, its lists are searched in RAM or on disk, so it never holds both sets.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch

from stillroom.errors import ConfigError
from stillroom.retrieval.tiers.device_shard import DeviceShard
from stillroom.retrieval.tiers.faiss_lists import Vectors
from stillroom.retrieval.tiers.host_scan import Scored
from stillroom.retrieval.tiers.list_file import Entries
from stillroom.retrieval.tiers.partition import Lists, Nearness, best_lists
from stillroom.retrieval.tiers.tiered_ivf import BatchShard, TieredLists

logger = logging.getLogger(__name__)


def parse_devices(names: str) -> tuple[str, ...]:
    """Parse `index.devices`: PyTorch's device names separated by commas; `cuda` alone means all CUDA devices.

    Raises:
        ConfigError: a device does not exist.
    """
    found: list[str] = []
    for name in (part.strip() for part in names.split(",") if part.strip()):
        found += [f"cuda:{number}" for number in range(torch.cuda.device_count())] if name == "cuda" else [name]
    try:
        for name in found:
            torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"index.devices={names!r}: {str(error).splitlines()[0]}") from error
    if not found:
        raise ConfigError(f"index.device_bytes is set, but index.devices={names!r} names no device of this machine")
    return tuple(found)


class DeviceLists:
    """Fills devices with lists of an index. Not thread-safe, but searches may run at the same time."""

    def __init__(self, tiers: TieredLists, devices: Sequence[str], num_bytes: int) -> None:
        """
        Args:
            num_bytes: limit of the codes on each device.
        """
        self._tiers, self._devices, self._num_bytes = tiers, tuple(devices), num_bytes
        self._code_bytes = tiers.file.sizes * tiers.file.code_size
        nothing = np.empty(0, dtype=np.int64)
        self._placed: list[tuple[BatchShard, Lists]] = [(_Empty(), nothing) for _ in devices]
        self._used = list(range(len(devices)))
        """Numbers of the devices that have not failed."""
        tiers.place(self._placed)

    @property
    def num_bytes(self) -> int:
        """Bytes of codes on all devices."""
        return int(sum(self._code_bytes[held].sum() for _, held in self._placed))

    def exchange(self, counts: "np.ndarray[tuple[int], np.dtype[np.float64]]", margin: float) -> int:
        """Exchange lists if their share of accesses is lower than that of the best choice by more than `margin`.

        Args:
            counts: accesses of each list, [nlist].

        Returns:
            The number of lists that were added.

        Raises:
            CorruptKnowledgeBaseError: a list is damaged in the file; lists placed before it stay.
        """
        if not self._used:
            return 0
        chosen = spread(
            best_lists(counts, self._code_bytes, self._num_bytes * len(self._used)),
            self._code_bytes,
            [self._placed[number][1] for number in self._used],
            self._num_bytes,
        )
        held, total = np.flatnonzero(self._tiers.device_of >= 0), counts.sum()
        best = np.concatenate(chosen)
        if len(held) and (total == 0 or counts[best].sum() - counts[held].sum() <= margin * total):
            return 0
        num_came = 0
        for number, lists in zip(tuple(self._used), chosen, strict=True):
            before = self._placed[number][1]
            if not np.array_equal(lists, before) and self._fill(number, lists):
                num_came += len(np.setdiff1d(lists, before))
        return num_came

    def _fill(self, number: int, lists: Lists) -> bool:
        """Replace the lists of a device. Returns whether they fit."""
        self._put(number, _Empty(), lists[:0])
        try:
            shard = DeviceShard(self._tiers.file.shell, lists, self._devices[number], self._entries)
        except RuntimeError as error:  # PyTorch's errors, such as too little memory
            self._used.remove(number)
            logger.warning(
                "%s cannot hold %d bytes of lists and stays unused until the next start; lower index.device_bytes: %s",
                self._devices[number],
                self._code_bytes[lists].sum(),
                (str(error).splitlines() or [type(error).__name__])[0],
            )
            return False
        self._put(number, shard, lists)
        return True

    def _put(self, number: int, shard: BatchShard, lists: Lists) -> None:
        self._placed[number] = shard, lists
        self._tiers.place(self._placed)

    def _entries(self, number: int) -> Entries:
        return self._tiers.file.entries(number)


def spread(lists: Lists, sizes: Lists, before: Sequence[Lists], num_bytes: int) -> list[Lists]:
    """Return the lists of each device, ascending.

    A list stays where it is. The others go, largest first, to the device with the most free memory; lists that fit
    nowhere are left out.

    Args:
        lists: lists to place.
        sizes: bytes of every list, [nlist].
        before: present lists of each device.
        num_bytes: limit per device.
    """
    found = [np.intersect1d(held, lists).tolist() for held in before]
    room = [num_bytes - int(sizes[held].sum()) for held in found]
    coming = np.setdiff1d(lists, np.concatenate([np.empty(0, dtype=np.int64), *before]))
    for number in coming[np.argsort(-sizes[coming], kind="stable")].tolist():
        device = max(range(len(room)), key=room.__getitem__)
        if sizes[number] <= room[device]:
            found[device].append(number)
            room[device] -= int(sizes[number])
    return [np.array(sorted(held), dtype=np.int64) for held in found]


class _Empty:
    """A shard without lists, which is never searched."""

    def scan_batch(
        self, queries: Vectors, num: int, probed: Lists, nearness: Nearness, allowed: object = None
    ) -> list[Scored]:
        raise AssertionError("an empty shard was searched")
