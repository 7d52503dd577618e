"""JSONL in BEIR layout: one document per line with `_id`, `title`, `text` and perhaps an object `metadata`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stillroom.core.document import Document, Paragraph
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import clean_metadata
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.source import blank_line_paragraphs, decode


def parse_jsonl(path: Path) -> Iterator[Document]:
    """One document per line, read as a stream. Blank lines are skipped; a record without `_id` is named by its line.

    Raises:
        DocumentError: the file cannot be read, or a line is no record; the message names the line.
    """
    seen: set[str] = set()
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                document = _parse_line(path, number, line)
                assert document.record_id is not None
                if document.record_id in seen:
                    raise DocumentError(
                        f"{path}:{number}: the _id {document.record_id!r} is there twice; make it unique"
                    )
                seen.add(document.record_id)
                yield document
    except OSError as error:
        raise DocumentError(f"{path}: cannot be read: {error.strerror or error}") from error


def looks_like_corpus(path: Path) -> bool:
    """Whether the first record of a JSONL file has a `text`; false where it cannot be read."""
    try:
        with path.open("rb") as lines:
            first = next((line for line in lines if line.strip()), b"")
        record = json.loads(first.decode("utf-8-sig"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and isinstance(record.get("text"), str)


def _parse_line(path: Path, number: int, line: bytes) -> Document:
    where = f"{path}:{number}"
    try:
        record = json.loads(decode(line, where))
    except ValueError as error:
        raise DocumentError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DocumentError(f"{where}: a record is a JSON object with `_id` and `text`, and perhaps `title`")
    return _document(path, number, record)


def _document(path: Path, number: int, record: dict[str, Any]) -> Document:
    record_id = str(record.get("_id", number))
    title = " ".join(str(record.get("title") or "").split())
    # all of a record stands on one line of its file
    paragraphs = tuple(Paragraph(part.text, (), number, number) for part in blank_line_paragraphs(record["text"]))
    if not paragraphs and title:
        paragraphs = (Paragraph(title, (), number, number),)
    metadata = record.get("metadata")
    said = clean_metadata(metadata) if isinstance(metadata, dict) else {}
    return Document(DocumentId(f"{path}#{record_id}"), title, paragraphs, record_id, said)
