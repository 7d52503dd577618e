"""Ids as distinct types: using one for another is a type error.

A chunk id depends on document, ordinal and text, never on insertion order, so a ranking with ties broken by chunk id
depends on the corpus only.
"""

import hashlib
from typing import NewType

from stillroom.errors import UsageError

DocumentId = NewType("DocumentId", str)
"""Name of a file, or `<name>#<record id>` for a record of a JSONL file. The name of an upload is relative to the
knowledge base (`uploads/keys.md`); the name of another file is its absolute path."""

ChunkId = NewType("ChunkId", int)
"""63-bit non-negative integer; shown to users as 16 hexadecimal digits."""

RequestId = NewType("RequestId", str)

BlockId = NewType("BlockId", int)
"""Index of a block in the block pool; its slots are [id * block_size, (id + 1) * block_size)."""


def public_id(document_id: str) -> str:
    """Return the document id that tenants see, without folders of the server.

    The upload `uploads/notes/keys.md` keeps its name. The file `/srv/handbook/keys.md` becomes
    `files/6b0b9a1c37fd/keys.md`, with a hash of its folder.
    """
    path, mark, record = document_id.partition("#")
    if not path.startswith("/"):
        return document_id
    folder, _, name = path.rpartition("/")
    return f"files/{hashlib.sha256(folder.encode()).hexdigest()[:12]}/{name}{mark}{record}"


def chunk_id_of(document_id: DocumentId, ordinal: int, text: str) -> ChunkId:
    """Return the id of the `ordinal`-th chunk (from 0) of a document: 63 bits of a SHA-256."""
    digest = hashlib.sha256(f"{document_id}\0{ordinal}\0{text}".encode()).digest()
    return ChunkId(int.from_bytes(digest[:8], "big") >> 1)


def format_chunk_id(chunk_id: ChunkId) -> str:
    """Return 16 hexadecimal digits."""
    return f"{chunk_id:016x}"


def parse_chunk_id(text: str) -> ChunkId:
    """Parse the output of `format_chunk_id`.

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
