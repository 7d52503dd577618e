"""KV between device, host and disk: a move returns exact bytes or fails."""

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stillroom.core.ids import BlockId
from stillroom.core.kv import OWN_TIERS, KVMover, NodeCopy, NodeKey, NodeRecord, Tier
from stillroom.kvstore.device import DeviceStore, KVShape
from stillroom.kvstore.disk import DiskStore
from stillroom.kvstore.files import path_of, read_header
from stillroom.kvstore.host import HostStore
from stillroom.kvstore.record import PAGE_SIZE, Defect, Header, checksum_of
from stillroom.kvstore.tiered_store import TieredStore, TransferFlow
from stillroom.ops.rope import rerotate_keys
from tests.fakes import ManualClock
from tests.kvstore.nodes import MODEL, key, on_device

BLOCK_SIZE = 4
NUM_BLOCKS = 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLACES = [
    pytest.param([5], 4, id="one-block"),
    pytest.param([5], 1, id="one-token"),
    pytest.param([2, 3, 4], 11, id="one-run"),
    pytest.param([7, 0, 1, 9, 8], 17, id="scattered"),
]


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(i) for i in ids]


def new_device(
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, head_dim: int = 5
) -> DeviceStore:
    store = DeviceStore(KVShape(3, 2, head_dim, dtype), NUM_BLOCKS, BLOCK_SIZE, torch.device(device))
    generator = torch.Generator().manual_seed(seed)
    for kv in (store.k_LSGD, store.v_LSGD):
        kv.copy_(torch.randn(kv.shape, generator=generator))
    return store


def new_tiers(device: DeviceStore, root: Path | None, clock: ManualClock | None = None) -> TieredStore:
    host = HostStore(device.k_LSGD.device)
    disk = DiskStore(root, MODEL) if root else None
    return TieredStore(device, host, disk, clock or ManualClock())


def record(n: int, num_tokens: int) -> NodeRecord:
    return NodeRecord(key(n), NodeKey(bytes(32)), 0, num_tokens, None, 0.1, 1.0)


