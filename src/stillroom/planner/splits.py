"""Splits of memory between the inverted lists of the vector index and kept KV. Arithmetic only.

Knowledge tree and chunk caches are one store (adr/0009) with one budget for each tier and one order of eviction. A
split says how many bytes of each tier the index gets; KV gets the rest. Lists on the model's device share its memory.
"""

from dataclasses import dataclass
from typing import Protocol

NUM_STEPS = 10
NUM_DEVICE_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes of each tier, for the index and KV together."""

    device: int
    """KV blocks of running requests and kept KV; lists too, if `shares_device`."""
    ram: int
    """Lists in RAM, and KV on the host."""
    disk: int
    """All lists, and KV on disk."""
    device_lists: int = 0
    """Most bytes of lists on each device for lists."""
    shares_device: bool = False
    """Whether `device_lists` is part of `device`: one of the devices for lists is the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Bytes of each tier for KV and for lists."""

    device_kv: int
    host_kv: int
    disk_kv: int
    host_lists: int = 0
    disk_lists: int = 0
    device_lists: int = 0
    """Most bytes on each device for lists."""
    num_devices: int = 0
    """Devices for lists."""

    @property
    def ram(self) -> int:
        """Host memory in all."""
        return self.host_lists + self.host_kv


class ListPacking(Protocol):
    """Bytes of lists that fit into a budget, the hottest first."""

    @property
    def num_devices(self) -> int:
        """Devices for lists."""
        ...

    def list_bytes_within(self, ram_bytes: int, device_lists: int = 0) -> int:
        """Return the bytes of the lists that fit into `ram_bytes`, after `device_lists` bytes on each device."""
        ...

    def least_device_bytes(self, device_lists: int) -> int:
        """Return the fewest bytes on each device that hold the same lists as `device_lists` bytes do."""
        ...


def candidate_splits(
    budgets: Budgets,
    list_bytes: int,
    packing: ListPacking,
    num_steps: int = NUM_STEPS,
    num_device_steps: int = NUM_DEVICE_STEPS,
) -> list[Split]:
    """Return a grid of distinct splits, ascending: from no list on devices to all that fit, and for each of these from
    no list in RAM to all that fit, in equal steps.

    Empty if the disk cannot hold all lists: the file always has them.

    Args:
        list_bytes: bytes of all lists; 0 if the index cannot be divided.
    """
    if list_bytes > budgets.disk:
        return []
    found: dict[tuple[int, int], Split] = {}
    for device_lists in _on_devices(budgets, packing, num_device_steps) if list_bytes else [0]:
        most = min(packing.list_bytes_within(list_bytes, device_lists), budgets.ram) if list_bytes else 0
        for step in range(num_steps + 1):
            host_lists = packing.list_bytes_within(most * step // num_steps, device_lists) if list_bytes else 0
            found[device_lists, host_lists] = Split(
                device_kv=budgets.device - (device_lists if budgets.shares_device else 0),
                host_kv=budgets.ram - host_lists,
                disk_kv=budgets.disk - list_bytes,
                host_lists=host_lists,
                disk_lists=list_bytes,
                device_lists=device_lists,
                num_devices=packing.num_devices if list_bytes else 0,
            )
    return list(found.values())


def _on_devices(budgets: Budgets, packing: ListPacking, num_steps: int) -> list[int]:
    """Return the grid of bytes for lists on each device."""
    if not packing.num_devices:
        return [0]
    most = packing.least_device_bytes(budgets.device_lists)
    return sorted({packing.least_device_bytes(most * step // num_steps) for step in range(num_steps + 1)})


def split_settings(split: Split) -> dict[str, int | str]:
    """Return the settings that give this split, by `section.field`."""
    found: dict[str, int | str] = {
        "runtime.kv_bytes": split.device_kv,
        "reuse.host_bytes": split.host_kv,
        "reuse.disk_bytes": split.disk_kv,
    }
    if split.disk_lists:
        found["index.hot_bytes"] = max(1, split.host_lists)  # one byte holds no list; 0 would keep all lists in RAM
    if split.num_devices:
        found["index.device_bytes"] = split.device_lists
    if split.device_lists:  # ConfigError without these
        found |= {"index.kind": "ivf_pq", "index.nbits": 8}
    return found
