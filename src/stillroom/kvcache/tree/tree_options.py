"""Options of the knowledge tree: capacities of host and disk, eviction policy, admission to the disk."""

from collections.abc import Callable
from dataclasses import dataclass

from stillroom.core.kv import FULL_BITS
from stillroom.kvcache.tree.eviction import Policy, prefix_heat


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions:
    """Each improvement over RAGCache is a switch."""

    host_bytes: int = 0
    disk_bytes: int = 0
    unused_host_bytes: int = 0
    unused_disk_bytes: int = 0
    """Parts of host and disk that KV may take which was prepared and never used."""
    is_disk_read_only: bool = False
    """Another process writes to the disk: records there are used, none is stored or removed."""
    bytes_per_token: int = 1
    """On the device, and on host and disk with `FULL_BITS`."""
    prepared_bits: int = FULL_BITS
    """Bits of each number of prepared KV on host and disk, in its document's context only (`NodeRecord.bits`)."""
    narrow_size: Callable[[int, int], int] | None = None
    """Bytes of KV of this many tokens in 8 or 4 bits a number; None: in proportion to `bytes_per_token`."""
    size_on_disk: Callable[[int, int, int], int] = lambda payload_size, num_seen, notes_size: payload_size
    """Bytes of a record on disk. Arguments: bytes of its KV, number of chunks it has seen, bytes of its notes."""
    policy: Policy = prefix_heat
    window_seconds: float = float("inf")
    """Frequency counts the uses of this many seconds."""
    half_life_uses: float = 50_000.0
    """After this many uses of any nodes a use counts half (heat)."""
    looks_ahead: bool = True
    """Nodes that waiting requests will use are evicted last."""
    admits_by_frequency: bool = False
    """A full disk takes a node only if it was asked for at least as often as the node it would displace. Saves writes
    and loses hits (docs/policies-bench.md)."""
    replicates_system: bool = True
    """The first piece of every prompt is copied to the host at once, so that it survives the device (RAGCache 6)."""

    def num_bytes(self, num_tokens: int, bits: int = FULL_BITS) -> int:
        """Return the bytes of KV with this many bits a number, without a header."""
        if bits == FULL_BITS or self.narrow_size is None:
            return num_tokens * self.bytes_per_token * bits // FULL_BITS
        return self.narrow_size(num_tokens, bits)
