"""The truth: every document, chunk and embedding of a knowledge base, in one SQLite file.

A document is wholly there or wholly absent, for each `commit` is one transaction. Each one raises the generation and
stamps with it what it added and removed, so that a search index knows what it has missed (`changes_since`): the
indexes are projections that can be brought up to date, or thrown away and rebuilt without embedding anything again.
Thread-safe; readers in this and other processes see the last commit. Who asks for the generation or which chunks exist
never waits for a commit: the engine does, between two steps of everybody.
"""

import contextlib
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.core.document import Chunk, DocumentInfo
from stillroom.core.ids import ChunkId, DocumentId, public_id
from stillroom.errors import (
    CorruptKnowledgeBaseError,
    EngineClosedError,
    IncompatibleKnowledgeBaseError,
    KnowledgeBaseError,
    KnowledgeBaseNotFoundError,
)
from stillroom.retrieval.filters.sql import Condition, register
from stillroom.retrieval.store import rows
from stillroom.retrieval.store.corpus_file import CorpusFile, read_beside
from stillroom.retrieval.store.document_names import DocumentNames
from stillroom.retrieval.store.rows import Changes, SourceFile, SourceUpdate, StoredDocument

_BATCH = 500
"""Parameters per statement; SQLite takes at least 999."""

_FIRST_WITH_METADATA = 2
_FIRST_WITH_NAMES = 4
"""Versions of the tables."""


