"""`migrate`: a knowledge base is copied from a folder into PostgreSQL and back, whole or continued."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stillroom.config.settings import IndexConfig, StillroomConfig
from stillroom.core.ids import DocumentId
from stillroom.errors import UsageError
from stillroom.retrieval import knowledge_base, migrating
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.migrating import corpus_digest, migrate
from stillroom.retrieval.uploads import Uploads
from tests.cli.harness import runner
from tests.crash.worker import OTHER_MODEL, SmallEmbedder

Open = Callable[..., KnowledgeBase]


@pytest.fixture
def open_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Open]:
    monkeypatch.setattr(knowledge_base, "Embedder", SmallEmbedder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    opened: list[KnowledgeBase] = []

    def open_one(where: str | Path, like: KnowledgeBase | None = None) -> KnowledgeBase:
        kb = KnowledgeBase.open(where, StillroomConfig(), create=True if like is None else like.manifest)
        opened.append(kb)
        return kb

    yield open_one
    for kb in opened:
        kb.close()


@pytest.fixture
def source(open_at: Open, tmp_path: Path) -> KnowledgeBase:
    """A folder with files, records, metadata, an upload, a removed record and another embedder than in the settings."""
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("keys", "cats", "bread"):
        (docs / f"{name}.md").write_text(f"# {name}\n\nAbout {name}.\n\n## More\n\nMore about {name}.\n")
    (docs / "many.jsonl").write_text("\n".join(json.dumps({"_id": one, "text": f"Record {one}."}) for one in "abc"))
    kb = KnowledgeBase.open(tmp_path / "kb", StillroomConfig(index=IndexConfig(kind="hnsw")), create=True)
    kb.add([docs], metadata={"team": "legal"})
    Uploads(kb).add([("notes/up.md", io.BytesIO(b"# Up\n\nUploaded text.\n"))])
    kb.remove([f"{docs / 'many.jsonl'}#b"])
    kb.reembed(OTHER_MODEL)
    kb.close()
    return open_at(tmp_path / "kb")


def refuse_to_embed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("embedded again")

    monkeypatch.setattr(SmallEmbedder, "embed_documents", refuse)


def test_copy_of_a_folder_finds_the_same(
    source: KnowledgeBase, open_at: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_embed(monkeypatch)
    target = open_at(tmp_path / "copy", like=source)
    report = migrate(source, target, lambda *_: None)
    assert (report.num_documents, report.num_copied, report.num_uploads) == (6, 6, 1)
    assert corpus_digest(source.corpus) == report.digest == corpus_digest(target.corpus)
    assert target.manifest.index.kind == "hnsw"
    assert (target.path / "uploads/notes/up.md").read_bytes() == b"# Up\n\nUploaded text.\n"
    searched = [kb.search("about cats", mode="dense", where="team = legal").results for kb in (source, target)]
    assert searched[0] and searched[0] == searched[1]
    assert target.add([tmp_path / "docs/keys.md"]).num_unchanged == 1
    assert migrate(source, target, lambda *_: None).num_copied == 0


def test_interrupted_migration_is_continued(
    source: KnowledgeBase, open_at: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrating, "_DOCUMENTS_TOGETHER", 2)
    target = open_at(tmp_path / "copy", like=source)

    def interrupt(num_done: int, _: int) -> None:
        if num_done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        migrate(source, target, interrupt)
    assert target.num_documents == 4
    report = migrate(source, target, lambda *_: None)
    assert (report.num_copied, report.num_documents) == (2, 6)


def test_target_with_other_documents_or_another_embedder_is_refused(
    source: KnowledgeBase, open_at: Open, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="another chunker"):
        migrate(source, open_at(tmp_path / "small"), lambda *_: None)
    target = open_at(tmp_path / "copy", like=source)
    Uploads(target).add([("other.md", io.BytesIO(b"# Other\n\nOther text.\n"))])
    with pytest.raises(UsageError, match=r"such as uploads/other\.md"):
        migrate(source, target, lambda *_: None)
    assert target.num_documents == 1


@pytest.mark.postgres
def test_into_postgresql_and_back(
    source: KnowledgeBase, open_at: Open, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_embed(monkeypatch)
    shared = open_at(f"{database}&kb=docs", like=source)
    report = migrate(source, shared, lambda *_: None)
    assert (report.num_copied, report.num_uploads, report.digest) == (6, 1, corpus_digest(source.corpus))
    assert shared.corpus.original_path("uploads/notes/up.md").read_bytes() == b"# Up\n\nUploaded text.\n"
    back = open_at(tmp_path / "back", like=shared)
    assert migrate(shared, back, lambda *_: None).digest == report.digest
    assert (back.path / "uploads/notes/up.md").exists()
    (info,) = back.documents_of("uploads/notes/up.md")
    assert (info.document_id, info.num_chunks) == (DocumentId("uploads/notes/up.md"), 1)


def test_command_prints_what_was_copied(
    source: KnowledgeBase, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source.close()
    printed = runner(capfd)("migrate", source.path, tmp_path / "copy", "--json").json
    assert (printed["num_documents"], printed["num_copied"]) == (6, 6)
    with KnowledgeBase.open(tmp_path / "copy", StillroomConfig()) as copy:
        assert printed["digest"] == corpus_digest(copy.corpus)
