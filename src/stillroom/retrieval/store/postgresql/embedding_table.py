"""The vectors of one knowledge base in pgvector: a table of its own, with a `vector(n)` column and an HNSW index.

A commit writes the table in its own transaction, and a row goes with its row in `stillroom.vectors`, which it
references. So a search finds what the last commit left, on every machine, and nothing that was removed.

Vectors have length 1, so the negative inner product `<#>` orders them as the cosine distance does.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig
from stillroom.errors import ConfigError, DatabaseUnavailableError, IndexUnavailableError, KnowledgeBaseBusyError
from stillroom.retrieval.store.postgresql import statements as sql
from stillroom.retrieval.store.postgresql.database import Connection, Database
from stillroom.retrieval.store.vector_table import MOST_CANDIDATES, StoredVectors

_MOST_WHOLE, _MOST_HALVES = 2000, 4000
"""Most dimensions of an HNSW index over `vector` and over `halfvec`."""

_OLDEST = (0, 5)
_FIRST_WITH_HALVES = (0, 7)
_FIRST_WITH_ITERATIVE_SCANS = (0, 8)
"""Versions of pgvector."""

_BATCH = 1000
_READS = {"jit": "off", "lock_timeout": "1s"}
"""Settings of reads. Compiling a plan takes longer than a search. Nothing that Stillroom does locks readers out, and
while something else does, each search of the process waits for those before it."""
_HEADER_BYTES = 4
"""`vector_send` begins with the dimension and a zero, of two bytes each."""

_SELECT_VERSION = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
_IS_INSTALLED = "SELECT count(*) FROM pg_available_extensions WHERE name = 'vector'"
_SELECT_PLACE = """SELECT extnamespace::regnamespace::text, current_setting('search_path'),
    to_regtype('vector') IS NOT NULL FROM pg_extension WHERE extname = 'vector'"""
_CREATE = """CREATE TABLE {table} (
    kb integer NOT NULL DEFAULT {kb}, chunk_id bigint PRIMARY KEY, embedding vector({dimension}) NOT NULL,
    FOREIGN KEY (kb, chunk_id) REFERENCES stillroom.vectors (kb, chunk_id) ON DELETE CASCADE)"""
_CREATE_INDEX = """CREATE INDEX {name} ON {table} USING hnsw ({column} {type}_ip_ops)
    WITH (m = {m}, ef_construction = {ef_construction})"""
_SELECT_GRANTS = """SELECT format('GRANT %s ON {table} TO %s', one.privilege_type,
    CASE one.grantee WHEN 0 THEN 'PUBLIC' ELSE one.grantee::regrole::text END)
    FROM pg_class c, aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) one
    WHERE c.oid = 'stillroom.vectors'::regclass AND one.privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')"""
_PUT = """INSERT INTO {table} (chunk_id, embedding) VALUES (%s, %s) ON CONFLICT (chunk_id)
    DO UPDATE SET embedding = excluded.embedding"""
_SELECT = "SELECT e.chunk_id, vector_send(e.embedding) FROM {table} e"
_SELECT_STORED = """SELECT e.chunk_id, vector_send(e.embedding), v.generation
    FROM {table} e JOIN stillroom.vectors v USING (kb, chunk_id) WHERE e.chunk_id = ANY(%s)"""
_NO_INDEX = "+ 0"
"""After the distance: PostgreSQL then sorts all rows, because the index does not have this order."""


