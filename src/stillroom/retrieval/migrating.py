"""Copies a knowledge base into another one: from a folder into PostgreSQL, or back. Nothing is embedded again.

Documents are committed in batches, so an interrupted run is continued by the next one, which copies what is missing.
At the end both are compared by a digest of every document, chunk, vector and file record. The source is not changed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stillroom.config.settings import IndexConfig, StillroomConfig
from stillroom.core.document import DocumentInfo
from stillroom.core.metadata import metadata_to_json
from stillroom.core.private_files import open_file
from stillroom.errors import CorruptKnowledgeBaseError, KnowledgeBaseBusyError, UsageError
from stillroom.retrieval.atomic_files import make_folder_durably, replace_durably
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.store import sql_rows
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.document_names import is_upload
from stillroom.retrieval.store.manifest import MACHINE_SETTINGS, SEARCH_SETTINGS, Manifest
from stillroom.retrieval.store.postgresql.address import address_of
from stillroom.retrieval.store.sql_rows import PENDING, SourceFile, SourceUpdate, StoredDocument

_CHUNKS_TOGETHER = 512
_DOCUMENTS_TOGETHER = 500
_MAX_ROUNDS = 3

OnProgress = Callable[[int, int], None]
"""Called with the numbers of copied and of all documents."""


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """Result of a migration."""

    num_documents: int
    num_chunks: int
    num_copied: int
    """Documents copied by this run; those of an interrupted one before it do not count."""
    num_uploads: int
    """Uploaded files whose bytes were copied."""
    digest: str
    """Digest of both corpora."""


def target_manifest(source: Manifest, asked: IndexConfig, target: Path) -> Manifest:
    """Return the settings of a new target: those of the source, with another index where pgvector is asked for, or
    where the target is a folder, which cannot have it.

    Args:
        asked: Index in the user's settings.
    """
    if address_of(Path(os.path.abspath(target))) is not None:
        return dataclasses.replace(source, index=asked) if asked.kind == "pgvector" else source
    if source.index.kind != "pgvector":
        return source
    return dataclasses.replace(source, index=IndexConfig() if asked.kind == "pgvector" else asked)


def side_settings(settings: StillroomConfig, side: Path, *, is_target: bool = False) -> StillroomConfig:
    """Return the user's settings for opening one side: the index that they ask for is that of the target, and pgvector
    that of the side in PostgreSQL, so neither is said to be ignored by the other side."""
    asked = settings.index
    if is_target and (asked.kind != "pgvector" or address_of(Path(os.path.abspath(side))) is not None):
        return settings
    kept = {name: getattr(asked, name) for name in (*SEARCH_SETTINGS, *MACHINE_SETTINGS)}
    return dataclasses.replace(settings, index=IndexConfig(**kept))


def migrate(source: KnowledgeBase, target: KnowledgeBase, on_progress: OnProgress) -> MigrationReport:
    """Copy every document of `source` that `target` lacks.

    Raises:
        UsageError: The target holds documents that the source lacks, or was made with other settings.
        KnowledgeBaseBusyError: Another process writes to one of them.
        CorruptKnowledgeBaseError: Both differ in the end.
    """
    _check_settings(source, target)
    num_copied = num_uploads = 0
    with source.writing("migrate"), target.writing("migrate"):
        for _ in range(_MAX_ROUNDS):
            generation = source.num_changes
            _check_documents(source.corpus, target.corpus)
            num_copied += _copy_documents(source.corpus, target.corpus, on_progress)
            num_uploads += _copy_sources(source.corpus, target.corpus)
            digests = corpus_digest(source.corpus), corpus_digest(target.corpus)
            if source.num_changes == generation:
                break
        else:
            raise KnowledgeBaseBusyError(
                "other machines change the documents of the source all the time; stop them, then run the same command"
            )
    if digests[0] != digests[1]:
        raise CorruptKnowledgeBaseError(
            "the copy differs from the source; `stillroom verify` both, remove the copy and run the same command again"
        )
    return MigrationReport(target.num_documents, target.num_chunks, num_copied, num_uploads, digests[0])


def corpus_digest(corpus: Corpus) -> str:
    """Return a SHA-256 of all documents, chunks, vectors and file records, without generations and times of files."""
    sha = hashlib.sha256()

    def feed(*values: object) -> None:
        sha.update(json.dumps(values).encode() + b"\n")

    for document in _documents(corpus):
        feed(*sql_rows.document_row(document, 0))
        for chunk, vector in zip(document.chunks, document.vectors, strict=True):
            feed(*sql_rows.chunk_row(chunk))
            sha.update(np.ascontiguousarray(vector, dtype="<f4").tobytes())
    for name, source in sorted(_finished(corpus).items()):
        feed(name, source.size, source.content_hash, metadata_to_json(source.metadata))
    return sha.hexdigest()


def _check_settings(source: KnowledgeBase, target: KnowledgeBase) -> None:
    made, found = source.manifest, target.manifest
    if (made.fingerprint, made.dimension, made.chunker) != (found.fingerprint, found.dimension, found.chunker):
        raise UsageError(
            f"the target was made with the embedder {found.model} or another chunker, the source with {made.model}; "
            "name a target that does not exist yet"
        )


def _check_documents(source: Corpus, target: Corpus) -> None:
    known = {info.document_id for info in source.documents()}
    others = sorted(info.document_id for info in target.documents() if info.document_id not in known)
    if others:
        raise UsageError(
            f"the target holds documents that the source lacks ({len(others)}), such as {others[0]}; remove them, or "
            "name a target that does not exist yet"
        )


def _copy_documents(source: Corpus, target: Corpus, on_progress: OnProgress) -> int:
    known = {info.document_id: (info.num_chunks, info.added_at) for info in target.documents()}
    batch: list[StoredDocument] = []
    num_done = num_copied = num_chunks = 0
    total = source.num_documents
    for info in _infos(source):
        num_done += 1
        if known.get(info.document_id) == (info.num_chunks, info.added_at):
            continue
        document = _document(source, info)
        if document is not None:
            batch.append(document)
            num_chunks += len(document.chunks)
        if num_chunks >= _CHUNKS_TOGETHER or len(batch) >= _DOCUMENTS_TOGETHER:
            target.commit(batch)
            num_copied += len(batch)
            batch, num_chunks = [], 0
            on_progress(num_done, total)
    target.commit(batch)
    on_progress(num_done, total)
    return num_copied + len(batch)


def _copy_sources(source: Corpus, target: Corpus) -> int:
    """Copy the records of files, and the bytes of uploaded ones. Returns the number of the latter."""
    num_uploads, known = 0, _finished(target)
    for name, record in _finished(source).items():
        if known.get(name) == record and (not is_upload(name) or target.original_path(name).exists()):
            continue
        path = Path(target.names.path_of(name))
        if is_upload(name) and (original := source.original_path(name)).exists():
            _copy_file(original, path)
            num_uploads += 1
        target.commit(sources=[SourceUpdate(name, record)])
        if is_upload(name) and target.is_copy:
            path.unlink(missing_ok=True)
    return num_uploads


def _copy_file(path: Path, to: Path) -> None:
    make_folder_durably(to.parent)
    partial = to.with_name(f".{to.name}.tmp")
    try:
        with path.open("rb") as file, open_file(partial) as copy:
            shutil.copyfileobj(file, copy)
            copy.flush()
            os.fsync(copy.fileno())
        shutil.copystat(path, partial)
        replace_durably(partial, to)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _finished(corpus: Corpus) -> dict[str, SourceFile]:
    """Return the records of files, without those of unfinished uploads."""
    return {name: source for name, source in corpus.sources().items() if source.size != PENDING}


def _infos(corpus: Corpus) -> Iterator[DocumentInfo]:
    after = ""
    while found := corpus.documents(after, _DOCUMENTS_TOGETHER):
        yield from found
        after = found[-1].document_id


def _documents(corpus: Corpus) -> Iterator[StoredDocument]:
    for info in _infos(corpus):
        document = _document(corpus, info)
        if document is not None:
            yield document


def _document(corpus: Corpus, info: DocumentInfo) -> StoredDocument | None:
    """Return a document as it is stored; None if it was removed just now."""
    origin = corpus.origin_of(info.document_id)
    if origin is None:
        return None
    found = corpus.chunks_of(info.document_id)
    vectors = np.stack([vector for _, vector in found]) if found else np.empty((0, 0), dtype=np.float32)
    named = (info.document_id, origin.path, origin.record_id, origin.title, origin.content_hash)
    chunks = tuple(chunk for chunk, _ in found)
    return StoredDocument(*named, info.num_bytes, info.added_at, chunks, vectors, origin.metadata)
