"""Applies placements to a lease: plans them, copies KV, starts the recomputing, keeps computed chunks afterwards."""

from collections.abc import Sequence

from stillroom.core.ids import ChunkId
from stillroom.core.kv import FULL_BITS, Tier
from stillroom.core.prompt import SegmentKind
from stillroom.core.reuse import Variant
from stillroom.kvcache.chunk_reuse.plan import (
    AnywhereOptions,
    Placement,
    load_seconds,
    pays_for_query_pass,
    placeable_copy,
    plan_placements,
    saved_seconds,
)
from stillroom.kvcache.chunk_reuse.recompute import PlacedChunk, SelectiveRecompute
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.prepared import plan_prepared
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import Piece
from stillroom.kvcache.tree.provenance import MAX_SEEN, Context, PromptContext, saw_other_messages, system_of


def plan_for(
    tree: KnowledgeTree,
    lease: Lease,
    num_exact: int,
    num_tokens: int,
    options: AnywhereOptions | None,
    *,
    always_loads: bool,
) -> list[Placement]:
    """Return what to place behind the first `num_exact` pieces of a prompt of `num_tokens`, with its answer so far.

    A preempted request that began with exact KV resumes with exact KV, as its report says: nothing is placed.
    """
    began_exact = lease.reuse is not None and not lease.reuse.has_placed
    if options is None or began_exact or not lease.may_place:
        return []
    if options.only_prepared:
        return plan_prepared(tree, lease, num_exact, options, always_loads=always_loads)

    def copy_of(piece: Piece, before: Sequence[bytes]) -> Node | None:
        return placeable_copy(tree, lease.placeable, options, piece, before)

    found = plan_placements(tree, lease.pieces, copy_of, num_exact, options, always_loads=always_loads)
    exact_tokens = sum(piece.num_tokens for piece in lease.pieces[:num_exact])
    num_last = num_tokens - lease.prompt.num_tokens + len(lease.prompt.segments[-1].token_ids)
    is_worth_it = always_loads or pays_for_query_pass(tree, found, exact_tokens, num_tokens, num_last, options)
    return found if is_worth_it else []


def place(
    tree: KnowledgeTree, lease: Lease, placements: Sequence[Placement], options: AnywhereOptions | None
) -> list[Placement]:
    """Copy nodes into the lease's own blocks. Return what was placed; chunks with damaged copies are computed."""
    placed, chunks = [], []
    for placement in placements:
        assert options is not None
        piece, node = lease.pieces[placement.piece_index], placement.node
        blocks = lease.table.blocks_of(piece.start, piece.num_tokens)
        position = piece.start if options.rotates_keys else node.first_position
        if tree.place(node, blocks, position, placement.reusability.overhead):
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


def describe(tree: KnowledgeTree, lease: Lease, placement: Placement, options: AnywhereOptions) -> Variant:
    """Describe a placement for the report, before it is known what the question attends to."""
    reusability = placement.reusability
    behind = _chunks_before(tree, placement.node)
    if options.only_prepared and not placement.node.document_path:  # by a prompt that began like this one
        before = lease.pieces[: placement.piece_index]
        behind = tuple(piece.chunk_id for piece in before if piece.chunk_id is not None)
    return Variant(
        behind=behind,
        first_position=placement.node.first_position,
        overlap=reusability.overlap,
        impact=reusability.impact,
        overhead=reusability.overhead if options.alpha is None else options.share(reusability),
        saved_seconds=saved_seconds(placement, options) - load_seconds(tree, placement),
        bits=FULL_BITS if placement.tier is Tier.DEVICE else placement.node.bits,
    )


def _chunks_before(tree: KnowledgeTree, node: Node) -> tuple[ChunkId | None, ...]:
    """The chunks before a node when it was computed, in order; None for a chunk without kept KV."""
    if node.document_path:
        return node.document_path[:-1]
    seen = node.seen  # a variant may belong to a document that the request may not see
    behind = [[variant.chunk_id for variant in tree.variants(content)] for content in node.before]
    return tuple(next((chunk_id for chunk_id in same if chunk_id in seen), None) for same in behind)


def record_recompute(tree: KnowledgeTree, lease: Lease) -> None:
    """Count the tokens of placed chunks that are recomputed, now that they are chosen, and add them to the report."""
    assert lease.recompute is not None and lease.reuse is not None
    num_chosen, is_focused = lease.recompute.num_chosen(), lease.recompute.is_focused()
    tree.stats.recomputed_tokens += sum(num_chosen)
    tree.stats.unfocused += is_focused.count(False)
    lease.reuse = lease.reuse.repaired(num_chosen, is_focused)


def keep_computed_chunks(tree: KnowledgeTree, lease: Lease) -> None:
    """Keep chunks computed behind placed chunks as detached nodes, where the request found no copy that it may place;
    behind prepared copies for prompts that begin alike.

    Such a chunk has seen every chunk before it and all that the placed chunks had seen. It is not kept if it has seen
    turns of a conversation, which may quote any document, or too many chunks.
    """
    is_prepared = bool(lease.placements[0].node.document_path)
    placed = {placement.piece_index: placement.node for placement in lease.placements}
    first, system = lease.placements[0].piece_index, system_of(lease.pieces)
    before: list[bytes] = []
    seen: set[ChunkId] = set()
    context = PromptContext()
    for index, piece in enumerate(lease.pieces[: lease.num_keepable]):
        if piece.kind is SegmentKind.SYSTEM:
            continue
        node = placed.get(index)
        if piece.chunk_id is None or (node is not None and saw_other_messages(node, system)):
            break
        seen |= {piece.chunk_id} if node is None else {piece.chunk_id, *node.seen}
        if len(seen) > MAX_SEEN:
            break
        if index > first and node is None and is_prepared:
            _keep_detached(tree, lease, index, Context(tuple(before), frozenset(seen), in_prompt=context.name))
        elif index > first and node is None and not any(map(lease.placeable.may_place, tree.variants(piece.content))):
            _keep_detached(tree, lease, index, Context(tuple(before), frozenset(seen), system))
        context.add(piece, None if node is None else node.key)
        before.append(piece.content)


def _keep_detached(tree: KnowledgeTree, lease: Lease, index: int, context: Context) -> None:
    piece = lease.pieces[index]
    own = lease.table.blocks_of(piece.start, piece.num_tokens)
    node = tree.insert_detached(piece, own, context, lease.cost_per_token)
    node.mass = None if lease.mass_sampler is None else lease.mass_sampler.mass_of(index)
    tree.acquire([node])  # its blocks cannot be evicted while the lease holds them
    lease.nodes.append(node)