def slow_gather(store: DeviceStore, block_ids: list[BlockId], num_tokens: int) -> torch.Tensor:
    """Token by token."""
    kv = torch.empty(store.shape.of_node(num_tokens), dtype=store.shape.dtype, device=store.k_LSGD.device)
    for token in range(num_tokens):
        slot = block_ids[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE
        for layer in range(store.shape.num_layers):
            kv[0, layer, token] = store.k_LSGD[layer, slot]
            kv[1, layer, token] = store.v_LSGD[layer, slot]
    return kv


def slow_scatter(store: DeviceStore, block_ids: list[BlockId], kv: torch.Tensor) -> None:
    """Token by token."""
    for token in range(kv.shape[2]):
        slot = block_ids[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE
        for layer in range(store.shape.num_layers):
            store.k_LSGD[layer, slot] = kv[0, layer, token]
            store.v_LSGD[layer, slot] = kv[1, layer, token]


def assert_same(one: DeviceStore, other: DeviceStore) -> None:
    assert torch.equal(one.k_LSGD, other.k_LSGD) and torch.equal(one.v_LSGD, other.v_LSGD)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ids", "num_tokens"), PLACES)
def test_gather_and_scatter_equal_their_slow_twins(
    ids: list[int], num_tokens: int, dtype: torch.dtype, device: str
) -> None:
    source = new_device(dtype, device)
    kv = source.gather(blocks(*ids), num_tokens)
    assert kv.device == source.k_LSGD.device
    assert torch.equal(kv, slow_gather(source, blocks(*ids), num_tokens))
    out = torch.empty(kv.shape, dtype=dtype)
    assert source.gather(blocks(*ids), num_tokens, out=out) is out and torch.equal(out, kv.cpu())

    fast, slow = new_device(dtype, device, seed=1), new_device(dtype, device, seed=1)
    fast.scatter(blocks(*ids), out)
    slow_scatter(slow, blocks(*ids), kv)
    assert_same(fast, slow)  # the slots beyond num_tokens too


@given(st.permutations(range(NUM_BLOCKS)), st.integers(1, NUM_BLOCKS * BLOCK_SIZE))
def test_scatter_and_gather_blocks_in_any_order(order: list[int], num_tokens: int) -> None:
    ids = blocks(*order[: -(-num_tokens // BLOCK_SIZE)])
    source, fast, slow = new_device(), new_device(seed=1), new_device(seed=1)
    kv = source.gather(ids, num_tokens)
    assert torch.equal(kv, slow_gather(source, ids, num_tokens))
    fast.scatter(ids, kv)
    slow_scatter(slow, ids, kv)
    assert_same(fast, slow)


@pytest.mark.parametrize(("ids", "num_tokens"), PLACES)
def test_tensor_operations_equal_the_cpu_path(ids: list[int], num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source, fast, slow = new_device(), new_device(seed=1), new_device(seed=1)
    for store in (source, fast):
        monkeypatch.setattr(store, "is_on_host", False)
    kv = slow_gather(source, blocks(*ids), num_tokens)
    assert torch.equal(source.gather(blocks(*ids), num_tokens), kv)
    assert torch.equal(source.gather(blocks(*ids), num_tokens, out=torch.empty(kv.shape)), kv)
    fast.scatter(blocks(*ids), kv)
    slow_scatter(slow, blocks(*ids), kv)
    assert_same(fast, slow)


@pytest.mark.parametrize("wrong", [0, 8, 17])
def test_tokens_and_blocks_must_agree(wrong: int) -> None:
    with pytest.raises(AssertionError):
        new_device().gather(blocks(1, 2, 3), wrong)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ids", "num_tokens"), PLACES)
@pytest.mark.parametrize("way", ["host", "disk", "host-disk"])
def test_round_trips(
    way: str, ids: list[int], num_tokens: int, dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    store = new_device(dtype, device)
    tiers = new_tiers(store, tmp_path)
    expected = new_device(dtype, device, seed=1)
    there = blocks(*reversed(ids))
    slow_scatter(expected, there, slow_gather(store, blocks(*ids), num_tokens))

    if way != "disk":
        assert tiers.offload(on_device(1, blocks(*ids), num_tokens))
    if way != "host":
        source = Tier.DEVICE if way == "disk" else Tier.HOST
        assert tiers.store(record(1, num_tokens), source, blocks(*ids) if way == "disk" else [])
    other = new_device(dtype, device, seed=1)
    store.k_LSGD.copy_(other.k_LSGD)
    store.v_LSGD.copy_(other.v_LSGD)
    assert tiers.load(key(1), Tier.HOST if way == "host" else Tier.DISK, there, num_tokens)
    assert_same(store, expected)


def test_kv_on_disk_survives_a_restart(tmp_path: Path) -> None:
    first = new_tiers(new_device(torch.bfloat16), tmp_path)
    for n, num_tokens in enumerate([4, 11, 3]):  # the staging buffer grows, and is larger than needed
        assert first.store(record(n, num_tokens), Tier.DEVICE, blocks(*range(n, n + -(-num_tokens // 4))))
    first.close()
    store = new_device(torch.bfloat16, seed=1)
    again = new_tiers(store, tmp_path)
    assert again.load(key(1), Tier.DISK, blocks(3, 8, 5), 11)
    assert torch.equal(store.gather(blocks(3, 8, 5), 11), first.device.gather(blocks(1, 2, 3), 11))


@pytest.mark.parametrize("place", [0, 60, PAGE_SIZE, -20, -1])
def test_a_flipped_bit_reaches_no_slot(place: int, tmp_path: Path) -> None:
    store = new_device()
    tiers = new_tiers(store, tmp_path)
    assert tiers.disk is not None and tiers.store(record(1, 11), Tier.DEVICE, blocks(2, 3, 4))
    path = path_of(tiers.disk.folder, key(1))
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    assert not tiers.load(key(1), Tier.DISK, blocks(7, 8, 9), 11)
    assert_same(store, new_device())
    assert not path.exists() and not tiers.disk.records()
    assert sum(tiers.stats.verify_failures.values()) == 1
    assert tiers.stats.flows[Tier.DISK, Tier.DEVICE].num_failed == 1


def test_moving_a_missing_copy_fails(tmp_path: Path) -> None:
    store = new_device()
    for tiers in (new_tiers(store, tmp_path), new_tiers(store, None)):
        assert not tiers.load(key(1), Tier.HOST, blocks(1), 3)
        assert not tiers.load(key(1), Tier.DISK, blocks(1), 3)
        assert not tiers.store(record(1, 3), Tier.HOST, [])
        tiers.drop(key(1), Tier.HOST)
        tiers.drop(key(1), Tier.DISK)
        assert not tiers.stats.verify_failures and tiers.stats.num_write_failures == 0
        tiers.close()
    assert not tiers.store(record(1, 3), Tier.DEVICE, blocks(1)), "there is no disk store"
    assert_same(store, new_device())


def test_dropped_copies_free_their_bytes(tmp_path: Path) -> None:
    store = new_device()
    tiers = new_tiers(store, tmp_path)
    assert tiers.disk is not None
    assert tiers.offload(on_device(1, blocks(1), 3)) and tiers.offload(on_device(2, blocks(4, 5), 8))
    assert tiers.offload(on_device(1, blocks(1), 3)), "a second offload replaces the first"
    assert tiers.store(record(1, 3), Tier.HOST, [])
    assert tiers.host.num_bytes == store.shape.bytes_per_token * 11 and len(tiers.host) == 2
    tiers.drop(key(1), Tier.HOST)
    assert tiers.host.num_bytes == store.shape.bytes_per_token * 8 and tiers.host.get(key(1)) is None
    assert tiers.disk.num_bytes > 0
    tiers.drop(key(1), Tier.DISK)
    assert tiers.disk.num_bytes == 0 and not tiers.load(key(1), Tier.DISK, blocks(1), 3)
    tiers.close()
    assert tiers.host.num_bytes == 0 and len(tiers.host) == 0


def test_a_full_disk_is_a_failed_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    tiers = new_tiers(new_device(), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert not tiers.store(record(1, 3), Tier.DEVICE, blocks(1))
    assert tiers.stats.num_write_failures == 1
    assert tiers.stats.flows[Tier.DEVICE, Tier.DISK] == TransferFlow(num_failed=1)
    assert not list(tmp_path.rglob("*.kv")) and not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("error", [MemoryError("none"), RuntimeError("can't allocate memory")])
def test_a_move_fails_without_memory(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object, **__: object) -> torch.Tensor:
        raise error

    store = new_device()
    tiers = new_tiers(store, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", none_left)
        assert not tiers.offload(on_device(1, blocks(1), 3))
        assert tiers.host.allocate(key(1), 3) is None
        assert not tiers.store(record(1, 3), Tier.DEVICE, blocks(1))
    assert tiers.host.num_bytes == 0 and not list(tmp_path.rglob("*.kv"))
    assert tiers.offload(on_device(1, blocks(1), 3))


@pytest.mark.parametrize("byte", [0, 100, -1])
def test_a_bit_flipped_in_host_memory_reaches_neither_slots_nor_disk(byte: int, tmp_path: Path) -> None:
    store = new_device()
    tiers = new_tiers(store, tmp_path)
    assert tiers.disk is not None
    for n in (1, 2, 3):
        assert tiers.offload(on_device(n, blocks(2, 3, 4), 11))
        copy = tiers.host.get(key(n))
        assert copy is not None
        copy.payload[byte] ^= 4
    tiers = TieredStore(store, tiers.host, tiers.disk, ManualClock(), torch.ones(3, 2))
    assert not tiers.load(key(1), Tier.HOST, blocks(7, 8, 9), 11)
    assert not tiers.place(NodeCopy(key(2), Tier.HOST, (), 0, 11), blocks(7, 8, 9), 5)
    assert not tiers.store(record(3, 11), Tier.HOST, ())
    assert_same(store, new_device())
    assert not list(tmp_path.rglob("*.kv")) and len(tiers.host) == tiers.host.num_bytes == 0
    assert tiers.stats.verify_failures == {(Tier.HOST, Defect.CHECKSUM): 3}


def test_the_checksum_of_the_host_copy_is_stored_in_the_record(tmp_path: Path) -> None:
    tiers = new_tiers(new_device(), tmp_path)
    assert tiers.offload(on_device(1, blocks(2, 3, 4), 11)) and tiers.disk is not None
    copy = tiers.host.get(key(1))
    assert copy is not None and tiers.store(record(1, 11), Tier.HOST, ())
    header = read_header(path_of(tiers.disk.folder, key(1)), MODEL)
    assert isinstance(header, Header) and header.checksum == copy.checksum == checksum_of(copy.payload.numpy().data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_kv_is_copied_to_no_tier(value: float, dtype: torch.dtype, device: str, tmp_path: Path) -> None:
    store = new_device(dtype, device)
    tiers = new_tiers(store, tmp_path)
    for kv, layer, slot in ((store.k_LSGD, 0, 9), (store.v_LSGD, 2, 18)):
        before = kv[layer, slot, 1, 4].item()
        kv[layer, slot, 1, 4] = value
        assert tiers.is_finite(blocks(3, 4), 6), "other slots do not count"
        assert not tiers.is_finite(blocks(2, 4), 8)
        assert not tiers.offload(on_device(1, blocks(2, 4), 8))
        assert not tiers.store(record(1, 8), Tier.DEVICE, blocks(2, 4))
        kv[layer, slot, 1, 4] = before
    assert len(tiers.host) == 0 and not list(tmp_path.rglob("*.kv"))
    assert tiers.stats.verify_failures == {(Tier.DEVICE, Defect.NON_FINITE): 6}
    assert tiers.is_finite(blocks(2, 4), 8) and tiers.offload(on_device(1, blocks(2, 4), 8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_kv_values_count_as_finite(dtype: torch.dtype) -> None:
    store = new_device(dtype)
    for kv in (store.k_LSGD, store.v_LSGD):
        kv.fill_(6e4)
    assert store.is_finite(blocks(*range(NUM_BLOCKS)), NUM_BLOCKS * BLOCK_SIZE)


def test_bytes_and_seconds_are_counted_by_direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    tiers: KVMover = (tiered := new_tiers(new_device(), tmp_path, clock))
    size = tiered.device.shape.bytes_per_token

    def takes(seconds: float, method: str) -> None:
        real = getattr(DeviceStore, method)

        def slow(*args: object, **named: object) -> object:
            clock.advance(seconds)
            return real(*args, **named)

        monkeypatch.setattr(DeviceStore, method, slow)

    takes(2.0, "gather")
    takes(0.5, "scatter")
    before = tiered.stats
    assert tiers.offload(on_device(1, blocks(1), 3)) and tiers.offload(on_device(2, blocks(2), 4))
    assert tiers.load(key(1), Tier.HOST, blocks(5), 3)
    assert tiers.store(record(1, 3), Tier.HOST, [])
    assert tiers.store(record(3, 1), Tier.DEVICE, blocks(3))
    assert tiers.load(key(3), Tier.DISK, blocks(6), 1)
    assert not tiers.load(key(4), Tier.DISK, blocks(6), 1)
    assert tiered.stats.flows == {
        (Tier.DEVICE, Tier.HOST): TransferFlow(2, 0, 7 * size, 4.0),
        (Tier.HOST, Tier.DEVICE): TransferFlow(1, 0, 3 * size, 0.5),
        (Tier.HOST, Tier.DISK): TransferFlow(1, 0, 3 * size, 0.0),
        (Tier.DEVICE, Tier.DISK): TransferFlow(1, 0, size, 2.0),
        (Tier.DISK, Tier.DEVICE): TransferFlow(1, 1, size, 0.5),
        (Tier.NETWORK, Tier.DEVICE): TransferFlow(),
        (Tier.DEVICE, Tier.DEVICE): TransferFlow(),
    }
    assert set(before.flows.values()) == {TransferFlow()}, "a snapshot does not change"


def test_device_copies_cannot_be_dropped() -> None:
    with pytest.raises(AssertionError):
        new_tiers(new_device(), None).drop(key(1), Tier.DEVICE)


def turned(kv: torch.Tensor, inv_freq: torch.Tensor, old: int, new: int) -> torch.Tensor:
    """Token by token and layer by layer."""
    slow = kv.clone()
    for layer in range(kv.shape[1]):
        for token in range(kv.shape[2]):
            one = kv[0, layer : layer + 1, token : token + 1]
            slow[0, layer, token] = rerotate_keys(one, inv_freq[layer : layer + 1], old + token, new + token)[0, 0]
    return slow


@pytest.mark.parametrize("tier", OWN_TIERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_node_is_placed_from_any_tier_without_changing_its_copy(
    tmp_path: Path, tier: Tier, dtype: torch.dtype
) -> None:
    device = new_device(dtype)
    inv_freq = torch.tensor([[1.0, 0.1], [1.0, 0.1], [0.5, 0.01]])
    tiers = TieredStore(device, HostStore(torch.device("cpu")), DiskStore(tmp_path, MODEL), ManualClock(), inv_freq)
    source, target, num_tokens = blocks(2, 3, 4), blocks(9, 1, 7), 11
    kv = device.gather(source, num_tokens)
    assert tiers.offload(on_device(1, source, num_tokens)) and tiers.store(record(1, num_tokens), Tier.DEVICE, source)
    before = device.gather(source, num_tokens)
    for _ in range(2):  # a copy can be placed again
        copy = NodeCopy(key(1), tier, source if tier is Tier.DEVICE else (), 40, num_tokens)
        assert tiers.place(copy, target, 3)
        placed, expected = device.gather(target, num_tokens), turned(kv, inv_freq, 40, 3)
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]  # a rounding of a key
        torch.testing.assert_close(placed[0], expected[0], rtol=tolerance, atol=tolerance)
        assert torch.equal(placed[1], expected[1])
    assert torch.equal(device.gather(source, num_tokens), before)
    assert tiers.stats.flows[tier, Tier.DEVICE].num_copies == 2


def test_a_damaged_record_is_not_placed(tmp_path: Path) -> None:
    device = new_device()
    tiers = TieredStore(
        device,
        HostStore(torch.device("cpu")),
        DiskStore(tmp_path, MODEL),
        ManualClock(),
        torch.ones(3, 2),
    )
    assert tiers.store(record(1, 4), Tier.DEVICE, blocks(5))
    path = path_of(tmp_path / next(tmp_path.iterdir()).name, key(1))
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    before = device.gather(blocks(6), 4)
    assert not tiers.place(NodeCopy(key(1), Tier.DISK, (), 0, 4), blocks(6), 9)
    assert torch.equal(device.gather(blocks(6), 4), before)
    assert not path.exists()
