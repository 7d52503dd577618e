"""This machine's copy of a knowledge base in PostgreSQL: a corpus in SQLite that is brought up to date row by row.

The copy notes the revision that it shows. `catch_up` reads all later rows from one snapshot of the database, and
applies them in one transaction of SQLite: readers see every commit as a whole, and a killed process leaves the copy as
it was. Text, vectors, generations and ids of commits are those of the database, so indexes, citations and kept KV are
valid on every machine.
"""

import contextlib
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import Timeout

from stillroom.core.folder_lock import FolderLock
from stillroom.errors import KnowledgeBaseBusyError, KnowledgeBaseError, StorageError
from stillroom.retrieval.store import sql_rows
from stillroom.retrieval.store.corpus_file import CorpusFile
from stillroom.retrieval.store.document_names import is_upload
from stillroom.retrieval.store.postgresql import statements as sql
from stillroom.retrieval.store.postgresql.database import Connection, KnowledgeBaseRow, ReplacedError
from stillroom.retrieval.store.postgresql.published_vectors import published
from stillroom.retrieval.store.postgresql.statements import from_text
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from stillroom.retrieval.store.vector_sets import adopt

ORIGINALS = "originals"
"""Folder of the uploaded files that were opened on this machine, each below the hash of its name."""

_LOCK = "copy.lock"
_OPENING_TIMEOUT_S = 60.0
_FETCHED_TOGETHER = 2000

_CREATE = """CREATE TABLE IF NOT EXISTS copied (
    one INTEGER PRIMARY KEY CHECK (one = 0), kb INTEGER NOT NULL, revision INTEGER NOT NULL, commit_id TEXT NOT NULL)"""
_CREATE_TIME = "CREATE TABLE IF NOT EXISTS copied_at (one INTEGER PRIMARY KEY CHECK (one = 0), unix REAL NOT NULL)"
_SELECT_KB = "SELECT copied.kb, state.corpus_id FROM copied, state"
_SELECT = "SELECT revision, commit_id FROM copied WHERE kb = ?"

_Row = tuple[Any, ...]


def prepare_copy(path: Path, connection: Connection, kb: int, corpus_id: str) -> None:
    """Make the file of the copy, unless there is one of this knowledge base and of its history.

    Raises:
        KnowledgeBaseBusyError: Another process on this machine has been doing the same for a minute.
        StorageError: The local folder cannot be written.
    """
    lock = FolderLock(path.with_name(_LOCK), _OPENING_TIMEOUT_S)
    try:
        lock.acquire()
    except Timeout as error:
        raise KnowledgeBaseBusyError(f"another process is making {path}; try again later") from error
    except OSError as error:
        raise StorageError(f"{path.parent} cannot be written: {error.strerror or error}") from error
    try:
        if not _is_copy_of(path, connection, kb, corpus_id):
            _remove(path)
            SqliteCorpus(path).close()
            with contextlib.closing(CorpusFile(path)) as file, file.translating_errors(), file.reading() as database:
                database.execute("BEGIN IMMEDIATE")
                database.execute(_CREATE)
                database.execute("INSERT INTO copied VALUES (0, ?, 0, '')", (kb,))
                database.execute("UPDATE state SET corpus_id = ?", (corpus_id,))
                database.execute("COMMIT")
    finally:
        lock.release()


def catch_up(path: Path, connection: Connection, row: KnowledgeBaseRow, now: float) -> int:
    """Bring the copy up to date. Returns the revision that it shows.

    Args:
        now: Seconds since 1970 UTC.

    Raises:
        ReplacedError: The copy does not belong to the database's history.
        KnowledgeBaseBusyError: Another process on this machine has been doing the same for more than 10 s.
        StorageError: The local disk is full.
    """
    with contextlib.closing(CorpusFile(path)) as file, file.translating_errors(), file.reading() as database:
        database.execute("BEGIN IMMEDIATE")
        try:
            revision, is_changed = _apply(database, connection, row, path.parent)
            if is_changed:
                database.execute(_CREATE_TIME)
                database.execute("INSERT OR REPLACE INTO copied_at VALUES (0, ?)", (now,))
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
    return revision


def _apply(
    database: sqlite3.Connection, connection: Connection, row: KnowledgeBaseRow, folder: Path
) -> tuple[int, bool]:
    """Copy what was committed since. Returns the revision, and whether it is a new one."""
    kb = row.kb
    known, commit_id = database.execute(_SELECT, (kb,)).fetchone() or (-1, "")
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        state = connection.execute(sql.SELECT_STATE, (kb,)).fetchone()
        if state is None or state[0] != row.corpus_id or not _is_in_history(connection, kb, known, commit_id):
            raise ReplacedError
        _, generation, revision = state
        if revision != known:
            _Copying(database, connection, (kb, known), folder).run(generation)
            made = published(connection.execute(sql.SELECT_MANIFEST, (kb,)).fetchone()[0])
            if made is not None:
                adopt(database, made)
            commit = connection.execute(sql.SELECT_COMMIT, (kb, revision)).fetchone()
            database.execute("UPDATE copied SET revision = ?, commit_id = ?", (revision, commit[0] if commit else ""))
    return int(revision), revision != known


