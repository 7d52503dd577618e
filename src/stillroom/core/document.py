"""Values from a file to a search result: `Document` -> `Chunk` -> `ScoredChunk`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stillroom.core.ids import ChunkId, DocumentId
from stillroom.core.metadata import Metadata


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A run of text, with its place in the file. Chunks are cut between paragraphs where possible."""

    text: str
    heading_path: tuple[str, ...] = ()
    """Headings above it, outermost first, without the document's title."""
    start_line: int = 0
    """First line in the file, counted from 1; 0 if the format has no lines."""
    end_line: int = 0
    """Last line, inclusive."""
    start_page: int = 0
    """First page (or slide), counted from 1; 0 if the format has no pages."""
    end_page: int = 0
    """Last page, inclusive."""

    @property
    def keeps_lines(self) -> bool:
        """Whether the text has the line breaks of its file."""
        return self.text.count("\n") == self.end_line - self.start_line


@dataclass(frozen=True, slots=True)
class Document:
    """A loaded file, or one record of a JSONL file."""

    document_id: DocumentId
    title: str
    paragraphs: tuple[Paragraph, ...]
    record_id: str | None = None
    """The record's own `_id` in a JSONL corpus (BEIR layout), else None."""
    metadata: Metadata = field(default_factory=dict)
    """Metadata from the file, after `clean_metadata`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit that is indexed, retrieved and (as KV) cached."""

    chunk_id: ChunkId
    document_id: DocumentId
    ordinal: int
    """Index in its document, from 0."""
    text: str
    title: str = ""
    heading_path: tuple[str, ...] = ()
    num_tokens: int = 0
    """Tokens of `text` under the embedder's tokenizer."""
    start_line: int = 0
    end_line: int = 0
    record_id: str | None = None
    start_page: int = 0
    """0 if the format has no pages."""
    end_page: int = 0

    @property
    def heading(self) -> str:
        """`Title > Section > Subsection`; empty if the document has none."""
        return " > ".join(part for part in (self.title, *self.heading_path) if part)

    @property
    def indexed_text(self) -> str:
        """The text that is embedded and indexed by BM25: the heading, then `text`."""
        return f"{self.heading}\n{self.text}" if self.heading else self.text


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """One search result; a higher score is better."""

    chunk: Chunk
    score: float
    scores: Mapping[str, float] = field(default_factory=dict)
    """The score from each retriever that found it: `dense` (cosine), `sparse` (BM25), and from the `reranker` if it
    read the chunk; `score` is then the reranker's."""
    copies: tuple[Chunk, ...] = ()
    """Chunks of other places with the same text, which the search found too and left out, best first."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Results, best first, and the time of the search."""

    results: tuple[ScoredChunk, ...]
    embed_seconds: float = 0.0
    """Time to embed the query."""
    search_seconds: float = 0.0
    """Time in indexes, fusion and fetching text."""
    rerank_seconds: float = 0.0
    """Time of the reranker, without loading it; 0 without one."""
    num_reranked: int = 0
    """Candidates that the reranker read."""


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
    """False for an uploaded file that searches do not find, because its upload or removal was interrupted."""
