"""Connections to PostgreSQL, its errors, and the tables. psycopg is imported with the first connection."""

import contextlib
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from stillroom.errors import (
    DatabaseUnavailableError,
    IncompatibleKnowledgeBaseError,
    KnowledgeBaseBusyError,
    StorageError,
    UsageError,
)
from stillroom.retrieval.store.postgresql import statements as sql
from stillroom.retrieval.store.postgresql.address import DatabaseAddress

Connection: TypeAlias = Any
"""A `psycopg.Connection`, whose library may be missing."""

_OLDEST_SERVER = 14
_MAX_WAIT_S = 10
"""Longest wait for another commit, as for SQLite's lock."""
_MAX_STATEMENT_S = 120
_CONNECTING = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "application_name": "stillroom",
}
_SESSION = f"""SET lock_timeout = '{_MAX_WAIT_S}s'; SET statement_timeout = '{_MAX_STATEMENT_S}s';
    SET idle_in_transaction_session_timeout = '{_MAX_STATEMENT_S}s'; SET client_encoding = 'UTF8'"""

_REST = "nothing was changed. Start the server or correct --kb, then run the same command again"
_NO_SUCH_DATABASE, _FULL, _LOCK_TIMEOUT = "3D000", "53", "55P03"
_CONFLICTS = ("40P01", "40001")
_WRONG_USER = ("28000", "28P01")
_MAY_NOT_WRITE = ("42501", "25006")
"""SQL states, or their beginnings (PostgreSQL manual, appendix A)."""


@dataclass(frozen=True, slots=True)
class KnowledgeBaseRow:
    """A knowledge base in the database."""

    kb: int
    corpus_id: str
    manifest: str


