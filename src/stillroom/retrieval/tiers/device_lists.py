"""Which lists of a tiered index are on devices: the hottest, spread so that each device has about as many bytes and as
much to do (VectorLiteRAG 4.1), and exchanged device by device as what people ask for drifts.

A list stays on its device or leaves it, and never moves to another. While a device's lists are copied anew, those that
it held are searched where the others are, so no device needs memory for both.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch

from stillroom.errors import ConfigError
from stillroom.retrieval.tiers.device_shard import DeviceShard
from stillroom.retrieval.tiers.list_file import Entries
from stillroom.retrieval.tiers.partition import Lists, Nearness, best_lists
from stillroom.retrieval.tiers.tiered_ivf import BatchShard, Scored, TieredLists, Vectors

logger = logging.getLogger(__name__)


def devices_named(names: str) -> tuple[str, ...]:
    """The devices of a setting: PyTorch's names with commas between them; `cuda` alone is every one there is.

    Raises:
        ConfigError: one does not exist.
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
    """Fills some devices with lists of an index. For one thread at a time; searches may go on meanwhile."""

    def __init__(self, tiers: TieredLists, devices: Sequence[str], num_bytes: int) -> None:
        """
        Args:
            num_bytes: most that the codes of lists may take on each device.
        """
        self._tiers, self._devices, self._num_bytes = tiers, tuple(devices), num_bytes
        self._code_bytes = tiers.file.sizes * tiers.file.code_size
        nothing = np.empty(0, dtype=np.int64)
        self._placed: list[tuple[BatchShard, Lists]] = [(_Empty(), nothing) for _ in devices]
        self._used = list(range(len(devices)))
        """Devices that have not failed."""
        tiers.place(self._placed)

    @property
    def num_bytes(self) -> int:
        """Of codes on devices."""
        return int(sum(self._code_bytes[held].sum() for _, held in self._placed))

    def follow(self, counts: "np.ndarray[tuple[int], np.dtype[np.float64]]", margin: float) -> int:
        """Exchange lists, if what is held takes so much less of all accesses than the best choice would.

        Args:
            counts: accesses of each list, [nlist].

        Returns:
            How many lists came.

        Raises:
            CorruptKnowledgeBaseError: a list is damaged in the file; what was placed before it stays.
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
        """Copy lists to a device, in place of those that it holds. Returns whether it could take them."""
        self._put(number, _Empty(), lists[:0])
        try:
            shard = DeviceShard(self._tiers.file.shell, lists, self._devices[number], self._entries)
        except RuntimeError as error:  # PyTorch's, of which too little memory is one
            self._used.remove(number)
            logger.warning(
                "%s cannot hold %d bytes of lists and is left without any until the next start, which a smaller "
                "index.device_bytes may change: %s",
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
    """Lists for each of some devices, ascending: those that it has already stay, the others go, the largest first, to
    the device with the most room; one for which none has room goes nowhere.

    Args:
        lists: to be on devices.
        sizes: bytes of every list, [nlist].
        before: what each device has.
        num_bytes: most of each.
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
    """No lists, so it is never asked."""

    def scan_batch(
        self, queries: Vectors, num: int, probed: Lists, nearness: Nearness, allowed: object = None
    ) -> list[Scored]:
        raise AssertionError("nothing is here")
