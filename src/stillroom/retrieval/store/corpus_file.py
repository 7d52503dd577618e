"""SQLite connections to the corpus file, and translation of SQLite's errors.

The file has a write-ahead log (WAL). In a folder without write permission SQLite cannot open a log, not even for
reading. The file is then opened as immutable, which is complete if no log is left. Another process may still change it,
so each read compares the file's state before and after.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from stillroom.core.private_files import create_file
from stillroom.core.sqlite_errors import code_of, reason_of
from stillroom.errors import CorruptKnowledgeBaseError, KnowledgeBaseBusyError, KnowledgeBaseError, StorageError

_BUSY_TIMEOUT_S = 10.0

_State = tuple[int, ...]


class CorpusFile:
    """A connection to the corpus file, reopened if an immutable file has changed. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. Raises as `translating_errors`."""
        self.path = path
        with self.translating_errors():
            self._connection, self._state = _opened(path)

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection.

        Raises:
            KnowledgeBaseBusyError: At exit, if an immutable file was changed while it was read.
        """
        if self._state is not None and self._state != _state(self.path):
            self._connection.close()
            self._connection, self._state = _opened(self.path)
        with _unchanged(self.path, self._state):
            yield self._connection

    @contextlib.contextmanager
    def translating_errors(self) -> Iterator[None]:
        """Translate SQLite's errors.

        Raises:
            KnowledgeBaseBusyError: Another process holds SQLite's lock.
            StorageError: The disk or the folder's permissions prevent the access.
            CorruptKnowledgeBaseError: The file is damaged or not such a database.
        """
        try:
            yield
        except sqlite3.DatabaseError as error:
            if isinstance(error, (sqlite3.IntegrityError, sqlite3.ProgrammingError)):
                raise
            raise self._translated(error) from None  # SQLite's message may quote a document

    def _translated(self, error: sqlite3.DatabaseError) -> KnowledgeBaseError:
        code = code_of(error, sqlite3.SQLITE_CORRUPT)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return KnowledgeBaseBusyError(f"{self.path} is locked by another process; try again later")
        if code in _STORAGE_CODES:
            return StorageError(
                f"{self.path}: {reason_of(error)}; earlier commits are safe. Free some space or check the disk and the "
                "folder's permissions, then run the same command again: it does the rest"
            )
        folder = self.path.parent
        return CorruptKnowledgeBaseError(
            f"{self.path} is damaged: {reason_of(error)}; `stillroom verify --kb {folder}` shows the extent. Restore a "
            "backup, or remove the folder and add the documents again",
            part=self.path.name,
        )


_STORAGE_CODES = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
)


@contextlib.contextmanager
def separate_connection(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a new connection for long reads. Raises as `CorpusFile.reading`."""
    connection, state = _opened(path)
    with contextlib.closing(connection), _unchanged(path, state):
        yield connection


def _opened(path: Path) -> tuple[sqlite3.Connection, _State | None]:
    """Return a connection, and the file's state if it is opened as immutable."""
    try:
        return _opened_with_log(path), None
    except sqlite3.OperationalError as error:
        state = _state(path)
        is_barred = code_of(error, 0) in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
        if not is_barred or state is None or os.access(path.parent, os.W_OK):
            raise
    return _connected(f"{path.absolute().as_uri()}?mode=ro&immutable=1", is_uri=True), state


def _opened_with_log(path: Path) -> sqlite3.Connection:
    with contextlib.suppress(OSError):  # SQLite raises the error
        create_file(path)  # with private permissions, which SQLite copies to its log
    connection = _connected(str(path))
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # each commit is on the disk before it returns and survives a power cut
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _connected(name: str, *, is_uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(name, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=is_uri)


def _state(path: Path) -> _State | None:
    """Return inode, size and time of the file; None if a log holds further changes."""
    try:
        log = path.with_name(f"{path.name}-wal")
        if log.exists() and log.stat().st_size:
            return None
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def _unchanged(path: Path, state: _State | None) -> Iterator[None]:
    """Raise KnowledgeBaseBusyError at exit if an immutable file (`state` is not None) has changed."""
    try:
        yield
    finally:
        if state is not None and state != _state(path):
            raise KnowledgeBaseBusyError(f"{path} was written to while it was read; try again")
