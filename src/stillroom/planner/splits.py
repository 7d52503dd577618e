"""How memory may be split between the lists of the vector index and kept KV. Arithmetic only.

Knowledge tree and chunk caches are one store (adr/0009): one budget for each tier, one order of eviction. So a split
says how much of each tier is the index's, and the rest is that store's. Lists may lie on devices of their own; on the
model's they share its memory with KV.
"""

from dataclasses import dataclass
from typing import Protocol

NUM_STEPS = 10
NUM_DEVICE_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes of each tier, for index and KV together."""

    device: int
    """Blocks of running requests, and KV that stays there; lists too, where they share it."""
    ram: int
    """Lists that are kept in RAM, and KV on the host."""
    disk: int
    """All lists, and KV on disk."""
    device_lists: int = 0
    """Most that lists may take on each of their devices."""
    shares_device: bool = False
    """Whether that comes out of `device`: one of their devices is the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Who has how many bytes."""

    device_kv: int
    host_kv: int
    disk_kv: int
    host_lists: int = 0
    disk_lists: int = 0
    device_lists: int = 0
    """On each of the devices for lists, at most."""
    num_devices: int = 0
    """For lists."""

    @property
    def ram(self) -> int:
        """Of the host, in all."""
        return self.host_lists + self.host_kv


class Fits(Protocol):
    """Bytes of lists that fit somewhere, the hottest first."""

    @property
    def num_devices(self) -> int:
        """For lists."""
        ...

    def fitted(self, ram_bytes: int, device_lists: int = 0) -> int:
        """Into so much RAM, beside devices that have so many bytes for lists each."""
        ...

    def fitted_on_devices(self, device_lists: int) -> int:
        """The least on each device that holds the same lists as so much does."""
        ...


def candidates(
    budgets: Budgets,
    list_bytes: int,
    fits: Fits,
    num_steps: int = NUM_STEPS,
    num_device_steps: int = NUM_DEVICE_STEPS,
) -> list[Split]:
    """Splits from no list on devices to as many as there is room for, and for each of them from no list in RAM to as
    many as there is room for, in equal steps, different ones only; ascending. The file holds all lists, so there are
    none where the disk has no room for them.

    Args:
        list_bytes: of all lists; 0 where the index has none that could be divided.
    """
    if list_bytes > budgets.disk:
        return []
    found: dict[tuple[int, int], Split] = {}
    for device_lists in _on_devices(budgets, fits, num_device_steps) if list_bytes else [0]:
        most = min(fits.fitted(list_bytes, device_lists), budgets.ram) if list_bytes else 0
        for step in range(num_steps + 1):
            host_lists = fits.fitted(most * step // num_steps, device_lists) if list_bytes else 0
            found[device_lists, host_lists] = Split(
                device_kv=budgets.device - (device_lists if budgets.shares_device else 0),
                host_kv=budgets.ram - host_lists,
                disk_kv=budgets.disk - list_bytes,
                host_lists=host_lists,
                disk_lists=list_bytes,
                device_lists=device_lists,
                num_devices=fits.num_devices if list_bytes else 0,
            )
    return list(found.values())


def _on_devices(budgets: Budgets, fits: Fits, num_steps: int) -> list[int]:
    """Bytes on each device."""
    if not fits.num_devices:
        return [0]
    most = fits.fitted_on_devices(budgets.device_lists)
    return sorted({fits.fitted_on_devices(most * step // num_steps) for step in range(num_steps + 1)})
