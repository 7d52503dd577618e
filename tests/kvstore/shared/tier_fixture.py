"""A shared tier on a folder or a server, with records that tests write and read without an engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from stillroom.backends.tier_opening import open_tier
from stillroom.config.settings import ReuseConfig
from stillroom.core.clock import Clock
from stillroom.core.ids import ChunkId
from stillroom.core.kv import NO_TENANT, NodeRecord, OwnerTag
from stillroom.kvstore.prefetch import ReadPayload
from stillroom.kvstore.record import checksum_of, encode
from stillroom.kvstore.shared.shared_tier import SharedTier
from tests.fakes import ManualClock
from tests.kvstore.nodes import MODEL, key, payload, record

SIZE = 1000


class TierFixture:
    """One process's view of a tier."""

    def __init__(self, url: str, clock: Clock, model: bytes = MODEL, secret: str = "", **settings: float) -> None:
        options: dict[str, Any] = {"kv_tier_timeout_s": 2.0} | settings
        config = ReuseConfig(kv_tier=url, kv_tier_key=secret, **options)
        found = open_tier(config, model, clock, is_pinned=False)
        assert found is not None
        self.tier: SharedTier = found
        self.model = model

    def put(self, n: int, *chunks: int, owner: OwnerTag = NO_TENANT, size: int = SIZE, settles: bool = True) -> bool:
        """Write the record of node n, which has seen these chunks."""
        made = self.record(n, *chunks, owner=owner)
        content = payload(n, size)
        parts = [encode(made, self.model, size, checksum_of(content)), content]
        is_queued = self.tier.write(made, size, lambda: parts)
        assert not settles or self.tier.settle()
        return is_queued

    def record(self, n: int, *chunks: int, owner: OwnerTag = NO_TENANT) -> NodeRecord:
        seen = tuple(ChunkId(chunk) for chunk in chunks)
        return replace(record(n, chunk=chunks[-1] if chunks else None), owner=owner, seen=seen)

    def get(self, n: int, size: int = SIZE) -> ReadPayload | None:
        """Read the record of node n."""
        assert self.tier.fetch(key(n), size)
        assert self.tier.settle()
        found = self.tier.get(key(n))
        self.tier.cancel_fetch(key(n))
        assert found is None or bytes(found.payload.numpy().data) == payload(n, size), "other KV than was written"
        return found

    def count(self, pieces: Sequence[tuple[int, int | None]], owner: OwnerTag = NO_TENANT) -> int | None:
        """Look up nodes with their chunks; None if the tier is not asked."""
        wanted = [(key(n), None if chunk is None else ChunkId(chunk)) for n, chunk in pieces]
        lookup = self.tier.look_up(owner, wanted)
        assert self.tier.settle()
        return None if lookup is None else lookup.num_found


@contextmanager
def opened(
    url: str | Path, clock: Clock | None = None, model: bytes = MODEL, secret: str = "", **settings: float
) -> Iterator[TierFixture]:
    address = url if isinstance(url, str) else f"file://{url}"
    fixture = TierFixture(address, clock or ManualClock(), model, secret, **settings)
    try:
        yield fixture
    finally:
        fixture.tier.close()
