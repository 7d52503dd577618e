"""Text on its way from a file to a search result: `Document` -> `Chunk` -> `ScoredChunk`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stillroom.core.ids import ChunkId, DocumentId
from stillroom.core.metadata import Metadata


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One run of text that a chunk would rather not split, and where it stands in its file."""

    text: str
    heading_path: tuple[str, ...] = ()
    """Headings above it, outermost first; without the document's title."""
    start_line: int = 0
    """First line in the file, counted from 1; 0 where the format has no lines."""
    end_line: int = 0
    """Last line, inclusive."""
    start_page: int = 0
    """First page (or slide), counted from 1; 0 where the format has no pages."""
    end_page: int = 0
    """Last page, inclusive."""


@dataclass(frozen=True, slots=True)
class Document:
    """What a loader makes of one file, or of one record of a JSONL file."""

    document_id: DocumentId
    title: str
    paragraphs: tuple[Paragraph, ...]
    record_id: str | None = None
    """The record's own `_id` in a JSONL corpus (BEIR layout), else None."""
    metadata: Metadata = field(default_factory=dict)
    """What the file itself says about it, as `clean_metadata` leaves it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit that is indexed, retrieved and (as KV) cached."""

    chunk_id: ChunkId
    document_id: DocumentId
    ordinal: int
    """Place in its document, from 0."""
    text: str
    title: str = ""
    heading_path: tuple[str, ...] = ()
    num_tokens: int = 0
    """Tokens of `text` under the embedder's tokenizer."""
    start_line: int = 0
    end_line: int = 0
    record_id: str | None = None
    start_page: int = 0
    """0 where the format has no pages."""
    end_page: int = 0

    @property
    def heading(self) -> str:
        """`Title > Section > Subsection`; empty where the document has none."""
        return " > ".join(part for part in (self.title, *self.heading_path) if part)

    @property
    def indexed_text(self) -> str:
        """What is embedded and what BM25 sees: the heading, then the text."""
        return f"{self.heading}\n{self.text}" if self.heading else self.text


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """One search result; a higher score is better."""

    chunk: Chunk
    score: float
    scores: Mapping[str, float] = field(default_factory=dict)
    """The score from each retriever that found it: `dense` (cosine), `sparse` (BM25)."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Best first, with what the search cost."""

    results: tuple[ScoredChunk, ...]
    embed_seconds: float = 0.0
    """Time to embed the query."""
    search_seconds: float = 0.0
    """Time in the indexes, in fusion and in fetching the text."""


@dataclass(frozen=True, slots=True)
class DocumentInfo:
    """One row of `stillroom list`."""

    document_id: DocumentId
    title: str
    num_chunks: int
    num_bytes: int
    """Size of the source text in bytes."""
    added_at: float
    """Unix time in seconds."""
    metadata: Metadata = field(default_factory=dict)
    is_indexed: bool = True
    """False of an uploaded file that searches do not find: its upload or removal was interrupted."""
