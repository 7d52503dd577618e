"""Layer by layer copies: readers find the same KV as after an immediate copy, and a failed copy is not used."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.batch import BlockCopy
from stillroom.core.ids import BlockId
from stillroom.core.kv import OWN_TIERS, NodeCopy, Tier
from stillroom.errors import DeviceLostError
from stillroom.kvstore.device import DeviceStore
from stillroom.kvstore.disk import DiskStore
from stillroom.kvstore.host import HostStore
from stillroom.kvstore.layer_copies import LayerCopies
from stillroom.kvstore.tiered_store import TieredStore
from tests.fakes import ManualClock
from tests.kvstore.nodes import MODEL, key, on_device
from tests.kvstore.test_prefetch import PATIENCE
from tests.kvstore.test_tiered import BLOCK_SIZE, NUM_BLOCKS, assert_same, blocks, new_device, record

NUM_LAYERS = 3


@pytest.fixture
def copies() -> Iterator[LayerCopies]:
    one = LayerCopies(NUM_LAYERS)
    yield one
    one.close()


def note(done: list[tuple[str, int]], name: str, layers: slice) -> None:
    done.append((name, layers.start))


def test_copies_run_layer_by_layer_in_the_order_added(copies: LayerCopies) -> None:
    done: list[tuple[str, int]] = []
    copies.add(partial(note, done, "a"))
    copies.add(partial(note, done, "b"))
    assert not done
    copies.settle()
    assert done == [(name, layer) for layer in range(NUM_LAYERS) for name in "ab"]


def test_a_layer_is_readable_while_the_next_is_copied(copies: LayerCopies) -> None:
    may_go_on, done = threading.Event(), list[int]()

    def copy(layers: slice) -> None:
        assert layers.start == 0 or may_go_on.wait(PATIENCE)
        done.append(layers.start)

    copies.add(copy)
    copies.wait(0)
    assert done == [0]
    may_go_on.set()
    copies.wait(1)
    assert 1 in done
    copies.settle()
    assert done == [0, 1, 2]


def test_later_copies_run_after_running_ones(copies: LayerCopies) -> None:
    done: list[tuple[str, int]] = []
    copies.add(partial(note, done, "a"))
    copies.wait(0)
    copies.add(partial(note, done, "b"))
    copies.wait(0)
    assert done[:4] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]


def test_every_wait_raises_after_a_failure_until_drop(copies: LayerCopies) -> None:
    def copy(layers: slice) -> None:
        if layers.start == 1:
            raise MemoryError("none left")

    copies.add(copy)
    copies.wait(0)
    for _ in range(2):
        with pytest.raises(MemoryError):
            copies.settle()
    copies.add(lambda _: None)
    with pytest.raises(MemoryError):
        copies.wait(0)
    copies.drop()
    copies.settle()


def test_nothing_is_copied_after_a_drop(copies: LayerCopies) -> None:
    may_go_on, has_begun, done = threading.Event(), threading.Event(), list[int]()

    def copy(layers: slice) -> None:
        has_begun.set()
        assert layers.start == 0 or may_go_on.wait(PATIENCE)
        done.append(layers.start)

    copies.add(copy)
    copies.wait(0)
    threading.Timer(0.0, may_go_on.set).start()
    copies.drop()
    seen = list(done)
    copies.settle()
    assert done == seen


# As part of the device


def preloading(dtype: torch.dtype = torch.float32, seed: int = 0) -> DeviceStore:
    store = new_device(dtype, seed=seed)
    store.preload_layers()
    return store


def new_tiers(device: DeviceStore, root: Path | None = None) -> TieredStore:
    inv_freq = torch.tensor([[1.0, 0.1], [1.0, 0.1], [0.5, 0.01]])
    disk = DiskStore(root, MODEL) if root else None
    return TieredStore(device, HostStore(torch.device("cpu")), disk, ManualClock(), inv_freq)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tier", OWN_TIERS)
def test_every_layer_is_complete_when_it_is_read(tmp_path: Path, tier: Tier, dtype: torch.dtype) -> None:
    slow, fast = new_tiers(new_device(dtype), tmp_path / "slow"), new_tiers(preloading(dtype), tmp_path / "fast")
    for tiers in (slow, fast):
        source = blocks(2, 3)
        assert tiers.offload(on_device(1, source, 7)) and tiers.store(record(1, 7), Tier.DEVICE, source)
        assert tiers.offload(on_device(2, blocks(4), 4)) and tiers.store(record(2, 4), Tier.DEVICE, blocks(4))
        assert tiers.place(NodeCopy(key(1), tier, source if tier is Tier.DEVICE else (), 40, 7), blocks(9, 1), 3)
        assert tiers.place(NodeCopy(key(2), tier, blocks(4) if tier is Tier.DEVICE else (), 0, 4), blocks(7), 10)
        if tier is not Tier.DEVICE:
            assert tiers.load(key(2), tier, blocks(5), 4)
    for layer in range(NUM_LAYERS):
        for ours, expected in zip(fast.device.layer(layer), slow.device.layer(layer), strict=True):
            assert torch.equal(ours, expected), layer
    fast.close()
    assert_same(fast.device, slow.device)


def test_every_access_to_slots_waits_for_copies() -> None:
    """Every method that reads or writes slots waits."""
    for look in (
        lambda device: device.gather(blocks(7), 4),
        lambda device: device.copy_blocks([BlockCopy(BlockId(7), BlockId(8))]),
        lambda device: device.settle(),
        lambda device: [device.layer(layer) for layer in range(NUM_LAYERS)],
    ):
        slow, fast = new_tiers(new_device()), new_tiers(preloading())
        for tiers in (slow, fast):
            assert tiers.place(on_device(1, blocks(4), 4), blocks(7), 10)
            look(tiers.device)
        assert_same(fast.device, slow.device)


def compute(tiers: TieredStore, source: int, target: int, number: int) -> None:
    for layer in range(NUM_LAYERS):
        tiers.device.layer(layer)[0][target * BLOCK_SIZE] = number


def copy_block(tiers: TieredStore, source: int, target: int, number: int) -> None:
    tiers.device.copy_blocks([BlockCopy(BlockId(source), BlockId(target))])


def place_from_device(tiers: TieredStore, source: int, target: int, number: int) -> None:
    tiers.place(NodeCopy(key(1), Tier.DEVICE, blocks(source), 2, 3), blocks(target), number)


def place_from_host(tiers: TieredStore, source: int, target: int, number: int) -> None:
    tiers.place(NodeCopy(key(0), Tier.HOST, (), 2, BLOCK_SIZE), blocks(target), number)


def load(tiers: TieredStore, source: int, target: int, number: int) -> None:
    tiers.load(key(0), Tier.HOST, blocks(target), BLOCK_SIZE)


def offload(tiers: TieredStore, source: int, target: int, number: int) -> None:
    tiers.offload(on_device(0, blocks(source), BLOCK_SIZE))


def look(tiers: TieredStore, source: int, target: int, number: int) -> None:
    tiers.device.layer(0)


MOVES = [compute, copy_block, place_from_device, place_from_host, load, offload, look]
PAIRS = st.permutations(range(NUM_BLOCKS)).map(lambda order: (order[0], order[1]))


@given(st.lists(st.tuples(st.sampled_from(MOVES), PAIRS), max_size=12))
def test_moves_in_any_order_leave_the_same_kv_as_immediate_copies(
    moves: list[tuple[Callable[[TieredStore, int, int, int], None], tuple[int, int]]],
) -> None:
    """Blocks are reused at once, as after an abort or an eviction."""
    slow, fast = new_tiers(new_device()), new_tiers(preloading())
    for tiers in (slow, fast):
        assert tiers.offload(on_device(0, blocks(0), BLOCK_SIZE))
        for number, (move, (source, target)) in enumerate(moves, start=1):
            move(tiers, source, target, number)
    fast.device.settle()
    fast.close()
    assert_same(fast.device, slow.device)


def test_a_copy_that_fails_loses_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = preloading()
    tiers = new_tiers(device)

    def fails(*_: object) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr("stillroom.ops.cpu_kernels.rotate_into_single_threaded", fails)
    assert tiers.place(on_device(1, blocks(4), 4), blocks(7), 10)
    assert not tiers.offload(on_device(1, blocks(7), 4)), "nothing of it is kept"
    assert device.is_lost and len(tiers.host) == 0
    with pytest.raises(DeviceLostError):
        device.layer(0)
    device.reset()
    device.layer(0)
    assert not device.is_lost


def test_a_lost_device_is_not_written_to() -> None:
    device = preloading()
    tiers = new_tiers(device)
    assert tiers.place(on_device(1, blocks(4), 4), blocks(7), 10)
    device.lose()
    device.settle()
    assert device.k_LSGD.isnan().all() and not tiers.offload(on_device(1, blocks(7), 4))


def test_closing_ends_the_thread() -> None:
    device = preloading()
    tiers = new_tiers(device)
    assert tiers.place(on_device(1, blocks(4), 4), blocks(7), 10)
    device.layer(0)
    assert device._copies is not None
    (thread,) = device._copies._executor._threads
    tiers.close()
    assert not thread.is_alive()