def create_embeddings(connection: Connection, kb: int, index: IndexConfig, dimension: int) -> None:
    """Make the table of a new knowledge base, and its HNSW index, and shut out programs that do not know them.

    Who may read or change `stillroom.vectors` may do so with the new table.

    Raises:
        ConfigError: The database lacks pgvector, has an old version, or has it where the user does not find it; or
            vectors have too many dimensions for it.
    """
    version = _checked_version(connection)
    if dimension > _MOST_HALVES or (dimension > _MOST_WHOLE and version < _FIRST_WITH_HALVES):
        raise ConfigError(
            f"the embedder makes vectors of {dimension:,} dimensions, and an HNSW index of pgvector has at most "
            f"{_MOST_HALVES:,} (before version 0.7: {_MOST_WHOLE:,}); use another index.kind or embedder"
        )
    table, column = table_of(kb), _Column(dimension)
    connection.execute(_CREATE.format(table=table, kb=int(kb), dimension=int(dimension)))
    settings = {"m": int(index.m), "ef_construction": int(index.ef_construction)}
    connection.execute(
        _CREATE_INDEX.format(
            name=_index_name(kb), table=table, column=column.indexed("embedding"), type=column.type, **settings
        )
    )
    for (grant,) in connection.execute(_SELECT_GRANTS.format(table=table)).fetchall():
        connection.execute(grant)
    connection.execute(sql.RAISE_VERSION)


def table_of(kb: int) -> str:
    """Return the name of the table of a knowledge base."""
    return f"stillroom.embeddings_{kb:d}"


