"""Files into the corpus: read, cut, embed, commit; batch by batch.

What has not changed costs nothing: a file of the same size and time is not read, one of the same content is not parsed,
a document that says the same is not cut, a chunk that reads the same is not embedded. Each batch is committed whole, so
an interrupted run loses only the batch it was in, and a repeat continues from there.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stillroom.core.clock import Clock
from stillroom.core.document import Chunk, Document
from stillroom.core.ids import DocumentId
from stillroom.core.metadata import Metadata, metadata_to_json
from stillroom.errors import DocumentError
from stillroom.retrieval.chunker import Chunker
from stillroom.retrieval.corpus import Corpus
from stillroom.retrieval.discovery import Discovery, discover
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.loaders.load import load
from stillroom.retrieval.loaders.metadata import Said, sidecar_metadata, sidecar_of
from stillroom.retrieval.rows import Source, SourceUpdate, StoredDocument

_WINDOW = 512
"""Chunks embedded and committed together. Larger: batches of more equal length; longer until something is safe."""

_MAX_PENDING_DOCUMENTS = 1000


@dataclass(frozen=True, slots=True)
class AddProgress:
    """How far an `add` is."""

    num_files_done: int
    num_files_total: int
    num_bytes_done: int
    """Of the files' bytes; what was unchanged counts as done."""
    num_bytes_total: int
    num_chunks: int
    """Chunks embedded or taken over so far in this run."""
    current: str
    """Path of the file that was read last."""


@dataclass(frozen=True, slots=True)
class AddReport:
    """What an `add` did, in documents; each record of a JSONL file is one."""

    num_added: int = 0
    num_updated: int = 0
    num_unchanged: int = 0
    num_removed: int = 0
    """Records that are no longer in a file, and documents of files that are no longer in an added folder."""
    num_chunks: int = 0
    """Chunks of the added and updated documents."""
    failures: tuple[tuple[str, str], ...] = ()
    """Path and reason for each file that could not be read. What was known of it before is kept."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RemoveReport:
    """What a `remove` did."""

    num_documents: int
    num_chunks: int


@dataclass(slots=True)
class _Pending:
    """A document that waits for its batch."""

    document: Document
    path: str
    content_hash: str
    num_bytes: int
    outcome: Literal["added", "updated", "unchanged"]
    """What the report counts it as. `unchanged`: it says the same, on other lines or pages."""
    chunks: list[Chunk]
    known: dict[str, NDArray[np.float32]]
    """Embeddings from the document's last version, by the text that was embedded."""

    def texts(self) -> list[str]:
        """What has to be embedded."""
        return [chunk.indexed_text for chunk in self.chunks if chunk.indexed_text not in self.known]


@dataclass(slots=True)
class _Batch:
    """What the next commit does."""

    documents: list[_Pending] = field(default_factory=list)
    sources: list[SourceUpdate] = field(default_factory=list)
    removed: list[DocumentId] = field(default_factory=list)
    num_texts: int = 0
    num_files: int = 0
    num_bytes: int = 0


