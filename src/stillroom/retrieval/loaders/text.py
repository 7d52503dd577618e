"""Loader of plain text: blank lines separate paragraphs."""

from pathlib import Path

from stillroom.core.document import Document
from stillroom.core.ids import DocumentId
from stillroom.retrieval.loaders.source import blank_line_paragraphs


def parse_text(path: Path, text: str) -> Document:
    """Parse plain text. The title is the file name without extension."""
    return Document(DocumentId(str(path)), path.stem, tuple(blank_line_paragraphs(text)))
