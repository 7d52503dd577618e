"""KV of nodes in host memory: one buffer of bytes each, the payload of a record (`NodeRecord.bits`).

Each copy has the checksum that was computed when it was gathered, so that damage is found before use. Memory is
page-locked where the device is CUDA, so that copies run at the speed of the bus. `kvcache` decides how much is kept;
`allocate` fails only when the machine is out of memory.
"""

from dataclasses import dataclass

import torch

from stillroom.core.kv import NodeKey
from stillroom.kvstore.record import checksum_of, is_intact


@dataclass(slots=True)
class HostCopy:
    """A node's KV and its checksum."""

    payload: torch.Tensor
    """uint8."""
    checksum: bytes = b""
    """Empty until the copy is sealed."""

    def is_intact(self) -> bool:
        """Whether the bytes match the checksum."""
        return is_intact(self.payload.numpy().data, self.checksum)


class HostStore:
    def __init__(self, device: torch.device) -> None:
        """
        Args:
            device: of the `DeviceStore`.
        """
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

    def allocate(self, key: NodeKey, num_bytes: int) -> torch.Tensor | None:
        """Allocate a node's copy, uint8, in place of an existing one; the caller fills it and calls `seal`. None if
        there is no memory."""
        self.drop(key)
        try:
            payload = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.is_pinned)
        except (MemoryError, RuntimeError):  # PyTorch's own allocator raises the latter
            return None
        self._nodes[key] = HostCopy(payload)
        self._num_bytes += num_bytes
        return payload

    def seal(self, key: NodeKey) -> None:
        """Compute the checksum of a filled copy, which must not be written to again."""
        copy = self._nodes[key]
        copy.checksum = checksum_of(copy.payload.numpy().data)

    def get(self, key: NodeKey) -> HostCopy | None:
        """Return the copy, not verified; None if there is none."""
        return self._nodes.get(key)

    def drop(self, key: NodeKey) -> None:
        """Drop a node's copy, if there is one."""
        copy = self._nodes.pop(key, None)
        if copy is not None:
            self._num_bytes -= copy.payload.nbytes

    def clear(self) -> None:
        self._nodes.clear()
        self._num_bytes = 0
