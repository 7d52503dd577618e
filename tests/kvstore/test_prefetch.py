"""Prefetching: records are returned verified, and never after they were removed."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from stillroom.core.kv import NodeCopy, NodeKey, NodeRecord, Tier
from stillroom.kvstore.disk import DiskStore
from stillroom.kvstore.files import path_of
from stillroom.kvstore.host import HostStore
from stillroom.kvstore.prefetch import Prefetcher, PrefetchStats, ReadPayload, read_record
from stillroom.kvstore.record import Defect, checksum_of
from stillroom.kvstore.tiered_store import TieredStore
from tests.fakes import ManualClock
from tests.kvstore.nodes import MODEL, OTHER_MODEL, key, payload, record, sealed
from tests.kvstore.test_tiered import assert_same, blocks, new_device
from tests.server.fakes import until

SIZE = 100
PATIENCE = 30.0
"""Seconds that a test waits for the other thread before it fails."""


@dataclass
class Gate:
    """A reader whose reads can be delayed."""

    is_open: threading.Event = field(default_factory=threading.Event)
    has_begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    read: list[NodeKey] = field(default_factory=list)
    broken: set[NodeKey] = field(default_factory=set)

    def __call__(self, key: NodeKey, num_bytes: int) -> ReadPayload | None:
        self.read.append(key)
        self.has_begun.release()
        assert self.is_open.wait(PATIENCE)
        content = torch.full((num_bytes,), key[0], dtype=torch.uint8)
        return None if key in self.broken else ReadPayload(content, checksum_of(content.numpy().data))

    def await_begin(self) -> None:
        assert self.has_begun.acquire(timeout=PATIENCE)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def prefetcher(gate: Gate) -> Iterator[Prefetcher]:
    one = Prefetcher(gate, 3 * SIZE)
    yield one
    gate.is_open.set()
    one.close()


def test_without_a_thread_nothing_is_prefetched(
    prefetcher: Prefetcher, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(prefetcher._executor, "submit", refuse)
        assert not prefetcher.request(key(1), SIZE) and prefetcher.num_bytes == 0
    assert prefetcher.request(key(1), SIZE) and prefetcher.num_bytes == SIZE


def test_a_requested_record_is_returned(prefetcher: Prefetcher, gate: Gate) -> None:
    gate.is_open.set()
    assert prefetcher.request(key(1), SIZE) and prefetcher.request(key(2), SIZE)
    gate.await_begin()
    gate.await_begin()
    kv = prefetcher.get(key(2))
    assert kv is not None and kv.payload.tolist() == [key(2)[0]] * SIZE
    assert prefetcher.get(key(3)) is None
    assert prefetcher.get(key(2)) is kv, "other requests may need it too"
    prefetcher.release(key(1))
    prefetcher.release(key(2))
    assert prefetcher.num_bytes == 0
    assert prefetcher.stats == PrefetchStats(used_bytes=SIZE, wasted_bytes=SIZE)


def test_get_waits_for_a_read_in_progress(prefetcher: Prefetcher, gate: Gate) -> None:
    prefetcher.request(key(1), SIZE)
    gate.await_begin()
    threading.Timer(0.0, gate.is_open.set).start()
    assert prefetcher.get(key(1)) is not None


def test_get_before_the_read_begins_leaves_it_to_the_caller(prefetcher: Prefetcher, gate: Gate) -> None:
    prefetcher.request(key(1), SIZE)
    gate.await_begin()
    prefetcher.request(key(2), SIZE)
    assert prefetcher.get(key(2)) is None
    assert prefetcher.request(key(2), SIZE), "the next request"
    gate.is_open.set()
    gate.await_begin()
    assert prefetcher.get(key(2)) is not None and gate.read == [key(1), key(2)]


def test_cancelled_reads_in_progress_count_against_the_capacity(prefetcher: Prefetcher, gate: Gate) -> None:
    assert prefetcher.request(key(1), SIZE)
    gate.await_begin()
    assert prefetcher.request(key(2), 2 * SIZE)
    assert not prefetcher.request(key(3), 1), "full"
    assert prefetcher.request(key(2), 2 * SIZE), "it is being read"
    prefetcher.cancel(key(2))
    assert prefetcher.num_bytes == SIZE, "it had not begun"
    prefetcher.cancel(key(1))
    assert prefetcher.num_bytes == SIZE, "it is still being read"
    assert not prefetcher.request(key(4), 3 * SIZE)
    under_way = prefetcher._abandoned[0].future
    gate.is_open.set()
    under_way.result(PATIENCE)
    assert prefetcher.num_bytes == 0 and prefetcher.request(key(4), 3 * SIZE)


def test_a_record_is_kept_until_its_last_release(prefetcher: Prefetcher, gate: Gate) -> None:
    gate.is_open.set()
    for _ in range(2):
        prefetcher.request(key(1), SIZE)
    prefetcher._entries[key(1)].future.result(PATIENCE)
    prefetcher.release(key(1))
    assert prefetcher.num_bytes == SIZE
    prefetcher.release(key(1))
    assert prefetcher.num_bytes == 0
    prefetcher.release(key(1))  # it was cancelled meanwhile


def test_a_cancelled_record_is_never_returned(prefetcher: Prefetcher, gate: Gate) -> None:
    prefetcher.request(key(1), SIZE)
    gate.await_begin()
    prefetcher.cancel(key(1))
    gate.is_open.set()
    assert prefetcher.get(key(1)) is None
    assert prefetcher.stats == PrefetchStats(wasted_bytes=SIZE)


def test_a_failed_read_is_a_miss(prefetcher: Prefetcher, gate: Gate) -> None:
    gate.broken.add(key(1))
    gate.is_open.set()
    prefetcher.request(key(1), SIZE)
    assert prefetcher.get(key(1)) is None


def test_closing_ends_the_thread(prefetcher: Prefetcher, gate: Gate) -> None:
    prefetcher.request(key(1), SIZE)
    prefetcher.request(key(2), SIZE)
    gate.await_begin()
    (thread,) = prefetcher._executor._threads
    second = prefetcher._entries[key(2)].future
    closing = threading.Thread(target=prefetcher.close)
    closing.start()
    until(second.cancelled)
    gate.is_open.set()
    closing.join(PATIENCE)
    assert not thread.is_alive() and prefetcher.num_bytes == 0 and gate.read == [key(1)]


def test_only_verified_records_are_prefetched(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, MODEL)
    assert disk.write(record(1), *sealed(1))
    read = partial(read_record, disk.folder, MODEL, False)
    found = read(key(1), 1000)
    assert found is not None and found.payload.numpy().tobytes() == payload(1)
    assert read(key(1), 999) is None and read(key(2), 1000) is None
    assert read_record(disk.folder, OTHER_MODEL, False, key(1), 1000) is None
    path = path_of(disk.folder, key(1))
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)
    assert read(key(1), 1000) is None
    assert path.exists() and not disk.verify_failures, "the ordinary read counts it"


# As part of the tiers


def new_tiers(tmp_path: Path, prefetch_bytes: int = 2**20) -> TieredStore:
    device = new_device()
    host = HostStore(torch.device("cpu"))
    disk = DiskStore(tmp_path, MODEL)
    return TieredStore(device, host, disk, ManualClock(), torch.ones(3, 2), prefetch_bytes)


def stored(n: int, tiers: TieredStore, *block_ids: int) -> None:
    one = NodeRecord(key(n), key(n), 0, 4 * len(block_ids), None, 0.1, 1.0)
    assert tiers.store(one, Tier.DEVICE, blocks(*block_ids))


def await_read(tiers: TieredStore, n: int) -> None:
    assert tiers._prefetcher is not None
    assert tiers._prefetcher._entries[key(n)].future.result(PATIENCE) is not None


@pytest.mark.parametrize("is_placed", [False, True])
def test_load_and_place_use_prefetched_records(tmp_path: Path, is_placed: bool) -> None:
    slow, fast = new_tiers(tmp_path / "slow", 0), new_tiers(tmp_path / "fast")
    for tiers in (slow, fast):
        stored(1, tiers, 2, 3)
    assert not slow.prefetch(key(1), 8) and fast.prefetch(key(1), 8)
    await_read(fast, 1)
    assert fast.disk is not None
    path_of(fast.disk.folder, key(1)).unlink()
    for tiers in (slow, fast):
        if is_placed:
            assert tiers.place(NodeCopy(key(1), Tier.DISK, (), 0, 8), blocks(7, 9), 5)
        else:
            assert tiers.load(key(1), Tier.DISK, blocks(7, 9), 8)
    assert_same(slow.device, fast.device)
    fast.cancel_prefetch(key(1))
    assert fast.stats.prefetch.used_bytes == 8 * fast.device.shape.bytes_per_token
    for tiers in (slow, fast):
        tiers.close()


def test_a_prefetched_record_damaged_in_memory_is_read_from_disk_again(tmp_path: Path) -> None:
    tiers = new_tiers(tmp_path)
    stored(1, tiers, 2, 3)
    assert tiers.prefetch(key(1), 8)
    await_read(tiers, 1)
    assert tiers._prefetcher is not None
    read = tiers._prefetcher.get(key(1))
    assert read is not None
    read.payload[30] ^= 1
    assert tiers.load(key(1), Tier.DISK, blocks(7, 9), 8)
    device = tiers.device
    assert torch.equal(device.gather(blocks(7, 9), 8), device.gather(blocks(2, 3), 8))
    assert tiers.stats.verify_failures == {(Tier.HOST, Defect.CHECKSUM): 1}


def test_a_prefetched_record_dropped_since_is_not_used(tmp_path: Path) -> None:
    tiers = new_tiers(tmp_path)
    stored(1, tiers, 2, 3)
    assert tiers.prefetch(key(1), 8)
    await_read(tiers, 1)
    tiers.drop(key(1), Tier.DISK)
    assert not tiers.load(key(1), Tier.DISK, blocks(7, 9), 8)
    assert_same(tiers.device, new_device())


def test_a_prefetched_record_rewritten_since_is_read_again(tmp_path: Path) -> None:
    tiers = new_tiers(tmp_path)
    stored(1, tiers, 2, 3)
    assert tiers.prefetch(key(1), 8)
    await_read(tiers, 1)
    stored(1, tiers, 4, 5)
    assert tiers.load(key(1), Tier.DISK, blocks(7, 9), 8)
    device = tiers.device
    assert torch.equal(device.gather(blocks(7, 9), 8), device.gather(blocks(4, 5), 8))
    assert tiers.stats.prefetch.used_bytes == 0


def test_a_record_damaged_before_prefetching_fails_once(tmp_path: Path) -> None:
    tiers = new_tiers(tmp_path)
    stored(1, tiers, 2, 3)
    assert tiers.disk is not None
    path = path_of(tiers.disk.folder, key(1))
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    assert tiers.prefetch(key(1), 8)
    assert not tiers.load(key(1), Tier.DISK, blocks(7, 9), 8)
    assert_same(tiers.device, new_device())
    assert sum(tiers.stats.verify_failures.values()) == 1 and not path.exists()
