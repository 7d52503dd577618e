"""Loads one file into documents; every fault of the file is a DocumentError."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.core.document import Document
from stillroom.core.metadata import clean_text
from stillroom.core.panics import panics_as_errors
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.formats import PLAIN, UNSUPPORTED, format_of, is_image, is_jsonl
from stillroom.retrieval.loaders.jsonl import parse_jsonl, parse_record
from stillroom.retrieval.loaders.source import File, is_text, read_file, text_of, within_limits

_DEFAULT = DocumentsConfig()


def load(
    path: Path, config: DocumentsConfig = _DEFAULT, on_page: Callable[[int], None] = lambda page: None
) -> Iterator[Document]:
    """Yield the document of a file, or one document per line of a JSONL file.

    Args:
        path: Absolute path. A file of unknown format is read as plain text if it is UTF-8.
        on_page: Called before a page is read by OCR.

    Raises:
        DocumentError: The file cannot be read, is malformed or exceeds a limit of `config`.
        MemoryError: The process has not enough memory.
    """
    if is_jsonl(path):
        yield from map(_storable, parse_jsonl(path, config))
    else:
        yield parse(dataclasses.replace(read_file(path, config), on_page=on_page))


def load_record(path: Path, number: int, config: DocumentsConfig) -> Document:
    """Return the document of line `number` (from 1) of a JSONL file. Raises as `parse_record`."""
    return _storable(parse_record(path, number, config))


def _storable(document: Document) -> Document:
    """Remove NUL and surrogates, which JSON and PDF can contain and UTF-8 cannot store."""
    if all(text.isascii() and "\0" not in text for text in _texts(document)):
        return document
    return dataclasses.replace(
        document,
        title=clean_text(document.title),
        paragraphs=tuple(
            dataclasses.replace(part, text=text, heading_path=tuple(map(clean_text, part.heading_path)))
            for part in document.paragraphs
            if (text := clean_text(part.text)).strip()
        ),
    )


def _texts(document: Document) -> Iterator[str]:
    yield document.title
    for paragraph in document.paragraphs:
        yield paragraph.text
        yield from paragraph.heading_path


def parse(file: File) -> Document:
    """Parse a file other than JSONL. Raises as `load`."""
    kind = None if is_image(file.path) and is_text(file.data) else format_of(file.path)
    advice = UNSUPPORTED.get(file.path.suffix.lower())
    if advice is not None:
        raise DocumentError(f"{file.path}: Stillroom does not read this format; {advice}")
    try:
        with panics_as_errors("the parser"):
            if kind is not None and (kind.takes_file or not kind.is_text):
                document: Document = kind.parser()(file)
            else:
                document = (kind or PLAIN).parser()(file.path, text_of(file, strict=kind is None))
    except (DocumentError, MemoryError):
        raise
    except RecursionError as error:
        raise DocumentError(f"{file.path}: nested too deeply") from error
    except Exception as error:  # a parser's fault must not stop the other files
        raise DocumentError(f"{file.path}: damaged, or not understood: {type(error).__name__}: {error}") from error
    document = _storable(document)
    for _ in within_limits(file.path, document.paragraphs, file.config):
        pass
    return document
