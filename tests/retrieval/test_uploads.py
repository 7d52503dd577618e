"""Uploads: stored below one folder, all or nothing, with any name."""

import errno
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.core.document import Document
from stillroom.core.private_files import open_file
from stillroom.errors import KnowledgeBaseBusyError, StorageError, UnknownDocumentError, UsageError
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.loaders.load_file import load
from stillroom.retrieval.store.document_names import UPLOADS
from stillroom.retrieval.store.folder import WriteLock
from stillroom.retrieval.uploaded_files import checked_name
from stillroom.retrieval.uploads import UploadResult, Uploads
from tests.retrieval.conftest import OpenKb


@pytest.fixture
def kb(open_kb: OpenKb) -> KnowledgeBase:
    return open_kb()


@pytest.fixture
def uploads(kb: KnowledgeBase) -> Uploads:
    return Uploads(kb)


def add(uploads: Uploads, **files: str | bytes) -> list[UploadResult]:
    """Upload files; `__` in a name stands for a slash and `_` for a dot."""
    named = ((name.replace("__", "/").replace("_", "."), content) for name, content in files.items())
    return uploads.add((name, io.BytesIO(text.encode() if isinstance(text, str) else text)) for name, text in named)


def kept(kb: KnowledgeBase) -> dict[str, bytes]:
    folder = kb.path / UPLOADS
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_uploaded_document_is_found_and_has_a_path(kb: KnowledgeBase, uploads: Uploads) -> None:
    [result] = add(uploads, notes__keys_md="# Keys\n\nRotate keys twice a year.\n")

    assert (result.name, result.outcome) == ("notes/keys.md", "added")
    [info] = result.documents
    assert info.document_id == "uploads/notes/keys.md" and info.title == "Keys"
    assert kb.search("rotate keys").results[0].chunk.document_id == info.document_id
    assert uploads.find("notes/keys.md") == uploads.find(info.document_id) == [info]
    assert uploads.name_of(info.document_id) == "notes/keys.md"


def test_repeated_upload_changes_nothing_and_a_changed_one_replaces(kb: KnowledgeBase, uploads: Uploads) -> None:
    add(uploads, a_txt="first")
    before = (kb.generation, os.stat(kb.path / "uploads/a.txt").st_mtime_ns)

    [same] = add(uploads, a_txt="first")
    assert same.outcome == "unchanged" and len(same.documents) == 1
    assert (kb.generation, os.stat(kb.path / "uploads/a.txt").st_mtime_ns) == before

    [changed] = add(uploads, a_txt="second")
    assert changed.outcome == "updated"
    assert [chunk.text for chunk in kb.chunks_of(changed.documents[0].document_id)] == ["second"]


def test_reported_upload_is_synced_to_the_disk(
    kb: KnowledgeBase, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), kb.path))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    add(uploads, a__b__c_txt="first")
    assert os.path.dirname(os.path.dirname(synced[1])) == "uploads/.incoming", "what it says, before it has its name"
    assert (synced[0], set(synced[2:4]), synced[4]) == (".", {"uploads", "uploads/a"}, "uploads/a/b")


def test_unreadable_upload_leaves_nothing_and_does_not_stop_others(kb: KnowledgeBase, uploads: Uploads) -> None:
    good, bad = add(uploads, good_txt="good", bad_txt=b"\0\1\2")

    assert (good.outcome, bad.outcome, bad.documents) == ("added", "failed", ())
    assert bad.name == "bad.txt" and bad.reason == "binary data, not text"
    assert kept(kb) == {"good.txt": b"good"}


def test_unreadable_update_keeps_the_old_file(kb: KnowledgeBase, uploads: Uploads) -> None:
    add(uploads, a_txt="before")

    [result] = add(uploads, a_txt=b"\0")

    assert result.outcome == "failed" and len(result.documents) == 1
    assert kept(kb) == {"a.txt": b"before"}
    assert add(uploads, a_txt="before")[0].outcome == "unchanged"


