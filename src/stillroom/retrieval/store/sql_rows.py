"""SQL of the corpus: tables, statements, and conversion of rows to values. No connection here.

`PRAGMA user_version` holds `SCHEMA_VERSION`, or 0 for files of the first version.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.core.document import Chunk, DocumentInfo
from stillroom.core.ids import ChunkId, DocumentId, chunk_id_of, public_id
from stillroom.core.metadata import Metadata, metadata_from_json, metadata_to_json

SCHEMA_VERSION = 5
"""Version 2 had no commit ids; version 3 named uploads by absolute paths and had no public ids; version 4 had no
`vector_sets`."""

SCHEMA = (
    """CREATE TABLE IF NOT EXISTS state (
        one INTEGER PRIMARY KEY CHECK (one = 0), generation INTEGER NOT NULL, corpus_id TEXT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS sources (
        path TEXT PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, content_hash TEXT NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS documents (
        document_id TEXT PRIMARY KEY, path TEXT NOT NULL, record_id TEXT, title TEXT NOT NULL,
        content_hash TEXT NOT NULL, num_bytes INTEGER NOT NULL, num_chunks INTEGER NOT NULL, added_at REAL NOT NULL,
        generation INTEGER NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS documents_by_path ON documents (path)",
    """CREATE TABLE IF NOT EXISTS chunks (
        chunk_id INTEGER PRIMARY KEY, document_id TEXT NOT NULL, ordinal INTEGER NOT NULL, text TEXT NOT NULL,
        title TEXT NOT NULL, heading_path TEXT NOT NULL, num_tokens INTEGER NOT NULL, start_line INTEGER NOT NULL,
        end_line INTEGER NOT NULL, record_id TEXT)""",
    "CREATE INDEX IF NOT EXISTS chunks_by_document ON chunks (document_id, ordinal)",
    """CREATE TABLE IF NOT EXISTS vectors (
        chunk_id INTEGER PRIMARY KEY, generation INTEGER NOT NULL, vector BLOB NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS vectors_by_generation ON vectors (generation)",
    "CREATE TABLE IF NOT EXISTS tombstones (chunk_id INTEGER PRIMARY KEY, generation INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS tombstones_by_generation ON tombstones (generation)",
    "CREATE TABLE IF NOT EXISTS commits (generation INTEGER PRIMARY KEY, commit_id TEXT NOT NULL)",
    """CREATE TRIGGER IF NOT EXISTS commits_have_names AFTER UPDATE OF generation ON state BEGIN
        INSERT OR REPLACE INTO commits VALUES (new.generation, lower(hex(randomblob(16)))); END""",
    """CREATE TABLE IF NOT EXISTS vector_sets (
        number INTEGER PRIMARY KEY, role TEXT NOT NULL UNIQUE CHECK (role IN ('active', 'next', 'old')),
        model TEXT NOT NULL, fingerprint TEXT NOT NULL, dimension INTEGER NOT NULL)""",
)
"""Tables of the first version, `commits` of version 3, and `vector_sets` of version 5 (`vector_sets.py`). A commit id
differs from that of a commit with the same generation that a restored backup has undone. Later columns are in
`ADDED_COLUMNS`, for new and old files."""

ADDED_COLUMNS = (
    ("sources", "metadata", "TEXT NOT NULL DEFAULT '{}'"),
    ("documents", "metadata", "TEXT NOT NULL DEFAULT '{}'"),
    ("documents", "public_id", "TEXT NOT NULL DEFAULT ''"),
    ("chunks", "start_page", "INTEGER NOT NULL DEFAULT 0"),
    ("chunks", "end_page", "INTEGER NOT NULL DEFAULT 0"),
)
"""Table, column, definition. Given metadata (`add --meta`) is in `sources`; merged metadata is in `documents`."""

INDEX_OF_ADDED = "CREATE INDEX IF NOT EXISTS documents_by_public_id ON documents (public_id)"

CHUNK_COLUMNS = """c.chunk_id, c.document_id, c.ordinal, c.text, c.title, c.heading_path, c.num_tokens, c.start_line,
    c.end_line, c.record_id, c.start_page, c.end_page"""
SELECT_CHUNKS = f"SELECT {CHUNK_COLUMNS} FROM chunks c WHERE c.chunk_id IN ({{}})"
SELECT_CHUNKS_OF = f"""SELECT {CHUNK_COLUMNS}, v.vector FROM chunks c JOIN vectors v USING (chunk_id)
    WHERE c.document_id = ? ORDER BY c.ordinal LIMIT ? OFFSET ?"""
SELECT_BEFORE = """SELECT o.chunk_id FROM chunks c JOIN chunks o ON o.document_id = c.document_id
    WHERE c.chunk_id = :chunk AND o.ordinal < c.ordinal ORDER BY o.ordinal DESC LIMIT :limit"""
SELECT_VECTORS = "SELECT chunk_id, vector FROM vectors WHERE chunk_id IN ({})"
SELECT_EXISTING = "SELECT chunk_id FROM chunks WHERE chunk_id IN ({})"
_INFO = "SELECT document_id, title, num_chunks, num_bytes, added_at, metadata FROM documents"
SELECT_INFOS = f"{_INFO} WHERE document_id > ? ORDER BY document_id LIMIT ?"
SELECT_PUBLIC_INFOS = f"{_INFO} WHERE public_id > ? ORDER BY public_id LIMIT ?"
SELECT_INFOS_OF = f"{_INFO} WHERE document_id = :name OR path = :name OR public_id = :name ORDER BY document_id"
SELECT_ORIGIN = """SELECT d.document_id, d.path, d.record_id, d.title, d.content_hash, d.metadata,
    coalesce(s.content_hash, ''), coalesce((SELECT start_line FROM chunks c WHERE c.document_id = d.document_id
    AND c.ordinal = 0), 0) FROM documents d LEFT JOIN sources s USING (path) WHERE d.document_id = ?"""
SELECT_STORED = """SELECT document_id, path, record_id, title, content_hash, num_bytes, added_at, metadata
    FROM documents WHERE path = ?"""
SELECT_COMPARED = "SELECT path, title, metadata, content_hash FROM documents WHERE document_id = ?"
SELECT_HASHES = "SELECT document_id, content_hash FROM documents WHERE path = ?"
SELECT_SOURCES = "SELECT path, size, mtime_ns, content_hash, metadata FROM sources"
PENDING = -2
"""`sources.size` of a file whose upload has not finished."""
SELECT_PENDING = f"SELECT path FROM sources WHERE size = {PENDING} ORDER BY path"
UNREAD_SOURCES = "UPDATE sources SET size = -1, content_hash = ''"
UNREAD_SOURCE = f"{UNREAD_SOURCES} WHERE path = ?"
DELETE_EMPTY_SOURCE = "DELETE FROM sources WHERE path = ? AND NOT EXISTS (SELECT 1 FROM documents WHERE path = ?)"
SELECT_FIELDS = "SELECT DISTINCT key FROM documents, json_each(documents.metadata) ORDER BY key LIMIT ?"
SELECT_MATCHING = """SELECT c.chunk_id FROM chunks c
    WHERE c.document_id IN (SELECT d.document_id FROM documents d WHERE {})"""
SELECT_ADDED = "SELECT chunk_id FROM vectors WHERE generation > ? AND generation <= ? ORDER BY generation, chunk_id"
SELECT_REMOVED = "SELECT chunk_id FROM tombstones WHERE generation > ? AND generation <= ? ORDER BY chunk_id"
SELECT_GONE = "SELECT chunk_id FROM tombstones WHERE generation > ? ORDER BY chunk_id"
SELECT_NTH_ADDED = "SELECT generation FROM vectors WHERE generation > ? ORDER BY generation LIMIT 1 OFFSET ?"
SELECT_COUNTS = "SELECT generation, (SELECT count(*) FROM documents), (SELECT count(*) FROM vectors) FROM state"
SELECT_COMMIT = """SELECT c.commit_id FROM state s LEFT JOIN commits c ON c.generation = :generation
    WHERE s.generation >= :generation"""
COUNT_ADDED = "SELECT count(*) FROM vectors WHERE generation > ?"
PUT_DOCUMENT = "INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
PUT_CHUNK = "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
MOVE_CHUNK = "UPDATE chunks SET start_line = ?, end_line = ?, start_page = ?, end_page = ? WHERE chunk_id = ?"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """State of a file and its sidecar when they were read."""

    path: str
    size: int
    """Sum of both in bytes; -1 if the file must be read again, `PENDING` while its upload has not finished."""
    mtime_ns: int
    """Sum of both."""
    content_hash: str
    metadata: Metadata = field(default_factory=dict)
    """Given metadata (`add --meta`)."""


@dataclass(frozen=True, slots=True)
class DocumentOrigin:
    """Where an indexed document came from, and what its file held then."""

    document_id: DocumentId
    path: str
    """Name of its file in the corpus."""
    record_id: str | None
    title: str
    content_hash: str
    """As `commit_batch.content_hash_of`."""
    metadata: Metadata
    file_hash: str
    """SHA-256 of the file's bytes, in hexadecimal digits; empty if it is not known."""
    start_line: int
    """First line of its first chunk; 0 without lines or chunks."""


@dataclass(frozen=True, slots=True)
class SourceUpdate:
    """Replaces the record of a file; None deletes it."""

    path: str
    source: SourceFile | None
    documents: Mapping[DocumentId, str] | None = None
    """All documents that were read from the file, with their content hashes. If the file's documents are others after
    the commit, because another process changed them meanwhile, the file is recorded as `unread`. None: not checked."""


@dataclass(frozen=True, slots=True)
class CommitReport:
    """Result of a commit."""

    num_removed: int = 0
    """Chunks of the removed documents."""
    unfinished: tuple[str, ...] = ()
    """Files that must be read again (`SourceUpdate.documents`)."""


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document to be stored."""

    document_id: DocumentId
    path: str
    """Name of its file."""
    record_id: str | None
    title: str
    content_hash: str
    num_bytes: int
    added_at: float
    """Unix time in seconds."""
    chunks: tuple[Chunk, ...]
    vectors: NDArray[np.float32]
    """[len(chunks), d]"""
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of chunks since a generation."""

    generation: int
    """Generation of an index after applying them."""
    removed: tuple[ChunkId, ...]
    added: tuple[ChunkId, ...]
    """New or changed chunks, in commit order."""


def chunk(row: tuple[Any, ...]) -> Chunk:
    """Convert a row that begins with `CHUNK_COLUMNS`, the fields of `Chunk` in order."""
    values = list(row[:12])
    values[5] = tuple(json.loads(values[5]))
    return Chunk(*values)


def chunk_row(chunk: Chunk) -> tuple[object, ...]:
    values = list(_chunk_values(chunk))
    values[5] = json.dumps(chunk.heading_path)
    return tuple(values)


_chunk_values = attrgetter(*(column.name for column in fields(Chunk)))


def document_row(document: StoredDocument, generation: int) -> tuple[object, ...]:
    names = (document.document_id, document.path, document.record_id, document.title, document.content_hash)
    sizes = (document.num_bytes, len(document.chunks), document.added_at, generation)
    return (*names, *sizes, metadata_to_json(document.metadata), public_id(document.document_id))


def stored_document(
    row: tuple[Any, ...], name: str, chunks: Sequence[Chunk], vectors: NDArray[np.float32]
) -> StoredDocument:
    """Convert a row of `SELECT_STORED` whose file is now called `name`; document and chunk ids change with it.

    Args:
        vectors: [len(chunks), d].
    """
    document_id, path, record_id, title, content_hash, num_bytes, added_at, metadata = row
    renamed = DocumentId(name + document_id.removeprefix(path))
    kept = (record_id, title, content_hash, num_bytes, added_at)
    moved = tuple(
        replace(old, document_id=renamed, chunk_id=chunk_id_of(renamed, old.ordinal, old.text)) for old in chunks
    )
    return StoredDocument(renamed, name, *kept, moved, vectors, metadata_from_json(metadata))


def compared(document: StoredDocument) -> tuple[object, ...]:
    """Return the fields that make a document changed even if its chunks are equal, as in `SELECT_COMPARED`."""
    return (document.path, document.title, metadata_to_json(document.metadata), document.content_hash)


def document_info(row: tuple[Any, ...]) -> DocumentInfo:
    document_id, title, num_chunks, num_bytes, added_at, metadata = row
    return DocumentInfo(DocumentId(document_id), title, num_chunks, num_bytes, added_at, metadata_from_json(metadata))


def document_origin(row: tuple[Any, ...]) -> DocumentOrigin:
    document_id, path, record_id, title, content_hash, metadata, hashes, start_line = row
    file_hash = hashes.partition(":")[0]  # the second is the sidecar's
    kept = (path, record_id, title, content_hash, metadata_from_json(metadata))
    return DocumentOrigin(DocumentId(document_id), *kept, file_hash, start_line)


def source(row: tuple[Any, ...]) -> SourceFile:
    path, size, mtime_ns, content_hash, metadata = row
    return SourceFile(path, size, mtime_ns, content_hash, metadata_from_json(metadata))


def unread(source: SourceFile) -> SourceFile:
    """Return the record of a file that must be read again."""
    return replace(source, size=-1, content_hash="")


def marked(source: SourceFile, machine: str) -> SourceFile:
    """Return the record of an unfinished upload (`PENDING`) whose file is on a machine."""
    return replace(source, content_hash=machine)


def source_row(source: SourceFile) -> tuple[object, ...]:
    return (source.path, source.size, source.mtime_ns, source.content_hash, metadata_to_json(source.metadata))
