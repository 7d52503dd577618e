"""Splits of memory: worked examples and properties of all splits."""

from hypothesis import given
from hypothesis import strategies as st

from stillroom.planner.splits import NUM_DEVICE_STEPS, Budgets, Split, candidate_splits


class UniformLists:
    """Lists of one size: only whole ones fit. On a device they take half of it."""

    def __init__(self, size: int, num_lists: int = 0, num_devices: int = 0) -> None:
        self.size, self.num_lists, self.num_devices = size, num_lists, num_devices

    def list_bytes_within(self, ram_bytes: int, device_lists: int = 0) -> int:
        fitting = ram_bytes // self.size * self.size
        return (
            min(fitting, self.size * (self.num_lists - self._num_on_devices(device_lists))) if device_lists else fitting
        )

    def least_device_bytes(self, device_lists: int) -> int:
        return -(-self._num_on_devices(device_lists) // self.num_devices) * self.size // 2

    def _num_on_devices(self, device_lists: int) -> int:
        return min(device_lists * 2 // self.size * self.num_devices, self.num_lists)


def test_splits_equal_a_worked_example() -> None:
    budgets = Budgets(device=10, ram=60, disk=90)
    assert candidate_splits(budgets, 80, UniformLists(40), num_steps=4) == [
        Split(device_kv=10, host_kv=60, disk_kv=10, host_lists=0, disk_lists=80),
        Split(device_kv=10, host_kv=20, disk_kv=10, host_lists=40, disk_lists=80),
    ], "80 bytes do not fit into RAM; the file holds all lists"


def test_index_without_lists_leaves_all_memory_to_kv() -> None:
    assert candidate_splits(Budgets(device=1, ram=2, disk=3), 0, UniformLists(1)) == [
        Split(device_kv=1, host_kv=2, disk_kv=3)
    ]


def test_no_split_if_the_disk_cannot_hold_all_lists() -> None:
    assert candidate_splits(Budgets(device=1, ram=500, disk=99), 100, UniformLists(1)) == []


def test_lists_on_the_models_device_equal_a_worked_example() -> None:
    """Five lists of 20, 10 each on a device; the first of these two is the model's."""
    budgets = Budgets(device=40, ram=45, disk=100, device_lists=20, shares_device=True)
    found = candidate_splits(budgets, 100, UniformLists(20, 5, 2), num_steps=2, num_device_steps=2)
    assert [(split.device_lists, split.device_kv, split.host_lists, split.host_kv) for split in found] == [
        (0, 40, 0, 45),
        (0, 40, 20, 25),
        (0, 40, 40, 5),
        (10, 30, 0, 45),
        (10, 30, 20, 25),
        (10, 30, 40, 5),
        (20, 20, 0, 45),
        (20, 20, 20, 25),
    ], "with 20 on each, one list is left"
    assert {split.num_devices for split in found} == {2} and {split.disk_kv for split in found} == {0}


def test_lists_on_other_devices_take_nothing_from_kv() -> None:
    budgets = Budgets(device=40, ram=0, disk=100, device_lists=30)
    found = candidate_splits(budgets, 100, UniformLists(20, 5, 1), num_device_steps=3)
    assert [(split.device_lists, split.device_kv) for split in found] == [(0, 40), (10, 40), (20, 40), (30, 40)]


SIZES = st.integers(0, 10_000)


@given(SIZES, SIZES, SIZES, st.integers(1, 500), st.integers(1, 12))
def test_every_split_uses_the_budgets_and_holds_all_lists(
    ram: int, disk: int, list_bytes: int, size: int, num_steps: int
) -> None:
    budgets = Budgets(device=5, ram=ram, disk=disk)
    list_bytes = list_bytes // size * size
    found = candidate_splits(budgets, list_bytes, UniformLists(size), num_steps)
    for split in found:
        assert split.ram == ram and split.disk_kv + split.disk_lists == disk
        assert split.host_lists <= split.disk_lists == list_bytes
        assert min(split.host_kv, split.disk_kv, split.host_lists) >= 0
    taken = [split.host_lists for split in found]
    assert taken == sorted(set(taken)) and len(taken) <= num_steps + 1
    assert bool(found) == (list_bytes <= disk)


@given(SIZES, SIZES, st.integers(1, 60), st.integers(2, 500), st.integers(1, 3), st.booleans())
def test_every_split_uses_the_budgets_of_devices_too(
    device: int, ram: int, num_lists: int, size: int, num_devices: int, shares: bool
) -> None:
    size = 2 * size
    budgets = Budgets(device=device, ram=ram, disk=10**9, device_lists=device, shares_device=shares)
    found = candidate_splits(budgets, num_lists * size, UniformLists(size, num_lists, num_devices))
    for split in found:
        assert split.device_kv + shares * split.device_lists == device and split.ram == ram
        assert min(split.device_kv, split.device_lists, split.host_lists, split.host_kv) >= 0
        assert split.host_lists + 2 * split.device_lists <= num_lists * size + 2 * size * num_devices
    taken = [(split.device_lists, split.host_lists) for split in found]
    assert taken == sorted(set(taken)) and len({one for one, _ in taken}) <= NUM_DEVICE_STEPS + 1
    assert taken[0] == (0, 0)
