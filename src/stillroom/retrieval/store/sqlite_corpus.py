"""A corpus in one SQLite file; see `Corpus`. Readers in this and other processes see the last commit."""

import contextlib
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.core.document import Chunk, DocumentInfo
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.errors import (
    CorruptKnowledgeBaseError,
    EngineClosedError,
    IncompatibleKnowledgeBaseError,
    KnowledgeBaseError,
    KnowledgeBaseNotFoundError,
)
from stillroom.retrieval.filters.sql import Condition, register
from stillroom.retrieval.store import sql_rows
from stillroom.retrieval.store.corpus import CopyState
from stillroom.retrieval.store.corpus_file import CorpusFile, separate_connection
from stillroom.retrieval.store.corpus_writer import CorpusWriter, rename_documents
from stillroom.retrieval.store.document_names import DocumentNames
from stillroom.retrieval.store.sql_rows import (
    Changes,
    CommitReport,
    DocumentOrigin,
    SourceFile,
    SourceUpdate,
    StoredDocument,
)
from stillroom.retrieval.store.vector_sets import switch_tables
from stillroom.retrieval.store.vector_table import VectorTable

_BATCH = 500
"""Parameters per statement; SQLite accepts at least 999."""

_FIRST_WITH_METADATA = 2
_FIRST_WITH_NAMES = 4
"""Schema versions."""


