"""The parsing process, `python -m stillroom.retrieval.intake.parse_worker FD`, and the encoding of its replies.

`parsing` starts it. Over one socket it receives paths and sends a document or a reason, until the other end is closed.
Before each page that it reads by OCR, it sends the page's number.
Replies are JSON, not pickle: a file that takes over this process must not take over the parent.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.core.document import Document, Paragraph
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import metadata_from_json, metadata_to_json
from stillroom.errors import DocumentError
from stillroom.retrieval.intake.process_limits import has_used_memory, limit_memory
from stillroom.retrieval.loaders.load_file import load

OUT_OF_MEMORY = 77
"""Exit code of a process that has run out of memory."""


def main() -> None:
    """Serve until the parent closes the connection."""
    connection = Connection(int(sys.argv[1]))
    config = DocumentsConfig(**json.loads(connection.recv_bytes()))
    limit_memory(config.max_reader_bytes)
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            path = Path(os.fsdecode(connection.recv_bytes()))
            _set_alarm(config.timeout_s)
            connection.send_bytes(_answer(path, config, partial(_begin_page, connection, config)))
            signal.setitimer(signal.ITIMER_REAL, 0)


def _begin_page(connection: Connection, config: DocumentsConfig, page: int) -> None:
    """Tell the parent that OCR of a page begins, which has a time limit of its own."""
    _set_alarm(config.ocr_page_timeout_s)
    connection.send_bytes(json.dumps({"page": page}).encode())


def _set_alarm(limit_s: float) -> None:
    """If the parent has died and a loader hangs, the alarm ends this process."""
    signal.setitimer(signal.ITIMER_REAL, 2 * limit_s + 10)


def _answer(path: Path, config: DocumentsConfig, on_page: Callable[[int], None]) -> bytes:
    try:
        (document,) = load(path, config, on_page)
        return encode_document(document)
    except DocumentError as error:
        return json.dumps({"error": str(error)}).encode()


def encode_document(document: Document) -> bytes:
    """Encode a document that is a whole file as JSON, each distinct heading path once."""
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


def decode_document(found: dict[str, Any]) -> Document:
    """Invert `encode_document`, given the parsed JSON."""
    paths = [tuple(path) for path in found["paths"]]
    return Document(
        DocumentId(found["id"]),
        found["title"],
        tuple(Paragraph(text, paths[index], *where) for text, index, where in found["paragraphs"]),
        metadata=metadata_from_json(found["metadata"]),
    )


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # the next file gets a new process
    except Exception:  # a library may make another error of it
        os._exit(OUT_OF_MEMORY if has_used_memory() else 1)
