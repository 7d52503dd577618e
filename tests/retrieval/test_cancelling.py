"""The limit of chunks per document, and cancelling an `add` or an upload between two pieces of work."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from stillroom.config.documents_settings import DocumentsConfig
from stillroom.config.settings import StillroomConfig
from stillroom.core.cancellation import Cancellation
from stillroom.errors import ChangeCancelledError
from stillroom.retrieval import ingest
from stillroom.retrieval.chunker import Chunker
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.store.document_names import UPLOADS
from stillroom.retrieval.uploads import Uploads
from tests.retrieval.conftest import MakeFile, OpenKb, Spy

FEW = StillroomConfig(documents=DocumentsConfig(max_chunks=3, num_workers=1))
LONG = "\n\n".join(f"# Part {number}\n\nOf part {number}." for number in range(6))
RECORDS = "".join(json.dumps({"_id": str(number), "text": f"Record {number}."}) + "\n" for number in range(6))


def kept(kb: KnowledgeBase) -> dict[str, str]:
    folder = kb.path / UPLOADS
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_document_of_too_many_chunks_is_refused_before_embedding(
    open_kb: OpenKb, make_file: MakeFile, docs: Path, spy: Spy
) -> None:
    make_file("long.md", LONG)
    make_file("short.md", "Short.")
    report = open_kb(FEW).add([docs])
    [(path, reason)] = report.failures
    assert (Path(path).name, report.num_added, len(spy.texts)) == ("long.md", 1, 1)
    assert reason == ("more chunks than documents.max_chunks (3); split it, make it a JSONL file, or raise the limit")


def test_record_of_too_many_chunks_refuses_its_whole_file(open_kb: OpenKb, make_file: MakeFile) -> None:
    text = "\n\n".join("word " * 190 for _ in range(6))
    path = make_file("a.jsonl", RECORDS + json.dumps({"_id": "long", "text": text}))
    kb = open_kb(FEW)
    [(_, reason)] = kb.add([path]).failures
    assert "#long: more chunks than documents.max_chunks (3)" in reason
    assert kb.num_documents == 0


def test_document_far_too_large_is_refused_without_cutting(
    open_kb: OpenKb, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting tokens takes seconds, cutting minutes."""

    def refuse(*_: object) -> None:
        raise AssertionError("cut")

    monkeypatch.setattr(Chunker, "each_chunk", refuse)
    [(_, reason)] = open_kb(FEW).add([make_file("large.txt", "word " * 1000)]).failures
    assert "documents.max_chunks (3)" in reason


def test_refused_document_is_not_cut_again_while_unchanged(
    open_kb: OpenKb, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kb = make_file("long.md", LONG), open_kb(FEW)
    first = kb.add([path]).failures

    def refuse(*_: object) -> None:
        raise AssertionError("cut again")

    monkeypatch.setattr(Chunker, "each_chunk", refuse)
    assert kb.add([path]).failures == first


def test_large_document_is_embedded_in_pieces(
    open_kb: OpenKb, make_file: MakeFile, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    embed = embedder.embed_documents

    def noting(texts: Sequence[str], on_batch: Callable[[int], None] | None = None) -> object:
        sizes.append(len(texts))
        return embed(texts, on_batch)

    monkeypatch.setattr(embedder, "embed_documents", noting)
    monkeypatch.setattr(ingest, "_EMBEDDED_TOGETHER", 4)
    kb = open_kb()
    kb.add([make_file("long.md", LONG)])
    assert (sizes, kb.num_chunks) == ([4, 2], 6)


class CancelsWith(Cancellation):
    """Cancels itself at the n-th check."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def check(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.cancel()
        super().check()


@pytest.mark.parametrize("name", ["long.md", "records.jsonl"])
def test_cancelled_upload_leaves_nothing_at_any_point(
    open_kb: OpenKb, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "_MAX_PENDING_DOCUMENTS", 2)  # records are committed before the end of the file
    kb = open_kb()
    uploads, at = Uploads(kb), 0
    text = LONG if name == "long.md" else RECORDS
    while True:
        try:
            [result] = uploads.add([(name, io.BytesIO(text.encode()))], stop=CancelsWith(at))
        except ChangeCancelledError:
            assert (kb.num_documents, kept(kb)) == (0, {})
            at += 1
        else:
            break
    assert at > 6 and result.outcome == "added" and kb.verify().is_clean


def test_cancelled_update_keeps_the_old_document_and_file(open_kb: OpenKb) -> None:
    kb = open_kb()
    uploads = Uploads(kb)
    uploads.add([("a.md", io.BytesIO(b"before"))])
    with pytest.raises(ChangeCancelledError):
        uploads.add([("a.md", io.BytesIO(b"after"))], stop=CancelsWith(2))
    assert kept(kb) == {"a.md": "before"} and kb.verify().is_clean
    assert kb.search("before", mode="sparse").results


def test_cancel_ends_the_wait_for_a_parsing_process(open_kb: OpenKb, make_file: MakeFile) -> None:
    path = make_file("slow.md", "*a **b " * 60_000)  # takes the parser many seconds
    with pytest.raises(ChangeCancelledError):
        open_kb(FEW).add([path], stop=CancelsWith(4))
