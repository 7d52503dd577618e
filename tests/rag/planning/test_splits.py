"""Splits of memory, by hand and by what must hold for all of them."""

from hypothesis import given
from hypothesis import strategies as st

from stillroom.rag.planning.splits import Budgets, Split, candidates


class Fit:
    """Lists of one size: only whole ones fit."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, ram_bytes: int) -> int:
        return ram_bytes // self.size * self.size


def test_by_hand() -> None:
    budgets = Budgets(device=10, ram=60, disk=90)
    assert candidates(budgets, 80, Fit(40), num_steps=4) == [
        Split(device_kv=10, host_kv=60, disk_kv=10, ram_lists=0, disk_lists=80),
        Split(device_kv=10, host_kv=20, disk_kv=10, ram_lists=40, disk_lists=80),
    ], "80 do not fit into RAM; the file holds all of them"


def test_an_index_without_lists_leaves_all_to_kv() -> None:
    assert candidates(Budgets(device=1, ram=2, disk=3), 0, Fit(1)) == [Split(device_kv=1, host_kv=2, disk_kv=3)]


def test_the_disk_must_hold_all_lists() -> None:
    assert candidates(Budgets(device=1, ram=500, disk=99), 100, Fit(1)) == []


SIZES = st.integers(0, 10_000)


@given(SIZES, SIZES, SIZES, st.integers(1, 500), st.integers(1, 12))
def test_every_split_uses_the_budgets_and_holds_all_lists(
    ram: int, disk: int, list_bytes: int, size: int, num_steps: int
) -> None:
    budgets = Budgets(device=5, ram=ram, disk=disk)
    list_bytes = list_bytes // size * size
    found = candidates(budgets, list_bytes, Fit(size), num_steps)
    for split in found:
        assert split.ram == ram and split.disk_kv + split.disk_lists == disk
        assert split.ram_lists <= split.disk_lists == list_bytes
        assert min(split.host_kv, split.disk_kv, split.ram_lists) >= 0
    taken = [split.ram_lists for split in found]
    assert taken == sorted(set(taken)) and len(taken) <= num_steps + 1
    assert bool(found) == (list_bytes <= disk)
