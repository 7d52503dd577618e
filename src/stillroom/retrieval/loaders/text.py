"""Plain text: paragraphs are what stands between blank lines."""

from pathlib import Path

from stillroom.core.document import Document
from stillroom.core.ids import DocumentId
from stillroom.retrieval.loaders.source import blank_line_paragraphs


def parse_text(path: Path, text: str) -> Document:
    """The file's name without its extension is the title."""
    return Document(DocumentId(str(path)), path.stem, tuple(blank_line_paragraphs(text)))
