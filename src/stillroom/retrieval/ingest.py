"""Files into the corpus: read, cut, embed, commit; batch by batch.

What has not changed costs nothing: a file of the same size and time is not read, one of the same content is not parsed,
a document that says the same is not cut, a chunk that reads the same is not embedded. Each batch is committed whole, so
an interrupted run loses only the batch it was in, and a repeat continues from there.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stillroom.core.clock import Clock
from stillroom.core.document import Chunk, Document
from stillroom.core.ids import DocumentId
from stillroom.errors import DocumentError, ReaderUnavailableError, UnknownDocumentError, UsageError
from stillroom.retrieval.chunker import Chunker
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.intake.discovery import Discovery, Skipped, discover
from stillroom.retrieval.intake.reading import CheckedFile, FileReader
from stillroom.retrieval.loaders.formats import is_jsonl
from stillroom.retrieval.loaders.metadata import GivenMetadata, sidecar_metadata, with_given
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.document_names import DocumentNames
from stillroom.retrieval.store.pending import CommitBatch, Pending, content_hash_of, outcome_of
from stillroom.retrieval.store.rows import SourceFile, SourceUpdate

_WINDOW = 512
"""Chunks committed together, embedded or taken over. Larger: batches of more equal length; longer until something is
safe."""

_MAX_PENDING_DOCUMENTS = 1000

_EMBEDDED_TOGETHER = 2048
"""Chunks given to the embedder at a time: it tokenises them all before it computes."""

_BYTES_SHARE = 8
"""A document with more bytes of text than `max_chunks` times the tokens of a chunk divided by this may have too many
chunks: its tokens are counted before it is cut. A record is cut before anything of its file is taken over."""


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
    skipped: Skipped = field(default_factory=Skipped)
    """What was passed over in folders."""
    seconds: float = 0.0
    is_worth_repeating: bool = False
    """A file was not read for a reason that passes."""


@dataclass(frozen=True, slots=True)
class RemoveReport:
    """What a `remove` did."""

    num_documents: int
    num_chunks: int
    unknown: tuple[str, ...] = ()
    """Targets that stood for no document."""


class IngestWatch(Protocol):
    """Told how far a run is, and may end it."""

    def __call__(self, done: AddProgress) -> None: ...

    def check(self) -> None:
        """Called between two pieces of work; what it raises ends the run."""


class Ingest:
    """One run of `add`. The caller holds the write lock."""

    def __init__(
        self,
        corpus: Corpus,
        chunker: Chunker,
        embedder: Embedder,
        reader: FileReader,
        clock: Clock,
        watch: IngestWatch,
    ) -> None:
        self._corpus = corpus
        self._names = corpus.names
        self._chunker = chunker
        self._embedder = embedder
        self._reader = reader
        self._clock = clock
        self._watch = watch
        self._batch = CommitBatch()
        self._counts = {"added": 0, "updated": 0, "unchanged": 0, "removed": 0, "chunks": 0}
        self._failures: list[tuple[str, str]] = []
        self._is_worth_repeating = False
        self._sizes: dict[Path, int] = {}
        self._num_bytes_total = 0
        self._num_files_done = self._num_bytes_done = self._num_chunks_done = 0
        self._current = ""

    def run(self, paths: Sequence[str | Path], said: GivenMetadata, exclude: Sequence[str] = ()) -> AddReport:
        """Add files and folders.

        Args:
            said: of every file that is added, for as long as it is in the corpus; None takes back what was said.
            exclude: what to pass over, as in .gitignore.

        Raises:
            UsageError: a path is empty or does not exist, or a pattern is none; nothing was done.
        """
        began = self._clock.monotonic()
        sources = {self._names.path_of(name): source for name, source in self._corpus.sources().items()}
        known = {self._names.path_of(name): documents for name, documents in self._corpus.paths().items()}
        found = discover(paths, exclude, {*sources, *known})
        for folder, reason in found.failures:
            self._fail(folder, reason)
        self._sizes = {path: _size(path) for path in found.files}
        self._num_bytes_total = sum(self._sizes.values())
        with contextlib.closing(self._reader.read(found.files, sources, said)) as looked_at:
            for looked in looked_at:
                self._watch.check()
                self._current = str(looked.path)
                try:
                    self._add_file(looked, len(known.get(self._current, ())), sources.get(self._current))
                except DocumentError as error:
                    self._reader.remember_failure(looked, error)
                    self._is_worth_repeating |= isinstance(error, ReaderUnavailableError)
                    self._fail(looked.path, str(error))
                    self._finish_file(self._sizes[looked.path])
        self._remove_vanished(found, {*sources, *known}, known)
        self._flush()
        return AddReport(
            **{f"num_{name}": count for name, count in self._counts.items()},
            failures=tuple(self._failures),
            skipped=found.skipped,
            seconds=self._clock.monotonic() - began,
            is_worth_repeating=self._is_worth_repeating,
        )

    def _fail(self, path: Path, reason: str) -> None:
        name = self._names.name_of(str(path))
        self._failures.append((str(path), reason.removeprefix(f"{path}: ").removeprefix(f"{name}: ")))

    def _add_file(self, looked: CheckedFile, num_known: int, known: SourceFile | None) -> None:
        if looked.error is not None:
            raise looked.error
        path, source = looked.path, looked.source
        assert source is not None
        if looked.is_unchanged:
            if source != known:
                self._note(path, source)
            self._counts["unchanged"] += num_known
            self._finish_file(self._sizes[path])
            return
        if is_jsonl(path):
            for document in looked.documents():  # a bad record at the end must not leave half of the file behind
                self._watch.check()
                if self._may_be_too_large(document):
                    self._chunks(document)
        known_hashes = self._corpus.document_ids(self._names.name_of(str(path)))
        said = {**sidecar_metadata(path), **source.metadata}
        num_bytes = 0
        for document in looked.documents():
            document = dataclasses.replace(
                document,
                document_id=DocumentId(self._names.name_of(document.document_id)),
                metadata=with_given(document.metadata, said) if said else document.metadata,
            )
            num_bytes += self._add_document(path, document, known_hashes)
        self._counts["removed"] += len(known_hashes)  # those that are left were not seen again
        self._batch.removed += known_hashes
        self._note(path, source)
        self._finish_file(max(0, self._sizes[path] - num_bytes))

    def _add_document(self, path: Path, document: Document, known_hashes: dict[DocumentId, str]) -> int:
        """Queue a document, unless it says the same as before. Returns the bytes it accounts for."""
        content_hash = content_hash_of(document)
        known_hash = known_hashes.pop(document.document_id, None)
        num_bytes = self._sizes[path] if document.record_id is None else _num_text_bytes(document)
        self._batch.num_bytes += num_bytes
        if known_hash == content_hash:
            self._counts["unchanged"] += 1
            return num_bytes
        old = self._corpus.chunks_of(document.document_id) if known_hash is not None else []
        pending = Pending(
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
        if self._batch.num_chunks >= _WINDOW or len(self._batch.documents) >= _MAX_PENDING_DOCUMENTS:
            self._flush()
        return num_bytes

    def _may_be_too_large(self, document: Document) -> bool:
        return _num_text_bytes(document) > self._reader.max_chunks * self._chunker.max_tokens // _BYTES_SHARE

    def _chunks(self, document: Document) -> list[Chunk]:
        """Raises DocumentError: there are more than `documents.max_chunks`."""
        if self._may_be_too_large(document):
            num_tokens = 0
            for count in self._chunker.token_counts(document):
                self._watch.check()
                num_tokens += count
                self._check_num_chunks(document, -(-num_tokens // self._chunker.max_tokens))
        found: list[Chunk] = []
        for chunk in self._chunker.each_chunk(document):
            self._watch.check()
            found.append(chunk)
            self._check_num_chunks(document, len(found))
        return found

    def _check_num_chunks(self, document: Document, at_least: int) -> None:
        if at_least > self._reader.max_chunks:
            raise DocumentError(
                f"{document.document_id}: more chunks than documents.max_chunks ({self._reader.max_chunks:,}); "
                "split it, make it a JSONL file, or raise the limit"
            )

    def _note(self, path: Path, source: SourceFile | None) -> None:
        """Queue what is known of a file; None forgets it."""
        name = self._names.name_of(str(path))
        self._batch.sources.append(
            SourceUpdate(name, None if source is None else dataclasses.replace(source, path=name))
        )

    def _finish_file(self, num_bytes: int) -> None:
        """Count a file as done: now, or with the batch that its documents wait for."""
        self._batch.num_files += 1
        self._batch.num_bytes += num_bytes
        if not self._batch.documents:
            self._advance()

    def _remove_vanished(self, found: Discovery, paths: set[str], known: dict[str, list[DocumentId]]) -> None:
        """Forget files under an added folder that are gone, or that its rules pass over now."""
        for path in sorted(paths - {str(path) for path in found.files}):
            if found.covers(path) and (_is_gone(path) or found.ignores(path)):
                self._counts["removed"] += len(known.get(path, ()))
                self._batch.removed += known.get(path, ())
                self._note(Path(path), None)

    def _flush(self) -> None:
        """Embed and commit the batch."""
        batch = self._batch
        texts = [text for pending in batch.documents for text in pending.texts()]
        num_chunks = sum(len(pending.chunks) for pending in batch.documents)
        num_done = num_chunks - len(texts)

        def on_batch(num_texts: int) -> None:
            nonlocal num_done
            self._watch.check()
            num_done += num_texts
            self._report(batch.num_bytes * num_done // max(1, num_chunks), num_done)

        vectors = self._embedded(texts, on_batch)
        now = self._clock.unix()
        stored = [pending.stored(vectors, now) for pending in batch.documents]
        if stored or batch.removed or batch.sources:
            self._corpus.commit(stored, batch.removed, batch.sources)
        for pending in batch.documents:
            self._counts[pending.outcome] += 1
            self._counts["chunks"] += len(pending.chunks) if pending.outcome != "unchanged" else 0
        self._num_chunks_done += num_chunks
        self._advance()
        self._batch = CommitBatch()

    def _embedded(self, texts: Sequence[str], on_batch: Callable[[int], None]) -> Iterator[NDArray[np.float32]]:
        for start in range(0, len(texts), _EMBEDDED_TOGETHER):
            self._watch.check()
            yield from self._embedder.embed_documents(texts[start : start + _EMBEDDED_TOGETHER], on_batch)

    def _advance(self) -> None:
        """Move the batch's files and bytes to what is done."""
        self._num_files_done += self._batch.num_files
        self._num_bytes_done += self._batch.num_bytes
        self._batch.num_files = self._batch.num_bytes = 0
        self._report(0, 0)

    def _report(self, num_bytes: int, num_chunks: int) -> None:
        self._watch(
            AddProgress(
                num_files_done=self._num_files_done,
                num_files_total=len(self._sizes),
                num_bytes_done=self._num_bytes_done + num_bytes,
                num_bytes_total=self._num_bytes_total,
                num_chunks=self._num_chunks_done + num_chunks,
                current=self._current,
            )
        )


