"""What to reuse of one prompt: how far along its path in the knowledge tree, by measured cost."""

from collections.abc import Sequence
from itertools import takewhile

from stillroom.kvcache.tree.cost_model import CostProfile
from stillroom.kvcache.tree.node import Node


def plan_reuse(
    path: Sequence[Node], num_tokens: int, profile: CostProfile, bytes_per_token: int, *, always_loads: bool = False
) -> int:
    """How many nodes of a path to use; the rest of the prompt is computed.

    Load or recompute, for each node by measured cost: the cut of the path that makes prefill end soonest. What is on
    the device is always used. Of equally fast cuts the longest is taken; `always_loads` takes all.

    Args:
        path: a path of the tree that covers the beginning of the prompt.
        num_tokens: of the prompt.
    """
    if always_loads or not path or path[-1].block_ids is not None:  # no node is on a faster tier than its parent
        return len(path)
    on_device = list(takewhile(lambda node: node.block_ids is not None, path))
    num_cached, loads = sum(node.num_tokens for node in on_device), 0.0
    best, least = len(on_device), profile.prefill_seconds(num_cached, num_tokens - num_cached)
    for num_nodes, node in enumerate(path[len(on_device) :], start=len(on_device) + 1):
        assert node.tier is not None
        num_cached += node.num_tokens
        loads += profile.load_seconds(node.tier, node.num_tokens * bytes_per_token)
        seconds = loads + profile.prefill_seconds(num_cached, num_tokens - num_cached)
        if seconds <= least:
            best, least = num_nodes, seconds
    return best
