"""What kept KV has seen: the chunks and messages that its tokens attended to, and which requests may use it therefore.

A node on an exact path has seen that path and nothing else. A node that hangs from none has seen every chunk before it
in its prompt, and all that the placed nodes among those had seen. Its key is a hash of that set, so two copies of
different provenance never share a name, and a set that does not belong to a copy is not accepted for it.
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
"""Chunks that a node which hangs from none may have seen; one that has seen more is not kept. It bounds what the
removal of one document takes along."""

_ALONE = b"anywhere"


@dataclass(frozen=True, slots=True)
class Context:
    """What the KV of a node that hangs from none depends on, besides its own tokens."""

    before: tuple[bytes, ...]
    """Contents of the chunks that stood before it, in order."""
    seen: frozenset[ChunkId]
    """Chunks whose text it has seen, its own included."""
    system: bytes = NO_CONTENT
    """Content of the prompt's system message."""


def detached_key(content: bytes, first_position: int, seen: Iterable[ChunkId], system: bytes) -> NodeKey:
    """The key of a node that hangs from none."""
    ids = b"".join(chunk_id.to_bytes(8, "little") for chunk_id in sorted(seen))
    return NodeKey(hashlib.sha256(_ALONE + content + first_position.to_bytes(8, "little") + system + ids).digest())


def system_of(pieces: Sequence[Piece]) -> bytes:
    """The content of a prompt's system message; `NO_CONTENT` if it has none."""
    return pieces[0].content if pieces and pieces[0].kind is SegmentKind.SYSTEM else NO_CONTENT


def saw_other_messages(node: Node, system: bytes) -> bool:
    """Whether its KV has seen a message other than this system message."""
    return any(one.chunk_id is None and one.content != system for one in node.ancestors())


class View:
    """Which nodes one request may place: those whose KV has seen nothing that the request may not see.

    A request may see its own prompt and the chunks that its filter allows. Messages (the system message, earlier turns
    of a conversation) may quote any document, so KV that has seen one is used only where the prompt holds it too.
    """

    def __init__(self, pieces: Sequence[Piece], may_see: MaySee | None) -> None:
        """
        Args:
            may_see: of chunks outside the prompt; None allows every chunk of the request's tenant.
        """
        self._messages = {piece.content for piece in pieces if piece.chunk_id is None}
        self._own = {piece.chunk_id for piece in pieces if piece.chunk_id is not None}
        self._system = system_of(pieces)
        self._may_see = may_see
        self._known: dict[NodeKey, bool] = {}

    def may_place(self, node: Node) -> bool:
        """Asks about each node once."""
        known = self._known.get(node.key)
        if known is None:
            known = self._known[node.key] = self._may_place(node)
        return known

    def _may_place(self, node: Node) -> bool:
        if not all(one.chunk_id is not None or one.content in self._messages for one in node.ancestors()):
            return False
        if node.detached_seen:
            key = detached_key(node.content, node.first_position, node.detached_seen, self._system)
            if key != node.key:  # behind another system message, or of unknown provenance
                return False
        others = node.seen - self._own
        return self._may_see is None or not others or self._may_see(others)
