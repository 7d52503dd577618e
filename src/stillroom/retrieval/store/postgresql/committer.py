"""Writes documents to PostgreSQL within one transaction, with the rules of `CorpusWriter`.

The row of the knowledge base is locked first, so commits follow each other, and what a commit compares with is the
last one.
"""

import itertools
import json
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.core.document import Chunk
from stillroom.core.ids import DocumentId
from stillroom.retrieval.store import sql_rows
from stillroom.retrieval.store.document_names import is_upload
from stillroom.retrieval.store.postgresql import statements as sql
from stillroom.retrieval.store.postgresql.database import Connection, ReplacedError
from stillroom.retrieval.store.postgresql.embedding_table import EmbeddingTable
from stillroom.retrieval.store.postgresql.published_vectors import published, with_published
from stillroom.retrieval.store.postgresql.statements import from_text, key_of, to_text
from stillroom.retrieval.store.sql_rows import CommitReport, SourceUpdate, StoredDocument
from stillroom.retrieval.store.vector_sets import VectorSetRecord, VectorsReplacedError

_PART_BYTES = 1 << 20
_REPLACED_TOGETHER = 1000

_Row = tuple[Any, ...]


class Committer:
    """The changes of one transaction."""

    def __init__(
        self,
        connection: Connection,
        kb: int,
        corpus_id: str,
        embeddings: EmbeddingTable | None = None,
        embedded_with: int = 0,
    ) -> None:
        """Lock the knowledge base. Raises ReplacedError: it was removed or replaced.

        Args:
            embeddings: Table of the vectors; None stores them as bytes, for the copies.
            embedded_with: Number of the vector set whose model embedded the documents of `put`.
        """
        self._connection, self._kb, self._embeddings = connection, kb, embeddings
        self._embedded_with = embedded_with
        state = connection.execute(sql.LOCK_STATE, (kb,)).fetchone()
        if state is None or state[0] != corpus_id:
            raise ReplacedError
        self._generation, self.revision = state[1] + 1, state[2] + 1
        self._num_changes = 0
        self._num_removed = 0
        self._unfinished: list[str] = []

    def put(self, documents: Sequence[StoredDocument]) -> None:
        """Add or replace documents. Raises VectorsReplacedError: another machine has changed the embedder."""
        if documents and self._active_set() != self._embedded_with:
            raise VectorsReplacedError(
                "another machine has changed the embedder of this knowledge base; run the same command again"
            )
        for run in _unique_runs(documents):
            self._put(run)

    def remove(self, document_ids: Iterable[DocumentId]) -> None:
        """Remove documents; the next `add` reads their files again."""
        keys = list({key_of(one): None for one in document_ids})
        chunk_ids = [row[0] for row in self._all(sql.SELECT_CHUNK_IDS, self._kb, keys)]
        self._remove_chunks(chunk_ids)
        self._num_removed += len(chunk_ids)
        gone = self._all(sql.DELETE_DOCUMENTS, self._kb, keys)
        self._num_changes += len(gone)
        self._note_removals(sql.DOCUMENT, [(row[0], row[1]) for row in gone])
        paths = list({row[2] for row in gone})
        self._run(sql.UNREAD_SOURCES, self.revision, self._kb, paths)
        self._remove_sources(self._all(sql.DELETE_EMPTY_SOURCES, self._kb, paths))

    def update_source(self, update: SourceUpdate) -> None:
        """Replace the record of a file. It is `unread` if the file has other documents."""
        key = key_of(update.path)
        source = update.source
        if source is None:
            self._remove_sources(self._all(sql.DELETE_SOURCE, self._kb, key))
            return
        if update.documents is not None and self._documents_of(key) != update.documents:
            self._unfinished.append(update.path)
            source = sql_rows.unread(source)
        path, size, mtime_ns, content_hash, metadata = sql_rows.source_row(source)
        row = (to_text(source.path), size, mtime_ns, content_hash, metadata)
        self._run(sql.PUT_SOURCE, self._kb, key, *row, self.revision)

    def replace_vectors(self, made: VectorSetRecord, rows: Iterable[tuple[int, bytes]]) -> None:
        """Make a vector set the active one, and shut out programs that know only one.

        Args:
            rows: Id and vector of every chunk.
        """
        changed = ((vector, self.revision, self._kb, chunk_id) for chunk_id, vector in rows)
        with self._connection.cursor() as cursor:
            while batch := list(itertools.islice(changed, _REPLACED_TOGETHER)):
                cursor.executemany(sql.REPLACE_VECTOR, batch)
        ((manifest,),) = self._all(sql.SELECT_MANIFEST, self._kb)
        self._run(sql.UPDATE_MANIFEST, with_published(manifest, made), self._kb)
        self._run(sql.REFUSE_OLD_PROGRAMS, self._kb)
        self._run(sql.RAISE_VERSION)

    def finish(self) -> CommitReport:
        generation = self._generation if self._num_changes else None
        self._run(sql.INSERT_COMMIT, self._kb, self.revision, generation, uuid.uuid4().hex)
        now = self._generation if self._num_changes else self._generation - 1
        self._run(sql.UPDATE_STATE, now, self.revision, self._kb)
        self._run(sql.NOTIFY, sql.channel_of(self._kb))
        return CommitReport(self._num_removed, tuple(self._unfinished))

    def _active_set(self) -> int:
        ((manifest,),) = self._all(sql.SELECT_MANIFEST, self._kb)
        made = published(manifest)
        return 0 if made is None else made.number

    def _put(self, documents: Sequence[StoredDocument]) -> None:
        keys = [key_of(document.document_id) for document in documents]
        old: dict[bytes, dict[int, str]] = {}
        for key, chunk_id, title, heading_path in self._all(sql.SELECT_OLD_CHUNKS, self._kb, keys):
            old.setdefault(bytes(key), {})[chunk_id] = _heading(from_text(title), from_text(heading_path))
        compared = {
            bytes(row[0]): tuple(map(from_text, row[1:])) for row in self._all(sql.SELECT_COMPARED, self._kb, keys)
        }
        changes = _Changes()
        for key, document in zip(keys, documents, strict=True):
            self._num_changes += compared.get(key) != sql_rows.compared(document)
            self._add_document(changes, key, document, old.get(key, {}))
        self._remove_chunks(changes.removed)
        self._num_changes += len(changes.chunks)
        self._run(sql.DELETE_TOMBSTONES, self._kb, [row[1] for row in changes.chunks])
        with self._connection.cursor() as cursor:
            for statement, rows in (
                (sql.PUT_DOCUMENT, changes.documents),
                (sql.PUT_CHUNK, changes.chunks),
                (sql.PUT_VECTOR, changes.vectors),
                (sql.MOVE_CHUNK, changes.moved),
            ):
                if rows:
                    cursor.executemany(statement, rows)
        if self._embeddings is not None:
            self._embeddings.put(self._connection, changes.embeddings)

    def _add_document(self, changes: "_Changes", key: bytes, document: StoredDocument, old: dict[int, str]) -> None:
        kb, revision = self._kb, self.revision
        document_id, path, *row = sql_rows.document_row(document, self._generation)
        named = (key, to_text(document.document_id), to_text(document.path), key_of(document.path))
        changes.documents.append((kb, *named, *map(_stored, row), revision))
        new = {int(chunk.chunk_id) for chunk in document.chunks}
        changes.removed += [chunk_id for chunk_id in old if chunk_id not in new]
        for chunk, vector in zip(document.chunks, document.vectors, strict=True):
            if old.get(chunk.chunk_id) == chunk.heading:  # the id is a hash of the text
                where = (chunk.start_line, chunk.end_line, chunk.start_page, chunk.end_page)
                changes.moved.append((*where, revision, kb, int(chunk.chunk_id)))
                continue
            changes.chunks.append(_chunk_row(kb, key, chunk, revision))
            exact = vector.astype(np.float32, copy=False)
            content = exact.tobytes() if self._embeddings is None else b""
            changes.vectors.append((kb, int(chunk.chunk_id), self._generation, content, revision))
            changes.embeddings.append((int(chunk.chunk_id), exact))

    def _remove_chunks(self, chunk_ids: Sequence[int]) -> None:
        self._num_changes += len(chunk_ids)
        ids = list(chunk_ids)
        self._run(sql.DELETE_CHUNKS, self._kb, ids)
        self._run(sql.DELETE_VECTORS, self._kb, ids)
        self._run(sql.PUT_TOMBSTONES, self._kb, ids, self._generation, self.revision)

    def _remove_sources(self, rows: Sequence[_Row]) -> None:
        self._note_removals(sql.SOURCE, rows)
        keys = [row[0] for row in rows if is_upload(row[1])]
        if keys:
            self._run(sql.DELETE_UPLOADS, self._kb, keys)

    def _note_removals(self, kind: str, rows: Collection[_Row]) -> None:
        if rows:
            with self._connection.cursor() as cursor:
                cursor.executemany(sql.PUT_REMOVAL, [(self._kb, kind, *row, self.revision) for row in rows])

    def _documents_of(self, path_key: bytes) -> dict[DocumentId, str]:
        found = self._all(sql.SELECT_DOCUMENTS_OF, self._kb, path_key)
        return {DocumentId(from_text(row[0])): row[1] for row in found}

    def _run(self, statement: str, *parameters: object) -> None:
        self._connection.execute(statement, parameters)

    def _all(self, statement: str, *parameters: object) -> list[_Row]:
        found: list[_Row] = self._connection.execute(statement, parameters).fetchall()
        return found


