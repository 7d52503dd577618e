"""What becomes of a lease whose chunks are placed: planned, copied, repaired, and what is kept of it afterwards."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stillroom.core.prompt import SegmentKind
from stillroom.kvcache.knowledge_tree import KnowledgeTree
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.placement import AnywhereOptions, Placement, plan_placements
from stillroom.kvcache.repair import Repair


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
    placed, chunks, contexts = [], [], []
    for placement in placements:
        piece = lease.pieces[placement.piece_index]
        if tree.place(placement.node, lease.table.blocks_of(piece.start, piece.num_tokens), piece.start):
            placed.append(placement)
            chunks.append(range(piece.start, piece.end))
            known = placement.node.token_inter
            contexts.append(np.zeros(piece.num_tokens, np.float32) if known is None else known)
    lease.placements, lease.repair = tuple(placed), None
    if placed:
        assert options is not None
        num_exact = sum(node.num_tokens for node in lease.nodes)
        question_start = lease.prompt.num_tokens - len(lease.prompt.segments[-1].token_ids)
        lease.repair = Repair(num_exact, chunks, question_start, options, np.concatenate(contexts))
    return placed


def weigh(lease: Lease) -> None:
    """Have it measured how a prompt's tokens attend to its pieces."""
    lease.groups = np.full(lease.prompt.num_tokens, -1, dtype=np.int64)
    for index, piece in enumerate(lease.pieces):
        lease.groups[piece.start : piece.end] = index
    lease.masses = np.zeros((lease.prompt.num_tokens, len(lease.pieces)), np.float32)


def token_inter(lease: Lease, index: int) -> NDArray[np.float32] | None:
    """Attention of each token of a piece to the chunks before it (Cache-Craft Eq. 14); None if nobody measured it."""
    if lease.masses is None:
        return None
    piece = lease.pieces[index]
    chunks = [before for before in range(index) if lease.pieces[before].kind is SegmentKind.CHUNK]
    paid: NDArray[np.float32] = lease.masses[piece.start : piece.end, chunks].sum(axis=1)
    return paid


def account_repair(tree: KnowledgeTree, lease: Lease) -> None:
    """What is computed again of the placed chunks is known now."""
    assert lease.repair is not None and lease.reuse is not None
    num_chosen = lease.repair.num_chosen()
    tree.stats.recomputed_tokens += sum(num_chosen)
    lease.reuse = lease.reuse.repaired(num_chosen)


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
            node.token_inter = token_inter(lease, index)
            tree.acquire([node])  # its blocks are not free for others while the lease has them
            lease.nodes.append(node)
        before.append(piece.content)
