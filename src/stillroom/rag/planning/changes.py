"""A split as settings."""

from stillroom.config.load import settings
from stillroom.rag.planning.splits import Split

LISTS_RAM = "index.ram_bytes"
"""The setting for the RAM that lists of the index may take; written where this version has it."""


def settings_of(split: Split) -> dict[str, int]:
    """By `section.field`."""
    found = {
        "runtime.kv_bytes": split.device_kv,
        "reuse.host_bytes": split.host_kv,
        "reuse.disk_bytes": split.disk_kv,
    }
    if split.ram_lists + split.disk_lists and can_divide():
        found[LISTS_RAM] = max(1, split.ram_lists)  # a byte holds no list, and is not the word 0
    return found


def can_divide() -> bool:
    """Whether a knowledge base of this version keeps some lists in RAM and the others on disk."""
    return LISTS_RAM in settings()


def runnable(split: Split) -> Split:
    """What this version does with a split: where it cannot divide, all lists are in RAM."""
    if can_divide():
        return split
    return Split(
        device_kv=split.device_kv,
        host_kv=split.host_kv,
        disk_kv=split.disk_kv,
        ram_lists=split.ram_lists + split.disk_lists,
    )
