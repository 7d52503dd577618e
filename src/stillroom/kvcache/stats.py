"""What the knowledge tree did, counted. Only grows; metrics, `explain` and the benches read it."""

from collections import Counter
from dataclasses import dataclass, field

from stillroom.core.kv import Tier


def _by_tier() -> Counter[Tier]:
    return Counter()


@dataclass(slots=True)
class KVCacheStats:
    """Pieces of prompts, and copies of nodes."""

    hits: Counter[Tier] = field(default_factory=_by_tier)
    """Pieces that were used, by the tier they were in."""
    hit_tokens: Counter[Tier] = field(default_factory=_by_tier)
    misses: int = 0
    """Pieces that had to be computed."""
    missed_tokens: int = 0
    cheaper: int = 0
    """Of the misses: there was a copy, and computing was cheaper than loading it."""
    placed: Counter[Tier] = field(default_factory=_by_tier)
    """Chunks that were used at another place than their own, by the tier they were in."""
    placed_tokens: int = 0
    recomputed_tokens: int = 0
    """Of the placed ones: computed again to repair them."""
    placed_overlap: float = 0.0
    """beta' of the placed chunks (Cache-Craft Eq. 8), added up: how alike their old and new contexts were."""
    placed_overhead: float = 0.0
    """CFO of the placed chunks (Eq. 12), added up."""
    unfocused: int = 0
    """Of the placed chunks: not repaired, as the question does not look at them."""
    loads: Counter[Tier] = field(default_factory=_by_tier)
    """Copies brought to the device, by where they came from."""
    failed_loads: Counter[Tier] = field(default_factory=_by_tier)
    """Copies that were damaged or gone."""
    offloads: int = 0
    """Copies made from the device to the host."""
    stores: int = 0
    """Copies made to disk."""
    rejected: int = 0
    """Copies not made to disk because what they would have displaced is asked for more often."""
    evictions: Counter[Tier] = field(default_factory=_by_tier)
    """Copies dropped to make room, by tier."""
    lost: int = 0
    """Nodes of which no copy is left, for whatever reason."""
