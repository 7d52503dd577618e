"""One file to documents. Whatever is wrong with the file is a DocumentError, no crash."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.core.document import Document
from stillroom.core.metadata import clean_text
from stillroom.core.panics import panics_as_errors
from stillroom.errors import DocumentError
from stillroom.retrieval.loaders.formats import PLAIN, UNREADABLE, format_of, is_jsonl
from stillroom.retrieval.loaders.jsonl import parse_jsonl
from stillroom.retrieval.loaders.source import File, read_file, text_of, within_limits

_DEFAULT = DocumentsConfig()


def load(path: Path, config: DocumentsConfig = _DEFAULT) -> Iterator[Document]:
    """The documents of one file: one, or one per line of a JSONL file.

    Args:
        path: absolute. A file whose name does not tell its format is read as plain text if it is UTF-8.

    Raises:
        DocumentError: the file cannot be read, is malformed, or larger than the configuration allows.
        MemoryError: reading it takes more than there is.
    """
    if is_jsonl(path):
        yield from map(_storable, parse_jsonl(path, config))
    else:
        yield parse(read_file(path, config))


def _storable(document: Document) -> Document:
    """Without what no text in UTF-8 can hold, which JSON and PDF can name, and without NUL."""
    if all(text.isascii() and "\0" not in text for text in _texts(document)):
        return document
    return dataclasses.replace(
        document,
        title=clean_text(document.title),
        paragraphs=tuple(
            dataclasses.replace(one, text=clean_text(one.text), heading_path=tuple(map(clean_text, one.heading_path)))
            for one in document.paragraphs
            if clean_text(one.text).strip()
        ),
    )


def _texts(document: Document) -> Iterator[str]:
    yield document.title
    for paragraph in document.paragraphs:
        yield paragraph.text
        yield from paragraph.heading_path


def parse(file: File) -> Document:
    """The document in a file that is no JSONL file. Raises as `load`."""
    kind = format_of(file.path)
    advice = UNREADABLE.get(file.path.suffix.lower())
    if advice is not None:
        raise DocumentError(f"{file.path}: a format that Stillroom does not read; {advice}")
    try:
        with panics_as_errors("the parser"):
            if kind is not None and (kind.takes_file or not kind.is_text):
                document: Document = kind.parser()(file)
            else:
                document = (kind or PLAIN).parser()(file.path, text_of(file, strict=kind is None))
    except (DocumentError, MemoryError):
        raise
    except RecursionError as error:
        raise DocumentError(f"{file.path}: nested too deeply to be read") from error
    except Exception as error:  # whatever a parser does with a strange file, the other files go on
        raise DocumentError(f"{file.path}: damaged, or not understood: {type(error).__name__}: {error}") from error
    document = _storable(document)
    for _ in within_limits(file.path, document.paragraphs, file.config):
        pass
    return document
