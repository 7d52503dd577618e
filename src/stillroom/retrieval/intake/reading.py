"""Files looked at in order, and those that changed parsed ahead: the caller embeds while others are being read."""

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
from stillroom.core.metadata import Metadata
from stillroom.errors import DocumentError, ReaderUnavailableError
from stillroom.retrieval.intake.parsing import ParserPool
from stillroom.retrieval.loaders.formats import format_of, is_jsonl
from stillroom.retrieval.loaders.load import load
from stillroom.retrieval.loaders.metadata import Said, sidecar_of
from stillroom.retrieval.loaders.source import check_size, opened
from stillroom.retrieval.store.rows import SourceFile

_SMALL_BYTES = 16 * 1024
"""A text up to here is read at once, if its reader is one whose time is bounded."""
_CHECK_SECONDS = 0.1
"""How often it is looked, while a parsing process works, whether its document is still wanted."""
_NUM_HERE = 16
"""So many small texts are read in this process before others are started for them."""

Failures = dict[Path, tuple[SourceFile, str]]
"""Files that could not be parsed as they were, and why."""


@dataclass(frozen=True, slots=True)
class Looked:
    """A file whose turn it is."""

    path: Path
    source: SourceFile | None = None
    """As it is now; None where it cannot be read at all."""
    is_unchanged: bool = False
    error: DocumentError | None = None
    documents: Callable[[], Iterator[Document]] = lambda: iter(())
    """Of a file that changed; a DocumentError where it cannot be parsed."""
    is_parsed_ahead: bool = False


class FileReader:
    """Reads files for one `add`."""

    def __init__(self, config: DocumentsConfig, failures: Failures, check: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            failures: not tried again while the files stay as they are; those of this run are added.
            check: called while a parsing process is waited for; what it raises ends the reading.
        """
        self._config = config
        self._check = check
        self._failures = failures
        self._pool: ParserPool | None = None
        self._num_here = 0

    def read(self, files: Sequence[Path], known: Mapping[str, SourceFile], said: Said) -> Generator[Looked]:
        """Each file in order. Closing the iterator ends what is being parsed.

        Args:
            known: files as they were when they were last read, by path.
            said: metadata that is said of all files now, on top of what was said before.
        """
        ahead: deque[Looked] = deque()
        num_ahead = 0
        try:
            for path in files:
                ahead.append(self._look(path, known.get(str(path)), said))
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
    def max_chunks(self) -> int:
        """That one document may have."""
        return self._config.max_chunks

    def remember(self, looked: Looked, error: DocumentError) -> None:
        """Do not try a file again that was refused for what it says, while it stays as it is."""
        if looked.source is not None and not isinstance(error, ReaderUnavailableError):
            self._failures[looked.path] = (looked.source, str(error))

    @property
    def _max_ahead(self) -> int:
        """Documents that may wait for their turn: enough that no process waits, few enough for memory."""
        return 2 * self._pool.num_workers if self._pool is not None else 0

    def _look(self, path: Path, known: SourceFile | None, said: Said) -> Looked:
        try:
            source = look_at(path, known, self._config)
            source = dataclasses.replace(source, metadata=with_said(known.metadata if known else {}, said))
        except DocumentError as error:
            return Looked(path, error=error)
        is_same = known is not None and (known.content_hash, known.metadata) == (source.content_hash, source.metadata)
        if is_same:
            return Looked(path, source, is_unchanged=True)
        failed = self._failures.get(path)
        if failed is not None and failed[0] == source:
            return Looked(path, source, error=DocumentError(failed[1]))
        if self._is_read_here(path, source.size):
            return Looked(path, source, documents=lambda: self._noting(path, load(path, self._config)))
        if self._pool is None:
            self._pool = ParserPool(self._config)
        future = self._pool.submit(path)
        documents = (self._awaited(future) for _ in range(1))
        return Looked(path, source, documents=lambda: self._noting(path, documents), is_parsed_ahead=True)

    def _awaited(self, future: "Future[Document]") -> Document:
        while not wait([future], _CHECK_SECONDS).done:
            self._check()
        return future.result()

    def _is_read_here(self, path: Path, num_bytes: int) -> bool:
        """Whether it is not worth a process: JSONL is read as a stream, and a few small texts are read at once."""
        if is_jsonl(path):
            return True
        kind = format_of(path)
        self._num_here += 1
        is_quick = kind is None or (kind.is_text and kind.is_bounded)
        return num_bytes <= _SMALL_BYTES and self._num_here <= _NUM_HERE and is_quick

    def _noting(self, path: Path, documents: Iterator[Document]) -> Iterator[Document]:
        """The same; a failure that was remembered is forgotten once the file was read."""
        yield from documents
        self._failures.pop(path, None)


def look_at(path: Path, known: SourceFile | None, config: DocumentsConfig) -> SourceFile:
    """The file as it is now, with what describes it beside it. Its content is read only if size or time differ from
    what is known.

    Raises:
        DocumentError: the file cannot be read, is too large, or its name is no text.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise DocumentError(f"{path}: the name is not UTF-8; rename the file") from error
    beside = sidecar_of(path)
    files = [path, beside] if os.path.isfile(beside) else [path]  # false where its name would be too long
    try:
        states = [file.stat() for file in files]
    except OSError:
        states = []  # what is wrong with it is said where it is opened
    size, mtime_ns = sum(state.st_size for state in states), sum(state.st_mtime_ns for state in states)
    if states and known is not None and (known.size, known.mtime_ns) == (size, mtime_ns):
        return known
    return SourceFile(str(path), size, mtime_ns, ":".join(_file_hash(file, config) for file in files))


def _file_hash(path: Path, config: DocumentsConfig) -> str:
    with opened(path) as (stream, status):
        if not is_jsonl(path):
            check_size(path, status.st_size, config)
        return hashlib.file_digest(stream, "sha256").hexdigest()


def with_said(metadata: Metadata, said: Said) -> Metadata:
    """What is said in addition goes before; None takes a field away."""
    both = {**metadata, **said}
    return {name: value for name, value in sorted(both.items()) if value is not None}
