"""Killed uploads and removals: their files are listed as not indexed, can be deleted, and are completed."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stillroom.core.cancellation import Cancellation
from stillroom.errors import ChangeCancelledError, UnknownDocumentError
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.uploads import Uploads
from tests.retrieval.conftest import OpenKb

_KILLED = """
import io, os, signal, sys
from pathlib import Path
from stillroom.config.settings import StillroomConfig
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.uploads import Uploads

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

kb = KnowledgeBase.open(Path(sys.argv[1]), StillroomConfig())
uploads = Uploads(kb)
if sys.argv[2] == "upload":
    kb.add = die  # every file is in place, none is indexed
    files = [("new.md", b"new words"), ("known.md", b"other words"), ("bad.txt", b"\\0")]
    uploads.add([(name, io.BytesIO(text)) for name, text in files], metadata={"team": "legal"})
else:
    Path.unlink = die  # the documents are removed, the file is not
    uploads.remove("known.md")
"""


@pytest.fixture
def kb(open_kb: OpenKb) -> KnowledgeBase:
    kb = open_kb()
    Uploads(kb).add([("known.md", io.BytesIO(b"known words"))])
    return kb


def killed(kb: KnowledgeBase, what: str) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, kb.path, what], check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL


def lone(uploads: Uploads) -> list[str]:
    return [str(info.document_id) for info in uploads.not_indexed()]


def test_killed_upload_is_listed_and_completed(kb: KnowledgeBase) -> None:
    killed(kb, "upload")
    uploads = Uploads(kb)
    assert lone(uploads) == ["uploads/bad.txt", "uploads/new.md"]
    [info] = uploads.find_any("new.md")
    assert (info.is_indexed, info.num_chunks, info.num_bytes) == (False, 0, 9)

    stop = Cancellation()
    stop.cancel()
    with pytest.raises(ChangeCancelledError):
        uploads.complete(stop)
    assert lone(uploads) == ["uploads/bad.txt", "uploads/new.md"], "completed at the next start"
    assert uploads.complete() == 2
    assert lone(uploads) == ["uploads/bad.txt"], "it cannot be read"
    assert not uploads.are_incomplete, "it is not tried again"
    infos = {str(info.document_id): info for info in kb.documents()}
    assert [chunk.text for chunk in kb.chunks_of(infos["uploads/known.md"].document_id)] == ["other words"]
    assert {info.metadata.get("team") for info in infos.values()} == {"legal"}, "the given metadata is kept"


def test_unindexed_files_can_be_deleted(kb: KnowledgeBase) -> None:
    killed(kb, "upload")
    uploads = Uploads(kb)
    for name in ("bad.txt", "uploads/new.md"):
        assert uploads.remove(name).num_documents == 0
    assert lone(uploads) == [] and not (kb.path / "uploads/new.md").exists()
    with pytest.raises(UnknownDocumentError):
        uploads.remove("new.md")
    for trick in ("../manifest.json", "uploads/../corpus.sqlite3", ".incoming", "uploads"):
        with pytest.raises(UnknownDocumentError):
            uploads.remove(trick)
    assert uploads.complete() == 1 and kb.verify().is_clean


def test_removed_upload_is_not_indexed_again(kb: KnowledgeBase) -> None:
    killed(kb, "remove")
    uploads = Uploads(kb)
    assert (Path(kb.path / "uploads/known.md").exists(), kb.num_documents) == (True, 0)
    assert uploads.complete() == 0 and kb.num_documents == 0
    assert lone(uploads) == ["uploads/known.md"]
    uploads.remove("known.md")
    assert lone(uploads) == []


def test_finished_upload_leaves_nothing_to_complete(kb: KnowledgeBase) -> None:
    uploads = Uploads(kb)
    uploads.add([("a.md", io.BytesIO(b"one")), ("bad.txt", io.BytesIO(b"\0")), ("known.md", io.BytesIO(b"\0"))])
    assert not uploads.are_incomplete and kb.verify().is_clean
    assert kb.add([kb.path / "uploads/known.md"]).num_unchanged == 1
