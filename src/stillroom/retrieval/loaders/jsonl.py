"""Loader of JSONL in BEIR layout: one document per line with `_id`, `title`, `text` and optional object `metadata`."""

import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.core.document import Document, Paragraph
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import clean_metadata, clean_text
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.source import blank_line_paragraphs, check_text, decode, opened, within_limits

_MAX_FIRST_BYTES = 1 << 24


def parse_jsonl(path: Path, config: DocumentsConfig) -> Iterator[Document]:
    """Yield one document per line, as a stream. Blank lines are skipped; a record without `_id` gets its line number.

    Raises:
        DocumentError: The file cannot be read, or a line is not a record or too long; the message names the line.
    """
    seen: set[str] = set()
    with opened(path) as (stream, _):
        for number, line in enumerate(_lines(stream, config.max_text_bytes), start=1):
            if not line.strip():
                continue
            check_text(Path(f"{path}:{number}"), len(line), config)
            document = _parse_line(path, number, line, config)
            assert document.record_id is not None
            if document.record_id in seen:
                raise DocumentError(f"{path}:{number}: the _id {document.record_id!r} occurs twice; make it unique")
            seen.add(document.record_id)
            yield document


def parse_record(path: Path, number: int, config: DocumentsConfig) -> Document:
    """Return the document of one line of a JSONL file, counted from 1. Only the first `documents.max_file_bytes` bytes
    of the file are read.

    Raises:
        DocumentError: The file cannot be read or has no such line, or the line is not a record.
    """
    num_bytes = 0
    with opened(path) as (stream, _):
        for at, line in enumerate(_lines(stream, config.max_text_bytes), start=1):
            if at == number:
                check_text(Path(f"{path}:{number}"), len(line), config)
                return _parse_line(path, number, line, config)
            num_bytes += len(line)
            if num_bytes > config.max_file_bytes:
                raise DocumentError(f"{path}: line {number:,} is beyond documents.max_file_bytes; raise the limit")
    raise DocumentError(f"{path}: there is no line {number:,} any more")


def _lines(stream: BufferedReader, max_bytes: int) -> Iterator[bytes]:
    """Yield lines; a line longer than `max_bytes` is cut one byte above the limit."""
    while line := stream.readline(max_bytes + 1):
        yield line


def looks_like_corpus(path: Path) -> bool:
    """Return whether the first record of a JSONL file has a `text`; false if it cannot be read."""
    try:
        with opened(path) as (stream, _):
            first = next((line for line in _lines(stream, _MAX_FIRST_BYTES) if line.strip()), b"")
        record = json.loads(first.decode("utf-8-sig"))
    except (DocumentError, ValueError, RecursionError):
        return False
    return isinstance(record, dict) and isinstance(record.get("text"), str)


def _parse_line(path: Path, number: int, line: bytes, config: DocumentsConfig) -> Document:
    where = f"{path}:{number}"
    try:
        record = json.loads(decode(line, where))
    except RecursionError as error:
        raise DocumentError(f"{where}: JSON nested too deeply") from error
    except ValueError as error:
        raise DocumentError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DocumentError(f"{where}: a record must be a JSON object with `_id`, `text` and optionally `title`")
    return _document(path, number, record, config)


def _document(path: Path, number: int, record: dict[str, Any], config: DocumentsConfig) -> Document:
    record_id = clean_text(str(record.get("_id", number)))
    title = " ".join(str(record.get("title") or "").split())
    parts = within_limits(Path(f"{path}:{number}"), blank_line_paragraphs(record["text"]), config)
    paragraphs = tuple(Paragraph(part.text, (), number, number) for part in parts)
    if not paragraphs and title:
        paragraphs = (Paragraph(title, (), number, number),)
    metadata = record.get("metadata")
    kept = clean_metadata(metadata) if isinstance(metadata, dict) else {}
    return Document(DocumentId(f"{path}#{record_id}"), title, paragraphs, record_id, kept)
