"""Corpus: transactions, generations and tombstones."""

import contextlib
import dataclasses
import sqlite3
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId, chunk_id_of
from stillroom.core.metadata import Metadata
from stillroom.errors import CorruptKnowledgeBaseError
from stillroom.retrieval.store.sql_rows import Changes, SourceFile, SourceUpdate, StoredDocument
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus


def stored(name: str, *texts: str, title: str = "T", first_line: int = 1) -> StoredDocument:
    document_id = DocumentId(name)
    chunks = tuple(
        Chunk(
            chunk_id=chunk_id_of(document_id, ordinal, text),
            document_id=document_id,
            ordinal=ordinal,
            text=text,
            title=title,
            heading_path=("A", "B"),
            num_tokens=2,
            start_line=first_line + ordinal,
            end_line=first_line + ordinal,
        )
        for ordinal, text in enumerate(texts)
    )
    vectors = np.arange(len(texts) * 2, dtype=np.float32).reshape(len(texts), 2) + len(title)
    return StoredDocument(document_id, name, None, title, "hash", 10, 5.0, chunks, vectors)


@pytest.fixture
def corpus(tmp_path: Path) -> Iterator[SqliteCorpus]:
    with contextlib.closing(SqliteCorpus(tmp_path / "corpus.sqlite3")) as found:
        yield found


def test_stored_document_is_returned(corpus: SqliteCorpus) -> None:
    document = stored("a", "one", "two")
    corpus.commit([document])
    assert (corpus.num_documents, corpus.num_chunks, corpus.generation) == (1, 2, 1)
    assert [chunk for chunk, _ in corpus.chunks_of(document.document_id)] == list(document.chunks)
    ids = [chunk.chunk_id for chunk in document.chunks]
    assert corpus.chunks([*ids, 17]) == dict(zip(ids, document.chunks, strict=True))
    kept, vectors = corpus.embeddings([17, *reversed(ids)])
    assert kept.tolist() == ids[::-1]
    np.testing.assert_array_equal(vectors, document.vectors[::-1])
    (info,) = corpus.documents()
    assert (info.document_id, info.title, info.num_chunks, info.num_bytes, info.added_at) == ("a", "T", 2, 10, 5.0)


def test_changes_since_returns_what_an_index_misses(corpus: SqliteCorpus) -> None:
    first, second = stored("a", "one", "two"), stored("b", "three")
    corpus.commit([first])
    corpus.commit([second])
    corpus.commit(removed=[DocumentId("a")])
    changes = corpus.changes_since(0)
    assert (changes.generation, changes.added) == (3, (second.chunks[0].chunk_id,))
    assert set(changes.removed) == {chunk.chunk_id for chunk in first.chunks}
    assert corpus.changes_since(1).added == changes.added
    assert corpus.changes_since(3) == type(changes)(3, (), ())


def test_edit_changes_only_chunks_with_new_text(corpus: SqliteCorpus) -> None:
    corpus.commit([stored("a", "one", "two", "three")])
    edited = stored("a", "one", "2", "three", first_line=10)
    corpus.commit([edited])
    changes = corpus.changes_since(1)
    assert changes.added == (edited.chunks[1].chunk_id,)
    assert changes.removed == (stored("a", "one", "two").chunks[1].chunk_id,)
    assert [chunk.start_line for chunk, _ in corpus.chunks_of(DocumentId("a"))] == [10, 11, 12]


def test_pages_change_without_a_new_vector(corpus: SqliteCorpus) -> None:
    before = stored("a", "one", "two")
    corpus.commit([before])
    moved = tuple(dataclasses.replace(chunk, start_page=3, end_page=4) for chunk in before.chunks)
    corpus.commit([dataclasses.replace(before, chunks=moved)])
    assert [(chunk.start_page, chunk.end_page) for chunk, _ in corpus.chunks_of(DocumentId("a"))] == [(3, 4)] * 2
    assert (corpus.generation, corpus.changes_since(1)) == (1, Changes(1, (), ()))


def test_moved_lines_raise_the_generation_without_index_changes(corpus: SqliteCorpus) -> None:
    corpus.commit([stored("a", "one")])
    corpus.commit([dataclasses.replace(stored("a", "one", first_line=7), content_hash="the same, elsewhere")])
    assert corpus.chunks_of(DocumentId("a"))[0][0].start_line == 7
    assert corpus.changes_since(1) == Changes(2, (), ()), "caches of answers must notice"


