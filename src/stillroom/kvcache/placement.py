"""Which kept copy of a chunk to use at another place than its own, and whether that is worth it.

Any node of the knowledge tree can be placed: its keys are turned to the new position, and what it still carries of its
old context is repaired by computing a few of its tokens again (`repair`). So there is one store, one memory budget and
one order of eviction for both kinds of reuse. What was repaired is used by one request and never kept: copies are only
made of KV that was computed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stillroom.config.settings import TokenSelector
from stillroom.core.kv import Tier
from stillroom.core.prompt import SegmentKind
from stillroom.kvcache.chunk_scores import order_penalty
from stillroom.kvcache.knowledge_tree import KnowledgeTree
from stillroom.kvcache.node import Node
from stillroom.kvcache.pieces import Piece


@dataclass(frozen=True, slots=True)
class AnywhereOptions:
    """How far reuse may go beyond exact prefixes."""

    recompute_ratio: float
    """Share of the placed chunks' tokens that is computed again, in [0, 1]; 1 gives the KV of a full prefill."""
    selector: TokenSelector
    """Which tokens."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A piece of a prompt that takes its KV from a node of another place."""

    piece_index: int
    node: Node
    tier: Tier
    """Where the node was when that was decided."""


def plan_placements(
    tree: KnowledgeTree, pieces: Sequence[Piece], num_exact: int, options: AnywhereOptions, *, always_loads: bool
) -> list[Placement]:
    """The chunks behind the first `num_exact` pieces that are kept and worth placing, each with its best copy.

    Worth it is what loads faster than the share of its tokens computes that need not be computed then; by the measured
    cost of its tokens as part of a longer prefill.
    """
    found = []
    before = [piece.content for piece in pieces[:num_exact] if piece.kind is SegmentKind.CHUNK]
    for index in range(num_exact, len(pieces)):
        piece = pieces[index]
        if piece.kind is not SegmentKind.CHUNK:
            continue
        node = best_variant(tree.variants(piece.content), before, piece.start)
        before.append(piece.content)
        if node is None:
            continue
        tier = node.tier
        assert tier is not None
        saved = (1.0 - options.recompute_ratio) * node.cost_here * node.num_tokens
        if tier is Tier.DEVICE:
            load = 0.0
        else:
            load = tree.profile.load_seconds(tier, node.num_tokens * tree.options.bytes_per_token)
        if always_loads or load < saved:
            found.append(Placement(index, node, tier))
    return found


def best_variant(variants: Iterable[Node], before: Sequence[bytes], position: int) -> Node | None:
    """The copy whose old context is most like the new one, then the nearest tier, then the shortest way to turn."""

    def order(node: Node) -> tuple[float, int, int]:
        assert node.tier is not None
        return -context_overlap(node.before, before), node.tier, abs(node.first_position - position)

    return min(variants, key=order, default=None)


def context_overlap(old: Sequence[bytes], new: Sequence[bytes]) -> float:
    """How much of what a chunk has seen stands before it now, in [0, 1]: Cache-Craft's beta' (Eq. 6 to 8) with every
    chunk of the old context weighing the same."""
    if not old:
        return 0.0 if new else 1.0
    chunks = set(old)
    return len(chunks & set(new)) / len(chunks) * (1.0 - order_penalty(old, new))
