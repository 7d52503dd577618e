"""KV of chunks in the context of their own document: prepared before a question asks for it, and placed as it is.

A preparing prompt is the system message and consecutive chunks of one document. Each of its chunks becomes a node
without parent, whose key names the chunks of the document that it has seen, in order. A later prompt may place such a
node if these are still the chunks before it in its document; nothing of it is computed again, because that would
replace what it knows of its document by what the prompt happens to hold. Nodes without parent are evicted and read one
by one: the end of a document does not need its beginning. What a prompt computes behind prepared copies is kept for
prompts that begin with the same copies and the same chunks between them (`apply_placements.keep_computed_chunks`).
"""

from collections.abc import Sequence

from stillroom.core.ids import ChunkId
from stillroom.core.kv import FULL_BITS
from stillroom.core.prompt import SegmentKind
from stillroom.kvcache.chunk_reuse.plan import AS_PREPARED, AnywhereOptions, Placement, is_worth_loading
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import Piece
from stillroom.kvcache.tree.provenance import Context, PromptContext, document_key, system_of


def prepared_copy(tree: KnowledgeTree, lease: Lease, piece: Piece) -> Node | None:
    """Return the copy of a chunk that has seen most chunks before it in its document; None if there is none to use.

    Of equal copies the one in the fastest tier is returned.
    """
    if piece.chunk_id is None:
        return None
    before = lease.before.get(piece.chunk_id, ())
    best: Node | None = None
    for node in tree.variants(piece.content):
        is_better = best is None or (-len(node.document_path), node.tier) < (-len(best.document_path), best.tier)
        if is_better and _is_current(node, (*before, piece.chunk_id), lease):
            best = node
    return best


def plan_prepared(
    tree: KnowledgeTree, lease: Lease, num_exact: int, options: AnywhereOptions, *, always_loads: bool
) -> list[Placement]:
    """Return what to place behind the first `num_exact` pieces of a prompt: copies in their document's context, and
    between them what an earlier prompt computed behind the same copies."""
    found: list[Placement] = []
    context = PromptContext()
    for index, piece in enumerate(lease.pieces[num_exact:], start=num_exact):
        node = prepared_copy(tree, lease, piece)
        if node is None and context.name:
            node = tree.get(context.key_of(piece))
        placed = None
        if node is not None and node.tier is not None and lease.placeable.may_see(node.seen):
            placed = Placement(index, node, node.tier, AS_PREPARED)
            if not always_loads and not is_worth_loading(tree, placed, options):
                placed = None
        if placed is not None:
            found.append(placed)
        context.add(piece, None if placed is None else placed.node.key)
    return found


def _is_current(node: Node, path: tuple[ChunkId, ...], lease: Lease) -> bool:
    """Whether a node has seen the end of a path in its document, under the same system message, and nothing else."""
    own = node.document_path
    if not own or own != path[-len(own) :] or not lease.placeable.may_see(node.seen):
        return False
    return node.key == document_key(node.content, node.first_position, own, lease.placeable.system)


def prepared_path(tree: KnowledgeTree, lease: Lease) -> list[Node]:
    """Return the kept nodes that a preparing prompt begins with: its system message, then chunks in this context.

    A chunk that was narrowed and left the device ends the path: what is computed behind it would inherit its error.
    """
    found: list[Node] = []
    for index, piece in enumerate(lease.pieces[: num_pieces_to_keep(lease)]):
        context = _context_of(lease.pieces, index)
        key = piece.key if context is None else context.key_of(piece.content, piece.start)
        node = tree.get(key)
        if node is None or not (node.block_ids is not None or node.bits == FULL_BITS):
            break
        found.append(node)
    return found


def missing_bytes(tree: KnowledgeTree, lease: Lease, *, in_document: bool) -> int:
    """Return the bytes, where prepared KV is to last, of what a preparing prompt is for and what is not kept yet.

    Args:
        in_document: whether it prepares copies in their document's context, else beginnings of prompts.
    """
    num_bytes, bits = 0, tree.options.prepared_bits if in_document else FULL_BITS
    matched = 0 if in_document else len(tree.match(lease.pieces))
    for index, piece in enumerate(lease.pieces[matched : num_pieces_to_keep(lease)], start=matched):
        context = _context_of(lease.pieces, index) if in_document and piece.chunk_id in lease.prepares else None
        if context is not None:
            is_missing = tree.get(context.key_of(piece.content, piece.start)) is None
        else:
            is_missing = not in_document
        if is_missing:
            num_seen = sum(before.chunk_id is not None for before in lease.pieces[: index + 1])
            num_bytes += tree.tiers.prepared_size(piece.num_tokens, bits, num_seen)
    return num_bytes


def keep_prepared(tree: KnowledgeTree, lease: Lease, num_computed: int) -> None:
    """Keep the chunks of a preparing prompt that are complete: those within its first `num_computed` tokens.

    Also the chunks at its beginning that are prepared already, until it is complete: it goes on there if it is
    interrupted.

    Raises:
        NonFiniteError: a chunk's KV holds NaN or an infinity. It is not kept.
    """
    end = min(lease.num_keepable, num_pieces_to_keep(lease))
    while lease.num_committed < end and lease.pieces[lease.num_committed].end <= num_computed:
        piece, context = lease.pieces[lease.num_committed], _context_of(lease.pieces, lease.num_committed)
        own = lease.table.blocks_of(piece.start, piece.num_tokens)
        kept: Node | None = None
        if context is None and tree.get(piece.key) is None:
            kept = tree.insert(piece, own, lease.cost_per_token)  # used by every prompt
        elif context is not None:
            is_known = piece.chunk_id not in lease.prepares
            kept = tree.insert_detached(piece, own, context, lease.cost_per_token, is_passing=is_known)
        if kept is not None:
            tree.acquire([kept])
            lease.nodes.append(kept)
        lease.num_committed += 1
    if lease.num_committed == num_pieces_to_keep(lease):
        tree.drop([node for node in lease.nodes if _is_superseded(tree, node, lease)])


def _is_superseded(tree: KnowledgeTree, node: Node, lease: Lease) -> bool:
    """Whether a node was kept for this preparing prompt only: another copy of its chunk has seen more."""
    if not node.document_path or node.chunk_id in lease.prepares:
        return False
    own = node.document_path
    longer = (one for one in tree.variants(node.content) if one.document_path[-len(own) :] == own != one.document_path)
    return any(_is_current(one, one.document_path, lease) for one in longer)


def num_pieces_to_keep(lease: Lease) -> int:
    """Return how many pieces of a preparing prompt may be kept: its system message and chunks, not its question."""
    return sum(piece.kind in (SegmentKind.SYSTEM, SegmentKind.CHUNK) for piece in lease.pieces)


def _context_of(pieces: Sequence[Piece], index: int) -> Context | None:
    """The context of a chunk of a preparing prompt; None for its system message and its question."""
    if pieces[index].chunk_id is None:
        return None
    chunks = [piece for piece in pieces[: index + 1] if piece.chunk_id is not None]
    path = tuple(piece.chunk_id for piece in chunks if piece.chunk_id is not None)
    return Context(tuple(piece.content for piece in chunks[:-1]), frozenset(path), system_of(pieces), path)
