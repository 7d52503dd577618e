"""A knowledge base in a real PostgreSQL server: shared by machines, written by several processes, offline, restored."""

import datetime
import io
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.config.settings import IndexConfig, StillroomConfig
from stillroom.core.clock import VirtualClock
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.errors import (
    ConfigError,
    DatabaseRefusedError,
    DatabaseUnavailableError,
    KnowledgeBaseNotFoundError,
    UsageError,
)
from stillroom.retrieval import knowledge_base
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.originals import Originals
from stillroom.retrieval.store.corpus import CopyState
from stillroom.retrieval.store.postgresql import committer, statements
from stillroom.retrieval.store.postgresql import follower as follower_module
from stillroom.retrieval.store.postgresql.follower import Follower
from stillroom.retrieval.store.postgresql.postgres_corpus import PostgresCorpus
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from stillroom.retrieval.uploads import Uploads
from stillroom.telemetry import catalogue
from tests.crash.worker import SmallEmbedder
from tests.retrieval.store.corpus_model import stored
from tests.retrieval.store.test_any_corpus import open_postgres

pytestmark = pytest.mark.postgres

Open = Callable[..., KnowledgeBase]


@pytest.fixture
def open_on(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the knowledge base as a machine of a name; machines share the server and nothing else."""
    monkeypatch.setattr(knowledge_base, "Embedder", SmallEmbedder)
    monkeypatch.setattr(PostgresCorpus, "follow", lambda _: None)
    opened: list[KnowledgeBase] = []

    def open_one(machine: str, *, create: bool = False, config: StillroomConfig | None = None) -> KnowledgeBase:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
        kb = KnowledgeBase.open(with_name(database), config or StillroomConfig(), create=create)
        opened.append(kb)
        return kb

    yield open_one
    for kb in opened:
        kb.close()


def with_name(url: str) -> str:
    return f"{url}&kb=docs"


def corpus_of(kb: KnowledgeBase) -> PostgresCorpus:
    assert isinstance(kb.corpus, PostgresCorpus)
    return kb.corpus


def found(kb: KnowledgeBase, query: str) -> list[str]:
    corpus_of(kb).refresh()
    return [Path(one.chunk.document_id).name for one in kb.search(query).results]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "keys.md").write_text("# Keys\n\nRotate the keys of the vault.\n")
    (folder / "cats.md").write_text("# Cats\n\nCats sleep most of the day.\n")
    return folder


def test_machines_share_documents(open_on: Open, docs: Path) -> None:
    a = open_on("a", create=True)
    a.add([docs])
    b = open_on("b")
    assert (b.identity, b.num_documents) == (a.identity, 2)
    assert found(b, "keys of the vault")[0] == "keys.md"
    chunk: ChunkId = b.search("keys").results[0].chunk.chunk_id

    (docs / "keys.md").write_text("# Keys\n\nBurn the old keys.\n")
    b.add([docs])
    assert found(a, "burn")[0] == "keys.md"
    assert a.existing_chunks([chunk]) == set(), "kept KV of the old text is forgotten"
    assert a.num_changes == b.num_changes == 2
    b.remove([str(docs / "cats.md")])
    assert found(a, "cats") == ["keys.md"]
    assert a.digest() == b.digest()
    assert not a.verify().findings
    (a.path / "dense.npz").unlink()
    assert [one.is_repaired for one in a.verify(repair=True).findings] == [True]


def test_indexes_and_copy_are_kept_on_a_machine(open_on: Open, docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = open_on("a", create=True)
    a.add([docs])
    a.close()
    monkeypatch.setattr(SmallEmbedder, "embed_documents", None)
    again = open_on("a")
    assert (again.path / "dense.npz").exists()
    assert again.add([docs]).num_unchanged == 2
    assert not again.indexes.needs_write()


def test_indexes_that_are_older_than_the_copy_are_no_findings(open_on: Open, docs: Path, database: str) -> None:
    a, b = open_on("a", create=True), open_on("b")
    a.add([docs])
    corpus_of(b).refresh()
    b.indexes.write()
    (docs / "bread.md").write_text("# Bread\n\nBake the bread.\n")
    a.add([docs])
    corpus_of(b).refresh()
    assert not b.verify().findings, "behind"
    _execute(database, "UPDATE stillroom.commits SET commit_id = 'other'")  # as after a restore and other commits
    a.close()
    again = open_on("a")
    assert again.corpus.commit_id(again.corpus.generation) == "other", "the copy was made again"
    assert not again.verify().findings, "of another state"
    path = again.path / "dense.npz"
    path.write_bytes(path.read_bytes()[:-100])
    assert [one.part for one in again.verify().findings] == ["dense"]


def test_opening_needs_a_knowledge_base(open_on: Open) -> None:
    with pytest.raises(KnowledgeBaseNotFoundError, match="stillroom add PATH --kb 'postgresql://"):
        open_on("a")


def test_reading_makes_nothing_in_the_database(open_on: Open, database: str) -> None:
    for name in ("a", "b"):
        with pytest.raises(KnowledgeBaseNotFoundError):
            open_on(name)
    assert _execute(database, "SELECT count(*) FROM pg_namespace WHERE nspname = 'stillroom'") == [(0,)]


def _execute(url: str, statement: str) -> list[tuple[Any, ...]]:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def test_embedded_collection_is_refused(open_on: Open) -> None:
    with pytest.raises(ConfigError, match="qdrant"):
        open_on("a", create=True, config=StillroomConfig(index=IndexConfig(kind="qdrant")))


def test_embedder_cannot_be_changed_in_place(open_on: Open, docs: Path) -> None:
    kb = open_on("a", create=True)
    with pytest.raises(ConfigError, match="make a new one"):
        corpus_of(kb).writing()


# The server is away


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


@pytest.fixture
def switch(server: Any, database: str) -> Switch:
    return Switch(server, database)


def test_searches_go_on_without_the_server_and_changes_are_refused(
    open_on: Open, docs: Path, switch: Switch, caplog: pytest.LogCaptureFixture
) -> None:
    a = open_on("a", create=True)
    corpus_of(a)._clock = clock = VirtualClock(1234567.0)
    a.add([docs])
    clock.advance(60.0)
    corpus_of(a).refresh()
    assert corpus_of(a).copy_state == CopyState(answers=True, age_s=0.0)
    clock.advance(5.0)
    assert corpus_of(a).copy_state.readings() == {catalogue.DATABASE_UP: 1.0, catalogue.COPY_AGE: 5.0}
    switch(on=False)
    assert a.search("vault").results
    (docs / "bread.md").write_text("# Bread\n\nBake the bread.\n")
    upload = [("up.md", io.BytesIO(b"# Up\n\nUploaded text.\n"))]
    for change in (lambda: a.add([docs]), lambda: a.remove([str(docs)]), lambda: Uploads(a).add(upload)):
        with pytest.raises(DatabaseUnavailableError, match="nothing was changed"):
            change()
    assert not list((a.path / "uploads").rglob("*.md"))
    a.close()
    again = open_on("a")
    assert "cannot be reached" in caplog.text
    assert f"whose last change is of {datetime.datetime.fromtimestamp(1234567.0):%Y-%m-%d %H:%M:%S}" in caplog.text
    assert again.corpus.copy_state is not None and not again.corpus.copy_state.answers
    assert again.search("vault").results
    with pytest.raises(DatabaseUnavailableError):
        again.add([docs])
    with pytest.raises(DatabaseUnavailableError):
        open_on("b")
    switch(on=True)
    assert again.add([docs]).num_added == 1, "the same process goes on"
    assert found(open_on("b"), "bake bread")[0] == "bread.md"


def test_password_is_in_no_message_and_no_file(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = database.replace("postgres:@", "postgres:s3cret@").replace("/test", "/no_such_test")
    with pytest.raises(DatabaseUnavailableError, match="createdb") as refused:
        KnowledgeBase.open(url, StillroomConfig())
    assert "s3cret" not in str(refused.value) + caplog.text
    assert not (tmp_path / "cache").exists(), "a failed attempt leaves no folder"
    monkeypatch.setattr(knowledge_base, "Embedder", SmallEmbedder)
    with KnowledgeBase.open(database.replace("postgres:@", "postgres:s3cret@"), StillroomConfig(), create=True):
        files = [path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert files and not any(b"s3cret" in one for one in files)
    assert "s3cret" not in caplog.text


def test_unknown_parameter_of_the_url_is_named(database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match="foo"):
        KnowledgeBase.open(f"{database}&foo=bar", StillroomConfig())


def test_reading_needs_select_and_refused_users_do_not_read_the_copy(
    open_on: Open, docs: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_on("a", create=True).add([docs])
    own = database.partition("?")[0].rpartition("/")[2]
    user = f"reader_{own}"
    _execute(database, f"CREATE ROLE {user} LOGIN")
    monkeypatch.setattr(f"{__name__}.with_name", lambda url: f"{url.replace('postgres:@', f'{user}@')}&kb=docs")
    with pytest.raises(DatabaseRefusedError, match=r"permission denied for schema stillroom; grant .* for reading"):
        open_on("b")
    _execute(database, f"GRANT USAGE ON SCHEMA stillroom TO {user}")
    _execute(database, f"GRANT SELECT ON ALL TABLES IN SCHEMA stillroom TO {user}")
    b = open_on("b")
    assert b.num_documents == 2
    with pytest.raises(DatabaseRefusedError, match="for changes"):
        b.remove([str(docs)])
    b.close()
    for refuse in (f"REVOKE SELECT ON stillroom.knowledge_bases FROM {user}", f"ALTER ROLE {user} NOLOGIN"):
        _execute(database, refuse)
        with pytest.raises(DatabaseRefusedError):
            open_on("b")


# Changes of other machines


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
    _execute(database, "DROP SCHEMA stillroom CASCADE")
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
    _execute(database, "DROP SCHEMA stillroom CASCADE")
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
    a, b = (open_postgres(tmp_path / name, database, "kb") for name in "ab")
    a.commit([stored("/a.md", ("one",), "T", "legal", 1)])
    b.refresh()
    before = _rows(b)
    a.commit([stored("/b.md", ("two",), "T", "legal", 1)], [DocumentId("/a.md")])
    with monkeypatch.context() as patch:
        patch.setattr(statements, "COPIED_SOURCES", statements.COPIED_SOURCES.replace("metadata", "no_such_column"))
        with pytest.raises(psycopg_error()):
            b.refresh()
    assert _rows(b) == before
    b.refresh()
    assert _rows(b) == _rows(a)
    a.close()
    b.close()


def psycopg_error() -> type[Exception]:
    import psycopg

    error: type[Exception] = psycopg.Error
    return error


# Several writers


def test_commits_of_two_machines_follow_each_other(database: str, tmp_path: Path) -> None:
    """Each commit has a document of its own, whose generation tells the order; the last one decides each other one."""
    machines = [open_postgres(tmp_path / name, database, "kb") for name in "ab"]
    names = [f"/d{number}.md" for number in range(6)]
    commits: list[tuple[str, dict[str, str | None]]] = []

    def write(number: int) -> None:
        chance = random.Random(number)
        for step in range(12):
            mark = f"/mark-{number}-{step}.md"
            chosen = {name: chance.choice((None, "one", "two", "three")) for name in chance.sample(names, 3)}
            put = [stored(name, (text, mark), mark, "legal", 1) for name, text in chosen.items() if text]
            gone = [DocumentId(name) for name, text in chosen.items() if not text]
            machines[number].commit([*put, stored(mark, ("one",), mark, "legal", 1)], gone)
            commits.append((mark, {name: text and mark for name, text in chosen.items()}))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for machine in machines:
        machine.refresh()
        with machine.reading() as connection:
            order = dict(connection.execute("SELECT title, generation FROM documents WHERE document_id LIKE '/mark%'"))
        assert sorted(order.values()) == list(range(1, 25)), "each commit has a generation of its own"
        expected: dict[str, str] = {mark: mark for mark, _ in commits}
        for _, changes in sorted(commits, key=lambda commit: order[commit[0]]):
            for name, mark in changes.items():
                if mark:
                    expected[name] = mark
                else:
                    expected.pop(name, None)
        assert {info.document_id: info.title for info in machine.documents()} == expected
        assert machine.num_chunks == sum(2 if name in names else 1 for name in expected)
    assert _rows(machines[0]) == _rows(machines[1])
    for machine in machines:
        machine.close()


def _rows(corpus: SqliteCorpus) -> list[list[tuple[object, ...]]]:
    tables = ("state", "sources", "documents", "chunks", "vectors", "tombstones", "commits")
    with corpus.reading() as connection:
        return [sorted(connection.execute(f"SELECT * FROM {table}"), key=repr) for table in tables]


def test_file_is_whole_though_another_machine_removed_a_record_of_it_meanwhile(
    open_on: Open, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal comes between the reading of the file's records and their commit: as if it had come before."""
    path = docs / "records.jsonl"
    records = [{"_id": str(number), "text": f"Record of number {number}."} for number in range(3)]
    path.write_text("\n".join(map(json.dumps, records)))
    a, b = open_on("a", create=True), open_on("b")
    a.add([path])
    corpus_of(b).refresh()
    path.write_text("\n".join(map(json.dumps, [*records, {"_id": "3", "text": "A new one."}])))
    commit, turns = PostgresCorpus.commit, itertools.count()

    def after_a_removal(self: PostgresCorpus, *args: Any, **options: Any) -> Any:
        if self is a.corpus and next(turns) == 0:
            b.remove([f"{path}#1"])
        return commit(self, *args, **options)

    monkeypatch.setattr(PostgresCorpus, "commit", after_a_removal)
    report = a.add([path])
    assert (report.num_added, report.failures) == (1, ())
    assert a.num_documents == 4
    assert a.corpus.sources()[str(path)].size == path.stat().st_size
    assert a.add([path]).num_unchanged == 4


_KILLED = """
import sys, time
from pathlib import Path
from stillroom.retrieval.store.postgresql.committer import Committer
from tests.crash.worker import SmallEmbedder
from tests.retrieval.store.corpus_model import stored
from tests.retrieval.store.test_any_corpus import open_postgres

finish = Committer.finish
def hang(self):
    finish(self)
    print("all but committed", flush=True)
    time.sleep(600)
Committer.finish = hang
open_postgres(Path(sys.argv[1]), sys.argv[2], "kb").commit([stored("/a.md", ("new", "text"), "T", "legal", 1)])
"""


def test_killed_commit_leaves_nothing_and_holds_up_no_other(database: str, tmp_path: Path) -> None:
    a = open_postgres(tmp_path / "a", database, "kb")
    a.commit([stored("/a.md", ("old",), "T", "legal", 1)])
    before = _rows(a)
    (tmp_path / "b").mkdir()
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "b"), database]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"all but committed\n"
        process.send_signal(signal.SIGKILL)
    a.refresh()
    assert _rows(a) == before
    a.commit([stored("/b.md", ("one",), "T", "legal", 1)])
    b = open_postgres(tmp_path / "b", database, "kb")
    assert _rows(a) == _rows(b)
    a.close()
    b.close()


