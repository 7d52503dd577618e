"""Kept KV: tiers, keys, records, and the interface between the knowledge tree and the stores.

A node of the knowledge tree is the KV of one piece of a prompt after one exact sequence of earlier tokens. Its key is a
hash of all of that, so equal keys mean equal KV. `kvcache` decides; `kvstore` holds the bytes.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NewType, Protocol

from stillroom.core.ids import BlockId, ChunkId

NodeKey = NewType("NodeKey", bytes)
"""SHA-256 (32 bytes) chained over model, tenant, all earlier tokens and the piece's own."""


FULL_BITS = 16
"""`NodeRecord.bits` of KV that is kept as it was computed, in the model's type."""

NO_CONTENT = bytes(32)
"""`NodeRecord.content` of a node without a content hash."""

OwnerTag = NewType("OwnerTag", bytes)
"""The tenant of a node, in 8 bytes: removing a tenant's document drops KV of that tenant only."""

NO_TENANT = OwnerTag(bytes(8))
"""The tag of the salt "", of a process with one knowledge base."""


def owner_of(salt: str) -> OwnerTag:
    """Return the tag of a tenant's KV. The salt cannot be recovered from it."""
    return OwnerTag(hashlib.sha256(b"stillroom-owner\0" + salt.encode()).digest()[:8]) if salt else NO_TENANT


def salt_of(tenant: str, knowledge_base: str) -> str:
    """Return the salt of a tenant's requests; it changes when the knowledge base is recreated.

    Args:
        knowledge_base: id of the tenant's knowledge base.
    """
    return f"{tenant}\0{knowledge_base}"


def cache_salt_of(salt: str) -> str:
    """Return the salt that a server elsewhere gets: 64 hexadecimal digits. It cannot be guessed, because the id of a
    knowledge base is random and secret, and the tenant's salt cannot be recovered from it."""
    return hashlib.sha256(b"stillroom-cache-salt\0" + salt.encode()).hexdigest()


class Tier(IntEnum):
    """Tier of a copy of KV. Smaller is faster."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    NETWORK = 3
    """Records that several processes share (docs/kv-tier.md)."""

    @property
    def label(self) -> str:
        """Name in messages and metrics."""
        return self.name.lower()


OWN_TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""The tiers of one process."""


@dataclass(frozen=True, slots=True)
class Link:
    """Transfer from a tier to the device."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """Stored with a node's KV, so that a tree can be rebuilt from its records."""

    key: NodeKey
    parent: NodeKey
    """Key of the previous piece; the node's own key for the first piece of a prompt."""
    first_position: int
    """Prompt tokens before it."""
    num_tokens: int
    chunk_id: ChunkId | None
    """The chunk of its text; None for a system prompt or a question."""
    avg_cost: float
    """Seconds per token to compute it, as `KnowledgeTree` measured; above 0."""
    frequency: float
    """Uses in the time window before it was stored."""
    content: bytes = NO_CONTENT
    """Hash of its tokens, model and tenant, independent of position: 32 bytes."""
    notes: bytes = b""
    """Further data of the tree (`ContextMass.to_bytes`), of any length."""
    owner: OwnerTag = NO_TENANT
    seen: tuple[ChunkId, ...] = ()
    """Distinct ids of the chunks that its KV has attended to, its own included: sorted, or in the order of the document
    for KV in its document's context."""
    is_used: bool = True
    """False: it was computed before a question asked for it, and none has used it."""
    is_in_document: bool = False
    """Whether its KV has seen a system message and the chunks before it in its document, and nothing else."""
    bits: int = FULL_BITS
    """Bits of each number on host and disk: 8, 4, or `FULL_BITS`."""


@dataclass(frozen=True, slots=True)
class NodeCopy:
    """A copy of a node to read from."""

    key: NodeKey
    tier: Tier
    block_ids: Sequence[BlockId]
    """Its blocks on the device; empty on other tiers."""
    first_position: int
    """Position of its first token when its keys were rotated."""
    num_tokens: int
    bits: int = FULL_BITS
    """As in `NodeRecord`; on the device KV is always as it was computed."""


