"""Which kept copy of a chunk to use at another place than its own, what repairing it takes, and whether it is worth it.

Any node of the knowledge tree can be placed: its keys are rotated to the new position, and a few of its tokens are
recomputed (`recompute`) to correct what it still carries of its old context. So both kinds of reuse share one store,
one memory budget and one eviction order. Corrected KV is used by one request and never kept; only computed KV is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from stillroom.config.settings import TokenSelector
from stillroom.core.kv import Tier
from stillroom.core.prompt import SegmentKind
from stillroom.kvcache.tree.chunk_scores import adjusted_overlap, fix_overhead, order_penalty
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import Piece
from stillroom.kvcache.tree.provenance import View

UNKNOWN_IMPACT = 0.75
"""CCI of a copy that nobody measured: half way between owing nothing to its context and owing it everything."""
_LARGEST_RATIO, _LARGEST_ALPHA = 0.6, 4.0
"""Above this, computing everything is as fast."""


@dataclass(frozen=True, slots=True)
class AnywhereOptions:
    """How far reuse may go beyond exact prefixes."""

    recompute_ratio: float
    """Share of the placed chunks' tokens that is computed again, in [0, 1]; 1 gives the KV of a full prefill."""
    selector: TokenSelector
    """Which tokens."""
    alpha: float | None = None
    """The share is each chunk's own CFO instead, scaled by this (Cache-Craft Eq. 12)."""
    focus_window: int = 0
    """Chunks that the question does not look at, as so many layers in a row agree, are not repaired (Cache-Craft
    Algorithm 1); 0: all are."""
    turns_keys: bool = True
    """False leaves them as they stood, which is wrong: for Cache-Craft's Table 3."""

    @property
    def ranks_kept_tokens(self) -> bool:
        """Whether the selector ranks a copy's tokens by attention that was measured when the copy was computed."""
        return self.selector in ("context", "received")

    def share(self, reusability: "Reusability") -> float:
        """Of a chunk's tokens that is computed again if the question looks at it, in [0, 1]."""
        return self.recompute_ratio if self.alpha is None else min(1.0, self.alpha * reusability.overhead)

    def next_safer(self) -> "AnywhereOptions | None":
        """Twice as much computed again; None where computing everything is as fast."""
        if self.alpha is not None:
            alpha = 2 * self.alpha or 1.0
            return None if alpha > _LARGEST_ALPHA else replace(self, alpha=alpha)
        ratio = 2 * self.recompute_ratio or 0.15
        return None if ratio > _LARGEST_RATIO else replace(self, recompute_ratio=ratio)

    @property
    def level(self) -> float:
        """The number that `next_safer` doubles."""
        return self.recompute_ratio if self.alpha is None else self.alpha

    def __str__(self) -> str:
        return f"{'recompute ratio' if self.alpha is None else 'alpha'} {self.level:g}"


@dataclass(frozen=True, slots=True)
class Reusability:
    """How far a copy can be used behind other chunks than those it was computed behind (Cache-Craft 3.1, 3.2)."""

    overlap: float
    """beta' (Eq. 8)."""
    impact: float | None
    """CCI (Eq. 11); None if nobody measured it."""

    @property
    def overhead(self) -> float:
        """CFO with alpha = 1 (Eq. 12)."""
        return fix_overhead(UNKNOWN_IMPACT if self.impact is None else self.impact, self.overlap, 1.0)


@dataclass(frozen=True, slots=True)
class Placement:
    """A piece of a prompt that takes its KV from a node of another place."""

    piece_index: int
    node: Node
    tier: Tier
    """Where the node was when that was decided."""
    reusability: Reusability


def plan_placements(
    tree: KnowledgeTree,
    pieces: Sequence[Piece],
    view: View,
    num_exact: int,
    options: AnywhereOptions,
    *,
    always_loads: bool,
) -> list[Placement]:
    """The chunks behind the first `num_exact` pieces that are kept and worth placing, each with its best copy among
    those that the request may place.

    Worth it is what loads faster than the share of its tokens computes that need not be computed then; by the measured
    cost of its tokens as part of a longer prefill.
    """
    found = []
    before = [piece.content for piece in pieces[:num_exact] if piece.kind is SegmentKind.CHUNK]
    for index in range(num_exact, len(pieces)):
        piece = pieces[index]
        if piece.kind is not SegmentKind.CHUNK:
            continue
        seeable = filter(view.may_place, tree.variants(piece.content))
        copies = (node for node in seeable if _can_be_repaired(node, options))
        node = best_variant(copies, before, piece.start)
        if node is not None:
            tier = node.tier
            assert tier is not None
            placement = Placement(index, node, tier, reusability(node, before))
            if always_loads or load_seconds(tree, placement) < saved_seconds(placement, options):
                found.append(placement)
        before.append(piece.content)
    return found


def _can_be_repaired(node: Node, options: AnywhereOptions) -> bool:
    """False for a copy whose tokens the selector cannot rank: it was computed when only a sample was measured."""
    return not options.ranks_kept_tokens or (node.mass is not None and node.mass.token_inter is not None)


def load_seconds(tree: KnowledgeTree, placement: Placement) -> float:
    """To bring the copy to the device."""
    if placement.tier is Tier.DEVICE:
        return 0.0
    return tree.profile.load_seconds(placement.tier, placement.node.num_tokens * tree.options.bytes_per_token)


def saved_seconds(placement: Placement, options: AnywhereOptions) -> float:
    """Of computing, if the share that is computed again is; loading is not deducted."""
    node = placement.node
    return (1.0 - options.share(placement.reusability)) * node.cost_here * node.num_tokens


def best_variant(variants: Iterable[Node], before: Sequence[bytes], position: int) -> Node | None:
    """The copy that takes least to repair (lowest CFO), then the nearest tier, then the shortest way to turn."""

    def order(node: Node) -> tuple[float, int, int]:
        assert node.tier is not None
        return reusability(node, before).overhead, node.tier, abs(node.first_position - position)

    return min(variants, key=order, default=None)


def reusability(node: Node, before: Sequence[bytes]) -> Reusability:
    """Of a node behind other chunks.

    Args:
        before: contents of the chunks that will stand before it, in order.
    """
    if node.mass is None:
        return Reusability(context_overlap(node.before, before), None)
    return Reusability(adjusted_overlap(node.mass, before), node.mass.impact)


def context_overlap(old: Sequence[bytes], new: Sequence[bytes]) -> float:
    """How much of what a chunk has seen stands before it now, in [0, 1]: Cache-Craft's beta' (Eq. 6 to 8) with every
    chunk of the old context weighing the same, where nobody measured what it paid to each."""
    if not old:
        return 0.0 if new else 1.0
    chunks = set(old)
    return len(chunks & set(new)) / len(chunks) * (1.0 - order_penalty(old, new))
