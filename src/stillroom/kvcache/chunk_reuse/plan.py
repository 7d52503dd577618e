"""Plans placements: which kept copy of a chunk to use at another position, what it costs, and whether that pays.

Any node of the knowledge tree can be placed: its keys are rotated to the new position, and a few of its tokens are
recomputed (`recompute`) to correct what it still carries of its old context. So both kinds of reuse share one store,
one memory budget and one eviction order. Corrected KV is used by one request and never kept; only computed KV is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stillroom.config.settings import TokenSelector
from stillroom.core.kv import Tier
from stillroom.core.prompt import SegmentKind
from stillroom.kvcache.tree.chunk_scores import adjusted_overlap, fix_overhead, order_penalty
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import Piece
from stillroom.kvcache.tree.provenance import PlaceableNodes

UNKNOWN_IMPACT = 0.75
"""CCI of a copy that was not measured: the middle of its range, [0.5, 1]."""
CopyOf = Callable[[Piece, Sequence[bytes]], Node | None]
"""Chooses the copy of a chunk to place, given the contents of the chunks before it in the prompt."""
_LARGEST_RATIO, _LARGEST_ALPHA = 0.6, 4.0
"""Above these, computing everything is as fast."""
_QUERY_SELECTORS = ("question", "question_mean")


@dataclass(frozen=True, slots=True)
class AnywhereOptions:
    """How KV is reused at other positions."""

    recompute_ratio: float
    """Share of the placed chunks' tokens that is recomputed, in [0, 1]; 1 gives the KV of a full prefill."""
    selector: TokenSelector
    """Chooses these tokens."""
    alpha: float | None = None
    """Recompute each chunk's own CFO, scaled by this, in place of the ratio (Cache-Craft Eq. 12)."""
    focus_window: int = 0
    """Recompute nothing of chunks that the question does not attend to, as this many consecutive layers agree
    (Cache-Craft Algorithm 1); 0: recompute in all chunks."""
    rotates_keys: bool = True
    """False leaves keys at their old position, which is wrong: for Cache-Craft's Table 3."""
    only_prepared: bool = False
    """Place only copies that were computed in their document's context (`prepared`)."""

    @property
    def ranks_kept_tokens(self) -> bool:
        """Whether the selector ranks a copy's tokens by attention that was measured when the copy was computed."""
        return self.selector in ("context", "received")

    @property
    def looks_from_question(self) -> bool:
        """Whether a query pass chooses what to recompute (`recompute`)."""
        return self.selector in _QUERY_SELECTORS or self.focus_window > 0

    def share(self, reusability: "Reusability") -> float:
        """Return the share of a chunk's tokens to recompute if the question attends to it, in [0, 1]."""
        return self.recompute_ratio if self.alpha is None else min(1.0, self.alpha * reusability.overhead)

    def next_safer(self) -> "AnywhereOptions | None":
        """Return options that recompute twice as much; None where computing everything is as fast, and for prepared
        copies, of which nothing is recomputed."""
        if self.only_prepared:
            return None
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


class Reusability(NamedTuple):
    """How well a copy fits behind other chunks than those it was computed behind (Cache-Craft 3.1, 3.2)."""

    overlap: float
    """beta' (Eq. 8)."""
    impact: float | None
    """CCI (Eq. 11); None if not measured."""

    @property
    def overhead(self) -> float:
        """CFO with alpha = 1 (Eq. 12)."""
        return fix_overhead(UNKNOWN_IMPACT if self.impact is None else self.impact, self.overlap, 1.0)


AS_PREPARED = Reusability(1.0, None)
"""Of a copy in its document's context: it is used as it is, whatever stands before it in the prompt."""


class Placement(NamedTuple):
    """A piece of a prompt that takes its KV from a node of another context."""

    piece_index: int
    node: Node
    tier: Tier
    """The node's fastest tier when that was decided."""
    reusability: Reusability


def plan_placements(
    tree: KnowledgeTree,
    pieces: Sequence[Piece],
    copy_of: CopyOf,
    num_exact: int,
    options: AnywhereOptions,
    *,
    always_loads: bool,
) -> list[Placement]:
    """Return the chunks behind the first `num_exact` pieces worth placing, each with its best copy.

    Placing pays if loading the copy is faster than computing the tokens that are then not recomputed, by their measured
    cost as part of a longer prefill.
    """
    found = []
    before = [piece.content for piece in pieces[:num_exact] if piece.kind is SegmentKind.CHUNK]
    for index in range(num_exact, len(pieces)):
        piece = pieces[index]
        if piece.kind is not SegmentKind.CHUNK:
            continue
        node = copy_of(piece, before)
        if node is not None:
            tier = node.tier
            assert tier is not None
            placement = Placement(index, node, tier, reusability(node, before))
            if always_loads or is_worth_loading(tree, placement, options):
                found.append(placement)
        before.append(piece.content)
    return found