class SqliteCorpus:
    """Implements `Corpus`."""

    is_copy = False
    embedding_table: VectorTable | None = None

    def __init__(self, path: Path) -> None:
        """Open the file, or make it.

        Raises:
            CorruptKnowledgeBaseError: The file is damaged or not such a database.
            IncompatibleKnowledgeBaseError: A later version of Stillroom wrote it.
        """
        self._path = path
        self.names = DocumentNames(Path(os.path.abspath(path.parent)))
        self._lock = threading.RLock()
        self._counts = (-1, 0, 0)
        self._file = CorpusFile(path)
        self._inode = _inode_of(path)
        self._quick_lock = threading.Lock()
        self._quick_file: CorpusFile | None = None
        self._is_closed = False
        try:
            self._upgrade()
            self.corpus_id = self._own_id()
        except (sqlite3.Error, KnowledgeBaseError):
            self._file.close()
            raise

    @property
    def copy_state(self) -> CopyState | None:
        return None

    def after_each_look(self, job: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        """Idempotent."""
        with self._lock, self._quick_lock:
            self._is_closed = True
            self._file.close()
            if self._quick_file is not None:
                self._quick_file.close()

    @property
    def is_there(self) -> bool:
        """Whether the file at the path is still the one that was opened. SQLite keeps a removed file open, so its inode
        number is not reused."""
        try:
            return self._inode == _inode_of(self._path)
        except OSError:  # for example, the folder cannot be entered
            return True

    def check_is_there(self) -> None:
        """Raises KnowledgeBaseNotFoundError if the file was removed or replaced."""
        if not self.is_there:
            raise KnowledgeBaseNotFoundError(
                "this knowledge base was removed or replaced while it was open; open it again (a server: restart it)"
            )

    # Reading

    @property
    def generation(self) -> int:
        with self.quick_reading() as connection:
            return int(connection.execute("SELECT generation FROM state").fetchone()[0])

    def commit_id(self, generation: int) -> str | None:
        with self.reading() as connection:
            found = connection.execute(sql_rows.SELECT_COMMIT, {"generation": generation}).fetchone()
        return None if found is None else str(found[0] or "")

    @property
    def num_documents(self) -> int:
        return self._count()[1]

    @property
    def num_chunks(self) -> int:
        return self._count()[2]

    def documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        with self.reading() as connection:
            found = connection.execute(sql_rows.SELECT_INFOS, (after, -1 if limit is None else limit))
            return [sql_rows.document_info(row) for row in found]

    def public_documents(self, after: str = "", limit: int | None = None) -> list[DocumentInfo]:
        with self.reading() as connection:
            found = connection.execute(sql_rows.SELECT_PUBLIC_INFOS, (after, -1 if limit is None else limit))
            return [sql_rows.document_info(row) for row in found]

    def documents_of(self, name: str) -> list[DocumentInfo]:
        with self.reading() as connection:
            return [sql_rows.document_info(row) for row in connection.execute(sql_rows.SELECT_INFOS_OF, {"name": name})]

    def origin_of(self, document_id: DocumentId) -> DocumentOrigin | None:
        with self.reading() as connection:
            row = connection.execute(sql_rows.SELECT_ORIGIN, (document_id,)).fetchone()
        return None if row is None else sql_rows.document_origin(row)

    def sources(self) -> dict[str, SourceFile]:
        with self.reading() as connection:
            return {row[0]: sql_rows.source(row) for row in connection.execute(sql_rows.SELECT_SOURCES)}

    def pending(self) -> list[str]:
        with self.reading() as connection:
            return [row[0] for row in connection.execute(sql_rows.SELECT_PENDING)]

    def original_path(self, name: str) -> Path:
        return Path(self.names.path_of(name))

    def document_ids(self, path: str) -> dict[DocumentId, str]:
        with self.reading() as connection:
            found = connection.execute(sql_rows.SELECT_HASHES, (path,))
            return {DocumentId(row[0]): row[1] for row in found}

    def paths(self) -> dict[str, list[DocumentId]]:
        found: dict[str, list[DocumentId]] = {}
        with self.reading() as connection:
            for path, document_id in connection.execute("SELECT path, document_id FROM documents"):
                found.setdefault(path, []).append(DocumentId(document_id))
        return found

    def chunks_of(
        self, document_id: DocumentId, offset: int = 0, limit: int | None = None
    ) -> list[tuple[Chunk, NDArray[np.float32]]]:
        with self.reading() as connection:
            bounds = (-1 if limit is None else limit, offset)
            found = connection.execute(sql_rows.SELECT_CHUNKS_OF, (document_id, *bounds)).fetchall()
        return [(sql_rows.chunk(row), np.frombuffer(row[-1], dtype=np.float32)) for row in found]

    def bare_chunks_of(self, document_id: DocumentId, offset: int = 0, limit: int | None = None) -> list[Chunk]:
        return [chunk for chunk, _ in SqliteCorpus.chunks_of(self, document_id, offset, limit)]

    def chunks(self, chunk_ids: Sequence[int]) -> dict[ChunkId, Chunk]:
        found: dict[ChunkId, Chunk] = {}
        for row in self._select_in(sql_rows.SELECT_CHUNKS, chunk_ids, self.quick_reading):
            chunk = sql_rows.chunk(row)
            found[chunk.chunk_id] = chunk
        return found

    def existing(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        found = self._select_in(sql_rows.SELECT_EXISTING, list(chunk_ids), self.quick_reading)
        return {ChunkId(row[0]) for row in found}

    def removed_since(self, generation: int) -> tuple[ChunkId, ...]:
        with self.quick_reading() as connection:
            return tuple(ChunkId(row[0]) for row in connection.execute(sql_rows.SELECT_GONE, (generation,)))

    def chunks_before(self, chunk_ids: Collection[ChunkId], limit: int) -> dict[ChunkId, tuple[ChunkId, ...]]:
        found: dict[ChunkId, tuple[ChunkId, ...]] = {}
        with self.quick_reading() as connection:
            for chunk_id in chunk_ids:
                rows = connection.execute(sql_rows.SELECT_BEFORE, {"chunk": int(chunk_id), "limit": limit}).fetchall()
                found[chunk_id] = tuple(ChunkId(row[0]) for row in reversed(rows))
        return found

    def embeddings(
        self, chunk_ids: Sequence[int], statement: str = sql_rows.SELECT_VECTORS
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return ids [n] and embeddings [n, d] in the given order; removed chunks are left out.

        Args:
            statement: Selects ids and vectors, as `SELECT_VECTORS`.
        """
        found = {row[0]: row[1] for row in self._select_in(statement, chunk_ids)}
        kept = [chunk_id for chunk_id in chunk_ids if chunk_id in found]
        vectors = np.frombuffer(b"".join(found[chunk_id] for chunk_id in kept), dtype=np.float32)
        if kept and len(vectors) % len(kept):
            raise CorruptKnowledgeBaseError(
                f"{self._path} holds vectors of several lengths; `stillroom verify --repair --kb {self._path.parent}` "
                "embeds them again"
            )
        return np.array(kept, dtype=np.int64), vectors.reshape(len(kept), -1 if kept else 0)

    def num_added_since(self, generation: int) -> int:
        return self._one(sql_rows.COUNT_ADDED, generation)[0]

    def changes_since(self, generation: int, num_chunks: int | None = None, until: int | None = None) -> Changes:
        with self.reading() as connection:
            connection.execute("BEGIN")  # one snapshot for all statements
            try:
                now = int(connection.execute("SELECT generation FROM state").fetchone()[0])
                now = now if until is None else min(now, until)
                if num_chunks is not None:
                    last = connection.execute(sql_rows.SELECT_NTH_ADDED, (generation, num_chunks - 1)).fetchone()
                    now = min(now, last[0]) if last else now
                added = connection.execute(sql_rows.SELECT_ADDED, (generation, now)).fetchall()
                removed = connection.execute(sql_rows.SELECT_REMOVED, (generation, now)).fetchall()
            finally:
                connection.execute("COMMIT")
        return Changes(now, tuple(ChunkId(row[0]) for row in removed), tuple(ChunkId(row[0]) for row in added))

    def matching(self, condition: Condition) -> tuple[int, NDArray[np.int64]]:
        self.check_is_there()
        with self._file.translating_errors(), separate_connection(self._file.path) as connection:
            register(connection)
            connection.execute("BEGIN")
            generation = int(connection.execute("SELECT generation FROM state").fetchone()[0])
            found = connection.execute(sql_rows.SELECT_MATCHING.format(condition.sql), condition.parameters)
            ids = np.fromiter((row[0] for row in found), dtype=np.int64)
        ids.sort()
        return generation, ids

    def field_names(self, limit: int) -> list[str]:
        with self._file.translating_errors(), separate_connection(self._file.path) as connection:
            return [row[0] for row in connection.execute(sql_rows.SELECT_FIELDS, (limit,))]

    # Writing

    def commit(
        self,
        documents: Sequence[StoredDocument] = (),
        removed: Iterable[DocumentId] = (),
        sources: Sequence[SourceUpdate] = (),
    ) -> CommitReport:
        """Add or replace documents, remove others, and update file records, in one transaction.

        Returns:
            The number of chunks of the documents in `removed`.

        Raises:
            KnowledgeBaseBusyError: Another process holds SQLite's lock for more than 10 s.
        """
        with self._transaction() as connection:
            writer = CorpusWriter(connection)
            for document in documents:
                writer.put(document)
            num_removed = sum(writer.remove(document_id) for document_id in removed)
            unfinished = tuple(source.path for source in sources if not writer.update_source(source))
            writer.finish()
        return CommitReport(num_removed, unfinished)

    def remove(self, document_ids: Collection[DocumentId]) -> int:
        rest = list(document_ids)
        runs = (rest[start : start + _BATCH] for start in range(0, len(rest), _BATCH))
        return sum(self.commit(removed=run).num_removed for run in runs)

    def _upgrade(self) -> None:
        """Make the tables, or upgrade those of an earlier version, in one transaction."""
        if self._version() == sql_rows.SCHEMA_VERSION:
            return
        with self._transaction() as connection:
            version = self._version()  # again, under the lock
            if version > sql_rows.SCHEMA_VERSION:
                raise IncompatibleKnowledgeBaseError(
                    f"{self._path} has version {version}, this Stillroom reads up to {sql_rows.SCHEMA_VERSION}; "
                    "use the Stillroom that wrote it, or make the knowledge base again"
                )
            for statement in sql_rows.SCHEMA:
                connection.execute(statement)
            for table, column, definition in sql_rows.ADDED_COLUMNS:
                if column not in {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}:
                    connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {definition}")
            if version < _FIRST_WITH_METADATA:
                connection.execute("DELETE FROM sources")  # the next `add` reads every file for its metadata
            connection.execute(sql_rows.INDEX_OF_ADDED)
            connection.execute("INSERT OR IGNORE INTO state VALUES (0, 0, ?)", (uuid.uuid4().hex,))
            if version < _FIRST_WITH_NAMES:
                rename_documents(connection, self.names)
            connection.execute(f"PRAGMA user_version = {sql_rows.SCHEMA_VERSION}")

    def _own_id(self) -> str:
        with self.reading() as connection:
            state = connection.execute("SELECT corpus_id FROM state").fetchone()
        if state is None:
            raise CorruptKnowledgeBaseError(
                f"{self._path} has lost the record of its state; restore a backup, or remove the folder and add the "
                "documents again"
            )
        return str(state[0])

    def _version(self) -> int:
        return self._one("PRAGMA user_version")[0]

    def _count(self) -> tuple[int, int, int]:
        """Return generation and numbers of documents and chunks; counted once per generation."""
        if self._counts[0] != self.generation:
            with self.quick_reading() as connection:  # health probes must not wait for a writer
                self._counts = connection.execute(sql_rows.SELECT_COUNTS).fetchone()
        return self._counts

    def _one(self, statement: str, *parameters: int) -> tuple[int, ...]:
        with self.reading() as connection:
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
            with (reading or self.reading)() as connection:
                found = connection.execute(statement.format(",".join("?" * len(batch))), batch).fetchall()
            yield from found

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for statements that only read. Raises as `CorpusFile.translating_errors`."""
        with self._lock:
            self._check_open()
            with self._file.translating_errors(), self._file.reading() as connection:
                yield connection

    @contextlib.contextmanager
    def quick_reading(self) -> Iterator[sqlite3.Connection]:
        """A second connection, for short reads that never wait for a writer."""
        with self._quick_lock, self._file.translating_errors():
            self._check_open()
            if self._quick_file is None:
                self._quick_file = CorpusFile(self._path)
            with self._quick_file.reading() as connection:
                yield connection

    def _check_open(self) -> None:
        """Precondition: the caller holds one of the locks."""
        if self._is_closed:
            raise EngineClosedError(f"{self._path.parent} was closed; open it again")
        self.check_is_there()

    def writing(self) -> contextlib.AbstractContextManager[sqlite3.Connection]:
        return self._transaction()

    def switch_vectors(self, number: int) -> bool:
        with self._transaction() as connection:
            return switch_tables(connection, number)

    def expect_vectors(self, number: int) -> None:
        """Do nothing: a switch needs the write lock."""

    def changing_vectors(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self.reading() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # on a full disk SQLite has rolled back
                    connection.execute("ROLLBACK")
                raise


def _inode_of(path: Path) -> tuple[int, int] | None:
    """Return device and inode; None if the file does not exist."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return None
