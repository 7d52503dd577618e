"""Changes of other machines in PostgreSQL reach the local copy: commits, removals, restored backups."""

import threading
from pathlib import Path
from typing import Any

import pytest
from filelock import Timeout

from stillroom.config.settings import IndexConfig, IndexKind, StillroomConfig
from stillroom.core.clock import SystemClock, VirtualClock
from stillroom.core.folder_lock import FolderLock
from stillroom.core.ids import DocumentId
from stillroom.errors import (
    KnowledgeBaseNotFoundError,
)
from stillroom.retrieval.store.folder import REPAIR, WriteLock
from stillroom.retrieval.store.postgresql import follower as follower_module
from stillroom.retrieval.store.postgresql import statements
from stillroom.retrieval.store.postgresql.follower import Follower
from stillroom.retrieval.store.postgresql.postgres_corpus import PostgresCorpus
from tests.retrieval.store.corpus_model import stored
from tests.retrieval.store.postgresql.shared_machines import Open, corpus_of, execute, look, rows_of
from tests.retrieval.store.test_any_corpus import open_postgres

pytestmark = pytest.mark.postgres


def test_notification_wakes_a_machine_at_once(database: str, tmp_path: Path) -> None:
    a, b = (open_postgres(tmp_path / name, database, "kb") for name in "ab")
    _expect_change(a, b, look_every_s=3600.0)


def test_machine_looks_without_a_notification(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "NOTIFY", "SELECT %s")
    a, b = (open_postgres(tmp_path / name, database, "kb") for name in "ab")
    _expect_change(a, b, look_every_s=0.05)


def _expect_change(a: PostgresCorpus, b: PostgresCorpus, look_every_s: float) -> None:
    """Expect that `b` follows a commit of `a` that it hears of after it has looked once."""
    looked, is_there = threading.Event(), threading.Event()

    def catch_up(connection: Any) -> None:
        b.catch_up(connection)
        looked.set()
        if b.num_documents:
            is_there.set()

    follower = Follower(b._database, b._row.kb, catch_up, look_every_s)
    follower.begin()
    assert looked.wait(60)
    a.commit([stored("/a.md", ("one",), "T", "legal", 1)])
    assert is_there.wait(60)
    follower.end()
    a.close()
    b.close()


@pytest.mark.parametrize("kind", ["flat", "pgvector"])
def test_words_of_a_change_are_found_after_the_look_that_copies_it(
    open_on: Open, docs: Path, database: str, kind: IndexKind
) -> None:
    if kind == "pgvector":
        execute(database, "CREATE EXTENSION vector")
    config = StillroomConfig(index=IndexConfig(kind=kind))
    a, b = open_on("a", create=True, config=config), open_on("b", create=True, config=config)
    a.add([docs])
    look(b)
    assert b.search("vault", mode="sparse").results, "the first search completes the postings"
    for word in ("xylophone", "zither"):
        (docs / "keys.md").write_text(f"# Keys\n\nRotate the {word} of the vault.\n")
        a.add([docs])
        look(b)  # the test's time stands still, so that no search does it
        assert [word in one.chunk.text for one in b.search(word, mode="sparse").results] == [True]
    assert not b.search("xylophone", mode="sparse").results
    a.remove([str(docs / "keys.md")])
    look(b)
    assert not b.search("zither", mode="sparse").results


def test_postings_that_another_process_writes_follow_with_the_next_look(open_on: Open, docs: Path) -> None:
    a, b = open_on("a", create=True), open_on("b", create=True)
    a.add([docs])
    look(b)
    assert b.search("vault", mode="sparse").results
    (docs / "keys.md").write_text("# Keys\n\nRotate the xylophone.\n")
    a.add([docs])
    with WriteLock(b.path, SystemClock()).held("add"):
        look(b)
    assert not b.search("xylophone", mode="sparse").results
    look(b)
    assert b.search("xylophone", mode="sparse").results


def test_file_of_a_local_index_follows_the_postings(open_on: Open, docs: Path) -> None:
    clock = VirtualClock()
    a, b = open_on("a", create=True), open_on("b", create=True, clock=clock)
    a.add([docs])
    look(b)
    assert b.search("vault").results
    (docs / "keys.md").write_text("# Keys\n\nRotate the xylophone.\n")
    a.add([docs])
    look(b)
    assert b.indexes.needs_write(), "only the postings were written"
    clock.advance(5.0)
    b.search("vault")
    b._repairs.close()  # waits
    assert not b.indexes.needs_write()


