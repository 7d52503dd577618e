"""Ingest: reads files, cuts them into chunks, embeds them and commits them to the corpus in batches.

The walk of an uploaded file (`stillroom add` begins at step 4):

1. `DocumentRoutes.upload` (server/routes/document_routes.py) reads the request, checks the names and queues the upload.
2. `UploadQueue.start` (server/routes/upload_queue.py) runs one change per tenant at a time, in a thread.
3. `Uploads.add` (uploads.py), by way of `Stillroom.upload`, writes the bytes below `kb/uploads`, notes them as pending.
4. `KnowledgeBase.add` takes the write lock and makes an `Ingest`.
5. `Ingest.run`: `FileReader` parses, `Chunker` cuts, `Embedder` embeds, `Corpus.commit` stores each batch.
6. `Repairs.updating_indexes` (repairing.py) writes vectors and postings before the lock is released.

Unchanged input costs nothing: a file of the same size and time is not read, a file of the same content is not parsed,
a document of the same content is not cut, a chunk of the same text is not embedded. An interrupted run loses only its
current batch; a repeated run does the rest.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stillroom.core.cancellation import Cancellation
from stillroom.core.clock import Clock
from stillroom.core.document import Chunk, Document
from stillroom.core.ids import DocumentId
from stillroom.errors import DocumentError, ReaderUnavailableError
from stillroom.retrieval.chunker import Chunker
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.index.indexes import Indexes
from stillroom.retrieval.intake.discovery import Discovery, Skipped, discover
from stillroom.retrieval.intake.reading import CheckedFile, FileReader
from stillroom.retrieval.intake.sizes import is_gone, num_text_bytes, size_of
from stillroom.retrieval.loaders.document_metadata import GivenMetadata, sidecar_metadata, with_given
from stillroom.retrieval.loaders.formats import is_jsonl
from stillroom.retrieval.store.commit_batch import CommitBatch, PendingDocument, content_hash_of, outcome_of
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.sql_rows import SourceFile, SourceUpdate

_COMMITTED_TOGETHER = 512
"""Minimum number of chunks in a commit. More: embedding batches of more equal length, but more work lost if
interrupted."""

_MAX_PENDING_DOCUMENTS = 1000

_EMBEDDED_TOGETHER = 2048
"""Chunks given to the embedder at a time; it tokenises all of them before it computes."""

_MAX_ROUNDS = 10
"""Most times that files are read again because another process changes their documents."""

_BYTES_SHARE = 8
"""If a document has more bytes of text than `max_chunks` * `max_tokens` / this, its tokens are counted before it is
cut."""


@dataclass(frozen=True, slots=True)
class AddProgress:
    """Progress of an `add`."""

    num_files_done: int
    num_files_total: int
    num_bytes_done: int
    """Bytes of the files; unchanged files count as done."""
    num_bytes_total: int
    num_chunks: int
    """Chunks of this run, embedded or reused."""
    current: str
    """Path of the file that was read last."""


@dataclass(frozen=True, slots=True)
class AddReport:
    """Result of an `add`, in documents; each record of a JSONL file counts as one."""

    num_added: int = 0
    num_updated: int = 0
    num_unchanged: int = 0
    num_removed: int = 0
    """Records removed from a file, and documents of files removed from an added folder."""
    num_chunks: int = 0
    """Chunks of the added and updated documents."""
    failures: tuple[tuple[str, str], ...] = ()
    """Path and reason of each file that could not be read. Its documents of before are kept."""
    skipped: Skipped = field(default_factory=Skipped)
    """Files and folders skipped in folders."""
    seconds: float = 0.0
    is_worth_repeating: bool = False
    """Whether a file was not read for a temporary reason."""


@dataclass(frozen=True, slots=True)
class RemoveReport:
    """Result of a `remove`."""

    num_documents: int
    num_chunks: int
    unknown: tuple[str, ...] = ()
    """Targets without documents."""


class AddObserver:
    """Reports the progress of an `add`, cancels it, and writes to a collection (Qdrant) after each commit, so that
    readers need not hold the changes in memory."""

    def __init__(
        self,
        corpus: Corpus,
        indexes: Indexes,
        progress: Callable[[AddProgress], None] | None,
        stop: Cancellation | None,
    ) -> None:
        self._stop = stop or Cancellation()
        self._corpus, self._indexes = corpus, indexes
        self._progress = progress
        self._generation = corpus.generation

    def check(self) -> None:
        """Raises ChangeCancelledError if the `add` was cancelled."""
        self._stop.check()

    def report(self, done: AddProgress) -> None:
        """Write the collection if there was a commit, then call the progress callback."""
        generation = self._corpus.generation
        if generation != self._generation:
            self._indexes.write_collection()
            self._generation = generation
        if self._progress is not None:
            self._progress(done)


class Ingest:
    """One run of `add`. Precondition: the caller holds the write lock."""

    def __init__(
        self,
        corpus: Corpus,
        chunker: Chunker,
        embedder: Embedder,
        reader: FileReader,
        clock: Clock,
        observer: AddObserver,
    ) -> None:
        self._corpus = corpus
        self._names = corpus.names
        self._chunker = chunker
        self._embedder = embedder
        self._reader = reader
        self._clock = clock
        self._observer = observer
        self._batch = CommitBatch()
        self._counts = {"added": 0, "updated": 0, "unchanged": 0, "removed": 0, "chunks": 0}
        self._failures: list[tuple[str, str]] = []
        self._unfinished: list[Path] = []
        """Files whose documents another process changed meanwhile."""
        self._is_worth_repeating = False
        self._sizes: dict[Path, int] = {}
        self._num_bytes_total = 0
        self._num_files_done = self._num_bytes_done = self._num_chunks_done = 0
        self._current = ""

    def run(self, paths: Sequence[str | Path], given: GivenMetadata, exclude: Sequence[str] = ()) -> AddReport:
        """Add files and folders.

        Args:
            given: Metadata for every added file, kept until the file is removed; None removes a field given before.
            exclude: Patterns of files and folders to skip, as in .gitignore.

        Raises:
            UsageError: A path is empty or does not exist, or a pattern is invalid; nothing was done.
        """
        began = self._clock.monotonic()
        sources = self._sources()
        known = {self._names.path_of(name): documents for name, documents in self._corpus.paths().items()}
        found = discover(paths, exclude, {*sources, *known}, reads_images=self._reader.reads_images)
        for folder, reason in found.failures:
            self._fail(folder, reason)
        self._sizes = {path: size_of(path) for path in found.files}
        self._num_bytes_total = sum(self._sizes.values())
        self._add_files(found.files, sources, given, known)
        self._remove_vanished(found, {*sources, *known}, known)
        self._flush()
        self._add_unfinished(given)
        return AddReport(
            **{f"num_{name}": count for name, count in self._counts.items()},
            failures=tuple(self._failures),
            skipped=found.skipped,
            seconds=self._clock.monotonic() - began,
            is_worth_repeating=self._is_worth_repeating,
        )

    def _sources(self) -> dict[str, SourceFile]:
        return {self._names.path_of(name): source for name, source in self._corpus.sources().items()}

    def _add_files(
        self,
        paths: Sequence[Path],
        sources: Mapping[str, SourceFile],
        given: GivenMetadata,
        known: Mapping[str, list[DocumentId]],
    ) -> None:
        with contextlib.closing(self._reader.read(paths, sources, given)) as files:
            for file in files:
                self._observer.check()
                self._current = str(file.path)
                try:
                    self._add_file(file, len(known.get(self._current, ())), sources.get(self._current))
                except DocumentError as error:
                    self._reader.remember_failure(file, error)
                    self._is_worth_repeating |= isinstance(error, ReaderUnavailableError)
                    self._fail(file.path, str(error))
                    self._finish_file(self._sizes[file.path])

    def _add_unfinished(self, given: GivenMetadata) -> None:
        """Read files again whose documents another process changed while they were added; what is equal by now is not
        embedded again. Their documents are not counted twice."""
        for _ in range(_MAX_ROUNDS):
            if not self._unfinished:
                return
            paths, self._unfinished = sorted(set(self._unfinished)), []
            counts = dict(self._counts)
            self._add_files(paths, self._sources(), given, {})
            self._flush()
            self._counts = counts
        for path in self._unfinished:
            self._is_worth_repeating = True
            self._fail(path, "other processes change its documents at the same time; add it again")

    def _fail(self, path: Path, reason: str) -> None:
        name = self._names.name_of(str(path))
        self._failures.append((str(path), reason.removeprefix(f"{path}: ").removeprefix(f"{name}: ")))

    def _add_file(self, file: CheckedFile, num_known: int, known: SourceFile | None) -> None:
        if file.error is not None:
            raise file.error
        path, source = file.path, file.source
        assert source is not None
        if file.is_unchanged:
            if source != known:
                self._queue_source(path, source, self._corpus.document_ids(self._names.name_of(str(path))))
            self._counts["unchanged"] += num_known
            self._finish_file(self._sizes[path])
            return
        if is_jsonl(path):
            for document in file.documents():  # check all records first: a file is added whole or not at all
                self._observer.check()
                if self._may_be_too_large(document):
                    self._chunks(document)
        known_hashes = self._corpus.document_ids(self._names.name_of(str(path)))
        given = {**sidecar_metadata(path), **source.metadata}
        num_bytes, held = 0, dict[DocumentId, str]()
        for document in file.documents():
            document = dataclasses.replace(
                document,
                document_id=DocumentId(self._names.name_of(document.document_id)),
                metadata=with_given(document.metadata, given) if given else document.metadata,
            )
            held[document.document_id] = content_hash = content_hash_of(document)
            num_bytes += self._add_document(path, document, content_hash, known_hashes)
        self._counts["removed"] += len(known_hashes)  # the rest is no longer in the file
        self._batch.removed += known_hashes
        self._queue_source(path, source, held)
        self._finish_file(max(0, self._sizes[path] - num_bytes))

    def _add_document(
        self, path: Path, document: Document, content_hash: str, known_hashes: dict[DocumentId, str]
    ) -> int:
        """Queue a document unless it is unchanged. Returns the bytes of the file that it accounts for."""
        known_hash = known_hashes.pop(document.document_id, None)
        num_bytes = self._sizes[path] if document.record_id is None else num_text_bytes(document)
        self._batch.num_bytes += num_bytes
        if known_hash == content_hash:
            self._counts["unchanged"] += 1
            return num_bytes
        old = self._corpus.chunks_of(document.document_id) if known_hash is not None else []
        pending = PendingDocument(
            document=document,
            path=self._names.name_of(str(path)),
            content_hash=content_hash,
            num_bytes=num_bytes,
            outcome=outcome_of(known_hash, content_hash),
            chunks=self._chunks(document),
            known={chunk.indexed_text: vector for chunk, vector in old},
        )
        self._batch.documents.append(pending)
        self._batch.num_chunks += len(pending.chunks)
        if self._batch.num_chunks >= _COMMITTED_TOGETHER or len(self._batch.documents) >= _MAX_PENDING_DOCUMENTS:
            self._flush()
        return num_bytes

    def _may_be_too_large(self, document: Document) -> bool:
        return num_text_bytes(document) > self._reader.max_chunks * self._chunker.max_tokens // _BYTES_SHARE

    def _chunks(self, document: Document) -> list[Chunk]:
        """Cut a document. Raises DocumentError if it has more than `documents.max_chunks` chunks."""
        if self._may_be_too_large(document):
            num_tokens = 0
            for count in self._chunker.token_counts(document):
                self._observer.check()
                num_tokens += count
                self._check_num_chunks(document, -(-num_tokens // self._chunker.max_tokens))
        found: list[Chunk] = []
        for chunk in self._chunker.each_chunk(document):
            self._observer.check()
            found.append(chunk)
            self._check_num_chunks(document, len(found))
        return found

    def _check_num_chunks(self, document: Document, at_least: int) -> None:
        if at_least > self._reader.max_chunks:
            raise DocumentError(
                f"{document.document_id}: more chunks than documents.max_chunks ({self._reader.max_chunks:,}); "
                "split it, make it a JSONL file, or raise the limit"
            )

    def _queue_source(
        self, path: Path, source: SourceFile | None, documents: Mapping[DocumentId, str] | None = None
    ) -> None:
        """Queue the record of a file; None deletes it.

        Args:
            documents: All that were read from the file, with their content hashes.
        """
        name = self._names.name_of(str(path))
        named = None if source is None else dataclasses.replace(source, path=name)
        self._batch.sources.append(SourceUpdate(name, named, documents))

    def _finish_file(self, num_bytes: int) -> None:
        """Count a file as done, at once or with the batch of its documents."""
        self._batch.num_files += 1
        self._batch.num_bytes += num_bytes
        if not self._batch.documents:
            self._advance()

    def _remove_vanished(self, found: Discovery, paths: set[str], known: dict[str, list[DocumentId]]) -> None:
        """Remove files below an added folder that no longer exist or are ignored now."""
        for path in sorted(paths - {str(path) for path in found.files}):
            if found.covers(path) and (is_gone(path) or found.ignores(path)):
                self._counts["removed"] += len(known.get(path, ()))
                self._batch.removed += known.get(path, ())
                self._queue_source(Path(path), None)

    def _flush(self) -> None:
        """Embed and commit the batch."""
        batch = self._batch
        texts = [text for pending in batch.documents for text in pending.texts()]
        num_chunks = sum(len(pending.chunks) for pending in batch.documents)
        num_done = num_chunks - len(texts)

        def on_batch(num_texts: int) -> None:
            nonlocal num_done
            self._observer.check()
            num_done += num_texts
            self._report(batch.num_bytes * num_done // max(1, num_chunks), num_done)

        vectors = self._embedded(texts, on_batch)
        now = self._clock.unix()
        stored = [pending.stored(vectors, now) for pending in batch.documents]
        if stored or batch.removed or batch.sources:
            report = self._corpus.commit(stored, batch.removed, batch.sources)
            self._unfinished += (Path(self._names.path_of(name)) for name in report.unfinished)
        for pending in batch.documents:
            self._counts[pending.outcome] += 1
            self._counts["chunks"] += len(pending.chunks) if pending.outcome != "unchanged" else 0
        self._num_chunks_done += num_chunks
        self._advance()
        self._batch = CommitBatch()

    def _embedded(self, texts: Sequence[str], on_batch: Callable[[int], None]) -> Iterator[NDArray[np.float32]]:
        for start in range(0, len(texts), _EMBEDDED_TOGETHER):
            self._observer.check()
            yield from self._embedder.embed_documents(texts[start : start + _EMBEDDED_TOGETHER], on_batch)

    def _advance(self) -> None:
        """Count the batch's files and bytes as done."""
        self._num_files_done += self._batch.num_files
        self._num_bytes_done += self._batch.num_bytes
        self._batch.num_files = self._batch.num_bytes = 0
        self._report(0, 0)

    def _report(self, num_bytes: int, num_chunks: int) -> None:
        self._observer.report(
            AddProgress(
                num_files_done=self._num_files_done,
                num_files_total=len(self._sizes),
                num_bytes_done=self._num_bytes_done + num_bytes,
                num_bytes_total=self._num_bytes_total,
                num_chunks=self._num_chunks_done + num_chunks,
                current=self._current,
            )
        )
