"""Files of a knowledge base are private to the owner with any umask; opening removes permissions of others."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stillroom.config.settings import IndexConfig, StillroomConfig
from stillroom.core.kv import owner_of
from stillroom.kvstore.disk import DiskStore
from stillroom.kvstore.files import KV_FOLDER
from stillroom.kvstore.owners import OwnerNote, note_owner
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.store.document_names import UPLOADS
from stillroom.retrieval.uploads import Uploads
from stillroom.telemetry.trace import TRACE_FILE, TraceLog
from tests.kvstore.nodes import MODEL, record, sealed
from tests.retrieval.conftest import OpenKb

LISTS = StillroomConfig(index=IndexConfig(kind="ivf_pq", nlist=1, nbits=1, num_subquantizers=8, hot_bytes=1000))


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[int, set[int]]:
    """The modes of all folders and of all files, by kind: 0o700 stands for folders, 0o600 for files."""
    found: dict[int, set[int]] = {0o700: {folder.stat().st_mode & 0o777}, 0o600: set()}
    for path in folder.rglob("*"):
        found[0o700 if path.is_dir() else 0o600].add(path.stat().st_mode & 0o777)
    return found


def fill(kb: KnowledgeBase, three: Path) -> None:
    """Write everything that a server writes into the folder."""
    kb.add([three])
    Uploads(kb).add([("notes/a.md", io.BytesIO(b"# A vault\n\nThe vault has four keys.\n"))])
    kb.search("vault")
    with contextlib.closing(DiskStore(kb.path / KV_FOLDER, MODEL)) as store:
        assert store.write(record(1), *sealed(1))
        note_owner(kb.path / KV_FOLDER, owner_of("a"), OwnerNote("a", kb.path))
    with contextlib.closing(TraceLog(kb.path / TRACE_FILE, keep=2)) as traces:
        traces.add("a", 1.0, {})


@pytest.mark.parametrize("config", [StillroomConfig(), LISTS], ids=["flat", "lists"])
def test_folders_and_files_are_private_to_the_owner(open_kb: OpenKb, three: Path, config: StillroomConfig) -> None:
    kb = open_kb(config)
    fill(kb, three)
    names = {path.name for path in kb.path.rglob("*")}
    assert {"corpus.sqlite3", "corpus.sqlite3-wal", "corpus.sqlite3-shm", "manifest.json", TRACE_FILE} <= names
    assert {"write.lock", "writer.lock", "meta.json", "a.md"} <= names
    assert modes(kb.path) == {0o700: {0o700}, 0o600: {0o600}}


def test_opening_removes_permissions_of_others(open_kb: OpenKb, three: Path, caplog: pytest.LogCaptureFixture) -> None:
    kb = open_kb()
    fill(kb, three)
    kb.close()
    kb.path.chmod(0o755)
    for path in kb.path.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    kb = open_kb()
    open_kb()
    assert modes(kb.path) == {0o700: {0o700}, 0o600: {0o600}}
    assert caplog.text.count("was readable by other users") == 1


def test_group_permission_is_kept_for_files_added_later(open_kb: OpenKb, three: Path) -> None:
    kb = open_kb()
    kb.add([three])
    for path in [kb.path, *kb.path.rglob("*")]:  # chmod -R g+rX
        path.chmod(0o750 if path.is_dir() else 0o640)
    fill(kb, three)
    assert (kb.path / UPLOADS).is_dir()
    assert modes(kb.path) == {0o700: {0o750}, 0o600: {0o640}}