def test_upload_during_another_write_leaves_nothing(kb: KnowledgeBase, uploads: Uploads) -> None:
    add(uploads, a_txt="before")
    with FileLock(kb.path / "write.lock"), pytest.raises(KnowledgeBaseBusyError):
        add(uploads, a_txt="after", b_txt="new")
    with pytest.raises(UsageError, match="metadata"):
        uploads.add([("a.txt", io.BytesIO(b"after"))], metadata={"team": object()})

    assert kept(kb) == {"a.txt": b"before"}


def test_refused_upload_keeps_the_folder_of_a_concurrent_upload(
    kb: KnowledgeBase, uploads: Uploads, open_kb: OpenKb, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(uploads, a_txt="before")
    other, index = Uploads(open_kb()), kb.add

    def after_another(*args: object, **options: object) -> object:
        with pytest.raises(KnowledgeBaseBusyError):
            add(other, b_txt="another")
        return index(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(kb, "add", after_another)
    assert add(uploads, a_txt=b"\0")[0].outcome == "failed"
    assert kept(kb) == {"a.txt": b"before"}


def test_refused_upload_never_replaces_a_file_being_read(
    kb: KnowledgeBase, uploads: Uploads, open_kb: OpenKb, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Uploads(open_kb())
    documents: list[Document] = []

    def after_another(path: Path, config: DocumentsConfig) -> Iterator[Document]:
        """Read this file while the other upload is refused."""

        def read(_: WriteLock) -> str:
            documents.extend(load(path, config))
            return ""

        monkeypatch.setattr(WriteLock, "_holder", read)
        with pytest.raises(KnowledgeBaseBusyError):
            add(other, a_txt="refused")
        return iter(documents)

    monkeypatch.setattr("stillroom.retrieval.intake.reading.load", after_another)
    [result] = add(uploads, a_txt="accepted")

    assert [chunk.text for chunk in kb.chunks_of(result.documents[0].document_id)] == ["accepted"]
    assert kept(kb) == {"a.txt": b"accepted"}


def test_upload_waits_until_a_removed_file_is_deleted(
    kb: KnowledgeBase, uploads: Uploads, open_kb: OpenKb, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(uploads, a_txt="before")
    other, forget = Uploads(open_kb()), kb.remove

    def before_another(targets: list[str]) -> object:
        report = forget(targets)
        with pytest.raises(KnowledgeBaseBusyError):
            add(other, a_txt="after")
        return report

    monkeypatch.setattr(kb, "remove", before_another)
    uploads.remove("a.txt")

    assert kept(kb) == {} and add(other, a_txt="after")[0].outcome == "added"


@pytest.mark.parametrize("error", [RuntimeError, StorageError, KeyboardInterrupt])
def test_files_and_index_agree_after_a_failed_upload(
    kb: KnowledgeBase, uploads: Uploads, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    add(uploads, keep_md="version one")
    index = kb.add

    def some(paths: list[Path], **options: object) -> None:
        index(paths[:1], **options)  # type: ignore[arg-type]
        raise error

    monkeypatch.setattr(kb, "add", some)
    with pytest.raises(error):
        add(uploads, first_md="committed", keep_md="version two", new_md="never read")
    assert kept(kb) == {"first.md": b"committed", "keep.md": b"version one"}
    assert [uploads.name_of(info.document_id) for info in kb.documents()] == ["first.md", "keep.md"]


def test_repeated_upload_indexes_a_file_left_by_a_killed_one(kb: KnowledgeBase, uploads: Uploads) -> None:
    """The state after a killed upload."""
    (kb.path / UPLOADS).mkdir()
    (kb.path / UPLOADS / "a.txt").write_text("one")

    assert add(uploads, a_txt="one")[0].outcome == "added"


def test_slow_upload_is_not_removed_as_leftover(kb: KnowledgeBase, uploads: Uploads) -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            for folder in (kb.path / "uploads/.incoming").iterdir():
                os.utime(folder, (0, 0))
            return super().read(size)

    [result] = uploads.add([("a.txt", Slow(b"one"))])
    assert result.outcome == "added"


def test_next_writer_removes_leftovers_of_killed_uploads(kb: KnowledgeBase, uploads: Uploads) -> None:
    hour_ago = time.time() - 3601
    for name, is_old in (("old", True), ("new", False)):
        folder = kb.path / "uploads/.incoming" / name
        folder.mkdir(parents=True)
        (folder / "x").write_text("half")
        if is_old:
            os.utime(folder, (hour_ago, hour_ago))
    add(uploads, a_txt="one")
    assert set(kept(kb)) == {"a.txt", ".incoming/new/x"}


def test_next_writer_removes_empty_folders_of_killed_uploads_at_once(kb: KnowledgeBase, uploads: Uploads) -> None:
    """All files of the killed upload were moved into place."""
    (kb.path / "uploads/.incoming/new").mkdir(parents=True)
    add(uploads, a_txt="one")
    assert list((kb.path / "uploads/.incoming").iterdir()) == []


def test_upload_whose_empty_folder_was_removed_makes_it_again(
    kb: KnowledgeBase, uploads: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Path] = []

    def open_late(path: Path) -> BinaryIO:
        if not swept:
            swept.append(path)
            with kb.writing("add"):  # another writer, which sweeps
                assert not path.parent.exists()
        return open_file(path)

    monkeypatch.setattr("stillroom.retrieval.uploaded_files.open_file", open_late)
    [result] = add(uploads, a_txt="one")
    assert swept and result.outcome == "added"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS])
def test_disk_error_fails_the_whole_upload(
    kb: KnowledgeBase, uploads: Uploads, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    add(uploads, a_txt="before")
    replace = os.replace

    def fail(old: Path, new: Path) -> None:
        if Path(new).name == "b.txt":
            raise OSError(number, os.strerror(number))
        replace(old, new)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StorageError, match=r"b\.txt: cannot be stored"):
        add(uploads, a_txt="after", b_txt="new")
    assert kept(kb) == {"a.txt": b"before"}


def test_file_is_deleted_with_its_last_document(kb: KnowledgeBase, uploads: Uploads) -> None:
    [result] = add(uploads, deep__er__a_jsonl='{"_id": "1", "text": "one"}\n{"_id": "2", "text": "two"}\n')
    first, second = result.documents

    assert uploads.remove(first.document_id).num_documents == 1
    assert list(kept(kb)) == ["deep/er/a.jsonl"]
    assert uploads.remove("deep/er/a.jsonl").num_documents == 1
    assert kept(kb) == {} and not (kb.path / "uploads/deep").exists()
    with pytest.raises(UnknownDocumentError):
        uploads.remove(second.document_id)


def test_remove_all_deletes_uploaded_files_with_their_last_documents(
    kb: KnowledgeBase, uploads: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("outside")
    kb.add([outside])
    add(
        uploads,
        old__a_txt="one",
        old__b_jsonl='{"_id": "1", "text": "two"}\n{"_id": "2", "text": "three"}\n',
        c_txt="four",
    )

    report = uploads.remove_all([str(kb.path / UPLOADS / "old/b.jsonl#1"), str(outside), str(tmp_path / "nothing")])
    assert report.num_documents == 2 and len(report.unknown) == 1
    assert outside.exists() and sorted(kept(kb)) == ["c.txt", "old/a.txt", "old/b.jsonl"]
    forget = kb.remove

    def interrupted(targets: list[str]) -> None:
        forget(targets)
        raise KeyboardInterrupt

    monkeypatch.setattr(kb, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        uploads.remove_all([str(kb.path / UPLOADS / "old")])
    assert kept(kb) == {"c.txt": b"four"} and kb.verify().is_clean


def test_other_files_stay_and_folders_are_not_upload_names(kb: KnowledgeBase, uploads: Uploads, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("outside")
    kb.add([outside])

    for folder in (str(tmp_path), "/", "", "."):
        with pytest.raises(UnknownDocumentError):
            uploads.remove(folder)
    uploads.remove(str(outside))

    assert outside.exists() and kb.num_documents == 0


TRICKS = [
    "",
    "/etc/passwd",
    "../a.md",
    "a/../../b.md",
    "a/./b.md",
    "a//b.md",
    "a/",
    "..",
    ".hidden",
    "a/.incoming/b",
    "..\\a.md",
    "C:\\a.md",
    "a.md\0.png",
    "a\nb.md",
    "a.jsonl#1",
    " a.md",
    "a.md ",
    "x" * 256,
    "\udc80.md",
    "cod\u202egnp.md",
    "/".join(["x" * 200] * 6),
    "a.md.metadata.json",
]


def test_dangerous_names_are_refused_before_anything_is_written(kb: KnowledgeBase, uploads: Uploads) -> None:
    for name in TRICKS:
        with pytest.raises(UsageError, match="must be a relative path such as"):
            uploads.add([("good.txt", io.BytesIO(b"good")), (name, io.BytesIO(b"bad"))])

    assert not (kb.path / UPLOADS).exists() and kb.num_documents == 0


@given(st.text(max_size=40) | st.text(alphabet="./\\a #\0", max_size=12))
def test_allowed_name_leads_below_the_folder(name: str) -> None:
    try:
        taken = checked_name(name)
    except UsageError:
        return
    place = Path(os.path.normpath(f"/kb/uploads/{taken}"))
    assert place.is_relative_to("/kb/uploads") and str(place) == f"/kb/uploads/{taken}"
    assert checked_name(taken) == taken


def test_sidecar_uploaded_by_an_earlier_version_counts_until_removed(kb: KnowledgeBase, uploads: Uploads) -> None:
    beside = kb.path / UPLOADS / "a.txt.metadata.json"
    beside.parent.mkdir()
    beside.write_text('{"year": 2021}')
    kb.add([beside])

    [result] = add(uploads, a_txt="one")
    assert result.documents[0].metadata == {"year": 2021}
    assert uploads.remove("a.txt.metadata.json").num_documents == 1 and kept(kb) == {"a.txt": b"one"}
    assert add(uploads, a_txt="one")[0].documents[0].metadata == {} and kb.verify().is_clean


def test_links_below_uploads_are_not_followed(kb: KnowledgeBase, uploads: Uploads, tmp_path: Path) -> None:
    (kb.path / UPLOADS).mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (kb.path / UPLOADS / "folder").symlink_to(elsewhere)
    (kb.path / UPLOADS / "file.txt").symlink_to(elsewhere / "file.txt")

    results = add(uploads, folder__a_txt="a", file_txt="b")

    assert [result.outcome for result in results] == ["failed", "failed"]
    assert list(elsewhere.iterdir()) == []


def test_file_and_folder_of_the_same_name_exclude_each_other(kb: KnowledgeBase, uploads: Uploads) -> None:
    add(uploads, a_txt="a", b__c_txt="c")

    results = add(uploads, a_txt__b_txt="in a file", b="over a folder")

    assert [result.outcome for result in results] == ["failed", "failed"]
    assert kept(kb) == {"a.txt": b"a", "b/c.txt": b"c"}


def test_two_files_of_the_same_name_are_refused(uploads: Uploads) -> None:
    with pytest.raises(UsageError, match="same name"):
        uploads.add([("cafe\u0301.md", io.BytesIO(b"a")), ("caf\u00e9.md", io.BytesIO(b"b"))])


def test_verify_finds_unindexed_and_changed_uploads(kb: KnowledgeBase, uploads: Uploads) -> None:
    records = '{"_id": "1", "text": "one"}\n{"_id": "2", "text": "two"}\n'
    [_, _, of_records] = add(uploads, a_txt="as indexed", b_txt="before", c_jsonl=records)
    uploads.remove(of_records.documents[0].document_id)
    for name, text in {".incoming/x/y": "half", "b.txt": "after", "sub/e.txt": "never indexed"}.items():
        path = kb.path / UPLOADS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    for repair in (False, True):
        unknown, changed = kb.verify(repair=repair).findings
        assert (unknown.part, unknown.examples) == ("uploads", (str(kb.path / "uploads/sub/e.txt"),))
        assert (changed.part, changed.examples) == ("uploads", (str(kb.path / "uploads/b.txt"),))
        assert not unknown.is_repaired and "stillroom add FILE" in unknown.meaning
    add(uploads, b_txt="after", sub__e_txt="never indexed")
    assert kb.verify().is_clean
