"""A split as settings."""

from stillroom.planner.splits import Split


def settings_of(split: Split) -> dict[str, int | str]:
    """By `section.field`."""
    found: dict[str, int | str] = {
        "runtime.kv_bytes": split.device_kv,
        "reuse.host_bytes": split.host_kv,
        "reuse.disk_bytes": split.disk_kv,
    }
    if split.disk_lists:
        found["index.hot_bytes"] = max(1, split.host_lists)  # a byte holds no list; 0 would put all of them in RAM
    if split.num_devices:
        found["index.device_bytes"] = split.device_lists
    if split.device_lists:  # the settings are refused that do not say so
        found |= {"index.kind": "ivf_pq", "index.nbits": 8}
    return found
