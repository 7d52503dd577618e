"""The KV bytes on the compute device: one K and one V tensor per layer, addressed by slot.

Slot `block_id * block_size + offset` belongs to the block of that id; who may write it is `kvcache`'s decision. Slots
that were never written hold garbage, and nobody may attend to them. After the last block come the slots of one more,
which no pool knows of: rows that only pad a step write there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stillroom.core.batch import BlockCopy

# L layers, S slots, G key/value heads, D head dimension


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's KV looks like in a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class DeviceStore:
    """Room for `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.block_size = block_size
        self.scratch_slot = num_blocks * block_size
        size = (shape.num_layers, (num_blocks + 1) * block_size, shape.num_kv_heads, shape.head_dim)
        self.k_LSGD = torch.empty(size, dtype=shape.dtype, device=device)
        self.v_LSGD = torch.empty(size, dtype=shape.dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return 2 * self.k_LSGD.nbytes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each [S, G, D]; writes go through to the store."""
        return self.k_LSGD[index], self.v_LSGD[index]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in all layers; every source is read before any target is written."""
        source, target = (
            torch.tensor(ids, device=self.k_LSGD.device)
            for ids in ([copy.source for copy in copies], [copy.target for copy in copies])
        )
        for kv_LSGD in (self.k_LSGD, self.v_LSGD):
            blocks = kv_LSGD.view(len(kv_LSGD), -1, self.block_size, *kv_LSGD.shape[2:])
            blocks[:, target] = blocks[:, source]
