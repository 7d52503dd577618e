"""Reads indexed documents again, from the files that they came from, to show them.

A file is used only while its bytes have the hash that they had when it was indexed, and a document only if it is read
as it was then. So a changed file, or a link that leads elsewhere now, is never shown. Otherwise the indexed chunks are
the text.
"""

import contextlib
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.core.cancellation import Cancellation
from stillroom.core.document import Document, Paragraph
from stillroom.core.document_content import DocumentContent
from stillroom.core.ids import DocumentId
from stillroom.errors import DocumentError, OriginalGoneError, UnknownDocumentError
from stillroom.retrieval.intake.page_images import PDF, check_width, page_image
from stillroom.retrieval.intake.reading import FileReader
from stillroom.retrieval.loaders.formats import is_jsonl
from stillroom.retrieval.loaders.load_file import load_record
from stillroom.retrieval.loaders.ocr_use import NUM_OCR_PAGES
from stillroom.retrieval.loaders.source import opened
from stillroom.retrieval.store.commit_batch import content_hash_of
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.sql_rows import DocumentOrigin

_MAX_REMEMBERED_CHARS = 1 << 24
"""Text of the documents read last that is kept, so that their parts are shown without reading the files again."""
_MAX_REMEMBERED_HASHES = 512
_MAX_CHECKED_BYTES = 1 << 22
"""Of a file that is hashed only to warn of a change; a larger one is not."""
_FROM_OCR = "text as indexed: OCR read it from pictures of the pages, and it may have errors"
_CHANGED = "the file has changed since it was indexed; add it again to index what it holds now"

_FileState = tuple[int, int, int, int, int]
"""Device, inode, size, times of the last change of content and of status."""


@dataclass(frozen=True, slots=True)
class OriginalFile:
    """An open file that holds what was indexed."""

    name: str
    """File name without folders."""
    stream: BufferedReader
    status: os.stat_result
    sha256: str
    """Of its bytes, in hexadecimal digits."""


class Originals:
    """Texts, files and pages of the documents of one knowledge base. Thread-safe; files are parsed one at a time."""

    def __init__(self, corpus: Corpus, config: DocumentsConfig) -> None:
        self._corpus = corpus
        self._config = config
        self._parsing = threading.Lock()
        self._documents = _RecentDocuments()
        self._hashes = _RecentHashes()

    def content(self, document_id: DocumentId, stop: Cancellation | None = None) -> DocumentContent:
        """Return the text of a document. A file that cannot be read is a `notice`, not an error.

        Args:
            stop: Cancels the reading from another thread.

        Raises:
            UnknownDocumentError: No indexed document has that id.
            ChangeCancelledError: `stop` was cancelled.
        """
        origin = self._origin(document_id)
        path = self._path(origin)
        try:
            if origin.metadata.get(NUM_OCR_PAGES):  # reading it again would take seconds per page
                with self._verified(origin, path):
                    return _content(origin, self._indexed(document_id), _FROM_OCR, has_file=True)
            document = self._read(origin, path, stop or Cancellation())
        except DocumentError as error:
            reason = str(error).removeprefix(f"{path}: ")
            return _content(origin, self._indexed(document_id), f"text as indexed: {reason}", has_file=False)
        return _content(origin, document.paragraphs)

    def warnings(self, document_ids: Iterable[DocumentId]) -> tuple[str, ...]:
        """Return a sentence for each document whose file holds something else now. A file is read again only after its
        state has changed. Without a sentence: files that are gone or large, and records of JSONL files."""
        return tuple(f"{name}: {_CHANGED}" for name in dict.fromkeys(document_ids) if self._has_changed(name))

    def _has_changed(self, document_id: DocumentId) -> bool:
        origin = self._corpus.origin_of(document_id)
        if origin is None or not origin.file_hash or origin.record_id is not None:
            return False
        try:
            with opened(self._path(origin)) as (stream, status):
                is_small = status.st_size <= _MAX_CHECKED_BYTES
                return is_small and self._hashes.of(stream, status) != origin.file_hash
        except (DocumentError, OSError):
            return False

    @contextlib.contextmanager
    def file(self, document_id: DocumentId) -> Iterator[OriginalFile]:
        """Open the file that a document came from; for a record, the whole JSONL file.

        Raises:
            UnknownDocumentError: No indexed document has that id.
            OriginalGoneError: The file is gone, or does not hold what was indexed.
        """
        origin = self._origin(document_id)
        with self._verified(origin, self._path(origin)) as file:
            yield file

    def page_image(self, document_id: DocumentId, page: int, width: int, stop: Cancellation | None = None) -> bytes:
        """Draw a page of a PDF as PNG, in a process of its own.

        Args:
            page: From 1.
            width: In pixels; fewer if the page is so long that the picture would be too large.

        Raises:
            UnknownDocumentError: No indexed document has that id, or it has no such page.
            UsageError: The width is out of range.
            OriginalGoneError: The file is gone, or does not hold what was indexed.
            DocumentError: The page cannot be drawn within the limits of `documents`.
            ChangeCancelledError: `stop` was cancelled.
        """
        check_width(width)
        origin = self._origin(document_id)
        if not origin.path.lower().endswith(PDF):
            raise UnknownDocumentError(f"{origin.title!r} is not a PDF; only pages of a PDF have pictures")
        with self._verified(origin, self._path(origin)) as file:
            return page_image(file.stream, page, width, self._config, stop or Cancellation())

    def _origin(self, document_id: DocumentId) -> DocumentOrigin:
        origin = self._corpus.origin_of(document_id)
        if origin is None:
            raise UnknownDocumentError(f"{document_id!r} is not indexed; see `stillroom list`")
        return origin

    def _path(self, origin: DocumentOrigin) -> Path:
        return self._corpus.original_path(origin.path)

    def _indexed(self, document_id: DocumentId) -> tuple[Paragraph, ...]:
        """Return a document's chunks as paragraphs. Chunks do not overlap."""
        return tuple(
            Paragraph(
                chunk.text, chunk.heading_path, chunk.start_line, chunk.end_line, chunk.start_page, chunk.end_page
            )
            for chunk in self._corpus.bare_chunks_of(document_id)
        )

    def _read(self, origin: DocumentOrigin, path: Path, stop: Cancellation) -> Document:
        """Return the document as its loader reads it. Raises OriginalGoneError if it is not what was indexed."""
        if is_jsonl(path):
            return _checked(load_record(path, origin.start_line or 1, self._config), origin)
        with self._verified(origin, path):
            found = self._documents.get(origin)
            if found is not None:
                return found
            with self._parsing:
                stop.check()
                found = self._documents.get(origin)
                if found is None:
                    found = _checked(_parse(path, self._config, stop), origin)
                    self._documents.put(origin, found)
                return found

    @contextlib.contextmanager
    def _verified(self, origin: DocumentOrigin, path: Path) -> Iterator[OriginalFile]:
        """Open a file. Raises OriginalGoneError unless its bytes have the hash of the indexed ones."""
        with contextlib.ExitStack() as held:
            try:
                stream, status = held.enter_context(opened(path))
            except DocumentError as error:
                if os.path.exists(path):
                    raise
                raise OriginalGoneError("the file is no longer there") from error
            sha256 = self._hashes.of(stream, status)
            if sha256 != origin.file_hash:
                raise OriginalGoneError(_CHANGED)
            yield OriginalFile(path.name, stream, status, sha256)


