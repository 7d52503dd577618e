"""A `KVMover` without bytes for simulations: every move takes the time of its link on a virtual clock.

As with `TieredStore`, a move is complete when its method returns. It asserts that a loaded copy exists.
"""

from collections.abc import Callable, Sequence

from stillroom.core.clock import VirtualClock
from stillroom.core.ids import BlockId
from stillroom.core.kv import FULL_BITS, NodeCopy, NodeKey, NodeRecord, Tier


class ModelledMover:
    """Moves always succeed; nothing is prefetched."""

    def __init__(self, clock: VirtualClock, seconds: Callable[[Tier, int], float], bytes_per_token: int) -> None:
        """
        Args:
            seconds: time to move this many bytes between a tier and the device, in either direction.
        """
        self.clock = clock
        self._seconds = seconds
        self._bytes_per_token = bytes_per_token
        self._kept: dict[Tier, set[NodeKey]] = {Tier.HOST: set(), Tier.DISK: set()}

    def prefetch(self, key: NodeKey, num_tokens: int, bits: int = FULL_BITS) -> bool:
        return False

    def cancel_prefetch(self, key: NodeKey) -> None:
        pass

    def is_finite(self, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        return True

    def offload(self, copy: NodeCopy) -> bool:
        self._kept[Tier.HOST].add(copy.key)
        return self._move(Tier.HOST, copy.num_tokens, copy.bits)

    def load(self, key: NodeKey, source: Tier, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        assert key in self._kept[source]
        return self._move(source, num_tokens)

    def place(self, copy: NodeCopy, block_ids: Sequence[BlockId], first_position: int) -> bool:
        if copy.tier is Tier.DEVICE:  # a copy within the device costs nothing
            return True
        assert copy.key in self._kept[copy.tier]
        return self._move(copy.tier, copy.num_tokens, copy.bits)

    def store(self, record: NodeRecord, source: Tier, block_ids: Sequence[BlockId]) -> bool:
        self._kept[Tier.DISK].add(record.key)
        return self._move(Tier.DISK, record.num_tokens, record.bits)

    def mark_used(self, key: NodeKey) -> None:
        pass

    def has(self, key: NodeKey, tier: Tier) -> bool:
        return key in self._kept[tier]

    def drop(self, key: NodeKey, tier: Tier) -> None:
        self._kept[tier].remove(key)

    def _move(self, tier: Tier, num_tokens: int, bits: int = FULL_BITS) -> bool:
        self.clock.advance(self._seconds(tier, num_tokens * self._bytes_per_token * bits // FULL_BITS))
        return True