class EmbeddingTable:
    """Implements `VectorTable`. Reads run one at a time, on a connection of their own."""

    def __init__(self, database: Database, kb: int, dimension: int) -> None:
        """
        Args:
            database: Used for reads, and closed with this object.
        """
        self._database, self._kb, self._table = database, kb, table_of(kb)
        self._dimension, self._column = dimension, _Column(dimension)
        self._select = _SELECT.format(table=self._table)
        self._scanning: dict[str, str] | None = None

    def close(self) -> None:
        """Idempotent."""
        self._database.close()

    # Searching

    def nearest(self, query: NDArray[np.float32], num: int, ef_search: int) -> StoredVectors:
        column, kind = self._column.indexed("e.embedding"), self._column.cast
        statement = f"{self._select} ORDER BY {column} <#> %s::{kind} LIMIT %s"
        with self._searching():
            settings = {"hnsw.ef_search": str(min(ef_search, MOST_CANDIDATES)), **self._iterative_scans()}
            return self._read(statement, (_text(query), num), settings)

    def compared(self, query: NDArray[np.float32], num: int, among: Sequence[int] | None = None) -> StoredVectors:
        chosen, parameters = ("", ()) if among is None else ("WHERE e.chunk_id = ANY(%s)", (list(among),))
        order = f"(e.embedding <#> %s::vector({self._dimension})) {_NO_INDEX}"
        with self._searching():
            statement = f"{self._select} {chosen} ORDER BY {order} LIMIT %s"
            return self._read(statement, (*parameters, _text(query), num))

    def vectors_of(self, chunk_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return ids [n] and vectors [n, d] in the given order; removed chunks are left out."""
        with self._searching():
            stored = self.stored(chunk_ids)
        place = {chunk_id: at for at, chunk_id in enumerate(stored.ids.tolist())}
        rows = [place[int(chunk_id)] for chunk_id in chunk_ids if int(chunk_id) in place]
        return stored.ids[rows], stored.vectors[rows]

    def batches(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        last = -1
        while True:
            with self._searching():
                statement = f"{self._select} WHERE e.chunk_id > %s ORDER BY e.chunk_id LIMIT %s"
                found = self._read(statement, (last, _BATCH))
            if not len(found.ids):
                return
            yield found.ids, found.vectors
            last = int(found.ids[-1])

    def stored(self, chunk_ids: Sequence[int]) -> StoredVectors:
        """Return the rows of these chunks, with generations; removed ones are absent. Raises as `Database.read`."""
        return self._read(_SELECT_STORED.format(table=self._table), (list(map(int, chunk_ids)),))

    # Changes

    def put(self, connection: Connection, rows: Sequence[tuple[int, NDArray[np.float32]]]) -> None:
        """Store a vector [d] of each chunk within a transaction. Precondition: `stillroom.vectors` has the chunks."""
        if rows:
            with connection.cursor() as cursor:
                content = [(chunk_id, _text(vector)) for chunk_id, vector in rows]
                cursor.executemany(_PUT.format(table=self._table), content)

    def rebuild_index(self) -> None:
        """Build the HNSW index again, while searches and commits of all machines go on."""
        index = f"stillroom.{_index_name(self._kb)}"
        with (
            self._searching(),
            contextlib.closing(self._database.connect()) as connection,
            self._database.translating_errors(),
        ):
            connection.execute("SET statement_timeout = 0")
            connection.execute("SET lock_timeout = 0")  # it waits for every older transaction
            for left_over in ("ccnew", "ccold"):  # by an interrupted run
                connection.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {index}_{left_over}")
            connection.execute(f"REINDEX INDEX CONCURRENTLY {index}")

    # Inside

    def _read(
        self, statement: str, parameters: Sequence[object], settings: Mapping[str, str] | None = None
    ) -> StoredVectors:
        rows = self._database.read(statement, parameters, {**_READS, **(settings or {})})
        content = np.frombuffer(b"".join(row[1][_HEADER_BYTES:] for row in rows), dtype=">f4").astype(np.float32)
        ids = np.array([row[0] for row in rows], dtype=np.int64)
        generations = np.array([row[2] for row in rows if len(row) > 2], dtype=np.int64)
        return StoredVectors(ids, content.reshape(len(rows), self._dimension), generations)

    def _iterative_scans(self) -> Mapping[str, str]:
        """Return the setting with which a search goes on behind removed rows. The results are sorted again anyway."""
        if self._scanning is None:
            rows = self._database.read(_SELECT_VERSION, ())
            is_new = bool(rows) and _parsed(rows[0][0]) >= _FIRST_WITH_ITERATIVE_SCANS
            self._scanning = {"hnsw.iterative_scan": "relaxed_order"} if is_new else {}
        return self._scanning

    @contextlib.contextmanager
    def _searching(self) -> Iterator[None]:
        try:
            yield
        except DatabaseUnavailableError as error:
            raise IndexUnavailableError(f"{error}. --mode sparse searches by words alone") from error
        except KnowledgeBaseBusyError as error:
            raise IndexUnavailableError(
                f"the vectors in {self._table} of {self._database.address} are locked, for example by a REINDEX or a "
                "restore; try again later. --mode sparse searches by words alone"
            ) from error


@dataclass(frozen=True, slots=True)
class _Column:
    """What the HNSW index is made of: the vectors, or half precision of those with more than 2,000 dimensions."""

    dimension: int

    @property
    def type(self) -> str:
        return "vector" if self.dimension <= _MOST_WHOLE else "halfvec"

    @property
    def cast(self) -> str:
        return f"{self.type}({self.dimension:d})"

    def indexed(self, column: str) -> str:
        return column if self.type == "vector" else f"({column}::{self.cast})"


def _index_name(kb: int) -> str:
    return f"embeddings_{kb:d}_hnsw"


def _checked_version(connection: Connection) -> tuple[int, ...]:
    row = connection.execute(_SELECT_VERSION).fetchone()
    where = "as a superuser of the database run: CREATE EXTENSION vector"
    if row is None:
        is_installed = bool(connection.execute(_IS_INSTALLED).fetchone()[0])
        install = "" if is_installed else "install pgvector on the server (Debian: postgresql-17-pgvector), then "
        raise ConfigError(f"index.kind = 'pgvector' needs the extension vector in the database; {install}{where}")
    version = _parsed(row[0])
    if version < _OLDEST:
        raise ConfigError(
            f"index.kind = 'pgvector' needs pgvector 0.5 or later, the database has {row[0]}; update the package, then "
            "run: ALTER EXTENSION vector UPDATE"
        )
    schema, path, is_found = connection.execute(_SELECT_PLACE).fetchone()
    if not is_found:
        raise ConfigError(
            f"the extension vector is in the schema {schema}, which this user does not find: search_path is {path}. "
            f"For all users run: ALTER DATABASE ... SET search_path = {path}, {schema}; and: GRANT USAGE ON SCHEMA "
            f"{schema} TO PUBLIC"
        )
    return version


def _parsed(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _text(vector: NDArray[np.float32]) -> str:
    """Return a vector as pgvector reads it: decimal numbers that are rounded to the same float32."""
    return f"[{','.join(map(str, vector.tolist()))}]"