def _content(
    origin: DocumentOrigin, paragraphs: tuple[Paragraph, ...], notice: str = "", *, has_file: bool = True
) -> DocumentContent:
    num_pages = origin.metadata.get("num_pages")
    return DocumentContent(
        document_id=origin.document_id,
        title=origin.title,
        paragraphs=paragraphs,
        source="index" if notice else "file",
        notice=notice,
        num_lines=max((paragraph.end_line for paragraph in paragraphs), default=0),
        num_pages=max(
            num_pages if isinstance(num_pages, int) else 0,
            max((paragraph.end_page for paragraph in paragraphs), default=0),
        ),
        has_file=has_file,
        has_page_images=has_file and origin.path.lower().endswith(PDF),
    )


def _parse(path: Path, config: DocumentsConfig, stop: Cancellation) -> Document:
    """Parse a file as `add` does: in a process of its own unless it is a small text."""
    with contextlib.closing(FileReader(config, {}, stop.check).read([path], {}, {})) as files:
        for file in files:
            if file.error is not None:
                raise file.error
            for document in file.documents():
                return document
    raise OriginalGoneError(_CHANGED)


def _checked(document: Document, origin: DocumentOrigin) -> Document:
    """Return the document. Raises OriginalGoneError if its text is not the indexed one."""
    if document.record_id != origin.record_id:
        raise OriginalGoneError(_CHANGED)
    if content_hash_of(replace(document, metadata=origin.metadata)) != origin.content_hash:
        raise OriginalGoneError("the file is not read as it was when it was indexed; add it again")
    return document


class _RecentDocuments:
    """The documents that were read last, by id and content. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], tuple[Document, int]] = OrderedDict()
        self._num_chars = 0

    def get(self, origin: DocumentOrigin) -> Document | None:
        key = (origin.document_id, origin.content_hash)
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, origin: DocumentOrigin, document: Document) -> None:
        num_chars = sum(
            len(paragraph.text) + 100 + sum(map(len, paragraph.heading_path)) for paragraph in document.paragraphs
        )
        with self._lock:
            self._kept[origin.document_id, origin.content_hash] = document, num_chars
            self._num_chars += num_chars
            while self._num_chars > _MAX_REMEMBERED_CHARS:
                self._num_chars -= self._kept.popitem(last=False)[1][1]


class _RecentHashes:
    """Hashes of files, by their state, so that a file is not hashed for each of its parts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[_FileState, str] = OrderedDict()

    def of(self, stream: BufferedReader, status: os.stat_result) -> str:
        """Return the SHA-256 of an open file, and leave it at its start."""
        key = _state(status)
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
            stream.seek(0)
            if _state(os.fstat(stream.fileno())) == key:  # it was not written meanwhile
                self._keep(key, found)
        return found

    def _keep(self, key: _FileState, found: str) -> None:
        with self._lock:
            self._kept[key] = found
            if len(self._kept) > _MAX_REMEMBERED_HASHES:
                self._kept.popitem(last=False)


def _state(status: os.stat_result) -> _FileState:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
