"""KV of nodes in host memory: one contiguous tensor each, [2, L, T, G, D] as `DeviceStore.gather` gives it.

Page-locked where the device is CUDA, so that copies run at the speed of the bus. How much may be kept is `kvcache`'s
decision; this says no only when the machine has no memory left.
"""

import torch

from stillroom.core.kv import NodeKey
from stillroom.kvstore.device import KVShape


class HostStore:
    """The host's copies of nodes."""

    def __init__(self, shape: KVShape, device: torch.device) -> None:
        """Args: device: of the `DeviceStore` that is copied from and to."""
        self.shape = shape
        self.is_pinned = device.type == "cuda"
        self._nodes: dict[NodeKey, torch.Tensor] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: NodeKey) -> bool:
        return key in self._nodes

    def allocate(self, key: NodeKey, num_tokens: int) -> torch.Tensor | None:
        """Room for a node's KV, in place of what there is of it; the caller fills it. None if there is no memory."""
        self.drop(key)
        try:
            kv_2LTGD = torch.empty(self.shape.of_node(num_tokens), dtype=self.shape.dtype, pin_memory=self.is_pinned)
        except (MemoryError, RuntimeError):  # PyTorch's own allocator raises the latter
            return None
        self._nodes[key] = kv_2LTGD
        self._num_bytes += kv_2LTGD.nbytes
        return kv_2LTGD

    def put(self, key: NodeKey, kv_2LTGD: torch.Tensor) -> bool:
        """Keep a copy of this. False if there is no memory."""
        room = self.allocate(key, kv_2LTGD.shape[2])
        if room is None:
            return False
        room.copy_(kv_2LTGD)
        return True

    def get(self, key: NodeKey) -> torch.Tensor | None:
        """The copy itself, [2, L, T, G, D]; not to be written to. None if there is none."""
        return self._nodes.get(key)

    def drop(self, key: NodeKey) -> None:
        """Forget a node; does nothing if it is not there."""
        kv_2LTGD = self._nodes.pop(key, None)
        if kv_2LTGD is not None:
            self._num_bytes -= kv_2LTGD.nbytes

    def clear(self) -> None:
        """Forget everything."""
        self._nodes.clear()
        self._num_bytes = 0
