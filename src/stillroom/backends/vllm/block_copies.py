"""Copies whole blocks of vLLM's KV cache into bytes and back, in vLLM's own layout.

The bytes of a block are those of its first layer, its second layer, and so on; a layer's bytes are the elements of
`layer[block]` in row-major order, whatever its strides are and whatever the attention backend keeps where.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


class BlockCopies:
    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """
        Args:
            layers: vLLM's KV cache of each layer: the first dimension is that of the blocks.
        """
        self._layers = list(layers)
        self._sizes = [layer[0].numel() * layer.element_size() for layer in layers]

    @property
    def bytes_per_block(self) -> int:
        """Of all layers."""
        return sum(self._sizes)

    def gather(self, block_ids: Sequence[int]) -> NDArray[np.uint8] | None:
        """Return the bytes of some blocks: [num_blocks, bytes_per_block]; None if a number in them is not finite."""
        out = torch.empty((len(block_ids), self.bytes_per_block), dtype=torch.uint8)
        start = 0
        for layer, size in zip(self._layers, self._sizes, strict=True):
            taken = layer[torch.tensor(block_ids, device=layer.device)]
            if not bool(torch.isfinite(taken).all()):
                return None
            out[:, start : start + size] = taken.contiguous().cpu().view(torch.uint8).reshape(len(block_ids), size)
            start += size
        return out.numpy()

    def scatter(self, content_BN: NDArray[np.uint8], block_ids: Sequence[int]) -> None:
        """Write bytes that `gather` returned into some blocks.

        Args:
            content_BN: [num_blocks, bytes_per_block].
        """
        assert content_BN.shape == (len(block_ids), self.bytes_per_block), content_BN.shape
        start = 0
        for layer, size in zip(self._layers, self._sizes, strict=True):
            part = torch.from_numpy(content_BN[:, start : start + size].copy()).view(layer.dtype)
            target = torch.tensor(block_ids, device=layer.device)
            layer[target] = part.reshape(len(block_ids), *layer.shape[1:]).to(layer.device)
            start += size
