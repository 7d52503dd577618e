"""Records for tests of kept KV; everything about node n follows from n. No torch."""

import hashlib
import random
from collections.abc import Sequence

from stillroom.core.ids import BlockId, ChunkId
from stillroom.core.kv import FULL_BITS, NodeCopy, NodeKey, NodeRecord, Tier
from stillroom.kvstore.record import checksum_of

MODEL = bytes(range(32))
OTHER_MODEL = bytes(32)


def key(n: int) -> NodeKey:
    return NodeKey(hashlib.sha256(n.to_bytes(8, "big")).digest())


def record(n: int, *, parent: int = 0, first_position: int = 0, chunk: int | None = None) -> NodeRecord:
    chunk_id = None if chunk is None else ChunkId(chunk)
    return NodeRecord(key(n), key(parent), first_position, 7 + n, chunk_id, avg_cost=0.25, frequency=1.5)


def on_device(n: int, block_ids: Sequence[BlockId], num_tokens: int, first: int = 0, bits: int = FULL_BITS) -> NodeCopy:
    """Describe a node on the device, or one that is to leave it in these bits."""
    return NodeCopy(key(n), Tier.DEVICE, block_ids, first, num_tokens, bits)


def payload(n: int, size: int = 1000) -> bytes:
    return random.Random(n).randbytes(size)


def sealed(n: int, size: int = 1000) -> tuple[bytes, bytes]:
    """A payload and its checksum."""
    content = payload(n, size)
    return content, checksum_of(content)
