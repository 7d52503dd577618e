"""Connections to PostgreSQL, its errors, and the tables. psycopg is imported with the first connection.

Only `Database.create` makes tables: reading changes nothing in the database, so that a backup can be restored into it.
"""

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from stillroom.errors import (
    DatabaseRefusedError,
    DatabaseUnavailableError,
    IncompatibleKnowledgeBaseError,
    KnowledgeBaseBusyError,
    KnowledgeBaseNotFoundError,
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

ADVICE = "nothing was changed. Start the server or correct --kb, then run the same command again"
_ADVICE_FOR_READS = "start the server or correct --kb, then try again"
_NO_SUCH_DATABASE, _FULL, _LOCK_TIMEOUT = "3D000", "53", "55P03"
_CONFLICTS = ("40P01", "40001")
_WRONG_USER = ("28000", "28P01")
_REFUSED_USER = ("password", "authentication", "role ", "permission denied", "pg_hba.conf")
"""Words of messages about a connection, which have no SQL state."""
_NO_RIGHTS, _READ_ONLY = "42501", "25006"
_NO_TABLES = ("42P01", "3F000")
"""SQL states, or their beginnings (PostgreSQL manual, appendix A)."""


class ReplacedError(KnowledgeBaseNotFoundError):
    """The database no longer holds this knowledge base, or an earlier state of it, restored from a backup."""

    def __init__(self) -> None:
        super().__init__(
            "this knowledge base was removed from the database, replaced, or restored from a backup while it was open; "
            "open it again (a server: restart it)"
        )


@dataclass(frozen=True, slots=True)
class KnowledgeBaseRow:
    """A knowledge base in the database."""

    kb: int
    corpus_id: str
    manifest: str


class Database:
    """The database of one knowledge base. Thread-safe: transactions of this object run one at a time."""

    def __init__(self, address: DatabaseAddress, *, only_reads: bool = False) -> None:
        """`only_reads`: For reads: messages do not say that nothing was changed."""
        self.address = address
        self._advice = _ADVICE_FOR_READS if only_reads else ADVICE
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._drop()

    def connect(self) -> Connection:
        """Return a new connection, which commits each statement.

        Raises:
            DatabaseUnavailableError: The server cannot be reached, or refuses.
            UsageError: psycopg is not installed, or libpq does not know a parameter of the URL.
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
        """Run a transaction, which is rolled back if an exception leaves the context.

        Raises:
            DatabaseUnavailableError: The server cannot be reached.
            DatabaseRefusedError: It refuses the user, or the user lacks a right.
            ReplacedError: The tables were removed.
            KnowledgeBaseBusyError: Another commit takes longer than 10 s.
            StorageError: The server's disk is full.
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

    def read(
        self, statement: str, parameters: Sequence[object], settings: Mapping[str, str] | None = None
    ) -> list[tuple[Any, ...]]:
        """Return the rows of a query, run in a transaction of its own and in one round trip.

        Unlike `transaction`, this does not ask first whether the kept connection still works: if it does not, the query
        is repeated on a new one. Raises as `transaction`.

        Args:
            settings: Values of PostgreSQL's settings for this transaction.
        """
        with self._lock:
            is_kept = self._connection is not None
            try:
                return self._read(statement, parameters, settings or {})
            except DatabaseUnavailableError:
                if not is_kept or self._connection is not None:
                    raise
            return self._read(statement, parameters, settings or {})

    def find(self) -> KnowledgeBaseRow | None:
        """Return the knowledge base; None if there is none. Makes no tables.

        Raises as `transaction`, and IncompatibleKnowledgeBaseError: a later version of Stillroom made the tables.
        """
        with self.transaction() as connection:
            if not _one(connection, sql.IS_THERE):
                return None
            self._check_version(connection)
            row = connection.execute(sql.SELECT_KB, (self.address.name,)).fetchone()
        return None if row is None else KnowledgeBaseRow(*row)

    def create(
        self, manifest: str, prepare: Callable[[Connection, int], None] = lambda connection, kb: None
    ) -> KnowledgeBaseRow:
        """Make the knowledge base, unless another process has just made it, and the tables, if there are none. Raises
        as `find` and `prepare`.

        Args:
            prepare: Called with the number of a new knowledge base, in the transaction that makes it.
        """
        with self.transaction() as connection:
            connection.execute(sql.LOCK_SCHEMA)
            if not _one(connection, sql.IS_THERE):
                for statement in sql.SCHEMA:
                    connection.execute(statement)
            self._check_version(connection)
            made = connection.execute(sql.INSERT_KB, (self.address.name, uuid.uuid4().hex, manifest))
            row = connection.execute(sql.SELECT_KB, (self.address.name,)).fetchone()
            assert row is not None
            if made.rowcount:
                prepare(connection, row[0])
        return KnowledgeBaseRow(*row)

    @contextlib.contextmanager
    def translating_errors(self) -> Iterator[None]:
        """Translate errors of psycopg. Raises as `transaction`."""
        import psycopg

        try:
            yield
        except (psycopg.DataError, psycopg.IntegrityError, psycopg.ProgrammingError) as error:
            if (error.sqlstate or "") in (_NO_RIGHTS, *_NO_TABLES):
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
        if state in _NO_TABLES:
            return ReplacedError()
        reason = error.diag.message_primary or _summary(error)
        if state.startswith(_FULL):
            return StorageError(
                f"{self.address}: {reason}; earlier commits are safe. Free some space on the server, then run the same "
                "command again: it does the rest"
            )
        if state == _READ_ONLY:
            return DatabaseUnavailableError(
                f"{self.address} refuses the change: {reason}; connect to the primary server (with several hosts: "
                "target_session_attrs=read-write)"
            )
        if state == _NO_RIGHTS:
            return DatabaseRefusedError(
                f"{self.address}: {reason}; grant the user what docs/postgresql.md lists for reading, for changes and "
                "for a new knowledge base, or connect as the owner of the schema stillroom"
            )
        if state in _WRONG_USER or (not state and any(word in reason for word in _REFUSED_USER)):
            return DatabaseRefusedError(
                f"{self.address} refuses the user: {reason}; set PGPASSWORD or ~/.pgpass, or correct the URL"
            )
        if state == _NO_SUCH_DATABASE or "does not exist" in reason:
            return DatabaseUnavailableError(
                f"{self.address}: {reason}; make the database with createdb, or correct --kb"
            )
        return DatabaseUnavailableError(f"{self.address} cannot be reached: {reason}; {self._advice}")

    def _connected(self) -> Connection:
        """Precondition: the lock is held."""
        if self._connection is not None and (self._connection.closed or not self._is_alive(self._connection)):
            self._drop()
        if self._connection is None:
            self._connection = self.connect()
        return self._connection

    def _read(self, statement: str, parameters: Sequence[object], settings: Mapping[str, str]) -> list[tuple[Any, ...]]:
        """Precondition: the lock is held."""
        if self._connection is None:
            self._connection = self.connect()
        connection = self._connection
        try:
            with self.translating_errors():
                cursor = connection.cursor(binary=True)
                with connection.pipeline(), connection.transaction():
                    if settings:
                        chosen = ", ".join(["set_config(%s, %s, true)"] * len(settings))
                        connection.execute(f"SELECT {chosen}", [part for pair in settings.items() for part in pair])
                    cursor.execute(statement, parameters)
                found: list[tuple[Any, ...]] = cursor.fetchall()
                return found
        finally:
            if connection.closed or connection.broken:
                self._drop()

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

    def _check_version(self, connection: Connection) -> None:
        version = _one(connection, sql.SELECT_VERSION)
        if version > sql.NEWEST_VERSION:
            raise IncompatibleKnowledgeBaseError(
                f"the tables of {self.address} have version {version}, this Stillroom reads up to "
                f"{sql.NEWEST_VERSION}; use the Stillroom that made them"
            )


def _one(connection: Connection, statement: str) -> Any:
    row = connection.execute(statement).fetchone()
    return None if row is None else row[0]


def _summary(error: Exception) -> str:
    """Return what libpq says, without its hints."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "failed" in line), lines[0] if lines else type(error).__name__)