def placeable_copy(
    tree: KnowledgeTree, placeable: PlaceableNodes, options: AnywhereOptions, piece: Piece, before: Sequence[bytes]
) -> Node | None:
    """Return the copy of a chunk that fits best behind these chunks, given by their contents; None without one."""
    variants = filter(placeable.may_place, tree.variants(piece.content))
    usable = (node for node in variants if _can_be_ranked(node, options))
    return best_variant(usable, before, piece.start)


def _can_be_ranked(node: Node, options: AnywhereOptions) -> bool:
    """Whether the selector can rank a copy's tokens; not if only a sample was measured when it was computed."""
    return not options.ranks_kept_tokens or (node.mass is not None and node.mass.token_inter is not None)


def is_worth_loading(tree: KnowledgeTree, placement: Placement, options: AnywhereOptions) -> bool:
    """Whether loading a copy is faster than computing what it saves."""
    return load_seconds(tree, placement) < saved_seconds(placement, options)


def pays_for_query_pass(
    tree: KnowledgeTree,
    placements: Sequence[Placement],
    num_exact: int,
    num_tokens: int,
    num_last: int,
    options: AnywhereOptions,
) -> bool:
    """Whether placements save more than the query pass costs that they make necessary; true where there is none.

    They save time together: what a GPU needs for one short chunk is hidden by reading the weights, which a step does
    once, so the sum of what each would save alone is too little.

    Args:
        num_exact: tokens of the exact prefix.
        num_tokens: of prompt and answer so far.
        num_last: tokens behind the last chunk: the question, and the answer so far.
    """
    if not options.looks_from_question or not any(0 < options.share(one.reusability) < 1 for one in placements):
        return True
    seconds, num_left = tree.profile.prefill_seconds, num_tokens - num_exact
    num_placed = sum(one.node.num_tokens for one in placements)
    num_reused = int(sum((1.0 - options.share(one.reusability)) * one.node.num_tokens for one in placements))
    saved = seconds(num_exact, num_left) - seconds(num_exact + num_reused, num_left - num_reused)
    loads = sum(load_seconds(tree, one) for one in placements)
    return saved - loads > seconds(num_exact + num_placed, num_last)


def load_seconds(tree: KnowledgeTree, placement: Placement) -> float:
    """Return the seconds to load the copy to the device."""
    if placement.tier is Tier.DEVICE:
        return 0.0
    return tree.profile.load_seconds(
        placement.tier, tree.options.num_bytes(placement.node.num_tokens, placement.node.bits)
    )


def saved_seconds(placement: Placement, options: AnywhereOptions) -> float:
    """Return the seconds of computing that a placement saves; loading is not deducted."""
    node = placement.node
    return (1.0 - options.share(placement.reusability)) * node.cost_here * node.num_tokens


def best_variant(variants: Iterable[Node], before: Sequence[bytes], position: int) -> Node | None:
    """Return the copy with the lowest CFO; of equal copies the one in the fastest tier, then the nearest position."""

    def order(node: Node) -> tuple[float, int, int]:
        assert node.tier is not None
        return reusability(node, before).overhead, node.tier, abs(node.first_position - position)

    return min(variants, key=order, default=None)


def reusability(node: Node, before: Sequence[bytes]) -> Reusability:
    """Return how well a node fits behind these chunks, given by their contents in order."""
    if node.mass is None:
        return Reusability(context_overlap(node.before, before), None)
    return Reusability(adjusted_overlap(node.mass, before), node.mass.impact)


def context_overlap(old: Sequence[bytes], new: Sequence[bytes]) -> float:
    """Return Cache-Craft's beta' (Eq. 6 to 8) with equal weights for all chunks of the old context, in [0, 1].

    Used where the attention to each chunk was not measured.
    """
    if not old:
        return 0.0 if new else 1.0
    chunks = set(old)
    return len(chunks & set(new)) / len(chunks) * (1.0 - order_penalty(old, new))