class SharedLookup(Protocol):
    """A question to the shared tier: how many of some records, from the first on, it holds. Answered by a thread."""

    @property
    def num_found(self) -> int | None:
        """How many it holds; None until that is known."""
        ...


class SharedKV(Protocol):
    """KV that several processes share (docs/kv-tier.md). Called by the engine's thread only; never waits for the tier.

    `KVMover.load` with `Tier.NETWORK` copies what `fetch` has read.
    """

    @property
    def link(self) -> Link | None:
        """Measured costs of loading from the tier; None while it cannot be used."""
        ...

    @property
    def timeout_seconds(self) -> float:
        """Longest time that the tier may take for a reply."""
        ...

    def look_up(self, owner: OwnerTag, pieces: Sequence[tuple[NodeKey, ChunkId | None]]) -> SharedLookup | None:
        """Start to ask for the records of consecutive pieces of a prompt, given with their chunks.

        Returns:
            None if the tier cannot be used now.
        """
        ...

    def fetch(self, key: NodeKey, num_tokens: int) -> bool:
        """Start to read a node. Each successful call needs one `cancel_fetch`; False if memory for it is lacking."""
        ...

    def is_fetched(self, key: NodeKey) -> bool:
        """Whether the reading of a node has ended, well or not; only then `load` may be called for it."""
        ...

    def cancel_fetch(self, key: NodeKey) -> None:
        """End one `fetch`."""
        ...

    def share(self, record: NodeRecord, source: Tier, block_ids: Sequence[BlockId]) -> bool:
        """Queue a copy of a node, from the given tier, for another thread to write; False if it is not queued."""
        ...

    def forget(self, owner: OwnerTag, chunk_ids: Collection[ChunkId] | None) -> None:
        """Delete the records of an owner that have seen one of these chunks; None: all of the owner's.

        Until that is done, `look_up` finds none of them and `share` stores none.
        """
        ...


class KVMover(Protocol):
    """Copies KV between tiers, synchronously and in order. Called by the engine's thread only.

    Methods return False if the copy cannot be made or does not verify; the target then holds nothing of it. After a
    failed `load`, `place` or `store`, `has` tells whether the source still exists. Copies on host and disk carry the
    checksum computed when the KV left the device, and every read verifies it. Non-finite KV is not copied to host or
    disk. `bits` is that of the node's copies on host and disk (`NodeRecord.bits`).
    """

    def prefetch(self, key: NodeKey, num_tokens: int, bits: int = FULL_BITS) -> bool:
        """Start to read a node from disk. Each successful call needs one `cancel_prefetch`.

        Returns:
            False if the node is not prefetched; then there is nothing to cancel.
        """
        ...

    def cancel_prefetch(self, key: NodeKey) -> None:
        """End one `prefetch`: the sequence has the KV or no longer waits."""
        ...

    def is_finite(self, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        """Whether the first `num_tokens` slots of these device blocks are finite."""
        ...

    def offload(self, copy: NodeCopy) -> bool:
        """Copy a node from the device to the host, in `copy.bits`."""
        ...

    def load(self, key: NodeKey, source: Tier, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        """Copy a node with `FULL_BITS` from another tier into these device blocks, and verify it."""
        ...

    def place(self, copy: NodeCopy, block_ids: Sequence[BlockId], first_position: int) -> bool:
        """Copy a node into these device blocks, with its keys rotated to `first_position`, and verify it."""
        ...

    def store(self, record: NodeRecord, source: Tier, block_ids: Sequence[BlockId]) -> bool:
        """Copy a node to disk, in `record.bits`: from the host, or from these device blocks if that is the source."""
        ...

    def mark_used(self, key: NodeKey) -> None:
        """Keep for the next process that the copy on disk was used; `NodeRecord.is_used` says so then."""
        ...

    def has(self, key: NodeKey, tier: Tier) -> bool:
        """Whether the copy on this tier exists, as far as known."""
        ...

    def drop(self, key: NodeKey, tier: Tier) -> None:
        """Delete the copy on this tier."""
        ...
