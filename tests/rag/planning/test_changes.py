"""A split as settings, with and without a setting for lists."""

import pytest

from stillroom.config.load import settings
from stillroom.rag.planning import changes
from stillroom.rag.planning.splits import Split

SPLIT = Split(device_kv=1, host_kv=2, disk_kv=3, ram_lists=40, disk_lists=60)


def test_a_split_as_settings() -> None:
    found = changes.settings_of(SPLIT)
    kv = {"runtime.kv_bytes": 1, "reuse.host_bytes": 2, "reuse.disk_bytes": 3}
    assert {path: found[path] for path in kv} == kv and set(found) <= set(settings())


@pytest.mark.parametrize("is_known", [True, False])
def test_lists_are_written_where_there_is_a_setting_for_them(monkeypatch: pytest.MonkeyPatch, is_known: bool) -> None:
    monkeypatch.setattr(changes, "LISTS_RAM", "reuse.prefetch_bytes" if is_known else "index.no_such_setting")
    assert (changes.LISTS_RAM in changes.settings_of(SPLIT)) == is_known
    if is_known:
        none = Split(device_kv=1, host_kv=2, disk_kv=3, disk_lists=100)
        assert changes.settings_of(none)[changes.LISTS_RAM] == 1
    runs = changes.runnable(SPLIT)
    assert (runs.ram_lists, runs.disk_lists) == ((40, 60) if is_known else (100, 0))
    without = Split(device_kv=1, host_kv=2, disk_kv=3)
    assert changes.LISTS_RAM not in changes.settings_of(without), "an index without lists has nothing to say"
