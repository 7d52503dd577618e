"""Who leaves a full tier first: a policy is a sort key over what is known of a node, smallest first.

`pgdsf` is RAGCache's (5.1, Algorithm 1); `gdsf`, `lru` and `lfu` are its baselines, `tamm` is llmds's, `reusability` is
Cache-Craft's. `prefix_heat` is ours. Compared on the same tree by `stillroom bench policies`: docs/policies-bench.md
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from stillroom.core.kv import NodeKey


class NodeUse(NamedTuple):
    """A node at its last use, as one tier sees it."""

    key: NodeKey
    num_tokens: int
    clock: float
    """Of the tier: the largest priority that was ever evicted from it (RAGCache Eq. 2)."""
    frequency: float
    """Uses within the time window, this one included."""
    avg_cost: float
    """Seconds of computing per token, mean over the requests that had to compute it (RAGCache Eq. 3)."""
    cost_alone: float
    """Seconds per token to compute it with nothing before it."""
    cost_here: float
    """Seconds per token to compute it where it stands, as part of a longer prefill: what keeping it saves."""
    recency: int
    """Number of this use, counted over the whole tree."""
    heat: float
    """log2 of its uses with a half-life, those before an eviction included (`Node.heat`)."""
    depth: int
    """Chunks on its path (`Node.depth`)."""
    reusability: float = 0.0
    """f_r (`Node.reusability`)."""


Policy = Callable[[NodeUse], float]


def pgdsf(use: NodeUse) -> float:
    """clock + avg_cost * frequency (RAGCache Algorithm 1, line 13)."""
    return use.clock + use.avg_cost * use.frequency


def gdsf(use: NodeUse) -> float:
    """The same without an eye for prefixes: the cost is what the node alone would take."""
    return use.clock + use.cost_alone * use.frequency


def lru(use: NodeUse) -> float:
    """The least recently used."""
    return float(use.recency)


def lfu(use: NodeUse) -> float:
    """The least used within the time window."""
    return use.frequency


def tamm(use: NodeUse) -> float:
    """recency / tokens (llmds 3.1)."""
    return use.recency / use.num_tokens


def prefix_heat(use: NodeUse) -> float:
    """log2 of uses * cost ** 0.2 / (1 + depth).

    PGDSF's product with four changes: uses fade with a half-life and not with a clock; an eviction does not end their
    memory; of two paths that were used alike the deeper end leaves first; and cost is the node's own and no mean over
    requests. Its exponent is a compromise: with 1 fewer tokens are found, with 0 fewer seconds are saved.
    """
    return use.heat + 0.2 * math.log2(use.cost_here) - math.log2(1 + use.depth)


def reusability(use: NodeUse) -> float:
    """f_r, 1 / CFO added up over its uses (Cache-Craft 3.3)."""
    return use.reusability


POLICIES: dict[str, Policy] = {
    policy.__name__: policy for policy in (prefix_heat, pgdsf, gdsf, lru, lfu, tamm, reusability)
}