def documents_at(
    targets: Sequence[str], known: Mapping[DocumentId, str], names: DocumentNames
) -> tuple[Collection[DocumentId], tuple[str, ...]]:
    """The documents that the targets of a `remove` stand for, and the targets that stand for none: of those that an
    interrupted run has removed already nothing is left.

    Args:
        known: the absolute path of each document's file.

    Raises:
        UsageError: a target is empty, which as a path would be the working folder.
        UnknownDocumentError: no target stands for any.
    """
    found = {target: _documents_at(target, known, names) for target in targets}
    unknown = tuple(target for target, document_ids in found.items() if not document_ids)
    if unknown and len(unknown) == len(found):
        others = f" or the {len(unknown) - 1:,} others" if len(unknown) > 1 else ""
        raise UnknownDocumentError(
            f"no document is or lies under {unknown[0]!r}{others}; `stillroom list` shows what there is"
        )
    return dict.fromkeys(document_id for document_ids in found.values() for document_id in document_ids), unknown


def _documents_at(target: str, known: Mapping[DocumentId, str], names: DocumentNames) -> list[DocumentId]:
    """The document of that id, else those of the file or folder."""
    if not target:
        raise UsageError("an empty target stands for no document; give a file, a folder or a document")
    found = [document_id for document_id in _ids_meant(target, names) if document_id in known][:1]
    if not found and not _leads_out_of_a_record(target):
        absolute = os.path.abspath(target)
        folder = os.path.join(absolute, "")
        found = [document_id for document_id, path in known.items() if path == absolute or path.startswith(folder)]
    return found


def _ids_meant(target: str, names: DocumentNames) -> Iterator[DocumentId]:
    """As it stands, and with its file from the working folder. What follows a `#` is the name that a file gave to a
    record: no path, whatever it looks like."""
    yield DocumentId(names.name_of(target))
    for at in (at for at, letter in enumerate(target) if letter == "#"):
        yield DocumentId(names.name_of(os.path.abspath(target[:at])) + target[at:])


def _leads_out_of_a_record(target: str) -> bool:
    return os.pardir in target.partition("#")[2].split("/")


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


def _num_text_bytes(document: Document) -> int:
    return len(document.title.encode()) + sum(len(paragraph.text.encode()) for paragraph in document.paragraphs)
