"""Which files are documents, and which loader reads each. A file that cannot be read is a DocumentError, no crash."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stillroom.core.document import Document
from stillroom.errors import DocumentError, UsageError
from stillroom.retrieval.loaders.html import parse_html
from stillroom.retrieval.loaders.jsonl import looks_like_corpus, parse_jsonl
from stillroom.retrieval.loaders.markdown import parse_markdown
from stillroom.retrieval.loaders.metadata import is_sidecar
from stillroom.retrieval.loaders.rst import parse_rst
from stillroom.retrieval.loaders.source import read_text
from stillroom.retrieval.loaders.text import parse_text

_PARSERS: dict[str, Callable[[Path, str], Document]] = {
    ".txt": parse_text,
    ".text": parse_text,
    ".md": parse_markdown,
    ".markdown": parse_markdown,
    ".mkd": parse_markdown,
    ".rst": parse_rst,
    ".rest": parse_rst,
    ".html": parse_html,
    ".htm": parse_html,
    ".xhtml": parse_html,
}
_JSONL = frozenset({".jsonl", ".ndjson"})


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a list of paths stands for."""

    files: tuple[Path, ...]
    """Absolute, without duplicates, in the order of the arguments and sorted within a folder."""
    folders: tuple[Path, ...]
    """The folders among the arguments, absolute."""
    failures: tuple[tuple[Path, str], ...] = ()
    """Folders that cannot be listed."""


def load(path: Path) -> Iterator[Document]:
    """The documents of one file: one, or one per line of a JSONL file.

    Args:
        path: absolute. A file of unknown extension is read as plain text if it is UTF-8.

    Raises:
        DocumentError: the file cannot be read or is malformed.
    """
    extension = path.suffix.lower()
    if extension in _JSONL:
        yield from parse_jsonl(path)
        return
    parser = _PARSERS.get(extension)
    text = read_text(path, strict=parser is None)
    try:
        document = (parser or parse_text)(path, text)
    except Exception as error:  # whatever a parser does with a strange file, the other files go on
        raise DocumentError(f"{path}: cannot be parsed: {type(error).__name__}: {error}") from error
    yield document


def discover(paths: Sequence[Path]) -> Discovery:
    """The files to load. Folders are walked; hidden names and unknown extensions in them are passed over.

    Raises:
        UsageError: a path does not exist.
    """
    files: dict[Path, None] = {}
    folders: list[Path] = []
    failures: list[tuple[Path, str]] = []
    for path in paths:
        absolute = Path(os.path.abspath(path))
        if absolute.is_dir():
            folders.append(absolute)
            files.update(dict.fromkeys(_walk(absolute, failures)))
        elif absolute.exists():
            files[absolute] = None
        else:
            raise UsageError(f"{path} does not exist; give files or folders that do")
    return Discovery(tuple(files), tuple(folders), tuple(failures))


def _walk(folder: Path, failures: list[tuple[Path, str]]) -> Iterator[Path]:
    def note(error: OSError) -> None:
        failures.append((Path(error.filename), f"{error.filename}: cannot be listed: {error.strerror or error}"))

    for parent, folders, names in os.walk(folder, onerror=note):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and _is_document(path) and not is_sidecar(path):
                yield path


def _is_document(path: Path) -> bool:
    extension = path.suffix.lower()
    if extension in _JSONL:
        is_queries = path.stem == "queries" and path.with_stem("corpus").exists()
        return not is_queries and looks_like_corpus(path)
    return extension in _PARSERS
