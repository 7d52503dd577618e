"""Provenance of kept KV: the chunks and messages that its tokens attended to ("seen"), and which requests may use it.

A node on an exact path has seen that path and nothing else. A detached node, which has no parent, has seen every chunk
before it in its prompt, and all that the placed nodes among those had seen. Its key hashes that set, so nodes of
different provenance have different keys, and a set that does not match the key is refused. A node in its document's
context is detached too; it has seen chunks of its own document, and its key hashes them in order. So is a node that was
computed behind such copies; its key hashes the prompt before it with the keys of these copies.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NO_CONTENT, NodeKey
from stillroom.core.prompt import SegmentKind
from stillroom.core.request import MaySee
from stillroom.kvcache.tree.node import Node
from stillroom.kvcache.tree.pieces import Piece

MAX_SEEN = 256
"""Most chunks that a detached node may have seen; KV that has seen more is not kept. Bounds what the removal of one
document drops."""

_DETACHED, _IN_DOCUMENT, _IN_PROMPT = b"anywhere", b"document", b"prompt"


@dataclass(frozen=True, slots=True)
class Context:
    """What the KV of a detached node depends on besides its own tokens."""

    before: tuple[bytes, ...]
    """Contents of the chunks before it, in order."""
    seen: frozenset[ChunkId]
    """Chunks it has seen, its own included."""
    system: bytes = NO_CONTENT
    """Content of the prompt's system message."""
    document_path: tuple[ChunkId, ...] = ()
    """The same chunks in the order of their document, if it has seen nothing else."""
    in_prompt: bytes = b""
    """For KV behind prepared copies: the name of all that stands before it in its prompt (`PromptContext`)."""

    def key_of(self, content: bytes, first_position: int) -> NodeKey:
        """Return the key of a detached node of this context."""
        if self.in_prompt:
            return _hashed(_IN_PROMPT, content, first_position, (), self.in_prompt)
        if self.document_path:
            return document_key(content, first_position, self.document_path, self.system)
        return detached_key(content, first_position, self.seen, self.system)


def detached_key(content: bytes, first_position: int, seen: Iterable[ChunkId], system: bytes) -> NodeKey:
    """Return the key of a detached node whose chunks came from any documents."""
    return _hashed(_DETACHED, content, first_position, sorted(seen), system)


def document_key(content: bytes, first_position: int, path: Iterable[ChunkId], system: bytes) -> NodeKey:
    """Return the key of a node in its document's context.

    Args:
        path: chunks of the document in order, from the first that it has seen to itself.
    """
    return _hashed(_IN_DOCUMENT, content, first_position, path, system)


def _hashed(kind: bytes, content: bytes, first_position: int, chunk_ids: Iterable[ChunkId], system: bytes) -> NodeKey:
    ids = b"".join(chunk_id.to_bytes(8, "little") for chunk_id in chunk_ids)
    return NodeKey(hashlib.sha256(kind + content + first_position.to_bytes(8, "little") + system + ids).digest())


class PromptContext:
    """Names what stands before each piece of a prompt, from its first prepared copy on: which copies, and which tokens
    were computed between them. A later prompt that begins alike may use what was computed there."""

    def __init__(self) -> None:
        self.name = b""
        """32 bytes; empty before the first copy, where the pieces' own keys name everything."""

    def key_of(self, piece: Piece) -> NodeKey:
        """Return the key of a piece that is computed here. Precondition: a copy was added."""
        assert self.name
        return Context((), frozenset(), in_prompt=self.name).key_of(piece.content, piece.start)

    def add(self, piece: Piece, placed: NodeKey | None) -> None:
        """Go on to the next piece.

        Args:
            placed: key of the copy that this piece takes its KV from; None if it is computed.
        """
        if self.name:
            self.name = hashlib.sha256(self.name + (placed or self.key_of(piece))).digest()
        elif placed is not None:
            self.name = hashlib.sha256(piece.parent + placed).digest()


def system_of(pieces: Sequence[Piece]) -> bytes:
    """Return the content of a prompt's system message; `NO_CONTENT` without one."""
    return pieces[0].content if pieces and pieces[0].kind is SegmentKind.SYSTEM else NO_CONTENT


def saw_other_messages(node: Node, system: bytes) -> bool:
    """Whether the KV of a node has seen a message other than this system message."""
    return any(ancestor.chunk_id is None and ancestor.content != system for ancestor in node.ancestors())


class PlaceableNodes:
    """Decides which nodes a request may place: those whose KV has seen nothing that the request may not see.

    A request may see its own prompt and the chunks that its filter allows. A message (the system message, an earlier
    turn) may quote any document, so KV that has seen a message is used only if the prompt contains it too.
    """

    def __init__(self, pieces: Sequence[Piece], may_see: MaySee | None) -> None:
        """
        Args:
            may_see: decides on chunks outside the prompt; None allows every chunk of the request's tenant.
        """
        self._messages = {piece.content for piece in pieces if piece.chunk_id is None}
        self._own = {piece.chunk_id for piece in pieces if piece.chunk_id is not None}
        self._system = system_of(pieces)
        self._may_see = may_see
        self._known: dict[NodeKey, bool] = {}

    @property
    def system(self) -> bytes:
        """Content of the request's system message; `NO_CONTENT` without one."""
        return self._system

    def may_see(self, seen: set[ChunkId]) -> bool:
        """Whether the request may use KV that has seen these chunks and no message but its own."""
        if self._may_see is None:
            return True
        others = seen - self._own
        return not others or self._may_see(others)

    def may_place(self, node: Node) -> bool:
        """Whether the request may place a node; decided once for each node."""
        known = self._known.get(node.key)
        if known is None:
            known = self._known[node.key] = self._may_place(node)
        return known

    def _may_place(self, node: Node) -> bool:
        messages = (ancestor.content for ancestor in node.ancestors() if ancestor.chunk_id is None)
        if not self._messages.issuperset(messages):
            return False
        if node.detached_seen:
            key = detached_key(node.content, node.first_position, node.detached_seen, self._system)
            if key != node.key:  # after another system message, or of unknown provenance
                return False
        return self.may_see(node.seen)
