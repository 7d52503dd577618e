"""What becomes of a lease whose chunks are placed: planned, copied, repaired, and what is kept of it afterwards."""

from collections.abc import Sequence

from stillroom.core.prompt import SegmentKind
from stillroom.core.reuse import Variant
from stillroom.kvcache.knowledge_tree import KnowledgeTree
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.placement import AnywhereOptions, Placement, load_seconds, plan_placements, saved_seconds
from stillroom.kvcache.repair import PlacedChunk, Repair


def plan_for(
    tree: KnowledgeTree, lease: Lease, num_exact: int, options: AnywhereOptions | None, *, always_loads: bool
) -> list[Placement]:
    """What to place of a prompt behind its first `num_exact` pieces.

    Nothing for who has begun with exact KV, and had to make room: who reads that in the report can rely on it.
    """
    began_exactly = lease.reuse is not None and not lease.reuse.has_placed
    if options is None or began_exactly or not lease.may_place:
        return []
    return plan_placements(tree, lease.pieces, num_exact, options, always_loads=always_loads)


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
            if lease.weigher is not None:
                lease.weigher.leave_out(placement.piece_index)
            mass = node.mass
            known = (None, None) if mass is None else (mass.token_inter, mass.received)
            chunks.append(PlacedChunk(range(piece.start, piece.end), placement.reusability, *known))
    lease.placements, lease.repair = tuple(placed), None
    if placed:
        assert options is not None
        num_exact = sum(node.num_tokens for node in lease.nodes)
        question_start = lease.prompt.num_tokens - len(lease.prompt.segments[-1].token_ids)
        lease.repair = Repair(num_exact, chunks, question_start, options)
    return placed


def describe(tree: KnowledgeTree, placement: Placement, options: AnywhereOptions) -> Variant:
    """For the report, before it is known what the question looks at."""
    reusability = placement.reusability
    behind = [tree.variants(content) for content in placement.node.before]
    return Variant(
        behind=tuple(nodes[0].chunk_id if nodes else None for nodes in behind),
        first_position=placement.node.first_position,
        overlap=reusability.overlap,
        impact=reusability.impact,
        overhead=reusability.overhead if options.alpha is None else options.share(reusability),
        saved_seconds=saved_seconds(placement, options) - load_seconds(tree, placement),
    )


def account_repair(tree: KnowledgeTree, lease: Lease) -> None:
    """What is computed again of the placed chunks is known now."""
    assert lease.repair is not None and lease.reuse is not None
    num_chosen, is_focused = lease.repair.num_chosen(), lease.repair.is_focused()
    tree.stats.recomputed_tokens += sum(num_chosen)
    tree.stats.unfocused += is_focused.count(False)
    lease.reuse = lease.reuse.repaired(num_chosen, is_focused)


def keep_to_be_placed(tree: KnowledgeTree, lease: Lease) -> None:
    """Chunks that were computed behind placed ones, and have no copy yet, are kept to be placed themselves."""
    first = lease.placements[0].piece_index
    is_placed = {placement.piece_index for placement in lease.placements}
    before = [piece.content for piece in lease.pieces[:first] if piece.kind is SegmentKind.CHUNK]
    for index, piece in enumerate(lease.pieces[first : lease.num_keepable], start=first):
        if piece.kind is not SegmentKind.CHUNK:
            continue
        if index not in is_placed and not tree.variants(piece.content):
            own = lease.table.blocks_of(piece.start, piece.num_tokens)
            node = tree.insert_alone(piece, own, tuple(before), lease.cost_per_token)
            node.mass = None if lease.weigher is None else lease.weigher.mass_of(index)
            tree.acquire([node])  # its blocks are not free for others while the lease has them
            lease.nodes.append(node)
        before.append(piece.content)
