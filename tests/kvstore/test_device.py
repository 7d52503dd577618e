"""Device store: copies of whole blocks in every layer."""

import pytest
import torch

from stillroom.core.batch import BlockCopy
from stillroom.core.ids import BlockId
from stillroom.kvstore.device import DeviceStore, KVShape


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_are_copied_in_every_layer_and_sources_are_read_first(device: str) -> None:
    store = DeviceStore(KVShape(3, 2, 4, torch.float32), num_blocks=5, block_size=4, device=torch.device(device))
    store.k_LSGD.copy_(torch.randn_like(store.k_LSGD))
    store.v_LSGD.copy_(torch.randn_like(store.v_LSGD))
    before = [kv.clone() for kv in (store.k_LSGD, store.v_LSGD)]

    pairs = [(1, 4), (1, 2), (0, 1)]  # block 1 is read before it is written
    store.copy_blocks([BlockCopy(BlockId(source), BlockId(target)) for source, target in pairs])

    moved = {4: 1, 2: 1, 1: 0}
    for kv, old in zip((store.k_LSGD, store.v_LSGD), before, strict=True):
        for block in range(5):
            source = moved.get(block, block)
            assert torch.equal(kv[:, 4 * block : 4 * block + 4], old[:, 4 * source : 4 * source + 4])
