"""A folder removed or replaced while its knowledge base is open: no data of the old one reaches the new one."""

import io
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from stillroom.core.clock import SystemClock
from stillroom.errors import KnowledgeBaseNotFoundError
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.store.folder import CORPUS, WriteLock
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from stillroom.retrieval.uploads import Uploads
from tests.retrieval.conftest import OpenKb
from tests.retrieval.test_corpus import stored

CALLS: dict[str, Callable[[KnowledgeBase, Path], object]] = {
    "search": lambda kb, docs: kb.search("vault"),
    "filtered search": lambda kb, docs: kb.search("vault", where="year = 2020"),
    "list": lambda kb, docs: kb.documents(),
    "generation": lambda kb, docs: kb.generation,
    "add": lambda kb, docs: kb.add([docs]),
    "remove": lambda kb, docs: kb.remove([str(docs / "keys.md")]),
    "upload": lambda kb, docs: Uploads(kb).add([("a.md", io.BytesIO(b"# A\n\nA secret.\n"))]),
    "verify": lambda kb, docs: kb.verify(repair=True),
    "digest": lambda kb, docs: kb.digest(),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_on_a_removed_folder_fail_and_write_nothing(open_kb: OpenKb, three: Path, call: str) -> None:
    kb = open_kb()
    kb.add([three])
    kb.search("vault")
    shutil.rmtree(kb.path)
    assert not kb.is_there
    with pytest.raises(KnowledgeBaseNotFoundError, match="was removed or replaced while it was open"):
        CALLS[call](kb, three)
    assert not kb.path.exists()


@pytest.mark.parametrize("call", CALLS)
def test_replacing_knowledge_base_is_neither_read_nor_written(open_kb: OpenKb, three: Path, call: str) -> None:
    old = open_kb()
    old.add([three])
    shutil.rmtree(old.path)
    new = open_kb()
    before = {path: path.stat().st_mtime_ns for path in new.path.rglob("*")}
    with pytest.raises(KnowledgeBaseNotFoundError, match="was removed or replaced while it was open"):
        CALLS[call](old, three)
    assert {path: path.stat().st_mtime_ns for path in new.path.rglob("*")} == before
    new.add([three])
    assert old.is_there is False and new.num_documents == 3


def test_folder_removed_during_an_add_stops_it_and_keeps_the_new_writers_note(
    open_kb: OpenKb, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = open_kb(), WriteLock(three.parent / "kb", SystemClock())

    def replaced(*_: object) -> None:
        shutil.rmtree(old.path)
        old.path.mkdir()
        new_writer.__enter__()

    new_writer = new.held("add")
    with pytest.raises(KnowledgeBaseNotFoundError):
        old.add([three], progress=replaced)
    assert {path.name for path in old.path.iterdir()} == {"write.lock", "writer.json"}
    new_writer.__exit__(None, None, None)


def test_closing_a_replaced_corpus_keeps_the_log_of_the_new_one(tmp_path: Path) -> None:
    """SQLite deletes the log by name when the last connection closes, unless the database file was replaced."""
    path = tmp_path / CORPUS
    old = SqliteCorpus(path)
    old.commit([stored("a", "one")])
    for one in tmp_path.iterdir():
        one.unlink()
    new = SqliteCorpus(path)
    new.commit([stored("b", "two")])
    old.close()
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT document_id FROM documents").fetchall() == [("b",)]
    new.close()
