"""A knowledge base in a read-only folder, such as a mounted image: searched without writing; changes are seen."""

import contextlib
import dataclasses
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stillroom.config.settings import IndexConfig, StillroomConfig
from stillroom.errors import KnowledgeBaseBusyError, StorageError
from stillroom.retrieval import atomic_files, repairing
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from tests.retrieval.conftest import MODES, OpenKb, names
from tests.retrieval.test_corpus import stored


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """Mount a folder read-only at another path; permissions alone would not stop root."""
    if os.geteuid():
        folder.chmod(0o555)
        try:
            yield folder
        finally:
            folder.chmod(0o755)
        return
    with mounted_read_only(folder) as view:
        yield view


@contextlib.contextmanager
def mounted_read_only(folder: Path) -> Iterator[Path]:
    view = folder.with_name(f"{folder.name} view")
    view.mkdir()
    if subprocess.run(["mount", "--bind", folder, view], check=False, capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", view], check=True)
        yield view
    finally:
        subprocess.run(["umount", "--lazy", view], check=True)  # its files may still be mapped


@pytest.mark.parametrize("index", [IndexConfig(), IndexConfig(kind="ivf_pq", nlist=1, nbits=1, num_subquantizers=8)])
def test_read_only_knowledge_base_is_searched_without_writing(
    open_kb: OpenKb, docs: Path, tmp_path: Path, index: IndexConfig
) -> None:
    (docs / "all.jsonl").write_text(
        "".join(f'{{"_id": "{number}", "text": "Vault number {number}."}}\n' for number in range(90))
    )
    config = StillroomConfig(index=dataclasses.replace(index, hot_bytes=1000 if index.kind == "ivf_pq" else 0))
    kb = open_kb(config)
    kb.add([docs])
    expected = {mode: kb.search("vault 7", mode=mode).results for mode in MODES}
    digest = kb.digest()
    kb.close()
    assert not (tmp_path / "kb" / "corpus.sqlite3-wal").exists()
    with read_only(tmp_path / "kb") as view:
        before = sorted(view.rglob("*"))
        kb = open_kb(config, name=view.name, create=False)
        for mode in MODES:
            assert kb.search("vault 7", mode=mode).results == expected[mode]
            assert len(kb.search("vault 7", mode=mode, where="path = 'nowhere'").results) == 0
        assert kb.num_documents == 90
        assert kb.verify().findings == () and kb.digest() == digest
        with pytest.raises(StorageError, match="cannot be written"):
            kb.verify(repair=True)
        with pytest.raises(StorageError, match="cannot be written"):
            kb.add([docs])
        kb.close()
        assert sorted(view.rglob("*")) == before


@pytest.mark.parametrize("has_room", [True, False])
def test_missing_postings_are_made_in_the_temporary_folder(
    three: Path, open_kb: OpenKb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    kb = open_kb()
    kb.add([three])
    expected = {mode: kb.search("keys", mode=mode).results for mode in MODES}
    digest = kb.digest()
    kb.close()
    restored, temporary = tmp_path / "restored", tmp_path / "temporary"
    for folder in (restored, temporary):
        folder.mkdir()
    for name in ("corpus.sqlite3", "manifest.json"):
        shutil.copy(tmp_path / "kb" / name, restored)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary if has_room else tmp_path / "none"))
    warned = warnings_of(monkeypatch)
    with read_only(restored) as view:
        kb = open_kb(name=view.name, create=False)
        if has_room:
            assert kb.digest() == digest
            assert {mode: kb.search("keys", mode=mode).results for mode in MODES} == expected
            assert {finding.problem[:20] for finding in kb.verify().findings} == {"the index is missing"}
            assert "until then each process updates the indexes" in warned[0]
        else:
            assert kb.search("keys", mode="sparse").results == ()
            assert "until then sparse searches find nothing" in warned[0]
        kb.close()
    assert len(warned) == 1 and not list(temporary.iterdir())


def test_postings_are_made_elsewhere_while_the_disk_is_full(
    three: Path, open_kb: OpenKb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, content: bytes) -> None:
        if path.is_relative_to(tmp_path / "kb"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        atomic_files.write_atomically(path, content)

    kb = open_kb()
    with monkeypatch.context() as patch:
        patch.setattr("stillroom.retrieval.index.bm25.write_atomically", write)
        with pytest.raises(StorageError, match="No space left"):
            kb.add([three])
        assert names(kb.search("keys", mode="sparse")) == {"keys.md"}
        with pytest.raises(StorageError, match="No space left"):
            (three / "dogs.md").write_text("All about dogs.")
            kb.add([three])
    kb.add([three])
    assert names(kb.search("dogs", mode="sparse")) == {"dogs.md"}
    kb.close()
    assert names(open_kb(create=False).search("keys", mode="sparse")) == {"keys.md"}


def warnings_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the warnings about folders that cannot be written."""
    warnings: list[str] = []
    monkeypatch.setattr(repairing.logger, "warning", lambda text, *values: warnings.append(text % values))
    return warnings


def test_read_only_reader_sees_changes_of_others(open_kb: OpenKb, docs: Path, tmp_path: Path) -> None:
    (docs / "keys.md").write_text("Rotate the keys of the vault.")
    kb = open_kb()
    kb.add([docs])
    kb.close()
    with mounted_read_only(tmp_path / "kb") as view:
        reader = open_kb(name=view.name, create=False)
        try:
            assert names(reader.search("keys")) == {"keys.md"}
            for name in ("cats.md", "dogs.md"):  # before and after a log was seen
                (docs / name).write_text(f"All about {name}.")
                writer = open_kb()
                writer.add([docs])
                for mode in MODES:
                    assert name in names(reader.search(f"about {name}", mode=mode))
                writer.close()
                for mode in MODES:
                    assert name in names(reader.search(f"about {name}", mode=mode))
        finally:
            reader.close()


def test_immutable_file_changed_during_a_read_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "kb"
    folder.mkdir()
    corpus = SqliteCorpus(folder / "corpus.sqlite3")
    corpus.commit([stored("a", "one")])
    corpus.close()
    with mounted_read_only(folder) as view:
        reader = SqliteCorpus(view / "corpus.sqlite3")
        try:
            with pytest.raises(KnowledgeBaseBusyError, match="while it was read"), reader.reading():
                other = SqliteCorpus(folder / "corpus.sqlite3")
                other.commit([stored("b", "two")])
                other.close()
            assert reader.num_documents == 2
        finally:
            reader.close()
