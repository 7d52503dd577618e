"""Counters of the knowledge tree, which only grow; metrics, `explain` and the benches read them."""

from collections import Counter
from dataclasses import dataclass, field

from stillroom.core.kv import Tier


def _by_tier() -> Counter[Tier]:
    return Counter()


@dataclass(slots=True)
class KVCacheStats:
    hits: Counter[Tier] = field(default_factory=_by_tier)
    """Pieces used, by the tier they were in."""
    hit_tokens: Counter[Tier] = field(default_factory=_by_tier)
    misses: int = 0
    """Pieces computed."""
    missed_tokens: int = 0
    cheaper: int = 0
    """Misses for which a copy existed and computing was cheaper than loading it."""
    placed: Counter[Tier] = field(default_factory=_by_tier)
    """Chunks used at another position than their own, by the tier they were in."""
    placed_tokens: int = 0
    prepared_tokens: int = 0
    """Those of chunks in their document's context."""
    recomputed_tokens: int = 0
    """Tokens of placed chunks that were recomputed."""
    placed_overlap: float = 0.0
    """Sum of beta' of the placed chunks (Cache-Craft Eq. 8): how alike their old and new contexts were."""
    placed_overhead: float = 0.0
    """Sum of CFO of the placed chunks (Eq. 12)."""
    unfocused: int = 0
    """Placed chunks not recomputed because the question does not attend to them."""
    prepared: int = 0
    """Chunks kept that preparing prompts computed."""
    loads: Counter[Tier] = field(default_factory=_by_tier)
    """Copies loaded to the device, by source."""
    failed_loads: Counter[Tier] = field(default_factory=_by_tier)
    """Copies that were damaged or gone."""
    offloads: int = 0
    """Copies made from the device to the host."""
    stores: int = 0
    """Copies made to disk."""
    rejected: int = 0
    """Copies not made to disk because the nodes they would have displaced are asked for more often."""
    evictions: Counter[Tier] = field(default_factory=_by_tier)
    """Copies dropped to make room, by tier."""
    displaced_bytes: int = 0
    """Bytes of prepared KV that left the tier where it was to last: evicted before a question used it, or damaged."""
    lost: int = 0
    """Nodes whose last copy was dropped, for any reason."""