class Database:
    """The database of one knowledge base. Thread-safe: transactions of this object run one at a time."""

    def __init__(self, address: DatabaseAddress) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._has_tables = False

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._drop()

    def connect(self) -> Connection:
        """Return a new connection, which commits each statement.

        Raises:
            DatabaseUnavailableError: The server cannot be reached, or refuses.
            UsageError: psycopg is not installed.
        """
        try:
            import psycopg
        except ImportError:
            raise UsageError(
                "a knowledge base in PostgreSQL needs psycopg; run: pip install 'stillroom[postgresql]'"
            ) from None
        password = {"password": self.address.password} if self.address.password else {}
        try:
            with self.translating_errors():
                connection = psycopg.connect(
                    self.address.url, autocommit=True, prepare_threshold=None, **_CONNECTING, **password
                )
        except psycopg.ProgrammingError as error:
            raise UsageError(f"libpq cannot use the URL {self.address}: {_summary(error)}") from None
        except UnicodeError:  # psycopg decodes messages by the server's settings
            raise DatabaseUnavailableError(f"{self.address} refuses the connection") from None
        if connection.info.server_version < _OLDEST_SERVER * 10_000:
            version = connection.info.server_version // 10_000
            connection.close()
            raise DatabaseUnavailableError(
                f"{self.address} is PostgreSQL {version}; Stillroom needs {_OLDEST_SERVER} or later"
            )
        with self.translating_errors():
            connection.execute(_SESSION)
        return connection

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Run a transaction, which is rolled back if an exception leaves the context. The tables exist in it.

        Raises:
            DatabaseUnavailableError: The server cannot be reached, or refuses.
            KnowledgeBaseBusyError: Another commit takes longer than 10 s.
            StorageError: The server's disk is full.
            IncompatibleKnowledgeBaseError: A later version of Stillroom made the tables.
        """
        with self.connection() as connection, connection.transaction():
            yield connection

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """Yield the connection of this object outside of a transaction. Raises as `transaction`."""
        with self._lock:
            connection = self._connected()
            try:
                with self.translating_errors():
                    yield connection
            finally:
                if connection.closed or connection.broken:
                    self._drop()

    def find(self) -> KnowledgeBaseRow | None:
        """Return the knowledge base; None if there is none. Raises as `transaction`."""
        with self.transaction() as connection:
            row = connection.execute(sql.SELECT_KB, (self.address.name,)).fetchone()
        return None if row is None else KnowledgeBaseRow(*row)

    def create(self, manifest: str) -> KnowledgeBaseRow:
        """Make the knowledge base, unless another process has just made it. Raises as `transaction`."""
        with self.transaction() as connection:
            connection.execute(sql.INSERT_KB, (self.address.name, uuid.uuid4().hex, manifest))
            row = connection.execute(sql.SELECT_KB, (self.address.name,)).fetchone()
        assert row is not None
        return KnowledgeBaseRow(*row)

    @contextlib.contextmanager
    def translating_errors(self) -> Iterator[None]:
        """Translate errors of psycopg. Raises as `transaction`."""
        import psycopg

        try:
            yield
        except (psycopg.DataError, psycopg.IntegrityError, psycopg.ProgrammingError) as error:
            if (error.sqlstate or "") in _MAY_NOT_WRITE:
                raise self._translated(error) from None
            raise
        except psycopg.Error as error:
            raise self._translated(error) from None  # a message may quote a document

    def _translated(self, error: Any) -> Exception:
        state = error.sqlstate or ""
        if state in _CONFLICTS:
            return KnowledgeBaseBusyError(f"another process changes the same files in {self.address}; try again")
        if state == _LOCK_TIMEOUT:
            return KnowledgeBaseBusyError(
                f"another process has been committing to {self.address} for more than {_MAX_WAIT_S} s; try again later"
            )
        reason = error.diag.message_primary or _summary(error)
        if state.startswith(_FULL):
            return StorageError(
                f"{self.address}: {reason}; earlier commits are safe. Free some space on the server, then run the same "
                "command again: it does the rest"
            )
        if state in _MAY_NOT_WRITE:
            return DatabaseUnavailableError(
                f"{self.address} refuses the change: {reason}; grant the user CREATE on the database, or connect as "
                "the owner of the schema stillroom to the primary server"
            )
        if state == _NO_SUCH_DATABASE or "does not exist" in reason:
            return DatabaseUnavailableError(
                f"{self.address}: {reason}; make the database with createdb, or correct --kb"
            )
        if state in _WRONG_USER or "password" in reason or "authentication" in reason:
            return DatabaseUnavailableError(
                f"{self.address} refuses the user: {reason}; set PGPASSWORD or ~/.pgpass, or correct the URL"
            )
        return DatabaseUnavailableError(f"{self.address} cannot be reached: {reason}; {_REST}")

    def _connected(self) -> Connection:
        """Precondition: the lock is held."""
        if self._connection is not None and (self._connection.closed or not self._is_alive(self._connection)):
            self._drop()
        if self._connection is None:
            self._connection = self.connect()
        if not self._has_tables:
            self._make_tables(self._connection)
            self._has_tables = True
        return self._connection

    def _is_alive(self, connection: Connection) -> bool:
        """Return whether a kept connection still works; a server that was restarted has closed it."""
        with contextlib.suppress(DatabaseUnavailableError), self.translating_errors():
            connection.execute("SELECT 1")
            return True
        return False

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _make_tables(self, connection: Connection) -> None:
        with self.translating_errors():
            if not _one(connection, sql.IS_THERE):
                with connection.transaction():
                    connection.execute(sql.LOCK_SCHEMA)
                    if not _one(connection, sql.IS_THERE):
                        for statement in sql.SCHEMA:
                            connection.execute(statement)
            version = _one(connection, sql.SELECT_VERSION)
        if version > sql.SCHEMA_VERSION:
            raise IncompatibleKnowledgeBaseError(
                f"the tables of {self.address} have version {version}, this Stillroom reads up to "
                f"{sql.SCHEMA_VERSION}; use the Stillroom that made them"
            )


def _one(connection: Connection, statement: str) -> Any:
    row = connection.execute(statement).fetchone()
    return None if row is None else row[0]


def _summary(error: Exception) -> str:
    """Return what libpq says, without its hints."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "failed" in line), lines[0] if lines else type(error).__name__)
