"""A `KVMover` without bytes: every move takes the time of its link, on a clock of its own. For simulations.

As `TieredStore`'s, every move is complete when its method returns; it keeps count of which copies there are, and nobody
may load one that is not there.
"""

from collections.abc import Callable, Sequence

from stillroom.core.clock import VirtualClock
from stillroom.core.ids import BlockId
from stillroom.core.kv import NodeCopy, NodeKey, NodeRecord, Tier


class ModelledMover:
    """Moves always succeed, and nothing is read ahead."""

    def __init__(self, clock: VirtualClock, seconds: Callable[[Tier, int], float], bytes_per_token: int) -> None:
        """
        Args:
            seconds: what moving so many bytes between a tier and the device takes, either way.
        """
        self._clock = clock
        self._seconds = seconds
        self._bytes_per_token = bytes_per_token
        self._kept: dict[Tier, set[NodeKey]] = {Tier.HOST: set(), Tier.DISK: set()}

    def prefetch(self, key: NodeKey, num_tokens: int) -> bool:
        """See `KVMover.prefetch`."""
        return False

    def cancel_prefetch(self, key: NodeKey) -> None:
        """See `KVMover.cancel_prefetch`."""

    def is_finite(self, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        """See `KVMover.is_finite`."""
        return True

    def offload(self, key: NodeKey, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        """See `KVMover.offload`."""
        self._kept[Tier.HOST].add(key)
        return self._move(Tier.HOST, num_tokens)

    def load(self, key: NodeKey, source: Tier, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        """See `KVMover.load`."""
        assert key in self._kept[source]
        return self._move(source, num_tokens)

    def place(self, copy: NodeCopy, block_ids: Sequence[BlockId], first_position: int) -> bool:
        """See `KVMover.place`. Copies within the device cost nothing."""
        if copy.tier is Tier.DEVICE:
            return True
        assert copy.key in self._kept[copy.tier]
        return self._move(copy.tier, copy.num_tokens)

    def store(self, record: NodeRecord, source: Tier, block_ids: Sequence[BlockId]) -> bool:
        """See `KVMover.store`."""
        self._kept[Tier.DISK].add(record.key)
        return self._move(Tier.DISK, record.num_tokens)

    def has(self, key: NodeKey, tier: Tier) -> bool:
        """See `KVMover.has`."""
        return key in self._kept[tier]

    def drop(self, key: NodeKey, tier: Tier) -> None:
        """See `KVMover.drop`."""
        self._kept[tier].remove(key)

    def _move(self, tier: Tier, num_tokens: int) -> bool:
        self._clock.advance(self._seconds(tier, num_tokens * self._bytes_per_token))
        return True
