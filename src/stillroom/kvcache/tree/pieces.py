"""Cuts a prompt into pieces that can be kept; the key of each is a SHA-256 chain over everything before it (llmds 3.2).

A piece begins at a block boundary. Each segment but the last is one piece and one node of the knowledge tree (RAGCache
5.1: one document). The last segment holds the question and is cut into pieces of `tail_tokens`: long conversations and
raw prompts share KV as far as they agree, and a short question is not kept. The rest of the last segment, at least the
prompt's last token, is always computed.

Two pieces have equal keys exactly if model, tenant, all earlier tokens, their cuts and their own tokens are equal
(SHA-256 taken as injective). Documents with equal tokens share KV.
"""

import hashlib
from typing import NamedTuple

from stillroom.core.ids import ChunkId
from stillroom.core.kv import NO_TENANT, NodeKey, OwnerTag, owner_of
from stillroom.core.prompt import SegmentedPrompt, SegmentKind

_ROOT = b"stillroom-kv-1"


class Piece(NamedTuple):
    """Tokens [start, start + num_tokens) of a prompt."""

    key: NodeKey
    parent: NodeKey
    content: bytes
    """Hash of model, tenant and its tokens, independent of position."""
    start: int
    num_tokens: int
    segment: int
    """Index of the segment it belongs to."""
    kind: SegmentKind
    chunk_id: ChunkId | None
    owner: OwnerTag = NO_TENANT

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def piece_ends(prompt: SegmentedPrompt, tail_tokens: int) -> list[int]:
    """Return the positions where the pieces of a prompt end."""
    ends, start = [], 0
    for length in prompt.lengths[:-1]:
        start += length
        ends.append(start)
    num_pieces = (prompt.lengths[-1] - 1) // tail_tokens
    return ends + [start + tail_tokens * number for number in range(1, num_pieces + 1)]


class PrefixKeys:
    """Cuts prompts into pieces and computes their keys, for one model."""

    def __init__(self, fingerprint: bytes, tail_tokens: int) -> None:
        """
        Args:
            fingerprint: hash of everything but tokens that KV depends on: weights, dtype and so on.
            tail_tokens: length of a piece of the last segment; a multiple of the block size.
        """
        self.fingerprint = fingerprint
        self.tail_tokens = tail_tokens

    def root(self, salt: str = "") -> NodeKey:
        """Return the parent key of a tenant's first pieces; tenants of different salts share no KV."""
        return NodeKey(hashlib.sha256(b"\0".join((_ROOT, self.fingerprint, salt.encode()))).digest())

    def pieces(self, prompt: SegmentedPrompt, salt: str = "") -> tuple[Piece, ...]:
        """Return the pieces of a prompt in order of position; the end of the last segment is in none."""
        found: list[Piece] = []
        parent = root = self.root(salt)
        owner, start = owner_of(salt), 0
        last, tokens = len(prompt.segments) - 1, prompt.array
        for index, (segment, size) in enumerate(zip(prompt.segments, prompt.lengths, strict=True)):
            num_pieces = 1 if index < last else (size - 1) // self.tail_tokens
            num_tokens = size if index < last else self.tail_tokens
            for _ in range(num_pieces):
                content = hashlib.sha256(root + tokens[start : start + num_tokens].tobytes()).digest()
                key = NodeKey(hashlib.sha256(parent + content).digest())
                chunk_id = segment.chunk_id
                found.append(Piece(key, parent, content, start, num_tokens, index, segment.kind, chunk_id, owner))
                parent, start = key, start + num_tokens
        return tuple(found)
