"""Bodies of replies about documents: their list, text and chunks, uploads, and jobs that index them."""

from typing import Any, Literal

from stillroom.server.schemas.replies import ErrorDetail, Reply


class DocumentObject(Reply):
    id: str
    object: Literal["document"] = "document"
    status: Literal["indexed", "not_indexed"] = "indexed"
    """`not_indexed`: a file that searches do not find, because its upload or removal was interrupted. Upload it again,
    or delete it."""
    name: str | None
    """Name of the uploaded file, with `#record` for a record of a JSONL file; null if it was not uploaded."""
    title: str
    num_chunks: int
    num_bytes: int
    added_at: float
    """Unix time in seconds."""
    metadata: dict[str, Any]


class DocumentChunk(Reply):
    chunk_id: str
    text: str
    heading: str
    start_line: int
    end_line: int
    start_page: int
    end_page: int


class DocumentWithChunks(DocumentObject):
    chunks: list[DocumentChunk]
    """Chunks of this page; `num_chunks` counts all chunks of the document."""
    has_more: bool


class ContentParagraph(Reply):
    text: str
    heading_path: list[str]
    """Headings above it, outermost first, without the title."""
    start_line: int
    """0 if the format has no lines; likewise `start_page`."""
    end_line: int
    start_page: int
    end_page: int


class DocumentText(Reply):
    """The readable text of a document."""

    object: Literal["document.content"] = "document.content"
    document: str
    """Its id."""
    title: str
    source: Literal["file", "index"]
    """`file`: read from the file, which is as it was indexed. `index`: the indexed chunks, one paragraph each."""
    notice: str
    """Why the text does not come from the file; empty if it does."""
    num_lines: int
    num_pages: int
    has_file: bool
    """Whether `?download=1` returns the original file."""
    has_page_images: bool
    """Whether `pages/{page}.png` returns pictures of its pages."""
    num_paragraphs: int
    """Paragraphs in the lines and pages that were asked for."""
    has_more: bool
    """Whether paragraphs follow these; ask for them with `offset`."""
    paragraphs: list[ContentParagraph]


class DocumentList(Reply):
    object: Literal["list"] = "list"
    data: list[DocumentObject]
    first_id: str | None
    last_id: str | None
    """Send it as `after` to get the next page."""
    has_more: bool


class DocumentDeleted(Reply):
    id: str
    object: Literal["document.deleted"] = "document.deleted"
    deleted: Literal[True] = True
    num_documents: int
    num_chunks: int


class UploadedFile(Reply):
    name: str
    status: Literal["added", "updated", "unchanged", "failed"]
    documents: list[DocumentObject]
    """The file's documents in the knowledge base; each record of a JSONL file is one."""
    error: ErrorDetail | None = None
    """Set if it failed."""


class JobProgress(Reply):
    num_files_done: int
    num_files_total: int
    num_bytes_done: int
    num_bytes_total: int
    num_chunks: int


class DocumentJob(Reply):
    """An upload that continues after its request was answered."""

    id: str
    object: Literal["documents.job"] = "documents.job"
    status: Literal["in_progress", "cancelling", "completed", "failed", "cancelled"]
    created_at: float
    """Unix time in seconds."""
    finished_at: float | None = None
    progress: JobProgress | None = None
    data: list[UploadedFile] = []
    """Result of each file, once the job is completed."""
    error: ErrorDetail | None = None
    """Set if it failed."""


class DocumentJobList(Reply):
    object: Literal["list"] = "list"
    data: list[DocumentJob]
    """Newest first."""


class UploadReply(Reply):
    object: Literal["documents.uploaded"] = "documents.uploaded"
    data: list[UploadedFile]
    error: ErrorDetail | None = None
    """Set if all files failed."""
