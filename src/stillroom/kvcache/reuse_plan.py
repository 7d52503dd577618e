"""What to reuse of one prompt: how far along its path in the knowledge tree, by measured cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.core.kv import Tier
from stillroom.kvcache.cost_model import CostProfile
from stillroom.kvcache.node import Node


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """The first `num_nodes` nodes of a path are used; the rest of the prompt is computed."""

    num_nodes: int
    num_cached: int
    """Tokens in them."""
    load_seconds: float
    compute_seconds: float


def plan_reuse(
    path: Sequence[Node], num_tokens: int, profile: CostProfile, bytes_per_token: int, *, always_loads: bool = False
) -> ReusePlan:
    """Load or recompute, for each node by measured cost: the cut of the path that makes prefill end soonest.

    What is on the device is always used. Of equally fast cuts the longest is taken; `always_loads` takes all.

    Args:
        path: a path of the tree that covers the beginning of the prompt.
        num_tokens: of the prompt.
    """
    loads, num_cached = 0.0, 0
    best: ReusePlan | None = None
    for used in range(len(path) + 1):
        if used > 0:
            node = path[used - 1]
            num_cached += node.num_tokens
            tier = node.tier
            assert tier is not None
            loads += 0.0 if tier is Tier.DEVICE else profile.load_seconds(tier, node.num_tokens * bytes_per_token)
        is_forced = always_loads or (used < len(path) and path[used].tier is Tier.DEVICE)
        if is_forced and used < len(path):
            continue
        cut = ReusePlan(used, num_cached, loads, profile.prefill_seconds(num_cached, num_tokens - num_cached))
        if best is None or cut.load_seconds + cut.compute_seconds <= best.load_seconds + best.compute_seconds:
            best = cut
    assert best is not None
    return best
