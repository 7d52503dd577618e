"""Names of things, as distinct types: mixing them up is a type error.

A chunk id is a function of document, place and text, never of insertion order, so that a ranking whose ties are
broken by chunk id is a function of the corpus.
"""

import hashlib
from typing import NewType

from stillroom.errors import UsageError

DocumentId = NewType("DocumentId", str)
"""Absolute path of a file, or `<path>#<record id>` for one record of a JSONL file."""

ChunkId = NewType("ChunkId", int)
"""63-bit positive integer; shown to people as 16 hexadecimal digits."""

RequestId = NewType("RequestId", str)

BlockId = NewType("BlockId", int)
"""Index of a block in the block pool; its slots are [id * block_size, (id + 1) * block_size)."""


def chunk_id_of(document_id: DocumentId, ordinal: int, text: str) -> ChunkId:
    """The identity of the `ordinal`-th chunk (from 0) of a document: 63 bits of a SHA-256."""
    digest = hashlib.sha256(f"{document_id}\0{ordinal}\0{text}".encode()).digest()
    return ChunkId(int.from_bytes(digest[:8], "big") >> 1)


def format_chunk_id(chunk_id: ChunkId) -> str:
    """16 hexadecimal digits."""
    return f"{chunk_id:016x}"


def parse_chunk_id(text: str) -> ChunkId:
    """The inverse of `format_chunk_id`.

    Raises:
        UsageError: the text is not 16 hexadecimal digits.
    """
    try:
        value = int(text, 16) if len(text) == 16 else -1
    except ValueError:
        value = -1
    if value < 0:
        raise UsageError(f"{text!r} is not a chunk id; a chunk id is 16 hexadecimal digits")
    return ChunkId(value)
