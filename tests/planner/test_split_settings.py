"""Settings of a split."""

from dataclasses import replace

from stillroom.config.load import settings
from stillroom.planner.splits import Split, split_settings

KV = {"runtime.kv_bytes": 1, "reuse.host_bytes": 2, "reuse.disk_bytes": 3}
SPLIT = Split(device_kv=1, host_kv=2, disk_kv=3, host_lists=40, disk_lists=100)


def test_split_becomes_settings() -> None:
    assert split_settings(SPLIT) == KV | {"index.hot_bytes": 40}
    assert split_settings(replace(SPLIT, host_lists=0)) == KV | {"index.hot_bytes": 1}, "0 would mean all of them"
    assert split_settings(replace(SPLIT, host_lists=0, disk_lists=0)) == KV, "an index without lists"
    beside = replace(SPLIT, num_devices=2)
    assert split_settings(beside) == KV | {"index.hot_bytes": 40, "index.device_bytes": 0}, "removes lists from devices"
    on_devices = split_settings(replace(beside, device_lists=70))
    assert on_devices["index.device_bytes"] == 70 and set(on_devices) <= set(settings())
    assert (on_devices["index.kind"], on_devices["index.nbits"]) == ("ivf_pq", 8), "ConfigError without these"
    assert set(split_settings(SPLIT)) <= set(settings())
