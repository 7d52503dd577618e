"""How memory may be split between the lists of the vector index and kept KV. Arithmetic only.

Knowledge tree and chunk caches are one store (adr/0009): one budget for each tier, one order of eviction. So a split
says how much of each tier is the index's, and the rest is that store's.
"""

from collections.abc import Callable
from dataclasses import dataclass

NUM_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes of each tier, for index and KV together."""

    device: int
    """Blocks of running requests, and KV that stays there."""
    ram: int
    """Lists that are kept in RAM, and KV on the host."""
    disk: int
    """All lists, and KV on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Who has how many bytes."""

    device_kv: int
    host_kv: int
    disk_kv: int
    ram_lists: int = 0
    disk_lists: int = 0

    @property
    def ram(self) -> int:
        """Of the host, in all."""
        return self.ram_lists + self.host_kv


def candidates(
    budgets: Budgets, list_bytes: int, fitted: Callable[[int], int], num_steps: int = NUM_STEPS
) -> list[Split]:
    """Splits from no list in RAM to as many as there is room for, in equal steps, different ones only; ascending. The
    file holds all lists, so there are none where the disk has no room for them.

    Args:
        list_bytes: of all lists; 0 where the index has none that could be divided.
        fitted: bytes of the hottest lists that fit into so many bytes.
    """
    if list_bytes > budgets.disk:
        return []
    most = min(list_bytes, budgets.ram)
    found: dict[int, Split] = {}
    for step in range(num_steps + 1):
        ram_lists = fitted(most * step // num_steps) if list_bytes else 0
        found[ram_lists] = Split(
            device_kv=budgets.device,
            host_kv=budgets.ram - ram_lists,
            disk_kv=budgets.disk - list_bytes,
            ram_lists=ram_lists,
            disk_lists=list_bytes,
        )
    return list(found.values())
