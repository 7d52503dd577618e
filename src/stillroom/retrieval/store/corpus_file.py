"""The corpus' file as SQLite opens it, and SQLite's errors in our words.

Whoever may write keeps a log beside the file (WAL). In a folder that cannot be written SQLite can make none, not even
for reading: the file is then read as it lies, which is all of it where no log is left. Somebody who may write there can
still change it, so each reading looks before and after whether it is the same.
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
    """One connection, or the one after it. Not thread-safe, but for `another`."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it. Raises as `reporting`."""
        self.path = path
        with self.reporting():
            self._connection, self._state = _opened(path)

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection.

        Raises:
            KnowledgeBaseBusyError: (in the end) what was read is of no one state.
        """
        if self._state is not None and self._state != _state(self.path):
            self._connection.close()
            self._connection, self._state = _opened(self.path)
        with _unchanged(self.path, self._state):
            yield self._connection

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """SQLite's errors in our words.

        Raises:
            KnowledgeBaseBusyError: somebody else writes and does not finish.
            StorageError: the disk, or what may be done in the folder, is in the way.
            CorruptKnowledgeBaseError: the file is damaged or no such database.
        """
        try:
            yield
        except sqlite3.DatabaseError as error:
            if isinstance(error, (sqlite3.IntegrityError, sqlite3.ProgrammingError)):
                raise
            raise self._explained(error) from None  # its message may quote a document

    def _explained(self, error: sqlite3.DatabaseError) -> KnowledgeBaseError:
        code = code_of(error, sqlite3.SQLITE_CORRUPT)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return KnowledgeBaseBusyError(f"{self.path} is locked by another process; try again later")
        if code in _STORAGE_CODES:
            return StorageError(
                f"{self.path}: {reason_of(error)}; what was committed before is safe. Free some space or see "
                "to the disk and the folder's rights, then run the same command again: it does the rest"
            )
        folder = self.path.parent
        return CorruptKnowledgeBaseError(
            f"{self.path} is damaged: {reason_of(error)}; `stillroom verify --kb {folder}` says how far. Put it back "
            "from a backup, or remove the folder and add the documents again",
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
def read_beside(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection of its own, for reading beside everybody. Raises as `CorpusFile.reading`."""
    connection, state = _opened(path)
    with contextlib.closing(connection), _unchanged(path, state):
        yield connection


def _opened(path: Path) -> tuple[sqlite3.Connection, _State | None]:
    """A connection, and the state of the file where it is read as it lies."""
    try:
        return _opened_with_log(path), None
    except sqlite3.OperationalError as error:
        state = _state(path)
        is_barred = code_of(error, 0) in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
        if not is_barred or state is None or os.access(path.parent, os.W_OK):
            raise
    return _connected(f"{path.absolute().as_uri()}?mode=ro&immutable=1", is_uri=True), state


def _opened_with_log(path: Path) -> sqlite3.Connection:
    with contextlib.suppress(OSError):  # SQLite says it in our words
        create_file(path)  # SQLite gives its log the mode of the file
    connection = _connected(str(path))
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # each commit is on the disk before it returns: what was reported as done outlives a power cut
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _connected(name: str, *, is_uri: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(name, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=is_uri)


def _state(path: Path) -> _State | None:
    """Changes with the file; None where it is not all there is."""
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
    """What is read in here from a file as it lies is of that state."""
    try:
        yield
    finally:
        if state is not None and state != _state(path):
            raise KnowledgeBaseBusyError(f"{path} was written to while it was read; try again")