def test_first_search_waits_for_a_repair_of_another_process(
    open_on: Open, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = open_on("a", create=True), open_on("b", create=True)
    a.add([docs])
    look(b)
    asked: list[float] = []

    def acquire(lock: FolderLock) -> None:
        asked.append(lock._timeout_s)
        if len(asked) == 1:
            raise Timeout("held")
        original(lock)

    original = FolderLock.acquire
    monkeypatch.setattr(FolderLock, "acquire", acquire)
    monkeypatch.setattr(WriteLock, "_holder_note", lambda _: {"what": REPAIR})
    assert b.search("vault", mode="sparse").results
    assert asked == [0.0, 10.0]


def test_removed_knowledge_base_is_noticed(open_on: Open, docs: Path, database: str) -> None:
    import psycopg

    kb = open_on("a", create=True)
    kb.add([docs])
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("DELETE FROM stillroom.knowledge_bases")
    with pytest.raises(KnowledgeBaseNotFoundError):
        corpus_of(kb).refresh()
    assert not kb.is_there
    with pytest.raises(KnowledgeBaseNotFoundError):
        kb.add([docs])
    assert open_on("a", create=True).num_documents == 0


def test_dropped_schema_is_noticed_and_logged_once(
    open_on: Open, docs: Path, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    kb = open_on("a", create=True)
    kb.add([docs])
    looked = threading.Event()
    follower = Follower(corpus_of(kb)._database, corpus_of(kb)._row.kb, lambda _: looked.set(), 0.01)
    follower.begin()
    assert looked.wait(60)
    follower._catch_up = corpus_of(kb).catch_up
    execute(database, "DROP SCHEMA stillroom CASCADE")
    assert follower._thread is not None
    follower._thread.join(60)
    assert not kb.is_there
    assert [(one.levelname, "removed from the database" in one.message) for one in caplog.records] == [("ERROR", True)]
    for change in (lambda: kb.search("vault"), lambda: kb.add([docs])):
        with pytest.raises(KnowledgeBaseNotFoundError):
            change()
    follower.end()


def test_commit_notices_a_dropped_schema(open_on: Open, docs: Path, database: str) -> None:
    kb = open_on("a", create=True)
    kb.add([docs])
    execute(database, "DROP SCHEMA stillroom CASCADE")
    with pytest.raises(KnowledgeBaseNotFoundError):
        kb.remove([str(docs)])
    assert not kb.is_there


def test_unexpected_errors_are_logged_once_per_outage(
    database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "LOOK_EVERY_S", 0.001)
    corpus = open_postgres(tmp_path / "a", database, "kb")
    outcomes = iter([ValueError("a"), ValueError("b"), None, ValueError("c"), ValueError("d")])
    is_over = threading.Event()

    def catch_up(_: Any) -> None:
        outcome = next(outcomes, is_over)
        if isinstance(outcome, ValueError):
            raise outcome
        if outcome is is_over:
            is_over.set()

    follower = Follower(corpus._database, corpus._row.kb, catch_up, 0.001)
    follower.begin()
    assert is_over.wait(60)
    follower.end()
    corpus.close()
    assert [one.message.partition(";")[0].rpartition(" ")[2] for one in caplog.records] == ["read", "again"] * 2


def test_copy_is_made_again_after_a_backup_was_restored(database: str, tmp_path: Path) -> None:
    import psycopg

    a = open_postgres(tmp_path / "a", database, "kb")
    a.commit([stored("/a.md", ("one",), "T", "legal", 1)])
    a.commit([stored("/b.md", ("two",), "T", "legal", 1)])
    with psycopg.connect(database, autocommit=True) as connection:  # as a backup of after the first commit
        for table in ("documents", "chunks", "vectors", "commits"):
            connection.execute(f"DELETE FROM stillroom.{table} WHERE revision = 2")
        connection.execute("UPDATE stillroom.knowledge_bases SET generation = 1, revision = 1")
    with pytest.raises(KnowledgeBaseNotFoundError, match="restored from a backup"):
        a.refresh()
    a.close()
    again = open_postgres(tmp_path / "a", database, "kb")
    assert [info.document_id for info in again.documents()] == ["/a.md"]
    again.close()


def test_interrupted_copying_leaves_the_copy_as_it_was(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    a, b = (open_postgres(tmp_path / name, database, "kb") for name in "ab")
    a.commit([stored("/a.md", ("one",), "T", "legal", 1)])
    b.refresh()
    before = rows_of(b)
    a.commit([stored("/b.md", ("two",), "T", "legal", 1)], [DocumentId("/a.md")])
    with monkeypatch.context() as patch:
        patch.setattr(statements, "COPIED_SOURCES", statements.COPIED_SOURCES.replace("metadata", "no_such_column"))
        with pytest.raises(psycopg.Error):
            b.refresh()
    assert rows_of(b) == before
    b.refresh()
    assert rows_of(b) == rows_of(a)
    a.close()
    b.close()