# Uploads


def test_upload_can_be_opened_and_removed_on_every_machine(open_on: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "_PART_BYTES", 10)
    a = open_on("a", create=True)
    content = "# Keys\n\nRotate the keys of the vault.\n"
    (result,) = Uploads(a).add([("notes/keys.md", io.BytesIO(content.encode()))])
    assert result.outcome == "added"
    assert not list((a.path / "uploads").rglob("*.md")), "the database has the bytes"
    assert Uploads(a).not_indexed() == []
    b = open_on("b")
    document_id = DocumentId("uploads/notes/keys.md")
    for kb in (a, b):
        originals = Originals(kb.corpus, DocumentsConfig())
        with originals.file(document_id) as file:
            assert (file.name, file.stream.read()) == ("keys.md", content.encode())
        assert originals.content(document_id).has_file
    (result,) = Uploads(b).add([("notes/keys.md", io.BytesIO(b"# Keys\n\nOther keys.\n"))])
    assert result.outcome == "updated"
    corpus_of(a).refresh()
    with Originals(a.corpus, DocumentsConfig()).file(document_id) as file:
        assert file.stream.read() == b"# Keys\n\nOther keys.\n"
    Uploads(b).remove("notes/keys.md")
    corpus_of(a).refresh()
    assert a.num_documents == 0
    assert not [path for kb in (a, b) for path in kb.path.rglob("keys.md")]
    with corpus_of(a)._database.transaction() as connection:
        assert connection.execute("SELECT count(*) FROM stillroom.uploads").fetchone() == (0,)


def test_unfinished_upload_belongs_to_its_machine(open_on: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = open_on("a", create=True), open_on("b")
    with monkeypatch.context() as patch:
        patch.setattr(KnowledgeBase, "add", _interrupt)
        patch.setattr(Uploads, "_undo", lambda *_: None)  # as if killed
        with pytest.raises(KeyboardInterrupt):
            Uploads(a).add([("keys.md", io.BytesIO(b"# Keys\n\nRotate the keys.\n"))])
    corpus_of(b).refresh()
    assert (a.corpus.pending(), b.corpus.pending()) == (["uploads/keys.md"], [])
    assert (Uploads(b).complete(), Uploads(a).complete()) == (0, 1)
    assert a.corpus.pending() == []
    corpus_of(b).refresh()
    assert b.num_documents == 1


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