def store_upload(connection: Connection, kb: int, name: str, path: Path) -> None:
    """Store the bytes of an uploaded file. Called before the knowledge base is locked: a large file takes long.

    Raises:
        OSError: The file cannot be read.
    """
    key = key_of(name)
    connection.execute(sql.DELETE_UPLOADS, (kb, [key]))
    with path.open("rb") as file:
        part = 0
        while content := file.read(_PART_BYTES):
            connection.execute(sql.PUT_UPLOAD, (kb, key, part, content))
            part += 1


class _Changes:
    """Rows of one statement each."""

    def __init__(self) -> None:
        self.documents: list[_Row] = []
        self.chunks: list[_Row] = []
        self.vectors: list[_Row] = []
        self.embeddings: list[tuple[int, NDArray[np.float32]]] = []
        self.moved: list[_Row] = []
        self.removed: list[int] = []


def _unique_runs(documents: Sequence[StoredDocument]) -> Iterator[list[StoredDocument]]:
    """Yield the documents in runs in which no id occurs twice, so that the last one of an id wins."""
    run: dict[DocumentId, StoredDocument] = {}
    for document in documents:
        if document.document_id in run:
            yield list(run.values())
            run = {}
        run[document.document_id] = document
    if run:
        yield list(run.values())


def _chunk_row(kb: int, key: bytes, chunk: Chunk, revision: int) -> _Row:
    chunk_id, *row = sql_rows.chunk_row(chunk)
    return (kb, int(chunk.chunk_id), key, *map(_stored, row), revision)


def _stored(value: object) -> object:
    return to_text(value) if isinstance(value, str) else value


def _heading(title: str, heading_path: str) -> str:
    """Return `Chunk.heading`."""
    return " > ".join(part for part in (title, *json.loads(heading_path)) if part)