def test_changed_metadata_raises_the_generation_without_index_changes(corpus: SqliteCorpus) -> None:
    metadata: Metadata = {"team": "legal", "year": 2024, "tags": ("a", 1, 2.5, True), "is_draft": False}
    document = stored("a", "one")
    corpus.commit([dataclasses.replace(document, metadata=metadata)])
    assert corpus.documents()[0].metadata == metadata
    corpus.commit([dataclasses.replace(document, metadata={"team": "sales"})])
    assert corpus.documents()[0].metadata == {"team": "sales"}
    assert corpus.changes_since(1) == Changes(2, (), ())


def test_new_title_changes_every_chunk(corpus: SqliteCorpus) -> None:
    corpus.commit([stored("a", "one")])
    renamed = stored("a", "one", title="Other")
    corpus.commit([renamed])
    assert corpus.changes_since(1).added == (renamed.chunks[0].chunk_id,)
    np.testing.assert_array_equal(corpus.chunks_of(DocumentId("a"))[0][1], renamed.vectors[0])


def test_restored_chunk_has_no_tombstone(corpus: SqliteCorpus) -> None:
    corpus.commit([stored("a", "one")])
    corpus.commit(removed=[DocumentId("a")])
    corpus.commit([stored("a", "one")])
    assert corpus.changes_since(0).removed == ()
    assert len(corpus.changes_since(1).added) == 1


def test_failed_commit_changes_nothing(corpus: SqliteCorpus) -> None:
    good, bad = stored("a", "one"), stored("b", "two", "three")
    bad = dataclasses.replace(bad, vectors=np.zeros((1, 2), np.float32))
    with pytest.raises(ValueError):
        corpus.commit([good, bad])
    assert (corpus.num_documents, corpus.num_chunks, corpus.generation) == (0, 0, 0)


def test_existing_does_not_wait_for_a_commit(corpus: SqliteCorpus) -> None:
    """The engine calls `existing` between two steps."""
    corpus.commit([stored("a", "one")])
    chunk = stored("a", "one").chunks[0].chunk_id

    def in_the_middle() -> Iterator[DocumentId]:
        yield DocumentId("a")
        seen.append(other.submit(lambda: (corpus.generation, corpus.existing([chunk]))).result(20))

    seen: list[tuple[int, set[ChunkId]]] = []
    with ThreadPoolExecutor(1) as other:
        corpus.commit(removed=in_the_middle())
    assert seen == [(1, {chunk})]
    assert (corpus.generation, corpus.existing([chunk])) == (2, set())


def test_many_documents_are_removed_in_several_commits(corpus: SqliteCorpus) -> None:
    """Others read in between, and no document is removed in part."""
    documents = [stored(f"d{index}", "one", "two") for index in range(501)]
    corpus.commit(documents)
    assert corpus.remove([document.document_id for document in documents]) == 1002
    assert (corpus.num_documents, corpus.num_chunks, corpus.generation) == (0, 0, 3)


def test_source_records_do_not_raise_the_generation(corpus: SqliteCorpus) -> None:
    source = SourceFile("a", 10, 99, "hash", {"team": "legal"})
    corpus.commit(sources=[SourceUpdate("a", source)])
    assert (corpus.sources(), corpus.generation) == ({"a": source}, 0)
    corpus.commit([stored("a", "one")])
    corpus.commit(removed=[DocumentId("a")])
    assert corpus.sources() == {}, "a file whose document was removed is read again when it is added again"


def test_another_connection_sees_the_last_commit(corpus: SqliteCorpus, tmp_path: Path) -> None:
    reader = SqliteCorpus(tmp_path / "corpus.sqlite3")
    assert reader.num_chunks == 0
    corpus.commit([stored("a", "one")])
    assert (reader.num_chunks, reader.generation) == (1, 1)
    assert reader.corpus_id == corpus.corpus_id
    reader.close()
    corpus.close()


def test_damaged_file_is_reported_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "corpus.sqlite3"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(CorruptKnowledgeBaseError, match="backup"):
        SqliteCorpus(path)


def test_error_for_a_damaged_row_does_not_quote_it(corpus: SqliteCorpus, tmp_path: Path) -> None:
    corpus.commit([stored("a", "one")])
    with sqlite3.connect(tmp_path / "corpus.sqlite3") as database:
        database.execute("UPDATE chunks SET text = CAST(x'73656372657420ff' AS TEXT)")
    with pytest.raises(CorruptKnowledgeBaseError, match="its content cannot be read") as raised:
        corpus.chunks_of(DocumentId("a"))
    assert "secret" not in "".join(traceback.format_exception(raised.value))
    assert raised.value.part == "corpus.sqlite3"
