"""Moved and copied knowledge bases keep their uploads, after an upgrade also those of earlier versions."""

import io
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from stillroom.core.ids import public_id
from stillroom.retrieval.store.document_names import DocumentNames
from stillroom.retrieval.uploads import Uploads
from tests.retrieval.conftest import KEYS, MakeFile, OpenKb

RECORDS = '{"_id": "1", "text": "Cats sleep."}\n{"_id": "2", "text": "Bread bakes."}\n'


def upload(uploads: Uploads, **texts: str) -> None:
    uploads.add((name.replace("_", "."), io.BytesIO(text.encode())) for name, text in texts.items())


def with_absolute_names(folder: Path, place: Path) -> None:
    """Downgrade a knowledge base at `place` to version 3."""
    database = sqlite3.connect(folder / "corpus.sqlite3")
    with database:
        for table, column in (("documents", "document_id"), ("documents", "path"), ("chunks", "document_id")):
            database.execute(
                f"UPDATE {table} SET {column} = ? || {column} WHERE {column} LIKE 'uploads/%'", (f"{place}/",)
            )
        database.execute("UPDATE sources SET path = ? || path WHERE path LIKE 'uploads/%'", (f"{place}/",))
        database.execute("DROP INDEX documents_by_public_id")
        database.execute("ALTER TABLE documents DROP COLUMN public_id")
        database.execute("PRAGMA user_version = 3")
    database.close()


def test_moved_knowledge_base_keeps_its_uploads(open_kb: OpenKb, tmp_path: Path, make_file: MakeFile) -> None:
    kb = open_kb()
    kb.add([make_file("outside.md", "# Outside\n\nElsewhere.")])
    upload(Uploads(kb), keys_md=KEYS, a_jsonl=RECORDS)
    ids, digest = [info.document_id for info in kb.documents()], kb.digest()
    kb.close()
    (tmp_path / "kb").rename(tmp_path / "moved")

    moved = open_kb(name="moved", create=False)
    uploads = Uploads(moved)
    assert [info.document_id for info in moved.documents()] == ids
    assert set(ids) > {"uploads/keys.md", "uploads/a.jsonl#1", "uploads/a.jsonl#2"}
    assert (moved.digest(), moved.verify().is_clean) == (digest, True)
    [same] = uploads.add([("keys.md", io.BytesIO(KEYS.encode()))])
    assert same.outcome == "unchanged"
    assert moved.add([tmp_path / "moved/uploads"]).num_unchanged == 3
    uploads.remove("a.jsonl")
    assert [path.name for path in (tmp_path / "moved/uploads").iterdir() if path.is_file()] == ["keys.md"]


@pytest.mark.parametrize("place", ["kb", "gone"])
def test_uploads_with_absolute_names_are_renamed_on_opening(
    open_kb: OpenKb, tmp_path: Path, make_file: MakeFile, place: str, refuse_to_embed: Callable[[], None]
) -> None:
    kb = open_kb()
    outside = make_file("outside.md", "# Outside\n\nElsewhere.")
    kb.add([outside])
    upload(Uploads(kb), keys_md=KEYS, a_jsonl=RECORDS)
    before = {info.document_id: (info.num_chunks, info.added_at) for info in kb.documents()}
    found = kb.search("rotate the keys").results[0].chunk
    kb.close()
    with_absolute_names(tmp_path / "kb", tmp_path / place)

    refuse_to_embed()
    kb = open_kb(create=False)
    assert {info.document_id: (info.num_chunks, info.added_at) for info in kb.documents()} == before
    assert kb.search("rotate the keys").results[0].chunk == found
    assert kb.verify().is_clean
    assert kb.add([outside, tmp_path / "kb/uploads"]).num_unchanged == len(before)
    [info] = kb.documents_of(str(tmp_path / "kb/uploads/keys.md"))
    assert info.document_id == "uploads/keys.md", "the old id still leads to it"
    assert [info.document_id for info in kb.documents_of(public_id(str(outside)))] == [str(outside)]


def test_files_outside_uploads_keep_their_names(tmp_path: Path) -> None:
    """Only uploads of this knowledge base at a former location are renamed."""
    (tmp_path / "kb/uploads").mkdir(parents=True)
    (tmp_path / "kb/uploads/a.md").write_text("four")
    (tmp_path / "there/uploads").mkdir(parents=True)
    (tmp_path / "there/uploads/a.md").write_text("four")
    names = DocumentNames(tmp_path / "kb")
    there, gone = str(tmp_path / "there/uploads/a.md"), str(tmp_path / "gone/uploads/a.md")
    assert list(names.renamed({there: 4, "/srv/a.md": 4})) == [], "it is still there, and in no knowledge base"
    assert list(names.renamed({gone: 5})) == [], "another size"
    assert list(names.renamed({gone: 4})) == [(gone, "uploads/a.md")]
    for name in ("manifest.json", "corpus.sqlite3"):
        (tmp_path / "there" / name).touch()
    assert list(names.renamed({there: 4})) == [(there, "uploads/a.md")], "the original of a copy"


def test_public_id_contains_the_file_name_and_no_folder() -> None:
    assert public_id("uploads/notes/keys.md") == "uploads/notes/keys.md"
    one, other = public_id("/srv/handbook/keys.md"), public_id("/srv/other/keys.md")
    assert one != other and one.startswith("files/") and one.endswith("/keys.md")
    assert "srv" not in one and "handbook" not in one
    assert public_id("/srv/handbook/a.jsonl#a/b") == one.replace("keys.md", "a.jsonl#a/b")
