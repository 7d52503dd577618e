"""A knowledge base in a real PostgreSQL server that machines share: documents, indexes, uploads."""

import io
from pathlib import Path

import pytest

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.config.settings import IndexConfig, StillroomConfig
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.errors import (
    ConfigError,
    KnowledgeBaseNotFoundError,
)
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.originals import Originals
from stillroom.retrieval.store.postgresql import committer
from stillroom.retrieval.uploads import Uploads
from tests.crash.worker import SmallEmbedder
from tests.retrieval.store.postgresql.shared_machines import Open, corpus_of, execute, found

pytestmark = pytest.mark.postgres


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
    execute(database, "UPDATE stillroom.commits SET commit_id = 'other'")  # as after a restore and other commits
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
    assert execute(database, "SELECT count(*) FROM pg_namespace WHERE nspname = 'stillroom'") == [(0,)]


def test_embedded_collection_is_refused(open_on: Open) -> None:
    with pytest.raises(ConfigError, match="qdrant"):
        open_on("a", create=True, config=StillroomConfig(index=IndexConfig(kind="qdrant")))


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
