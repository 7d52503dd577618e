"""Documents that wait for the next commit, and the content hash that tells whether a document changed."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stillroom.core.document import Chunk, Document
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import metadata_to_json
from stillroom.retrieval.store.sql_rows import SourceUpdate, StoredDocument


@dataclass(slots=True)
class PendingDocument:
    """A document that waits for its batch."""

    document: Document
    path: str
    content_hash: str
    num_bytes: int
    outcome: Literal["added", "updated", "unchanged"]
    """Outcome for the report. `unchanged`: the same content on other lines or pages."""
    chunks: list[Chunk]
    known: dict[str, NDArray[np.float32]]
    """Embeddings of the document's last version, by embedded text."""

    def texts(self) -> list[str]:
        """Return the texts that have to be embedded."""
        return [chunk.indexed_text for chunk in self.chunks if chunk.indexed_text not in self.known]

    def stored(self, vectors: Iterator[NDArray[np.float32]], now: float) -> StoredDocument:
        """Return the document for the corpus. `vectors` yields the embeddings of `texts`."""
        rows = [
            self.known[chunk.indexed_text] if chunk.indexed_text in self.known else next(vectors)
            for chunk in self.chunks
        ]
        return StoredDocument(
            document_id=self.document.document_id,
            path=self.path,
            record_id=self.document.record_id,
            title=self.document.title,
            content_hash=self.content_hash,
            num_bytes=self.num_bytes,
            added_at=now,
            chunks=tuple(self.chunks),
            vectors=np.stack(rows) if rows else np.empty((0, 0), dtype=np.float32),
            metadata=self.document.metadata,
        )


@dataclass(slots=True)
class CommitBatch:
    """Content of the next commit."""

    documents: list[PendingDocument] = field(default_factory=list)
    sources: list[SourceUpdate] = field(default_factory=list)
    removed: list[DocumentId] = field(default_factory=list)
    num_chunks: int = 0
    num_files: int = 0
    num_bytes: int = 0


def content_hash_of(document: Document) -> str:
    """Return two SHA-256 hashes, joined by a colon: of the content (title, headings, paragraphs, metadata), and of its
    lines and pages. Without metadata and pages the hashes equal those of earlier versions."""
    content: list[object] = [
        document.title,
        [(paragraph.text, paragraph.heading_path) for paragraph in document.paragraphs],
    ]
    content += [metadata_to_json(document.metadata)] if document.metadata else []
    where: list[object] = [(paragraph.start_line, paragraph.end_line) for paragraph in document.paragraphs]
    if any(paragraph.end_page for paragraph in document.paragraphs):
        where += [(paragraph.start_page, paragraph.end_page) for paragraph in document.paragraphs]
    return ":".join(_hash(part) for part in (content, where))


def _hash(parts: list[object]) -> str:
    """Hash the JSON text in pieces; with repeated headings, the whole text could be far larger than the document."""
    sha = hashlib.sha256()
    for piece in json.JSONEncoder().iterencode(parts):
        sha.update(piece.encode())
    return sha.hexdigest()


def outcome_of(known_hash: str | None, content_hash: str) -> Literal["added", "updated", "unchanged"]:
    """Compare the hashes of a document before and now."""
    if known_hash is None:
        return "added"
    return "unchanged" if known_hash.partition(":")[0] == content_hash.partition(":")[0] else "updated"