class Corpus:
    """One SQLite file; see the module's docstring."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it.

        Raises:
            CorruptKnowledgeBaseError: the file is damaged or no such database.
            IncompatibleKnowledgeBaseError: a later version of Stillroom wrote it.
        """
        self._path = path
        self.names = DocumentNames(Path(os.path.abspath(path.parent)))
        self._lock = threading.RLock()
        self._counts = (-1, 0, 0)
        self._file = CorpusFile(path)
        self._place = _place_of(path)
        self._glance_lock = threading.Lock()
        self._glance_file: CorpusFile | None = None
        self._is_closed = False
        try:
            self._upgrade()
            self.corpus_id = self._own_id()
        except (sqlite3.Error, KnowledgeBaseError):
            self._file.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        with self._lock, self._glance_lock:
            self._is_closed = True
            self._file.close()
            if self._glance_file is not None:
                self._glance_file.close()

    @property
    def is_there(self) -> bool:
        """Whether the file that was opened still stands under its name. SQLite would go on reading one that was
        removed, and keeps it open, so its inode number is not used again meanwhile."""
        try:
            return self._place == _place_of(self._path)
        except OSError:  # a folder that may not be entered just now, say
            return True

    def check_is_there(self) -> None:
        """Raises KnowledgeBaseNotFoundError if it was removed, or another one stands in its place."""
        if not self.is_there:
            raise KnowledgeBaseNotFoundError(
                "this knowledge base was removed or replaced while it was open; open it again (a server: restart it)"
            )

    # What there is

    @property
    def generation(self) -> int:
        """Number of commits that changed something so far; one cheap read."""
        with self._glancing() as connection:
            return int(connection.execute("SELECT generation FROM state").fetchone()[0])

    def commit_id(self, generation: int) -> str | None:
        """What names the commit that led to a generation: what was made from this corpus then, and from no other state
        of it, knows the same. Empty where it had no name yet; None where it never was."""
        with self._reading() as connection:
            found = connection.execute(rows.SELECT_COMMIT, {"generation": generation}).fetchone()
        return None if found is None else str(found[0] or "")

    @property
    def num_documents(self) -> int:
        return self._count()[1]

    @property
    def num_chunks(self) -> int:
        return self._count()[2]

    def documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        """Every document, by document id; those behind `after`, and at most `limit`."""
        with self._reading() as connection:
            found = connection.execute(rows.SELECT_INFOS, (after, -1 if limit is None else limit))
            return [rows.document_info(row) for row in found]

    def public_documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        """`documents`, by public id."""
        with self._reading() as connection:
            found = connection.execute(rows.SELECT_PUBLIC_INFOS, (after, -1 if limit is None else limit))
            return [rows.document_info(row) for row in found]

    def documents_of(self, name: str) -> list[DocumentInfo]:
        """The document of that id, public or not, or those of the file of that name."""
        with self._reading() as connection:
            return [rows.document_info(row) for row in connection.execute(rows.SELECT_INFOS_OF, {"name": name})]

    def sources(self) -> dict[str, SourceFile]:
        """What is known of each file that was read to its end, by path."""
        with self._reading() as connection:
            return {row[0]: rows.source(row) for row in connection.execute(rows.SELECT_SOURCES)}

    def pending(self) -> list[str]:
        """Names of files whose upload has begun and not ended."""
        with self._reading() as connection:
            return [row[0] for row in connection.execute(rows.SELECT_PENDING)]

    def document_ids(self, path: str) -> dict[DocumentId, str]:
        """The documents of one file, with the hash of what each says."""
        with self._reading() as connection:
            found = connection.execute("SELECT document_id, content_hash FROM documents WHERE path = ?", (path,))
            return {DocumentId(row[0]): row[1] for row in found}

    def paths(self) -> dict[str, list[DocumentId]]:
        """Every file with documents, and their ids."""
        found: dict[str, list[DocumentId]] = {}
        with self._reading() as connection:
            for path, document_id in connection.execute("SELECT path, document_id FROM documents"):
                found.setdefault(path, []).append(DocumentId(document_id))
        return found

    def chunks_of(
        self, document_id: DocumentId, offset: int = 0, limit: int | None = None
    ) -> list[tuple[Chunk, NDArray[np.float32]]]:
        """A document's chunks in order, with their embeddings [d]; without the first `offset`, and at most `limit`."""
        with self._reading() as connection:
            bounds = (-1 if limit is None else limit, offset)
            found = connection.execute(rows.SELECT_CHUNKS_OF, (document_id, *bounds)).fetchall()
        return [(rows.chunk(row), np.frombuffer(row[-1], dtype=np.float32)) for row in found]

    def chunks(self, chunk_ids: Sequence[int]) -> dict[ChunkId, Chunk]:
        """The chunks of these ids; those that are gone are left out."""
        found: dict[ChunkId, Chunk] = {}
        for row in self._select_in(rows.SELECT_CHUNKS, chunk_ids):
            chunk = rows.chunk(row)
            found[chunk.chunk_id] = chunk
        return found

    def existing(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        """Those of the chunks that are still there."""
        found = self._select_in(rows.SELECT_EXISTING, list(chunk_ids), self._glancing)
        return {ChunkId(row[0]) for row in found}

    def embeddings(self, chunk_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids [n] and embeddings [n, d] in the order asked for; chunks that are gone are left out."""
        found = {row[0]: row[1] for row in self._select_in(rows.SELECT_VECTORS, chunk_ids)}
        kept = [chunk_id for chunk_id in chunk_ids if chunk_id in found]
        vectors = np.frombuffer(b"".join(found[chunk_id] for chunk_id in kept), dtype=np.float32)
        if kept and len(vectors) % len(kept):
            raise CorruptKnowledgeBaseError(
                f"{self._path} holds vectors of several lengths; `stillroom verify --repair --kb {self._path.parent}` "
                "makes them again"
            )
        return np.array(kept, dtype=np.int64), vectors.reshape(len(kept), -1 if kept else 0)

    def num_added_since(self, generation: int) -> int:
        """Chunks that an index of that generation has to add."""
        return self._one(rows.COUNT_ADDED, generation)[0]

    def changes_since(self, generation: int, num_chunks: int | None = None) -> Changes:
        """What an index of that generation has missed. A chunk may be in both lists: remove first, then add.

        Args:
            num_chunks: only the first commits, up to the one with this many chunks added; None: all of them.
        """
        with self._reading() as connection:
            connection.execute("BEGIN")  # one snapshot for the three statements
            try:
                now = int(connection.execute("SELECT generation FROM state").fetchone()[0])
                if num_chunks is not None:
                    last = connection.execute(rows.SELECT_NTH_ADDED, (generation, num_chunks - 1)).fetchone()
                    now = last[0] if last else now
                added = connection.execute(rows.SELECT_ADDED, (generation, now)).fetchall()
                removed = connection.execute(rows.SELECT_REMOVED, (generation, now)).fetchall()
            finally:
                connection.execute("COMMIT")
        return Changes(now, tuple(ChunkId(row[0]) for row in removed), tuple(ChunkId(row[0]) for row in added))

    def matching(self, condition: Condition) -> tuple[int, NDArray[np.int64]]:
        """The generation, and the chunks of all documents of which a condition holds, ascending; of one moment. Nobody
        who reads waits for it."""
        self.check_is_there()
        with self._file.reporting(), read_beside(self._file.path) as connection:
            register(connection)
            connection.execute("BEGIN")
            generation = int(connection.execute("SELECT generation FROM state").fetchone()[0])
            found = connection.execute(rows.SELECT_MATCHING.format(condition.sql), condition.parameters)
            ids = np.fromiter((row[0] for row in found), dtype=np.int64)
        ids.sort()
        return generation, ids

    def field_names(self, limit: int) -> list[str]:
        """Names of metadata fields that documents have, at most `limit`, in order."""
        with self._file.reporting(), read_beside(self._file.path) as connection:
            return [row[0] for row in connection.execute(rows.SELECT_FIELDS, (limit,))]

    # Changing it

    def commit(
        self,
        documents: Sequence[StoredDocument] = (),
        removed: Iterable[DocumentId] = (),
        sources: Sequence[SourceUpdate] = (),
    ) -> int:
        """Put documents (replacing those of the same id), remove others, and note files as read; all or nothing.

        Returns:
            How many chunks were removed with documents in `removed`.

        Raises:
            KnowledgeBaseBusyError: another process writes and does not finish.
        """
        with self._writing() as connection:
            writer = _CorpusWriter(connection)
            for document in documents:
                writer.put(document)
            num_removed = sum(writer.remove(document_id) for document_id in removed)
            for source in sources:
                writer.note(source)
            writer.finish()
        return num_removed

    def remove(self, document_ids: Collection[DocumentId]) -> int:
        """Remove documents, some hundreds in each commit, so that readers get their turn in between. Returns how many
        chunks they had; raises as `commit`."""
        rest = list(document_ids)
        return sum(self.commit(removed=rest[start : start + _BATCH]) for start in range(0, len(rest), _BATCH))

    # Inside

    def _upgrade(self) -> None:
        """Make the tables, or bring those of an earlier version up to date; in one transaction, so that whoever is
        killed here, or comes at the same time, leaves the old tables or the new ones."""
        if self._version() == rows.SCHEMA_VERSION:
            return
        with self._writing() as connection:
            version = self._version()  # now that nobody else can change it
            if version > rows.SCHEMA_VERSION:
                raise IncompatibleKnowledgeBaseError(
                    f"{self._path} has version {version}, this Stillroom reads up to {rows.SCHEMA_VERSION}; "
                    "use the Stillroom that made it, or make the knowledge base again"
                )
            for statement in rows.SCHEMA:
                connection.execute(statement)
            for table, column, definition in rows.ADDED_COLUMNS:
                if column not in {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}:
                    connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {definition}")
            if version < _FIRST_WITH_METADATA:
                connection.execute("DELETE FROM sources")  # the next `add` looks into every file for its metadata
            connection.execute(rows.INDEX_OF_ADDED)
            connection.execute("INSERT OR IGNORE INTO state VALUES (0, 0, ?)", (uuid.uuid4().hex,))
            if version < _FIRST_WITH_NAMES:
                _name_anew(connection, self.names)
            connection.execute(f"PRAGMA user_version = {rows.SCHEMA_VERSION}")

    def _own_id(self) -> str:
        with self._reading() as connection:
            state = connection.execute("SELECT corpus_id FROM state").fetchone()
        if state is None:
            raise CorruptKnowledgeBaseError(
                f"{self._path} has lost the record of its state; put it back from a backup, or remove the folder and "
                "add the documents again"
            )
        return str(state[0])

    def _version(self) -> int:
        return self._one("PRAGMA user_version")[0]

    def _count(self) -> tuple[int, int, int]:
        """Generation, documents, chunks; counted once per generation."""
        if self._counts[0] != self.generation:
            with self._glancing() as connection:  # probes ask, and a writer may have the other one for long
                self._counts = connection.execute(rows.SELECT_COUNTS).fetchone()
        return self._counts

    def _one(self, statement: str, *parameters: int) -> tuple[int, ...]:
        with self._reading() as connection:
            row: tuple[int, ...] = connection.execute(statement, parameters).fetchone()
            return row

    def _select_in(
        self,
        statement: str,
        chunk_ids: Sequence[int],
        reading: Callable[[], contextlib.AbstractContextManager[sqlite3.Connection]] | None = None,
    ) -> Iterator[tuple[Any, ...]]:
        for start in range(0, len(chunk_ids), _BATCH):
            batch = [int(chunk_id) for chunk_id in chunk_ids[start : start + _BATCH]]
            with (reading or self._reading)() as connection:
                found = connection.execute(statement.format(",".join("?" * len(batch))), batch).fetchall()
            yield from found

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._check_open()
            with self._file.reporting(), self._file.reading() as connection:
                yield connection

    @contextlib.contextmanager
    def _glancing(self) -> Iterator[sqlite3.Connection]:
        """For short reads that wait for nobody who writes: a connection of their own, opened with the first."""
        with self._glance_lock, self._file.reporting():
            self._check_open()
            if self._glance_file is None:
                self._glance_file = CorpusFile(self._path)
            with self._glance_file.reading() as connection:
                yield connection

    def _check_open(self) -> None:
        """Under one of the locks."""
        if self._is_closed:
            raise EngineClosedError(f"{self._path.parent} was closed; open it again")
        self.check_is_there()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._reading() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # SQLite ends it by itself where the disk is full
                    connection.execute("ROLLBACK")
                raise


def counts_of(path: Path) -> tuple[int, int]:
    """How many documents and chunks a corpus has that nobody needs otherwise. Raises as `CorpusFile.reporting`."""
    file = CorpusFile(path)
    with contextlib.closing(file), file.reporting(), file.reading() as connection:
        _, num_documents, num_chunks = connection.execute(rows.SELECT_COUNTS).fetchone()
    return num_documents, num_chunks


def _place_of(path: Path) -> tuple[int, int] | None:
    """Device and inode; None if there is no such file."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return None


def _name_anew(connection: sqlite3.Connection, names: DocumentNames) -> None:
    """Bring names of earlier versions up to date: uploads by their names in the folder, and all with public ids."""
    writer = _CorpusWriter(connection)
    sizes = dict(connection.execute("SELECT path, -1 FROM documents").fetchall())
    sizes |= dict(connection.execute("SELECT path, size FROM sources").fetchall())
    for path, name in list(names.renamed(sizes)):
        connection.execute("UPDATE sources SET path = ? WHERE path = ?", (name, path))
        for row in connection.execute(rows.SELECT_STORED, (path,)).fetchall():
            found = connection.execute(rows.SELECT_CHUNKS_OF, (row[0], -1, 0)).fetchall()
            vectors = np.array([np.frombuffer(one[-1], dtype=np.float32) for one in found], dtype=np.float32)
            writer.put(rows.stored_document(row, name, [rows.chunk(one) for one in found], vectors))
            writer.remove(row[0])
    writer.finish()
    ids = connection.execute("SELECT document_id FROM documents").fetchall()
    named = [(public_id(document_id), document_id) for (document_id,) in ids]
    connection.executemany("UPDATE documents SET public_id = ? WHERE document_id = ?", named)


class _CorpusWriter:
    """One transaction's changes. The generation rises only if a document did."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._generation = int(connection.execute("SELECT generation FROM state").fetchone()[0]) + 1
        self._num_changes = 0

    def put(self, document: StoredDocument) -> None:
        """Replace a document. A chunk that reads the same keeps its row's generation: no index need look at it."""
        found = self._connection.execute(rows.SELECT_CHUNKS_OF, (document.document_id, -1, 0)).fetchall()
        old: Mapping[int, Chunk] = {row[0]: rows.chunk(row) for row in found}
        known_as = self._connection.execute(rows.SELECT_KNOWN_AS, (document.document_id,)).fetchone()
        if known_as != rows.known_as(document):
            self._num_changes += 1
        self._connection.execute(rows.PUT_DOCUMENT, rows.document_row(document, self._generation))
        new = {chunk.chunk_id for chunk in document.chunks}
        self._remove_chunks([chunk_id for chunk_id in old if chunk_id not in new])
        for chunk, vector in zip(document.chunks, document.vectors, strict=True):
            known = old.get(chunk.chunk_id)
            if known is not None and known.indexed_text == chunk.indexed_text:
                where = (chunk.start_line, chunk.end_line, chunk.start_page, chunk.end_page, chunk.chunk_id)
                self._connection.execute(rows.MOVE_CHUNK, where)
                continue
            self._num_changes += 1
            self._connection.execute("DELETE FROM tombstones WHERE chunk_id = ?", (chunk.chunk_id,))
            self._connection.execute(rows.PUT_CHUNK, rows.chunk_row(chunk))
            vector_row = (chunk.chunk_id, self._generation, vector.astype(np.float32, copy=False).tobytes())
            self._connection.execute("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", vector_row)

    def remove(self, document_id: DocumentId) -> int:
        """Remove a document; its file counts as not read, so that adding it again reads it. Returns its chunks."""
        found = self._connection.execute("SELECT chunk_id FROM chunks WHERE document_id = ?", (document_id,))
        chunk_ids = [row[0] for row in found]
        self._remove_chunks(chunk_ids)
        gone = self._connection.execute("DELETE FROM documents WHERE document_id = ? RETURNING path", (document_id,))
        for (path,) in gone.fetchall():
            self._num_changes += 1
            self._connection.execute(rows.UNREAD_SOURCE, (path,))  # what was said of it holds for its other documents
            self._connection.execute(rows.DELETE_EMPTY_SOURCE, (path, path))
        return len(chunk_ids)

    def note(self, update: SourceUpdate) -> None:
        """Forget a file's record, or replace it."""
        self._connection.execute("DELETE FROM sources WHERE path = ?", (update.path,))
        if update.source is not None:
            self._connection.execute("INSERT INTO sources VALUES (?, ?, ?, ?, ?)", rows.source_row(update.source))

    def finish(self) -> None:
        if self._num_changes:
            self._connection.execute("UPDATE state SET generation = ?", (self._generation,))

    def _remove_chunks(self, chunk_ids: Sequence[int]) -> None:
        self._num_changes += len(chunk_ids)
        one = [(chunk_id,) for chunk_id in chunk_ids]
        self._connection.executemany("DELETE FROM chunks WHERE chunk_id = ?", one)
        self._connection.executemany("DELETE FROM vectors WHERE chunk_id = ?", one)
        stamped = [(chunk_id, self._generation) for chunk_id in chunk_ids]
        self._connection.executemany("INSERT OR REPLACE INTO tombstones VALUES (?, ?)", stamped)
