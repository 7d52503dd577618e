"""What is remembered of past questions: why these chunks, what was reused, what it saved. Read by `stillroom explain`.

One SQLite file beside the knowledge base, so that another process can ask. It is a diary, not the truth: losing it, or
the last lines of it, loses nothing else, and whoever cannot write to it goes on without. A thread of its own writes, so
that nobody who answers waits for the disk or for another process.
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
"""Traces that wait to be written; the next ones are lost."""
_PATIENCE_S = 5.0
"""How long a reader waits for what was added before."""


class TraceLog:
    """The last `keep` traces. Thread-safe; several processes may write to one file."""

    def __init__(self, path: Path, keep: int) -> None:
        """
        Args:
            keep: 0 writes nothing, and `trim` removes all that there is.
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
        """Remember a finished question, soon; none once it is closed. Never raises, never waits: a trace is not worth
        an answer.

        Args:
            at: seconds since 1970.
            trace: plain JSON values; not to be changed afterwards.
        """
        if self._keep:
            self._soon(partial(self._write, request_id, at, trace))

    def trim(self) -> None:
        """Remove what is older than the last `keep`, soon, and its text from the file. Never raises, never waits.

        For a process that answers: who only reads may have been told another `keep` than the one that writes.
        """
        if self._path.is_file():
            self._soon(self._trim)

    def _soon(self, task: Callable[[], None]) -> None:
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
                    logger.warning("%s cannot be written (%s); stillroom explain will not know all", self._path, reason)
                self._is_failing = True
                has_given_up = self._is_closed  # nobody shall wait for a file that does not take it

    def _write(self, request_id: str, at: float, trace: Mapping[str, Any]) -> None:
        with self._lock, self._open() as connection:
            connection.execute("INSERT OR REPLACE INTO traces VALUES (?, ?, ?)", (request_id, at, json.dumps(trace)))
            self._remove_old(connection)

    def _trim(self) -> None:
        with self._lock, self._open() as connection:
            self._remove_old(connection)
            if not self._keep:
                connection.execute("VACUUM")  # pages that were freed without being overwritten
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _remove_old(self, connection: sqlite3.Connection) -> None:
        latest_first = "SELECT rowid FROM traces ORDER BY at DESC, rowid DESC"
        connection.execute(f"DELETE FROM traces WHERE rowid IN ({latest_first} LIMIT -1 OFFSET ?)", (self._keep,))

    def _wait_until_written(self) -> None:
        if self._writer is None:
            return
        is_written = threading.Event()
        with contextlib.suppress(queue.Full):
            self._pending.put(is_written, timeout=_PATIENCE_S)
            is_written.wait(_PATIENCE_S)

    def get(self, request_id: str | None = None) -> tuple[str, float, dict[str, Any]] | None:
        """Request id, time and trace of a question, the last one without an id; None if it is not there.

        Raises:
            KnowledgeBaseBusyError: another process holds the file.
            StorageError: it may not be read, or its disk fails.
            CorruptKnowledgeBaseError: it is damaged.
        """
        where, values = ("WHERE request_id = ?", (request_id,)) if request_id else ("", ())
        with self._reading() as connection:
            row = connection.execute(f"SELECT * FROM traces {where} ORDER BY at DESC LIMIT 1", values).fetchone()
            return None if row is None else (row[0], row[1], json.loads(row[2]))

    def recent(self, limit: int) -> list[tuple[str, float, dict[str, Any]]]:
        """Request id, time and trace of the last questions, latest first. Raises as `get`."""
        with self._reading() as connection:
            rows = connection.execute("SELECT * FROM traces ORDER BY at DESC, rowid DESC LIMIT ?", (limit,)).fetchall()
            return [(request_id, at, json.loads(trace)) for request_id, at, trace in rows]

    def questions(self) -> list[tuple[str, int]]:
        """Every remembered question with the number of tokens of its answer, oldest first, but prompts that were
        continued without a question. Raises as `get`."""
        with self._reading() as connection:
            rows = connection.execute("SELECT trace FROM traces ORDER BY at").fetchall()
            found = [json.loads(row) for (row,) in rows]
            return [(one["question"], int(one["num_generated_tokens"])) for one in found if one["question"]]

    def sources_of(self, chunk_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What was said of these chunks when one was last among a question's sources; those that never were are not in
        it. Raises as `get`."""
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
        """What was added is written, if it can be. Idempotent."""
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
        """A connection that changes nothing; to no questions where there is no diary yet. Raises as `get`, also where
        what is read in here is no trace."""
        self._wait_until_written()
        try:
            with contextlib.closing(_opened_for_reading(self._path)) as connection:
                yield connection
        except sqlite3.Error as error:
            raise _explained(self._path, error) from None  # its message may quote a question
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
            connection.execute("PRAGMA secure_delete = ON")  # what is forgotten does not stay in the file
            connection.execute(f"CREATE TABLE IF NOT EXISTS traces {_COLUMNS}")
            connection.execute("CREATE INDEX IF NOT EXISTS by_time ON traces (at)")
            self._connection = connection
        yield self._connection


def _opened_for_reading(path: Path) -> sqlite3.Connection:
    """Without making the file. In a folder that cannot be written SQLite can make no log, and without one it reads a
    file only as it lies: that is all of the diary while nobody writes to it."""
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
    """To a file whose first page was read."""
    connection = sqlite3.connect(name, timeout=_BUSY_TIMEOUT_S, isolation_level=None, uri=True)
    try:
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'traces'").fetchone() is None:
            connection.execute(f"CREATE TEMP TABLE traces {_COLUMNS}")  # nobody has written yet
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _explained(path: Path, error: sqlite3.Error) -> KnowledgeBaseError:
    code = code_of(error, sqlite3.SQLITE_ERROR)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return KnowledgeBaseBusyError(f"{path} is locked by another process; try again later")
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):
        return _damaged(path, reason_of(error))
    return StorageError(
        f"{path} cannot be read: {reason_of(error)}; see to the disk, and the rights of the file and its folder"
    )


def _damaged(path: Path, reason: str) -> CorruptKnowledgeBaseError:
    return CorruptKnowledgeBaseError(
        f"{path} is damaged ({reason}); remove it, it holds nothing but explanations of past questions", part=path.name
    )
