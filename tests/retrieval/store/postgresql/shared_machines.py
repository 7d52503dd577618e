"""Machines that share a knowledge base in a PostgreSQL server, and the server itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.store.postgresql.postgres_corpus import PostgresCorpus
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus

Open = Callable[..., KnowledgeBase]


def corpus_of(kb: KnowledgeBase) -> PostgresCorpus:
    assert isinstance(kb.corpus, PostgresCorpus)
    return kb.corpus


def look(kb: KnowledgeBase) -> None:
    """Look once at the database, as the thread of the machine does."""
    with corpus_of(kb)._database.connection() as connection:
        corpus_of(kb).look(connection)


def found(kb: KnowledgeBase, query: str) -> list[str]:
    corpus_of(kb).refresh()
    return [Path(one.chunk.document_id).name for one in kb.search(query).results]


def execute(url: str, statement: str) -> list[tuple[Any, ...]]:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def rows_of(corpus: SqliteCorpus) -> list[list[tuple[object, ...]]]:
    tables = ("state", "sources", "documents", "chunks", "vectors", "tombstones", "commits")
    with corpus.reading() as connection:
        return [sorted(connection.execute(f"SELECT * FROM {table}"), key=repr) for table in tables]


class Switch:
    """Lets no user connect to a database, or all of them."""

    def __init__(self, server: Any, url: str) -> None:
        self._server, self._name = server, url.partition("?")[0].rpartition("/")[2]

    def __call__(self, *, on: bool) -> None:
        import psycopg

        with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {self._name} ALLOW_CONNECTIONS {on}")
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (self._name,)
            )
