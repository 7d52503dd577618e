"""A simulated KV tier that all engines of a cluster share over the network.

An engine's tree sees the tier as its disk: the product decides what is stored there, and whether loading beats
computing. Records stay for ever. Engines that move KV at the same time share the tier's bandwidth.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stillroom.core.clock import VirtualClock
from stillroom.core.ids import BlockId
from stillroom.core.kv import FULL_BITS, Link, NodeCopy, NodeKey, NodeRecord, Tier
from stillroom.kvstore.modelled import ModelledMover


class SharedLink:
    """Bandwidth of which every transfer takes what earlier ones left over, up to the rate of its own port.

    Transfers are reserved in the order in which they are simulated; together they never exceed the link.
    """

    def __init__(self, bytes_per_second: float, port_bytes_per_second: float) -> None:
        """
        Args:
            port_bytes_per_second: the most that one transfer takes.
        """
        assert bytes_per_second > 0 and port_bytes_per_second > 0
        self._capacity, self._port = bytes_per_second, port_bytes_per_second
        self._times: list[float] = [0.0]
        self._taken: list[float] = [0.0]
        """Reserved rate from each time to the next; from the last one on, nothing."""

    def reserve(self, start: float, num_bytes: float) -> float:
        """Reserve a transfer that begins at a time; return when it ends."""
        at, left = self._split(start), num_bytes
        while True:
            rate = min(self._port, self._capacity - self._taken[at])
            began = self._times[at]
            end = self._times[at + 1] if at + 1 < len(self._times) else float("inf")
            if rate * (end - began) >= left > 0 < rate:
                done = began + left / rate
                last = self._split(done)
                for index in range(at, last):
                    self._taken[index] += rate
                return done
            if left <= 0:
                return began
            self._taken[at] += rate
            left -= rate * (end - began)
            at += 1

    def rate_at(self, moment: float) -> float:
        """Return the reserved rate, in bytes per second."""
        return self._taken[max(0, bisect_right(self._times, moment) - 1)]

    def _split(self, moment: float) -> int:
        """Return the index of the interval that begins at a moment."""
        index = bisect_left(self._times, moment)
        if index == len(self._times) or self._times[index] != moment:
            self._times.insert(index, moment)
            self._taken.insert(index, self._taken[index - 1])
        return index


@dataclass(frozen=True, slots=True)
class _Stored:
    record: NodeRecord
    at_seconds: float
    """When it is there."""


class NetworkTier:
    """Records of all engines, and the link to them."""

    def __init__(self, port: Link, bytes_per_second: float) -> None:
        """
        Args:
            port: of each engine.
            bytes_per_second: of the tier.
        """
        self.port = port
        self.names: dict[bytes, Tier] = {}
        """Keys and contents of the records; an engine takes them for KV on its disk."""
        self.num_loaded_bytes = 0
        self.num_stored_bytes = 0
        self._link = SharedLink(bytes_per_second, port.bytes_per_second)
        self._stored: dict[NodeKey, _Stored] = {}
        self._by_content: dict[bytes, list[NodeKey]] = {}

    def __contains__(self, key: NodeKey) -> bool:
        return key in self._stored

    def move(self, now: float, num_bytes: int) -> float:
        """Move bytes over the link; return when they have arrived."""
        return self._link.reserve(now + self.port.latency_seconds, num_bytes)

    def add(self, record: NodeRecord, now: float) -> None:
        """Keep a record. The tree stores parents before their children."""
        self._stored[record.key] = _Stored(record, now)
        self._by_content.setdefault(record.content, []).append(record.key)
        self.names[record.key] = self.names[record.content] = Tier.DISK

    def path_to(self, name: bytes, now: float) -> list[NodeRecord]:
        """Return a record of this key or content and all before it, from the beginning of its prompt; else nothing."""
        keys = [NodeKey(name)] if name in self._stored else self._by_content.get(name, ())
        return next((path for key in keys if (path := self._path(key, now))), [])

    def _path(self, key: NodeKey, now: float) -> list[NodeRecord]:
        path: list[NodeRecord] = []
        while (stored := self._stored.get(key)) is not None and stored.at_seconds <= now:
            path.append(stored.record)
            if stored.record.parent == key:
                return path[::-1]
            key = stored.record.parent
        return []


class NetworkMover(ModelledMover):
    """Moves KV of one engine; its disk is the network tier."""

    def __init__(
        self, clock: VirtualClock, seconds: Callable[[Tier, int], float], bytes_per_token: int, network: NetworkTier
    ) -> None:
        """
        Args:
            seconds: as in `ModelledMover`, for the host.
        """
        super().__init__(clock, seconds, bytes_per_token)
        self._network = network

    def load(self, key: NodeKey, source: Tier, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        return self._read(num_tokens) if source is Tier.DISK else super().load(key, source, block_ids, num_tokens)

    def place(self, copy: NodeCopy, block_ids: Sequence[BlockId], first_position: int) -> bool:
        if copy.tier is Tier.DISK:
            return self._read(copy.num_tokens, copy.bits)
        return super().place(copy, block_ids, first_position)

    def store(self, record: NodeRecord, source: Tier, block_ids: Sequence[BlockId]) -> bool:
        """Store a record unless another engine has; then it costs nothing."""
        if record.key not in self._network:
            self._network.num_stored_bytes += self._move_bytes(record.num_tokens, record.bits)
            self._network.add(record, self.clock.now)
        return True

    def has(self, key: NodeKey, tier: Tier) -> bool:
        return key in self._network if tier is Tier.DISK else super().has(key, tier)

    def drop(self, key: NodeKey, tier: Tier) -> None:
        if tier is not Tier.DISK:  # the tier keeps its records
            super().drop(key, tier)

    def _read(self, num_tokens: int, bits: int = FULL_BITS) -> bool:
        self._network.num_loaded_bytes += self._move_bytes(num_tokens, bits)
        return True

    def _move_bytes(self, num_tokens: int, bits: int) -> int:
        num_bytes = num_tokens * self._bytes_per_token * bits // FULL_BITS
        self.clock.advance(self._network.move(self.clock.now, num_bytes) - self.clock.now)
        return num_bytes
