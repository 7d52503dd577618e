"""Reads files in order and parses changed files ahead, so that the caller embeds while others are parsed."""

import dataclasses
import hashlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.core.document import Document
from stillroom.errors import DocumentError, ReaderUnavailableError
from stillroom.retrieval.intake.parsing import ParserPool
from stillroom.retrieval.loaders.document_metadata import GivenMetadata, sidecar_of, with_given
from stillroom.retrieval.loaders.formats import format_of, is_image, is_jsonl
from stillroom.retrieval.loaders.load_file import load
from stillroom.retrieval.loaders.source import check_size, opened
from stillroom.retrieval.store.sql_rows import SourceFile

_SMALL_BYTES = 16 * 1024
"""A text up to this size may be parsed in this process, if the time of its loader is bounded."""
_CHECK_SECONDS = 0.1
"""Interval of cancellation checks while a parsing process works."""
_MAX_INLINE = 16
"""Number of small texts parsed in this process before parsing processes are started."""
_OCR_MARK = ":ocr"
"""End of the hash of a file that was read while `documents.ocr` was on."""

Failures = dict[Path, tuple[SourceFile, str]]
"""Files that could not be parsed, with their state and the reason."""


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A file and whether it changed since it was indexed."""

    path: Path
    source: SourceFile | None = None
    """State now; None if the file cannot be read."""
    is_unchanged: bool = False
    error: DocumentError | None = None
    documents: Callable[[], Iterator[Document]] = lambda: iter(())
    """Yields the documents of a changed file; raises DocumentError if it cannot be parsed."""
    is_parsed_ahead: bool = False


class FileReader:
    """Reads the files of one `add`."""

    def __init__(self, config: DocumentsConfig, failures: Failures, check: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            failures: Not parsed again while the files stay unchanged; failures of this run are added.
            check: Called while waiting for a parsing process; an exception ends the reading.
        """
        self._config = config
        self._check = check
        self._failures = failures
        self._pool: ParserPool | None = None
        self._num_inline = 0

    def read(
        self, files: Sequence[Path], known: Mapping[str, SourceFile], given: GivenMetadata
    ) -> Generator[CheckedFile]:
        """Yield each file in order. Closing the iterator ends the parsing.

        Args:
            known: State of the files at their last indexing, by path.
            given: Metadata for all files, merged into the metadata given before.
        """
        ahead: deque[CheckedFile] = deque()
        num_ahead = 0
        try:
            for path in files:
                ahead.append(self._check_file(path, known.get(str(path)), given))
                num_ahead += ahead[-1].is_parsed_ahead
                while ahead and (num_ahead > self._max_ahead or not ahead[0].is_parsed_ahead):
                    num_ahead -= ahead[0].is_parsed_ahead
                    yield ahead.popleft()
            while ahead:
                yield ahead.popleft()
        finally:
            if self._pool is not None:
                self._pool.close()

    @property
    def reads_images(self) -> bool:
        """Whether image files of folders are read."""
        return self._config.ocr == "on"

    @property
    def max_chunks(self) -> int:
        """Maximum number of chunks of a document."""
        return self._config.max_chunks

    def remember_failure(self, file: CheckedFile, error: DocumentError) -> None:
        """Do not parse a file again while it stays unchanged, unless no process could be started for it."""
        if file.source is not None and not isinstance(error, ReaderUnavailableError):
            self._failures[file.path] = (file.source, str(error))

    @property
    def _max_ahead(self) -> int:
        """Number of files parsed ahead: two per process, so that no process waits."""
        return 2 * self._pool.num_workers if self._pool is not None else 0

    def _check_file(self, path: Path, known: SourceFile | None, given: GivenMetadata) -> CheckedFile:
        try:
            source = source_of(path, known, self._config)
            source = dataclasses.replace(source, metadata=with_given(known.metadata if known else {}, given))
            source = _marked(source, known, self._config)
        except DocumentError as error:
            return CheckedFile(path, error=error)
        is_same = known is not None and (known.content_hash, known.metadata) == (source.content_hash, source.metadata)
        if is_same:
            return CheckedFile(path, source, is_unchanged=True)
        failed = self._failures.get(path)
        if failed is not None and failed[0] == source:
            return CheckedFile(path, source, error=DocumentError(failed[1]))
        if self._is_parsed_inline(path, source.size):
            return CheckedFile(path, source, documents=lambda: self._succeeding(path, load(path, self._config)))
        if self._pool is None:
            self._pool = ParserPool(self._config)
        future = self._pool.submit(path)
        documents = (self._awaited(future) for _ in range(1))
        return CheckedFile(path, source, documents=lambda: self._succeeding(path, documents), is_parsed_ahead=True)

    def _awaited(self, future: "Future[Document]") -> Document:
        while not wait([future], _CHECK_SECONDS).done:
            self._check()
        return future.result()

    def _is_parsed_inline(self, path: Path, num_bytes: int) -> bool:
        """Return whether a file is parsed in this process: JSONL, which is streamed, and the first small texts."""
        if is_jsonl(path):
            return True
        kind = format_of(path)
        self._num_inline += 1
        is_quick = kind is None or (kind.is_text and kind.is_bounded)
        return num_bytes <= _SMALL_BYTES and self._num_inline <= _MAX_INLINE and is_quick

    def _succeeding(self, path: Path, documents: Iterator[Document]) -> Iterator[Document]:
        """Yield the documents, then forget a remembered failure of the file."""
        yield from documents
        self._failures.pop(path, None)


def source_of(path: Path, known: SourceFile | None, config: DocumentsConfig) -> SourceFile:
    """Return the state of a file and its sidecar. Their content is read only if size or time differ from `known`.

    Raises:
        DocumentError: The file cannot be read, is too large, or its name is not UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise DocumentError(f"{path}: the name is not UTF-8; rename the file") from error
    sidecar = sidecar_of(path)
    files = [path, sidecar] if os.path.isfile(sidecar) else [path]  # false if the name would be too long
    try:
        states = [file.stat() for file in files]
    except OSError:
        states = []  # opening the file raises the reason
    size, mtime_ns = sum(state.st_size for state in states), sum(state.st_mtime_ns for state in states)
    if states and known is not None and (known.size, known.mtime_ns) == (size, mtime_ns):
        return known
    return SourceFile(str(path), size, mtime_ns, ":".join(_file_hash(file, config) for file in files))


def _marked(source: SourceFile, known: SourceFile | None, config: DocumentsConfig) -> SourceFile:
    """Return the state of a file with the mark of OCR in its hash.

    So a file that was read while OCR was off is read again when it is on. A file that was read with OCR stays as it is
    when OCR is off, until it or its metadata change.
    """
    path = Path(source.path)
    if path.suffix.lower() != ".pdf" and not is_image(path):
        return source
    plain = without_ocr_mark(source.content_hash)
    if config.ocr == "on":
        return dataclasses.replace(source, content_hash=plain + _OCR_MARK)
    is_same = known is not None and (known.content_hash, known.metadata) == (plain + _OCR_MARK, source.metadata)
    return dataclasses.replace(source, content_hash=plain + _OCR_MARK if is_same else plain)


def without_ocr_mark(content_hash: str) -> str:
    """Return the hashes of a file and its sidecar alone."""
    return content_hash.removesuffix(_OCR_MARK)


def _file_hash(path: Path, config: DocumentsConfig) -> str:
    with opened(path) as (stream, status):
        if not is_jsonl(path):
            check_size(path, status.st_size, config)
        return hashlib.file_digest(stream, "sha256").hexdigest()
