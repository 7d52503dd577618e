"""Properties that every implementation of `Corpus` has."""

import contextlib
import itertools
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from stillroom.config.settings import IndexConfig
from stillroom.core.ids import DocumentId
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.postgresql.address import DatabaseAddress
from stillroom.retrieval.store.postgresql.database import Database
from stillroom.retrieval.store.postgresql.embedding_table import EmbeddingTable, create_embeddings
from stillroom.retrieval.store.postgresql.local_copy import prepare_copy
from stillroom.retrieval.store.postgresql.postgres_corpus import PostgresCorpus
from stillroom.retrieval.store.sql_rows import SourceFile, SourceUpdate
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from tests.retrieval.store.corpus_model import CorpusModel, stored

QUICK = settings(max_examples=8, stateful_step_count=12, deadline=None, phases=(Phase.generate,))

SMALL_GRAPH = IndexConfig(kind="pgvector", m=8, ef_construction=24)

numbers = itertools.count()


class SqliteModel(CorpusModel):
    def open_corpora(self, stack: contextlib.ExitStack) -> tuple[Corpus, Corpus]:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "corpus.sqlite3"
        one, other = (stack.enter_context(contextlib.closing(SqliteCorpus(path))) for _ in range(2))
        return one, other


def open_postgres(folder: Path, url: str, name: str, pgvector: int | None = None) -> PostgresCorpus:
    """Open a knowledge base as a machine whose local folder this is; it does not follow other machines by itself.

    Args:
        pgvector: Dimension of vectors in pgvector; None keeps them in the copies.
    """
    folder.mkdir(exist_ok=True)
    database = Database(DatabaseAddress(url, name))
    embeddings = None
    if pgvector is None:
        row = database.find() or database.create("{}")
    else:
        with database.connection() as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        prepare = partial(create_embeddings, index=SMALL_GRAPH, dimension=pgvector)
        row = database.find() or database.create("{}", prepare)
        embeddings = EmbeddingTable(Database(database.address), row.kb, pgvector)
    with database.transaction() as connection:
        prepare_copy(folder / "corpus.sqlite3", connection, row.kb, row.corpus_id)
    corpus = PostgresCorpus(folder / "corpus.sqlite3", database, row, embeddings=embeddings)
    corpus.refresh()
    return corpus


class PostgresModel(CorpusModel):
    """Two machines, in a knowledge base of its own per example."""

    url = ""
    pgvector: int | None = None

    def open_corpora(self, stack: contextlib.ExitStack) -> tuple[Corpus, Corpus]:
        name = f"kb{next(numbers)}"
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        self.corpora = [
            stack.enter_context(contextlib.closing(open_postgres(folder, self.url, name, self.pgvector)))
            for folder in folders
        ]
        return self.corpora[0], self.corpora[1]

    def catch_up(self) -> None:
        for corpus in self.corpora:
            corpus.refresh()


class PgvectorModel(PostgresModel):
    """As `PostgresModel`, with the vectors in pgvector only."""

    pgvector = 3

    @invariant()
    def no_machine_has_vectors(self) -> None:
        for corpus in self.corpora:
            with corpus.reading() as connection:
                assert not connection.execute("SELECT 1 FROM vectors WHERE length(vector) > 0").fetchone()


def test_properties_of_a_corpus_in_sqlite() -> None:
    run_state_machine_as_test(SqliteModel, settings=QUICK)


@pytest.mark.postgres
def test_properties_of_a_corpus_in_postgresql(database: str) -> None:
    PostgresModel.url = database
    run_state_machine_as_test(PostgresModel, settings=settings(QUICK, max_examples=3))


@pytest.mark.postgres
def test_properties_of_a_corpus_with_vectors_in_pgvector(database: str) -> None:
    PostgresModel.url = database
    run_state_machine_as_test(PgvectorModel, settings=settings(QUICK, max_examples=3))


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.parametrize("model", [PostgresModel, PgvectorModel])
def test_properties_of_a_corpus_in_postgresql_at_length(database: str, model: type[PostgresModel]) -> None:
    PostgresModel.url = database
    run_state_machine_as_test(model, settings=settings(QUICK, max_examples=40, stateful_step_count=25))


@pytest.fixture(
    params=["sqlite", *(pytest.param(one, marks=pytest.mark.postgres) for one in ("postgresql", "pgvector"))]
)
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "sqlite":
        made: Corpus = SqliteCorpus(tmp_path / "corpus.sqlite3")
    else:
        dimension = 3 if request.param == "pgvector" else None
        made = open_postgres(tmp_path, request.getfixturevalue("database"), "kb", dimension)
    yield made
    made.close()


def test_file_whose_documents_another_process_changed_is_read_again(corpus: Corpus) -> None:
    document = stored("/many.jsonl#1", ("one",), "T", "legal", 1)
    source = SourceFile("/many.jsonl", 10, 7, "hash", {"k": "v"})
    read = {document.document_id: document.content_hash, DocumentId("/many.jsonl#2"): "of a removed record"}
    report = corpus.commit([document], sources=[SourceUpdate("/many.jsonl", source, read)])
    assert report.unfinished == ("/many.jsonl",)
    unread = corpus.sources()["/many.jsonl"]
    assert (unread.size, unread.content_hash, unread.metadata) == (-1, "", {"k": "v"})
    del read[DocumentId("/many.jsonl#2")]
    assert corpus.commit(sources=[SourceUpdate("/many.jsonl", source, read)]).unfinished == ()
    assert corpus.sources() == {"/many.jsonl": source}


def test_last_of_equal_documents_in_a_commit_is_kept(corpus: Corpus) -> None:
    one, other = stored("/a.md", ("one", "two"), "T", "legal", 1), stored("/a.md", ("three",), "T", "legal", 1)
    corpus.commit([one, other])
    assert [chunk.text for chunk, _ in corpus.chunks_of(DocumentId("/a.md"))] == ["three"]
    assert corpus.generation == 1
