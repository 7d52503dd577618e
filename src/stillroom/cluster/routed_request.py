"""A request as a router sees it: names and lengths of its pieces, no tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from stillroom.core.prompt import SegmentKind
from stillroom.kvcache.tree.pieces import Piece


@dataclass(frozen=True, slots=True)
class RoutedPiece:
    """A piece of a prompt. Both names are those of the engines' knowledge trees (`kvcache.tree.pieces`)."""

    key: bytes
    """Names the piece behind all tokens before it: exact reuse."""
    content: bytes
    """Names the piece at any position: reuse in other prompts."""
    num_tokens: int
    is_chunk: bool = True


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A prompt to send to an engine."""

    number: int
    """Number of the request at its front, from 0; for round robin."""
    pieces: tuple[RoutedPiece, ...]
    """In the order of the prompt."""
    num_tail_tokens: int = 1
    """Tokens behind the pieces, which every engine computes; at least 1."""

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces) + self.num_tail_tokens

    @property
    def chunks(self) -> tuple[bytes, ...]:
        """Contents of its chunks, in order; of all pieces if it has no chunk; an empty name if it has no pieces."""
        found = tuple(piece.content for piece in self.pieces if piece.is_chunk)
        return found or tuple(piece.content for piece in self.pieces) or (b"",)


def routed_request(number: int, pieces: Sequence[Piece], num_tokens: int) -> RoutedRequest:
    """Make a routed request from the pieces of `PrefixKeys.pieces`.

    Args:
        num_tokens: of the whole prompt.
    """
    routed = tuple(
        RoutedPiece(piece.key, piece.content, piece.num_tokens, piece.kind is SegmentKind.CHUNK) for piece in pieces
    )
    return RoutedRequest(number, routed, num_tokens - sum(piece.num_tokens for piece in routed))
