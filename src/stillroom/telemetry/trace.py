"""The request log: sources, reuse and timing of past questions, read by `stillroom explain`.

One SQLite file in the knowledge base's folder, readable by other processes. It is not part of the knowledge base's
state: losing it loses nothing else, and failing to write it fails no answer. A thread of its own writes, so that
answers never wait for the disk or for another process.
"""

import contextlib
import json
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stillroom.core.private_files import create_file
from stillroom.core.sqlite_errors import code_of, reason_of
from stillroom.errors import CorruptKnowledgeBaseError, KnowledgeBaseBusyError, KnowledgeBaseError, StorageError

logger = logging.getLogger(__name__)

TRACE_FILE = "traces.sqlite"
_COLUMNS = "(request_id TEXT PRIMARY KEY, at REAL NOT NULL, trace TEXT NOT NULL)"
_BUSY_TIMEOUT_S = 2.0
_MAX_PENDING = 1024
"""Most records that wait to be written; further ones are dropped."""
_MAX_READ_WAIT_S = 5.0
"""Longest wait of a reader for pending writes."""


class TraceLog:
    """The last `keep` questions. Thread-safe; several processes may write to one file."""

    def __init__(self, path: Path, keep: int) -> None:
        """
        Args:
            keep: most questions to keep; with 0 nothing is written, and `trim` deletes all.
        """
        self._path = path
        self._keep = keep
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._is_failing = self._is_closed = False
        self._pending: queue.Queue[Callable[[], None] | threading.Event | None]
        self._pending = queue.Queue(_MAX_PENDING)
        self._writer: threading.Thread | None = None
        self._adding = threading.Lock()

    def add(self, request_id: str, at: float, trace: Mapping[str, Any]) -> None:
        """Queue the record of a finished question; ignored after `close`. Never raises and never waits.

        Args:
            at: seconds since 1970.
            trace: plain JSON values. Precondition: the caller does not change them afterwards.
        """
        if self._keep:
            self._queue(partial(self._write, request_id, at, trace))

    def trim(self) -> None:
        """Queue the deletion of records beyond the last `keep`, and of their text from the file. Never raises or waits.

        Called only by processes that answer: the `keep` of a reading process may differ.
        """
        if self._path.is_file():
            self._queue(self._trim)

    def _queue(self, task: Callable[[], None]) -> None:
        with self._adding, contextlib.suppress(queue.Full):
            if self._is_closed:
                return
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="stillroom-trace", daemon=True)
                self._writer.start()
            self._pending.put_nowait(task)

    def _write_all(self) -> None:
        has_given_up = False
        while (task := self._pending.get()) is not None:
            if isinstance(task, threading.Event):
                task.set()
                continue
            if has_given_up:
                continue
            try:
                task()
                self._is_failing = False
            except (sqlite3.Error, OSError, TypeError, ValueError) as error:
                if not self._is_failing:
                    reason = reason_of(error) if isinstance(error, sqlite3.Error) else error
                    logger.warning(
                        "%s cannot be written (%s); stillroom explain will miss questions", self._path, reason
                    )
                self._is_failing = True
                has_given_up = self._is_closed  # `close` must not wait for a file that cannot be written

    def _write(self, request_id: str, at: float, trace: Mapping[str, Any]) -> None:
        with self._lock, self._open() as connection:
            connection.execute("INSERT OR REPLACE INTO traces VALUES (?, ?, ?)", (request_id, at, json.dumps(trace)))
            self._remove_old(connection)

    def _trim(self) -> None:
        with self._lock, self._open() as connection:
            self._remove_old(connection)
            if not self._keep:
                connection.execute("VACUUM")  # removes pages that were freed but not overwritten
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _remove_old(self, connection: sqlite3.Connection) -> None:
        latest_first = "SELECT rowid FROM traces ORDER BY at DESC, rowid DESC"
        connection.execute(f"DELETE FROM traces WHERE rowid IN ({latest_first} LIMIT -1 OFFSET ?)", (self._keep,))

    def _wait_until_written(self) -> None:
        if self._writer is None:
            return
        is_written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._pending.put(is_written, timeout=_MAX_READ_WAIT_S)
            is_written.wait(_MAX_READ_WAIT_S)

    def get(self, request_id: str | None = None) -> tuple[str, float, dict[str, Any]] | None:
        """Return id, time and record of a question, of the last one without an id; None if absent.

        Raises:
            KnowledgeBaseBusyError: another process locks the file.
            StorageError: the file is not readable, or its disk failed.
            CorruptKnowledgeBaseError: the file is damaged.
        """
        where, values = ("WHERE request_id = ?", (request_id,)) if request_id else ("", ())
        with self._reading() as connection:
            row = connection.execute(f"SELECT * FROM traces {where} ORDER BY at DESC LIMIT 1", values).fetchone()
            return None if row is None else (row[0], row[1], json.loads(row[2]))

    def recent(self, limit: int) -> list[tuple[str, float, dict[str, Any]]]:
        """Return id, time and record of the last questions, latest first. Raises as `get`."""
        with self._reading() as connection:
            rows = connection.execute("SELECT * FROM traces ORDER BY at DESC, rowid DESC LIMIT ?", (limit,)).fetchall()
            return [(request_id, at, json.loads(trace)) for request_id, at, trace in rows]

    def questions(self) -> list[tuple[str, int]]:
        """Return every question with the tokens of its answer, oldest first; raw prompts are left out. Raises as
        `get`."""
        with self._reading() as connection:
            rows = connection.execute("SELECT trace FROM traces ORDER BY at").fetchall()
            found = [json.loads(row) for (row,) in rows]
            return [(one["question"], int(one["num_generated_tokens"])) for one in found if one["question"]]

    def sources_of(self, chunk_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the latest recorded source of each chunk; chunks that never were a source are absent. Raises as
        `get`."""
        found = {}
        with self._reading() as connection:
            for chunk_id in chunk_ids:
                query = "SELECT trace FROM traces WHERE instr(trace, ?) ORDER BY at DESC"
                rows = (json.loads(row) for (row,) in connection.execute(query, (chunk_id,)))
                sources = (source for trace in rows for source in trace["sources"])
                source = next((one for one in sources if one["chunk_id"] == chunk_id), None)
                if source is not None:
                    found[chunk_id] = source
        return found

    def close(self) -> None:
        """Write pending records, if possible, and close. Idempotent."""
        with self._adding:
            self._is_closed = True
            writer, self._writer = self._writer, None
        if writer is not None:
            self._pending.put(None)
            writer.join()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Open a read-only connection, to an empty table if there is no file. Raises as `get`, also if the block reads
        a malformed record."""
        self._wait_until_written()
        try:
            with contextlib.closing(_opened_for_reading(self._path)) as connection:
                yield connection
        except sqlite3.Error as error:
            raise _as_error(self._path, error) from None  # SQLite's message may quote a question
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(self._path, type(error).__name__) from None

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        if self._connection is None:
            create_file(self._path)
            connection = sqlite3.connect(
                self._path, timeout=_BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
            )
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA secure_delete = ON")  # deleted text is overwritten
            connection.execute(f"CREATE TABLE IF NOT EXISTS traces {_COLUMNS}")
            connection.execute("CREATE INDEX IF NOT EXISTS by_time ON traces (at)")
            self._connection = connection
        yield self._connection


def _opened_for_reading(path: Path) -> sqlite3.Connection:
    """Open the file without creating it.

    In a read-only folder SQLite cannot create its write-ahead log and reads the file as immutable, which is complete
    while no process writes.
    """
    if not path.is_file():
        return _connected(":memory:")
    uri = path.absolute().as_uri()
    try:
        return _connected(f"{uri}?mode=rw")
    except sqlite3.OperationalError as error:
        if code_of(error, sqlite3.SQLITE_ERROR) not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
            raise
    return _connected(f"{uri}?mode=ro&immutable=1")


def _connected(name: str) -> sqlite3.Connection:
    """Connect, and read the first page so that errors show here."""
    connection = sqlite3.connect(name, timeout=_BUSY_TIMEOUT_S, isolation_level=None, uri=True)
    try:
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'traces'").fetchone() is None:
            connection.execute(f"CREATE TEMP TABLE traces {_COLUMNS}")  # nothing was written yet
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _as_error(path: Path, error: sqlite3.Error) -> KnowledgeBaseError:
    code = code_of(error, sqlite3.SQLITE_ERROR)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return KnowledgeBaseBusyError(f"{path} is locked by another process; try again later")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
        return _damaged(path, reason_of(error))
    return StorageError(
        f"{path} cannot be read: {reason_of(error)}; check the disk, and the rights of the file and its folder"
    )


def _damaged(path: Path, reason: str) -> CorruptKnowledgeBaseError:
    return CorruptKnowledgeBaseError(
        f"{path} is damaged ({reason}); remove it, it holds only explanations of past questions", part=path.name
    )
