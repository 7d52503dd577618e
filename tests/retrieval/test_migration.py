"""Upgrading a knowledge base of an earlier format on opening, in one transaction."""

import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stillroom.core.ids import DocumentId
from stillroom.errors import IncompatibleKnowledgeBaseError
from stillroom.retrieval.store.sql_rows import ADDED_COLUMNS, SCHEMA, SCHEMA_VERSION, SourceFile, SourceUpdate
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from tests.retrieval.conftest import MakeFile, OpenKb
from tests.retrieval.test_corpus import stored

# ends itself at the n-th column; by a signal that nothing can catch
_KILLED = """
import os, signal, sys
from pathlib import Path
from stillroom.retrieval.store import sql_rows
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus

def dying(columns, at):
    for number, column in enumerate(columns):
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        yield column
    os.kill(os.getpid(), signal.SIGKILL)

sql_rows.ADDED_COLUMNS = dying(sql_rows.ADDED_COLUMNS, int(sys.argv[2]))
SqliteCorpus(Path(sys.argv[1]))
"""


def make_old(folder: Path) -> None:
    """Downgrade a knowledge base to format 1."""
    database = sqlite3.connect(folder / "corpus.sqlite3")
    with database:
        database.execute("DROP TABLE commits")
        database.execute("DROP TABLE vector_sets")
        database.execute("DROP TRIGGER commits_have_names")
        database.execute("DROP INDEX documents_by_public_id")
        for table, column, _ in ADDED_COLUMNS:
            database.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        database.execute("PRAGMA user_version = 0")
    database.close()
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format_version": 1}))


def shape(path: Path) -> tuple[int, list[tuple[str, ...]]]:
    database = sqlite3.connect(path)
    version = database.execute("PRAGMA user_version").fetchone()[0]
    columns = [
        (table, *(row[1] for row in database.execute(f"PRAGMA table_info({table})")))
        for table in ("documents", "chunks", "sources")
    ]
    made = "SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name"
    columns += list(database.execute(made))
    database.close()
    return version, columns


@pytest.fixture
def old(open_kb: OpenKb, make_file: MakeFile, tmp_path: Path) -> Path:
    """The folder of a knowledge base of format 1 with two documents."""
    kb = open_kb()
    kb.add([make_file("keys.md", "# Keys\n\nRotate the keys.\n"), make_file("cats.txt", "Cats sleep.")])
    kb.close()
    make_old(tmp_path / "kb")
    return tmp_path / "kb"


def test_old_knowledge_base_is_upgraded_on_opening(
    old: Path, open_kb: OpenKb, docs: Path, refuse_to_embed: Callable[[], None]
) -> None:
    assert shape(old / "corpus.sqlite3")[0] == 0
    kb = open_kb(create=False)
    assert [Path(info.document_id).name for info in kb.documents()] == ["cats.txt", "keys.md"]
    best = kb.search("rotate keys").results[0].chunk
    assert (best.start_line, best.start_page, best.end_page, dict(kb.documents()[0].metadata)) == (3, 0, 0, {})
    refuse_to_embed()
    report = kb.add([docs])
    assert (report.num_unchanged, report.num_updated, report.failures) == (2, 0, ())
    assert json.loads((old / "manifest.json").read_text())["format_version"] == 2
    fresh = SqliteCorpus(old.parent / "fresh.sqlite3")
    fresh.close()
    assert shape(old / "corpus.sqlite3") == shape(old.parent / "fresh.sqlite3")


def test_version_2_gets_commit_ids_and_keeps_its_data(tmp_path: Path) -> None:
    path = tmp_path / "corpus.sqlite3"
    corpus = SqliteCorpus(path)
    corpus.commit([stored("a", "one")], sources=[SourceUpdate("a", SourceFile("a", 10, 99, "hash"))])
    corpus.close()
    database = sqlite3.connect(path)
    for statement in ("DROP TABLE commits", "DROP TRIGGER commits_have_names", "PRAGMA user_version = 2"):
        database.execute(statement)
    database.close()
    corpus = SqliteCorpus(path)
    assert list(corpus.sources()) == ["a"], "no file has to be read again"
    corpus.commit(removed=[DocumentId("a")])
    assert (corpus.commit_id(1), len(corpus.commit_id(2) or ""), corpus.commit_id(3)) == ("", 32, None)
    corpus.close()


@pytest.mark.parametrize("at", [0, 2, len(ADDED_COLUMNS)])
def test_killed_upgrade_leaves_the_old_version(old: Path, open_kb: OpenKb, at: int) -> None:
    before = shape(old / "corpus.sqlite3")
    killed = subprocess.run([sys.executable, "-c", _KILLED, old / "corpus.sqlite3", str(at)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert shape(old / "corpus.sqlite3") == before
    kb = open_kb(create=False)
    assert (kb.num_documents, shape(old / "corpus.sqlite3")[0]) == (2, SCHEMA_VERSION)


def test_upgrade_killed_between_manifest_and_corpus_is_completed(old: Path, open_kb: OpenKb) -> None:
    manifest = old / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 2'))
    assert open_kb(create=False).num_documents == 2
    assert shape(old / "corpus.sqlite3")[0] == SCHEMA_VERSION


def test_incomplete_tables_of_version_1_are_completed(tmp_path: Path) -> None:
    """Version 1 made its tables in several transactions."""
    database = sqlite3.connect(tmp_path / "corpus.sqlite3")
    for statement in SCHEMA[:3]:
        database.execute(statement)
    database.close()
    corpus = SqliteCorpus(tmp_path / "corpus.sqlite3")
    assert (corpus.generation, corpus.num_documents, len(corpus.corpus_id)) == (0, 0, 32)
    corpus.close()


def test_tables_of_a_later_version_are_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "corpus.sqlite3"
    SqliteCorpus(path).close()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(IncompatibleKnowledgeBaseError, match=f"version 99.* up to {SCHEMA_VERSION}"):
        SqliteCorpus(path)
    assert shape(path)[0] == 99
