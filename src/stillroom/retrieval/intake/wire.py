"""A document as bytes, on its way from the process that parsed it. JSON, in which equal heading paths stand once."""

import json
from typing import Any

from stillroom.core.document import Document, Paragraph
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import metadata_from_json, metadata_to_json

OUT_OF_MEMORY = 77
"""Exit code of a process that has no memory left even to say so."""


def document_to_wire(document: Document) -> bytes:
    """Of a document that is a whole file."""
    paths: dict[tuple[str, ...], int] = {}
    paragraphs = [
        (
            paragraph.text,
            paths.setdefault(paragraph.heading_path, len(paths)),
            (paragraph.start_line, paragraph.end_line, paragraph.start_page, paragraph.end_page),
        )
        for paragraph in document.paragraphs
    ]
    metadata = metadata_to_json(document.metadata)
    found = {"id": document.document_id, "title": document.title, "paths": list(paths), "paragraphs": paragraphs}
    return json.dumps({**found, "metadata": metadata}).encode()


def document_from_wire(found: dict[str, Any]) -> Document:
    """The inverse of `document_to_wire`, of its JSON."""
    paths = [tuple(path) for path in found["paths"]]
    return Document(
        DocumentId(found["id"]),
        found["title"],
        tuple(Paragraph(text, paths[index], *where) for text, index, where in found["paragraphs"]),
        metadata=metadata_from_json(found["metadata"]),
    )
