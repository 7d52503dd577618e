"""What becomes of a lease whose chunks are placed: planned, copied, repaired, and what is kept of it afterwards."""

from collections.abc import Sequence

from stillroom.core.ids import ChunkId
from stillroom.core.prompt import SegmentKind
from stillroom.core.reuse import Variant
from stillroom.kvcache.chunk_reuse.plan import AnywhereOptions, Placement, load_seconds, plan_placements, saved_seconds
from stillroom.kvcache.chunk_reuse.recompute import PlacedChunk, SelectiveRecompute
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.provenance import MAX_SEEN, Context, saw_other_messages, system_of


def plan_for(
    tree: KnowledgeTree, lease: Lease, num_exact: int, options: AnywhereOptions | None, *, always_loads: bool
) -> list[Placement]:
    """What to place of a prompt behind its first `num_exact` pieces.

    Nothing for who has begun with exact KV, and had to make room: who reads that in the report can rely on it.
    """
    began_exactly = lease.reuse is not None and not lease.reuse.has_placed
    if options is None or began_exactly or not lease.may_place:
        return []
    return plan_placements(tree, lease.pieces, lease.view, num_exact, options, always_loads=always_loads)


def place(
    tree: KnowledgeTree, lease: Lease, placements: Sequence[Placement], options: AnywhereOptions | None
) -> list[Placement]:
    """Copy nodes into the lease's own blocks; returns what was placed. What was damaged will be computed."""
    placed, chunks = [], []
    for placement in placements:
        assert options is not None
        piece, node = lease.pieces[placement.piece_index], placement.node
        blocks = lease.table.blocks_of(piece.start, piece.num_tokens)
        at = piece.start if options.turns_keys else node.first_position
        if tree.place(node, blocks, at, placement.reusability.overhead):
            placed.append(placement)
            if lease.mass_sampler is not None:
                lease.mass_sampler.skip(placement.piece_index)
            mass = node.mass
            known = (None, None) if mass is None else (mass.token_inter, mass.received)
            chunks.append(PlacedChunk(range(piece.start, piece.end), placement.reusability, *known))
    lease.placements, lease.recompute = tuple(placed), None
    if placed:
        assert options is not None
        num_exact = sum(node.num_tokens for node in lease.nodes)
        question_start = lease.prompt.num_tokens - len(lease.prompt.segments[-1].token_ids)
        lease.recompute = SelectiveRecompute(num_exact, chunks, question_start, options)
    return placed


def describe(tree: KnowledgeTree, placement: Placement, options: AnywhereOptions) -> Variant:
    """For the report, before it is known what the question looks at."""
    reusability = placement.reusability
    seen = placement.node.seen  # the same text may be kept of a document that the request may not see
    behind = [[one.chunk_id for one in tree.variants(content)] for content in placement.node.before]
    return Variant(
        behind=tuple(next((one for one in same if one in seen), None) for same in behind),
        first_position=placement.node.first_position,
        overlap=reusability.overlap,
        impact=reusability.impact,
        overhead=reusability.overhead if options.alpha is None else options.share(reusability),
        saved_seconds=saved_seconds(placement, options) - load_seconds(tree, placement),
    )


def record_recompute(tree: KnowledgeTree, lease: Lease) -> None:
    """What is computed again of the placed chunks is known now."""
    assert lease.recompute is not None and lease.reuse is not None
    num_chosen, is_focused = lease.recompute.num_chosen(), lease.recompute.is_focused()
    tree.stats.recomputed_tokens += sum(num_chosen)
    tree.stats.unfocused += is_focused.count(False)
    lease.reuse = lease.reuse.repaired(num_chosen, is_focused)


def keep_to_be_placed(tree: KnowledgeTree, lease: Lease) -> None:
    """Keep chunks that were computed behind placed ones, to be placed themselves, where the request found no copy.

    They have seen every chunk before them and all that the placed ones had seen. What has seen turns of a conversation,
    or too many chunks, is not kept: turns may quote any document.
    """
    placed = {placement.piece_index: placement.node for placement in lease.placements}
    first, system = lease.placements[0].piece_index, system_of(lease.pieces)
    before: list[bytes] = []
    seen: set[ChunkId] = set()
    for index, piece in enumerate(lease.pieces[: lease.num_keepable]):
        if piece.kind is SegmentKind.SYSTEM:
            continue
        node = placed.get(index)
        if piece.chunk_id is None or (node is not None and saw_other_messages(node, system)):
            break
        seen |= {piece.chunk_id} if node is None else {piece.chunk_id, *node.seen}
        if len(seen) > MAX_SEEN:
            break
        if index > first and node is None and not any(map(lease.view.may_place, tree.variants(piece.content))):
            context = Context(tuple(before), frozenset(seen), system)
            _keep_alone(tree, lease, index, context)
        before.append(piece.content)


def _keep_alone(tree: KnowledgeTree, lease: Lease, index: int, context: Context) -> None:
    piece = lease.pieces[index]
    own = lease.table.blocks_of(piece.start, piece.num_tokens)
    node = tree.insert_detached(piece, own, context, lease.cost_per_token)
    node.mass = None if lease.mass_sampler is None else lease.mass_sampler.mass_of(index)
    tree.acquire([node])  # its blocks are not free for others while the lease has them
    lease.nodes.append(node)
