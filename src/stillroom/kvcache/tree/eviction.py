"""Eviction policies: sort keys over the statistics of a node; a full tier evicts the smallest first.

`pgdsf` is RAGCache's (5.1, Algorithm 1); `gdsf`, `lru` and `lfu` are its baselines, `tamm` is llmds's, `reusability` is
Cache-Craft's, `prefix_heat` is this project's. `stillroom bench policies` compares them: docs/policies-bench.md
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from stillroom.core.kv import NodeKey


class NodeUse(NamedTuple):
    """Statistics of a node in one tier at its last use."""

    key: NodeKey
    num_tokens: int
    clock: float
    """The largest priority that this tier ever evicted (RAGCache Eq. 2)."""
    frequency: float
    """Uses within the time window, this use included."""
    avg_cost: float
    """Seconds per token, mean over the requests that computed it (RAGCache Eq. 3)."""
    cost_alone: float
    """Seconds per token to compute it with nothing before it."""
    cost_here: float
    """Seconds per token to compute it at its position as part of a longer prefill: what keeping it saves."""
    recency: int
    """Sequence number of this use among the uses of all nodes."""
    heat: float
    """log2 of its uses with a half-life, uses before an eviction included (`Node.heat`)."""
    depth: int
    """Chunks on its path (`Node.depth`)."""
    reusability: float = 0.0
    """f_r (`Node.reusability`)."""


Policy = Callable[[NodeUse], float]


def pgdsf(use: NodeUse) -> float:
    """clock + avg_cost * frequency (RAGCache Algorithm 1, line 13)."""
    return use.clock + use.avg_cost * use.frequency


def gdsf(use: NodeUse) -> float:
    """clock + cost_alone * frequency: PGDSF without regard to the prefix."""
    return use.clock + use.cost_alone * use.frequency


def lru(use: NodeUse) -> float:
    """Least recently used."""
    return float(use.recency)


def lfu(use: NodeUse) -> float:
    """Least frequently used within the time window."""
    return use.frequency


def tamm(use: NodeUse) -> float:
    """recency / tokens (llmds 3.1)."""
    return use.recency / use.num_tokens


def prefix_heat(use: NodeUse) -> float:
    """log2 of uses * cost ** 0.2 / (1 + depth).

    PGDSF's product with four changes: uses fade with a half-life, not with a clock; they are remembered across an
    eviction; of two paths used alike the deeper end is evicted first; and cost is the node's own, not a mean over
    requests. The exponent 0.2 is a compromise: with 1 fewer tokens hit, with 0 fewer seconds are saved.
    """
    return use.heat + 0.2 * math.log2(use.cost_here) - math.log2(1 + use.depth)


def reusability(use: NodeUse) -> float:
    """f_r, the sum of 1 / CFO over its uses (Cache-Craft 3.3)."""
    return use.reusability


POLICIES: dict[str, Policy] = {
    policy.__name__: policy for policy in (prefix_heat, pgdsf, gdsf, lru, lfu, tamm, reusability)
}