class _Copying:
    """Copies the rows that were stamped after a revision."""

    def __init__(
        self, database: sqlite3.Connection, connection: Connection, since: tuple[int, int], folder: Path
    ) -> None:
        """`since`: Number of the knowledge base, and the revision that the copy shows."""
        self._database, self._connection, self._since, self._folder = database, connection, since, folder

    def run(self, generation: int) -> None:
        put = self._database.executemany
        removals = self._rows(sql.COPIED_REMOVALS)
        self._forget_originals(name for kind, name in removals if kind == sql.SOURCE)
        put("DELETE FROM documents WHERE document_id = ?", [row[1:] for row in removals if row[0] == sql.DOCUMENT])
        put("DELETE FROM sources WHERE path = ?", [row[1:] for row in removals if row[0] == sql.SOURCE])
        tombstones = self._rows(sql.COPIED_TOMBSTONES)
        put("DELETE FROM chunks WHERE chunk_id = ?", [row[:1] for row in tombstones])
        put("DELETE FROM vectors WHERE chunk_id = ?", [row[:1] for row in tombstones])
        put("INSERT OR REPLACE INTO tombstones VALUES (?, ?)", tombstones)
        put(sql_rows.PUT_DOCUMENT, self._each(sql.COPIED_DOCUMENTS))
        put(sql_rows.PUT_CHUNK, self._each(sql.COPIED_CHUNKS))
        for rows in self._batches(sql.COPIED_VECTORS):
            put("DELETE FROM tombstones WHERE chunk_id = ?", [row[:1] for row in rows])
            put("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", rows)
        sources = self._rows(sql.COPIED_SOURCES)
        self._forget_originals(row[0] for row in sources)
        put("INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?, ?)", sources)
        put("UPDATE state SET generation = ?1 WHERE generation <> ?1", [(generation,)])  # its trigger makes an id
        put("INSERT OR REPLACE INTO commits VALUES (?, ?)", self._each(sql.COPIED_COMMITS))

    def _forget_originals(self, names: Iterable[str]) -> None:
        for name in names:
            if is_upload(name):
                shutil.rmtree(original_folder(self._folder, name), ignore_errors=True)

    def _rows(self, statement: str) -> list[_Row]:
        return list(self._each(statement))

    def _each(self, statement: str) -> Iterator[_Row]:
        for rows in self._batches(statement):
            yield from rows

    def _batches(self, statement: str) -> Iterator[list[_Row]]:
        """Yield rows as SQLite stores them. Only a batch of them is in memory."""
        with self._connection.cursor(name="stillroom_copy") as cursor:
            cursor.execute(statement, self._since)
            while found := cursor.fetchmany(_FETCHED_TOGETHER):
                yield [tuple(from_text(value) if isinstance(value, str) else value for value in row) for row in found]


def copied_row(path: Path) -> KnowledgeBaseRow | None:
    """Return which knowledge base a copy shows, without its manifest; None if there is no usable copy."""
    if not path.exists():
        return None
    try:
        with contextlib.closing(CorpusFile(path)) as file, file.translating_errors(), file.reading() as database:
            found = database.execute(_SELECT_KB).fetchone()
    except KnowledgeBaseError:
        return None
    return None if found is None else KnowledgeBaseRow(found[0], found[1], manifest="")


def copied_at(path: Path) -> float | None:
    """Return when the copy got its last commit, in seconds since 1970 UTC; None if it does not say."""
    with (
        contextlib.suppress(KnowledgeBaseError, sqlite3.Error),
        contextlib.closing(CorpusFile(path)) as file,
        file.reading() as database,
    ):
        return float(database.execute("SELECT unix FROM copied_at").fetchone()[0])
    return None


def original_folder(folder: Path, name: str) -> Path:
    """Return the folder of an uploaded file of this name, below the folder of the knowledge base."""
    return folder / ORIGINALS / sql.key_of(name).hex()


def _is_copy_of(path: Path, connection: Connection, kb: int, corpus_id: str) -> bool:
    if not path.exists():
        return False
    try:
        with contextlib.closing(CorpusFile(path)) as file, file.translating_errors(), file.reading() as database:
            own_id = database.execute("SELECT corpus_id FROM state").fetchone()
            copied = database.execute(_SELECT, (kb,)).fetchone()
    except KnowledgeBaseBusyError:
        raise
    except KnowledgeBaseError:  # damaged
        return False
    return own_id == (corpus_id,) and copied is not None and _is_in_history(connection, kb, *copied)


def _is_in_history(connection: Connection, kb: int, revision: int, commit_id: str) -> bool:
    """Return whether the database has had the state that a copy shows."""
    if revision <= 0:
        return revision == 0
    return bool(connection.execute(sql.SELECT_COMMIT, (kb, revision)).fetchone() == (commit_id,))


def _remove(path: Path) -> None:
    """Remove the file of a copy. A process that has it open notices."""
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)
