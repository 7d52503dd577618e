"""Copies of KV in 8 and 4 bits a number on host and disk."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stillroom.core.kv import NodeCopy, Tier
from stillroom.kvstore.disk import DiskStore
from stillroom.kvstore.host import HostStore
from stillroom.kvstore.tiered_store import TieredStore
from tests.fakes import ManualClock
from tests.kvstore.nodes import MODEL, key, on_device
from tests.kvstore.test_tiered import DTYPES, blocks, new_device, record, turned


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "error"), [(8, 1 / 254), (4, 1 / 15)])
def test_narrow_copies_are_smaller_and_nearly_the_same_at_any_position(
    tmp_path: Path, tier: Tier, dtype: torch.dtype, bits: int, error: float
) -> None:
    device = new_device(dtype, head_dim=6)
    inv_freq = torch.tensor([[1.0, 0.1], [1.0, 0.1], [0.5, 0.01]])
    tiers = TieredStore(device, HostStore(torch.device("cpu")), DiskStore(tmp_path, MODEL), ManualClock(), inv_freq)
    source, target, num_tokens = blocks(2, 3, 4), blocks(9, 1, 7), 11
    kv = device.gather(source, num_tokens)
    found = replace(record(1, num_tokens), first_position=40, bits=bits)
    assert tiers.offload(on_device(1, source, num_tokens, 40, bits)) and tiers.store(found, Tier.DEVICE, source)
    assert tiers.host.num_bytes == device.shape.num_bytes(num_tokens, bits) < device.shape.num_bytes(num_tokens)
    assert tiers.prefetch(key(1), num_tokens, bits) is False, "this store reads nothing ahead"
    assert tiers.place(NodeCopy(key(1), tier, (), 40, num_tokens, bits), target, 3)
    placed, expected = device.gather(target, num_tokens), turned(kv, inv_freq, 40, 3)
    largest = float(kv.abs().max())
    limit = 2 * largest * error + {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype] * largest
    assert float((placed.float() - expected.float()).abs().max()) <= limit
    assert not torch.equal(placed, expected)
    assert tiers.stats.flows[tier, Tier.DEVICE].num_bytes == device.shape.num_bytes(num_tokens, bits)


def test_a_narrow_copy_goes_from_host_to_disk_as_it_is(tmp_path: Path) -> None:
    device = new_device(head_dim=6)
    inv_freq = torch.tensor([[1.0, 0.1]] * 3)
    tiers = TieredStore(device, HostStore(torch.device("cpu")), DiskStore(tmp_path, MODEL), ManualClock(), inv_freq)
    assert tiers.disk is not None and tiers.offload(on_device(1, blocks(2), 4, 40, 8))
    copy = tiers.host.get(key(1))
    assert copy is not None and tiers.store(replace(record(1, 4), bits=8), Tier.HOST, ())
    read = torch.empty_like(copy.payload)
    assert tiers.disk.read(key(1), read.numpy().data) and torch.equal(read, copy.payload)
    copy.payload[5] ^= 1
    assert not tiers.place(NodeCopy(key(1), Tier.HOST, (), 40, 4, 8), blocks(7), 0), "a damaged copy is not placed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_by_layer_the_same_numbers_are_placed(tmp_path: Path, dtype: torch.dtype) -> None:
    inv_freq = torch.tensor([[1.0, 0.1], [1.0, 0.1], [0.5, 0.01]])
    found = []
    for preloads in (False, True):
        device = new_device(dtype, head_dim=6)
        if preloads:
            device.preload_layers()
        tiers = TieredStore(device, HostStore(torch.device("cpu")), None, ManualClock(), inv_freq)
        assert tiers.offload(on_device(1, blocks(2, 3, 4), 11, 40, 8))
        assert tiers.place(NodeCopy(key(1), Tier.HOST, (), 40, 11, 8), blocks(9, 1, 7), 3)
        found.append(device.gather(blocks(9, 1, 7), 11))
        tiers.close()
    assert torch.equal(*found)


def test_without_memory_nothing_is_narrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = TieredStore(
        new_device(head_dim=6), HostStore(torch.device("cpu")), None, ManualClock(), torch.tensor([[1.0, 0.1]] * 3)
    )
    with monkeypatch.context() as patch:
        patch.setattr(tiers, "_buffer", lambda num_bytes: None)
        assert not tiers.offload(on_device(1, blocks(2), 4, 0, 8))
    assert tiers.host.num_bytes == 0 and tiers.offload(on_device(1, blocks(2), 4, 0, 8))
