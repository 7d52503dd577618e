"""A split as settings."""

from stillroom.rag.planning.splits import Split


def settings_of(split: Split) -> dict[str, int]:
    """By `section.field`."""
    found = {
        "runtime.kv_bytes": split.device_kv,
        "reuse.host_bytes": split.host_kv,
        "reuse.disk_bytes": split.disk_kv,
    }
    if split.disk_lists:
        found["index.hot_bytes"] = max(1, split.ram_lists)  # a byte holds no list; 0 would put all of them in RAM
    return found
