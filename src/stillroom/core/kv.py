"""Names for kept KV that everybody shares: where a copy is, what it is called, what is known of it.

A node of the knowledge tree is the KV of one piece of a prompt after one exact sequence of earlier tokens; its key is a
hash of all of that, so equal keys mean equal KV. Who decides is `kvcache`, who has the bytes is `kvstore`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NewType, Protocol

from stillroom.core.ids import BlockId, ChunkId

NodeKey = NewType("NodeKey", bytes)
"""SHA-256 (32 bytes) chained over model, tenant, all earlier tokens and the piece's own."""


NO_CONTENT = bytes(32)
"""Of a node whose tokens nobody has named."""

OwnerTag = NewType("OwnerTag", bytes)
"""Whose KV it is, in 8 bytes: only the tenant whose document is gone has its KV forgotten, and only his."""

NO_TENANT = OwnerTag(bytes(8))
"""The tag of the salt "": a process with one knowledge base has no other."""


def owner_of(salt: str) -> OwnerTag:
    """The tag of a tenant's KV. The salt cannot be found from it."""
    return OwnerTag(hashlib.sha256(b"stillroom-owner\0" + salt.encode()).digest()[:8]) if salt else NO_TENANT


def salt_of(tenant: str, knowledge_base: str) -> str:
    """The salt of a tenant's requests: another one once its knowledge base was made anew.

    Args:
        knowledge_base: its identity.
    """
    return f"{tenant}\0{knowledge_base}"


class Tier(IntEnum):
    """Where a copy of KV is. Smaller is faster."""

    DEVICE = 0
    HOST = 1
    DISK = 2

    @property
    def label(self) -> str:
        """As people and metrics call it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What is stored with a node's KV, so that a tree can be built again from its records."""

    key: NodeKey
    parent: NodeKey
    """The key of the piece before it; its own for the first piece of a prompt."""
    first_position: int
    """Prompt tokens before it."""
    num_tokens: int
    chunk_id: ChunkId | None
    """The chunk whose text it is; None for a system prompt or a question."""
    avg_cost: float
    """Seconds per token to compute it, as `KnowledgeTree` measured them; worth more than 0."""
    frequency: float
    """Uses in the last time window, when it was stored."""
    content: bytes = NO_CONTENT
    """32 bytes that name its tokens for this model and tenant, wherever they stand."""
    notes: bytes = b""
    """What else the tree knows of it (`ContextMass.to_bytes`), of any length."""
    owner: OwnerTag = NO_TENANT
    seen: tuple[ChunkId, ...] = ()
    """Ids of the chunks whose text its KV has attended to, its own included: sorted, each once."""


@dataclass(frozen=True, slots=True)
class NodeCopy:
    """A copy of a node, to be read."""

    key: NodeKey
    tier: Tier
    block_ids: Sequence[BlockId]
    """Where it is on the device; empty elsewhere."""
    first_position: int
    """Where its tokens stood when its keys were rotated."""
    num_tokens: int


class KVMover(Protocol):
    """Carries out what the knowledge tree decides, at once and in order. Called by the engine's thread only.

    A copy that cannot be made or does not verify is reported by False: nothing of it is left in the target. After a
    failed `load`, `place` or `store`, `has` tells whether the source is still there. Copies on host and disk have the
    checksum that was computed when the KV left the device, and verify against it whenever they are read. KV that is not
    finite is not copied to the host or to disk.
    """

    def prefetch(self, key: NodeKey, num_tokens: int) -> bool:
        """Read a node that is on disk only, ahead of its use, until `cancel_prefetch` is called as often.

        Returns:
            False if it will not be read ahead; then there is nothing to cancel.
        """
        ...

    def cancel_prefetch(self, key: NodeKey) -> None:
        """The sequence has it, or waits no more."""
        ...

    def is_finite(self, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        """Whether the first `num_tokens` slots of these device blocks hold finite numbers only."""
        ...

    def offload(self, key: NodeKey, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        """Copy the first `num_tokens` slots of these device blocks to the host."""
        ...

    def load(self, key: NodeKey, source: Tier, block_ids: Sequence[BlockId], num_tokens: int) -> bool:
        """Copy a node from host or disk into these device blocks, verified."""
        ...

    def place(self, copy: NodeCopy, block_ids: Sequence[BlockId], first_position: int) -> bool:
        """Copy a node into these device blocks as if its tokens stood from this position on, verified."""
        ...

    def store(self, record: NodeRecord, source: Tier, block_ids: Sequence[BlockId]) -> bool:
        """Copy a node to disk, from the host, or from these device blocks if `source` is the device."""
        ...

    def has(self, key: NodeKey, tier: Tier) -> bool:
        """Whether the host's or the disk's copy is there, as far as is known."""
        ...

    def drop(self, key: NodeKey, tier: Tier) -> None:
        """Forget the host's or the disk's copy."""
        ...
