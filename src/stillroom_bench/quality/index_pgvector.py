"""Arms of `stillroom bench index` for pgvector in a PostgreSQL server, searched and filled as a knowledge base does."""

import contextlib
import dataclasses
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.errors import UsageError
from stillroom.retrieval.index.pgvector_index import PgvectorIndex
from stillroom.retrieval.store.postgresql.address import parse_address
from stillroom.retrieval.store.postgresql.database import Database
from stillroom.retrieval.store.postgresql.embedding_table import EmbeddingTable, create_embeddings, table_of
from stillroom.retrieval.store.postgresql.local_copy import prepare_copy
from stillroom.retrieval.store.postgresql.postgres_corpus import PostgresCorpus
from stillroom.retrieval.store.sql_rows import StoredDocument
from stillroom_bench.instrument.harness import Arm
from stillroom_bench.quality.search_arms import K, Vectors, dense_arm

_COMMITTED_TOGETHER = 500
_SIZES = "SELECT pg_indexes_size('{table}') / 1048576.0, pg_total_relation_size('{table}') / 1048576.0"


@dataclass(frozen=True, slots=True)
class PgvectorRun:
    """What is measured, and where."""

    url: str
    """A PostgreSQL database with the extension `vector`."""
    config: IndexConfig
    efforts: tuple[int, ...]
    """Values of `ef_search`; an exact search is measured too."""


def check_url(url: str) -> None:
    """Raise UsageError if a URL holds a password, or cannot be read."""
    if parse_address(url).password:
        raise UsageError(
            "the command line is part of the report, so --pgvector must hold no password; set PGPASSWORD or ~/.pgpass"
        )


@contextlib.contextmanager
def pgvector_arms(
    run: PgvectorRun, vectors: Vectors, queries: Vectors, truth: NDArray[np.int64]
) -> Iterator[tuple[list[Arm], dict[str, Any]]]:
    """Yield an arm per effort, and a row of build costs. The knowledge base is removed at the end.

    Args:
        vectors: [n, d]; the ids are their places.
        truth: True ids [q, K].

    Raises:
        ConfigError: The database lacks the extension.
        DatabaseUnavailableError: It cannot be reached.
    """
    size, dimension = vectors.shape
    address = dataclasses.replace(parse_address(run.url), name=f"bench-{uuid.uuid4().hex[:8]}")
    database = Database(address)
    row = database.create("{}", partial(create_embeddings, index=run.config, dimension=dimension))
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, address, row.kb)
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "corpus.sqlite3"
        with database.transaction() as connection:
            prepare_copy(path, connection, row.kb, row.corpus_id)
        table = EmbeddingTable(Database(address), row.kb, dimension)
        corpus = stack.enter_context(contextlib.closing(PostgresCorpus(path, database, row, embeddings=table)))
        began = time.perf_counter()
        for start in range(0, size, _COMMITTED_TOGETHER):
            corpus.commit([_document(start, vectors[start : start + _COMMITTED_TOGETHER])])
        committed = time.perf_counter()
        table.rebuild_index()
        rebuilt = time.perf_counter()
        ((index_mib, whole_mib),) = database.read(_SIZES.format(table=table_of(row.kb)), ())
        costs = {
            "vectors": size,
            "commits, seconds": committed - began,
            "building the index at once, seconds": rebuilt - committed,
            "indexes MiB": float(index_mib),
            "with table MiB": float(whole_mib),
        }

        def searcher(ef_search: int, *, exact: bool) -> Callable[[], Callable[[Vectors], Any]]:
            index = PgvectorIndex(table, corpus, dimension, ef_search, exact=exact)
            return lambda: lambda query: index.search(query, K)

        name = f"{size:,} pgvector"
        arms = [
            dense_arm(f"{name} m={run.config.m} ef={effort}", searcher(effort, exact=False), queries, truth)
            for effort in run.efforts
        ]
        yield [*arms, dense_arm(f"{name} exact", searcher(1, exact=True), queries, truth)], costs


def _document(first: int, vectors: Vectors) -> StoredDocument:
    """Return a document whose chunks have the numbers from `first` as ids."""
    document_id = DocumentId(f"/bench/{first}")
    chunks = tuple(Chunk(ChunkId(first + at), document_id, at, f"{first + at}") for at in range(len(vectors)))
    return StoredDocument(document_id, document_id, None, "", "", 1, 0.0, chunks, vectors)


def _remove(address: Any, kb: int) -> None:
    database = Database(address)
    with contextlib.closing(database), database.transaction() as connection:
        connection.execute(f"DROP TABLE {table_of(kb)}")
        connection.execute("DELETE FROM stillroom.knowledge_bases WHERE kb = %s", (kb,))
