"""Properties that every implementation of `Corpus` has."""

import contextlib
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from stillroom.core.ids import DocumentId
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.postgresql.address import DatabaseAddress
from stillroom.retrieval.store.postgresql.database import Database
from stillroom.retrieval.store.postgresql.local_copy import prepare_copy
from stillroom.retrieval.store.postgresql.postgres_corpus import PostgresCorpus
from stillroom.retrieval.store.sql_rows import SourceFile, SourceUpdate
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from tests.retrieval.store.corpus_model import CorpusModel, stored

QUICK = settings(max_examples=8, stateful_step_count=12, deadline=None, phases=(Phase.generate,))

numbers = itertools.count()


class SqliteModel(CorpusModel):
    def open_corpora(self, stack: contextlib.ExitStack) -> tuple[Corpus, Corpus]:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "corpus.sqlite3"
        one, other = (stack.enter_context(contextlib.closing(SqliteCorpus(path))) for _ in range(2))
        return one, other


def open_postgres(folder: Path, url: str, name: str) -> PostgresCorpus:
    """Open a knowledge base as a machine whose local folder this is; it does not follow other machines by itself."""
    folder.mkdir(exist_ok=True)
    database = Database(DatabaseAddress(url, name))
    row = database.find() or database.create("{}")
    with database.transaction() as connection:
        prepare_copy(folder / "corpus.sqlite3", connection, row.kb, row.corpus_id)
    corpus = PostgresCorpus(folder / "corpus.sqlite3", database, row)
    corpus.refresh()
    return corpus


class PostgresModel(CorpusModel):
    """Two machines, in a knowledge base of its own per example."""

    url = ""

    def open_corpora(self, stack: contextlib.ExitStack) -> tuple[Corpus, Corpus]:
        name = f"kb{next(numbers)}"
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        self.corpora = [
            stack.enter_context(contextlib.closing(open_postgres(folder, self.url, name))) for folder in folders
        ]
        return self.corpora[0], self.corpora[1]

    def catch_up(self) -> None:
        for corpus in self.corpora:
            corpus.refresh()


def test_properties_of_a_corpus_in_sqlite() -> None:
    run_state_machine_as_test(SqliteModel, settings=QUICK)


@pytest.mark.postgres
def test_properties_of_a_corpus_in_postgresql(database: str) -> None:
    PostgresModel.url = database
    run_state_machine_as_test(PostgresModel, settings=settings(QUICK, max_examples=3))


@pytest.mark.slow
@pytest.mark.postgres
def test_properties_of_a_corpus_in_postgresql_at_length(database: str) -> None:
    PostgresModel.url = database
    run_state_machine_as_test(PostgresModel, settings=settings(QUICK, max_examples=40, stateful_step_count=25))


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "sqlite":
        made: Corpus = SqliteCorpus(tmp_path / "corpus.sqlite3")
    else:
        made = open_postgres(tmp_path, request.getfixturevalue("database"), "kb")
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
