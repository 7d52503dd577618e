"""KV of nodes in host memory: one contiguous tensor each, [2, L, T, G, D], as `DeviceStore.gather` returns it.

Each copy has the checksum that was computed when it was gathered, so that damage is found before use. Memory is
page-locked where the device is CUDA, so that copies run at the speed of the bus. `kvcache` decides how much is kept;
`allocate` fails only when the machine is out of memory.
"""

from dataclasses import dataclass

import torch

from stillroom.core.kv import NodeKey
from stillroom.kvstore.device import KVShape
from stillroom.kvstore.record import checksum_of, is_intact


@dataclass(slots=True)
class HostCopy:
    """A node's KV and its checksum."""

    kv_2LTGD: torch.Tensor
    checksum: bytes = b""
    """Empty until the copy is sealed."""

    def is_intact(self) -> bool:
        """Whether the bytes match the checksum."""
        return is_intact(payload_of(self.kv_2LTGD), self.checksum)


class HostStore:
    def __init__(self, shape: KVShape, device: torch.device) -> None:
        """
        Args:
            device: of the `DeviceStore`.
        """
        self.shape = shape
        self.is_pinned = device.type == "cuda"
        self._nodes: dict[NodeKey, HostCopy] = {}
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
        """Allocate a node's copy in place of an existing one; the caller fills it and calls `seal`. None if there is no
        memory."""
        self.drop(key)
        try:
            kv_2LTGD = torch.empty(self.shape.of_node(num_tokens), dtype=self.shape.dtype, pin_memory=self.is_pinned)
        except (MemoryError, RuntimeError):  # PyTorch's own allocator raises the latter
            return None
        self._nodes[key] = HostCopy(kv_2LTGD)
        self._num_bytes += kv_2LTGD.nbytes
        return kv_2LTGD

    def seal(self, key: NodeKey) -> None:
        """Compute the checksum of a filled copy, which must not be written to again."""
        copy = self._nodes[key]
        copy.checksum = checksum_of(payload_of(copy.kv_2LTGD))

    def get(self, key: NodeKey) -> HostCopy | None:
        """Return the copy, not verified; None if there is none."""
        return self._nodes.get(key)

    def drop(self, key: NodeKey) -> None:
        """Drop a node's copy, if there is one."""
        copy = self._nodes.pop(key, None)
        if copy is not None:
            self._num_bytes -= copy.kv_2LTGD.nbytes

    def clear(self) -> None:
        self._nodes.clear()
        self._num_bytes = 0


def payload_of(kv_2LTGD: torch.Tensor) -> memoryview:
    """View KV in host memory as flat bytes."""
    return kv_2LTGD.view(torch.uint8).view(-1).numpy().data