class Ingest:
    """One run of `add`. The caller holds the write lock."""

    def __init__(
        self,
        corpus: Corpus,
        chunker: Chunker,
        embedder: Embedder,
        clock: Clock,
        progress: Callable[[AddProgress], None] | None = None,
        said: Said | None = None,
    ) -> None:
        """`said`: of every file that is added, for as long as it is in the corpus; None takes back what was said."""
        self._said = said or {}
        self._corpus = corpus
        self._chunker = chunker
        self._embedder = embedder
        self._clock = clock
        self._progress = progress or (lambda _: None)
        self._batch = _Batch()
        self._counts = {"added": 0, "updated": 0, "unchanged": 0, "removed": 0, "chunks": 0}
        self._failures: list[tuple[str, str]] = []
        self._sizes: dict[Path, int] = {}
        self._num_files_done = self._num_bytes_done = self._num_chunks_done = 0
        self._current = ""

    def run(self, paths: Sequence[Path]) -> AddReport:
        """Add files and folders.

        Raises:
            UsageError: a path does not exist; nothing was done.
        """
        began = self._clock.monotonic()
        found = discover(paths)
        self._failures += [(str(path), reason) for path, reason in found.failures]
        self._sizes = {path: _size(path) for path in found.files}
        sources, known = self._corpus.sources(), self._corpus.paths()
        for path in found.files:
            self._current = str(path)
            try:
                self._add_file(path, sources.get(str(path)), len(known.get(str(path), ())))
            except DocumentError as error:
                self._failures.append((str(path), str(error)))
                self._finish_file(self._sizes[path])
        if not found.failures:
            self._remove_vanished(found, {*sources, *known}, known)
        self._flush()
        counts = {f"num_{name}": count for name, count in self._counts.items()}
        return AddReport(**counts, failures=tuple(self._failures), seconds=self._clock.monotonic() - began)

    def _add_file(self, path: Path, known: Source | None, num_known: int) -> None:
        source = _look_at(path, known)
        source = dataclasses.replace(source, metadata=_with(known.metadata if known else {}, self._said))
        if known is not None and known.content_hash == source.content_hash and known.metadata == source.metadata:
            if source != known:
                self._batch.sources.append(SourceUpdate(str(path), source))
            self._counts["unchanged"] += num_known
            self._finish_file(self._sizes[path])
            return
        if path.suffix.lower() in (".jsonl", ".ndjson"):
            for _ in load(path):  # a malformed line at the end must not leave half of the file behind
                pass
        known_hashes = self._corpus.document_ids(str(path))
        said = {**sidecar_metadata(path), **source.metadata}
        num_bytes = 0
        for document in load(path):
            if said:
                document = dataclasses.replace(document, metadata=_with(document.metadata, said))
            num_bytes += self._add_document(path, document, known_hashes)
        self._counts["removed"] += len(known_hashes)  # those that are left were not seen again
        self._batch.removed += known_hashes
        self._batch.sources.append(SourceUpdate(str(path), source))
        self._finish_file(max(0, self._sizes[path] - num_bytes))

    def _add_document(self, path: Path, document: Document, known_hashes: dict[DocumentId, str]) -> int:
        """Queue a document, unless it says the same as before. Returns the bytes it accounts for."""
        content_hash = _content_hash(document)
        known_hash = known_hashes.pop(document.document_id, None)
        num_bytes = self._sizes[path] if document.record_id is None else _num_text_bytes(document)
        self._batch.num_bytes += num_bytes
        if known_hash == content_hash:
            self._counts["unchanged"] += 1
            return num_bytes
        old = self._corpus.chunks_of(document.document_id) if known_hash is not None else []
        pending = _Pending(
            document=document,
            path=str(path),
            content_hash=content_hash,
            num_bytes=num_bytes,
            outcome=_outcome(known_hash, content_hash),
            chunks=self._chunker.chunks(document),
            known={chunk.indexed_text: vector for chunk, vector in old},
        )
        self._batch.documents.append(pending)
        self._batch.num_texts += len(pending.texts())
        if self._batch.num_texts >= _WINDOW or len(self._batch.documents) >= _MAX_PENDING_DOCUMENTS:
            self._flush()
        return num_bytes

    def _finish_file(self, num_bytes: int) -> None:
        """Count a file as done: now, or with the batch that its documents wait for."""
        self._batch.num_files += 1
        self._batch.num_bytes += num_bytes
        if not self._batch.documents:
            self._advance()

    def _remove_vanished(self, found: Discovery, paths: set[str], known: dict[str, list[DocumentId]]) -> None:
        """Forget files under an added folder that are gone."""
        files = {str(path) for path in found.files}
        prefixes = tuple(os.path.join(folder, "") for folder in found.folders)
        for path in sorted(paths - files):
            if prefixes and path.startswith(prefixes) and _is_gone(path):
                self._counts["removed"] += len(known.get(path, ()))
                self._batch.removed += known.get(path, ())
                self._batch.sources.append(SourceUpdate(path, None))

    def _flush(self) -> None:
        """Embed and commit the batch."""
        batch = self._batch
        texts = [text for pending in batch.documents for text in pending.texts()]
        num_chunks = sum(len(pending.chunks) for pending in batch.documents)
        num_done = num_chunks - len(texts)

        def on_batch(num_texts: int) -> None:
            nonlocal num_done
            num_done += num_texts
            self._report(batch.num_bytes * num_done // max(1, num_chunks), num_done)

        vectors = iter(self._embedder.embed_documents(texts, on_batch)) if texts else iter(())
        now = self._clock.unix()
        stored = [_stored(pending, vectors, now) for pending in batch.documents]
        if stored or batch.removed or batch.sources:
            self._corpus.commit(stored, batch.removed, batch.sources)
        for pending in batch.documents:
            self._counts[pending.outcome] += 1
            self._counts["chunks"] += len(pending.chunks) if pending.outcome != "unchanged" else 0
        self._num_chunks_done += num_chunks
        self._advance()
        self._batch = _Batch()

    def _advance(self) -> None:
        """Move the batch's files and bytes to what is done."""
        self._num_files_done += self._batch.num_files
        self._num_bytes_done += self._batch.num_bytes
        self._batch.num_files = self._batch.num_bytes = 0
        self._report(0, 0)

    def _report(self, num_bytes: int, num_chunks: int) -> None:
        self._progress(
            AddProgress(
                num_files_done=self._num_files_done,
                num_files_total=len(self._sizes),
                num_bytes_done=self._num_bytes_done + num_bytes,
                num_bytes_total=sum(self._sizes.values()),
                num_chunks=self._num_chunks_done + num_chunks,
                current=self._current,
            )
        )


def _stored(pending: _Pending, vectors: Iterator[NDArray[np.float32]], now: float) -> StoredDocument:
    rows = [pending.known[text] if text in pending.known else next(vectors) for text in _indexed_texts(pending)]
    document = pending.document
    return StoredDocument(
        document_id=document.document_id,
        path=pending.path,
        record_id=document.record_id,
        title=document.title,
        content_hash=pending.content_hash,
        num_bytes=pending.num_bytes,
        added_at=now,
        chunks=tuple(pending.chunks),
        vectors=np.stack(rows) if rows else np.empty((0, 0), dtype=np.float32),
        metadata=document.metadata,
    )


def _indexed_texts(pending: _Pending) -> list[str]:
    return [chunk.indexed_text for chunk in pending.chunks]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _is_gone(path: str) -> bool:
    """Whether a file does not exist; one that merely cannot be seen just now is not gone."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _look_at(path: Path, known: Source | None) -> Source:
    """The file as it is now, with what describes it beside it. Its content is read only if size or time differ from
    what is known.

    Raises:
        DocumentError: the file cannot be read, or its name is no text.
    """
    try:
        str(path).encode()
        beside = sidecar_of(path)
        files = [path, beside] if beside.is_file() else [path]
        states = [file.stat() for file in files]
        size, mtime_ns = sum(state.st_size for state in states), sum(state.st_mtime_ns for state in states)
        if known is not None and (known.size, known.mtime_ns) == (size, mtime_ns):
            return known
        content_hash = ":".join(map(_file_hash, files))
    except UnicodeEncodeError as error:
        raise DocumentError(f"{path!a}: the name is not UTF-8; rename the file") from error
    except OSError as error:
        raise DocumentError(f"{path}: cannot be read: {error.strerror or error}") from error
    return Source(str(path), size, mtime_ns, content_hash)


def _file_hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _with(metadata: Metadata, said: Said) -> Metadata:
    """What is said in addition goes before; None takes a field away."""
    both = {**metadata, **said}
    return {name: value for name, value in sorted(both.items()) if value is not None}


def _content_hash(document: Document) -> str:
    """SHA-256 of what the document says (title, headings, paragraphs, metadata), and after a colon of the lines and
    pages that it says it on. A document without metadata and pages has the hash that it had before there were any."""
    says: list[object] = [
        document.title,
        [(paragraph.text, paragraph.heading_path) for paragraph in document.paragraphs],
    ]
    says += [metadata_to_json(document.metadata)] if document.metadata else []
    where: list[object] = [(paragraph.start_line, paragraph.end_line) for paragraph in document.paragraphs]
    if any(paragraph.end_page for paragraph in document.paragraphs):
        where += [(paragraph.start_page, paragraph.end_page) for paragraph in document.paragraphs]
    return ":".join(hashlib.sha256(json.dumps(part).encode()).hexdigest() for part in (says, where))


def _outcome(known_hash: str | None, content_hash: str) -> Literal["added", "updated", "unchanged"]:
    if known_hash is None:
        return "added"
    return "unchanged" if known_hash.partition(":")[0] == content_hash.partition(":")[0] else "updated"


def _num_text_bytes(document: Document) -> int:
    return len(document.title.encode()) + sum(len(paragraph.text.encode()) for paragraph in document.paragraphs)
