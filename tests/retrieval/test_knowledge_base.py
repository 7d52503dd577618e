"""KnowledgeBase: adding, searching, editing, removing and interrupting."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from stillroom.config.settings import FusionName, IndexConfig, SearchConfig, SearchMode, StillroomConfig
from stillroom.core.ids import DocumentId
from stillroom.errors import (
    UnknownDocumentError,
    UsageError,
)
from stillroom.retrieval import ingest
from stillroom.retrieval.ingest import AddProgress
from stillroom.retrieval.intake import reading
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom.retrieval.store import sqlite_corpus
from stillroom.retrieval.store.sql_rows import CommitReport
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from tests.retrieval.conftest import BREAD, CATS, MODES, UNSHARED, MakeFile, OpenKb, Spy, first_name, names

# Searching


@pytest.mark.parametrize("mode", MODES)
def test_added_documents_are_found(open_kb: OpenKb, three: Path, mode: SearchMode) -> None:
    kb = open_kb()
    report = kb.add([three])
    assert (report.num_added, report.num_chunks, report.failures) == (3, 3, ())
    result = kb.search(f"How often are the keys rotated, {mode}?", mode=mode)  # no vector is kept of it
    best = result.results[0]
    assert first_name(result) == "keys.md"
    assert (best.chunk.title, best.chunk.start_line, best.chunk.end_line) == ("Key rotation", 3, 3)
    assert set(best.scores) == ({"dense", "sparse"} if mode == "hybrid" else {mode})
    assert [scored.score for scored in result.results] == sorted((s.score for s in result.results), reverse=True)
    assert result.search_seconds > 0 and (result.embed_seconds > 0.001) == (mode != "sparse")


def test_top_k_limits_and_fusions_differ_only_in_score(open_kb: OpenKb, three: Path) -> None:
    open_kb().add([three])
    fusions: tuple[FusionName, ...] = ("convex", "rrf", "minmax")
    for fusion in fusions:
        kb = open_kb(StillroomConfig(search=SearchConfig(fusion=fusion, top_k=2)))
        assert first_name(kb.search("baking bread")) == "bread.md"
        assert len(kb.search("bread").results) == 2
        assert len(kb.search("bread keys cats", top_k=10).results) == 3


@pytest.mark.parametrize(
    "query", ['"keys" AND (vault', "keys:* -vault", "\\", "+", "a" * 5000, "\u043a\u043b\u044e\u0447"]
)
def test_any_text_is_a_valid_query(open_kb: OpenKb, three: Path, query: str) -> None:
    kb = open_kb()
    kb.add([three])
    for mode in MODES:
        num_found = len(kb.search(query, mode=mode, top_k=2).results)
        assert num_found == 2 or mode == "sparse"


def test_invalid_searches_are_refused(open_kb: OpenKb) -> None:
    kb = open_kb()
    for arguments in ({"query": " "}, {"query": "x", "top_k": 0}, {"query": "x", "mode": "psychic"}):
        with pytest.raises(UsageError):
            kb.search(**arguments)


def test_empty_knowledge_base_finds_nothing(open_kb: OpenKb) -> None:
    kb = open_kb()
    assert [kb.search("keys", mode=mode).results for mode in MODES] == [(), (), ()]
    assert (kb.num_documents, kb.num_chunks, kb.documents()) == (0, 0, [])


def test_sparse_search_loads_no_model(
    tmp_path: Path, three: Path, open_kb: OpenKb, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_kb().add([three])
    monkeypatch.setattr("stillroom.retrieval.text_encoders.load_text_encoder", None)  # loading fails
    with KnowledgeBase.open(tmp_path / "kb", UNSHARED) as kb:
        assert first_name(kb.search("rotate keys", mode="sparse")) == "keys.md"
        with pytest.raises(TypeError):
            kb.search("rotate keys", mode="dense")


def test_embed_gives_unit_vectors(open_kb: OpenKb) -> None:
    vectors = open_kb().embed(["one", "two"])
    assert vectors.shape == (2, 384) and np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


# Adding again


def test_unchanged_files_are_neither_read_nor_embedded(
    open_kb: OpenKb, three: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    kb = open_kb()
    kb.add([three])
    assert len(spy.texts) == 3
    monkeypatch.setattr(reading, "load", None)
    report = kb.add([three])
    assert (report.num_added, report.num_updated, report.num_unchanged, len(spy.texts)) == (0, 0, 3, 3)
    os.utime(three / "keys.md", (1, 1))
    assert kb.add([three]).num_unchanged == 3, "another time with the same content"


def test_add_of_unchanged_files_does_not_load_the_model(
    tmp_path: Path, three: Path, open_kb: OpenKb, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_kb().add([three])
    monkeypatch.setattr("stillroom.retrieval.text_encoders.load_text_encoder", None)  # loading fails
    with KnowledgeBase.open(tmp_path / "kb", UNSHARED) as kb:
        assert kb.add([three]).num_unchanged == 3


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_edit_replaces_changed_chunks(open_kb: OpenKb, make_file: MakeFile, docs: Path, spy: Spy, kind: str) -> None:
    kb = open_kb(StillroomConfig(index=IndexConfig(kind=kind)))  # type: ignore[arg-type]
    path = make_file("guide.md", "# Guide\n\n## Keys\n\nRotate the keys.\n\n## Cats\n\nFeed the cats.\n")
    kb.add([docs])
    before = kb.num_chunks
    path.write_text("# Guide\n\nNew start.\n\n## Keys\n\nRotate the keys.\n\n## Cats\n\nPraise the dogs.\n")
    report = kb.add([docs])
    assert (report.num_updated, kb.num_chunks) == (1, before + 1)
    assert len(spy.texts) == 4, "the section about keys moved, but reads the same and keeps its embedding"
    for mode in MODES:
        texts = [scored.chunk.text for scored in kb.search("cats dogs keys start", mode=mode).results]
        assert "Feed the cats." not in texts and "Praise the dogs." in texts


def test_files_removed_from_a_folder_are_removed(open_kb: OpenKb, three: Path, make_file: MakeFile) -> None:
    kb = open_kb()
    kb.add([three])
    (three / "cats.md").unlink()
    assert kb.add([three / "keys.md"]).num_removed == 0, "only an added folder is looked through"
    report = kb.add([three])
    assert (report.num_removed, report.num_unchanged, kb.num_documents) == (1, 2, 2)
    assert "cats.md" not in names(kb.search("cats"))


def test_jsonl_records_are_separate_documents(open_kb: OpenKb, docs: Path, spy: Spy) -> None:
    path = docs / "corpus.jsonl"
    records = [{"_id": name, "title": name, "text": f"All about {name}."} for name in ("keys", "cats", "bread")]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    kb = open_kb()
    assert kb.add([docs]).num_added == 3
    assert kb.search("cats").results[0].chunk.record_id == "cats"
    records[1]["text"] = "All about dogs."
    path.write_text("".join(json.dumps(record) + "\n" for record in records[1:]))
    report = kb.add([docs])
    assert (report.num_added, report.num_updated, report.num_unchanged, report.num_removed) == (0, 1, 1, 1)
    assert len(spy.texts) == 4
    assert kb.remove([f"{path}#bread"]).num_documents == 1
    assert kb.add([docs]).num_added == 1, "a removed record comes back when its file is added again"


def test_record_id_with_a_surrogate_is_stored(open_kb: OpenKb, make_file: MakeFile, docs: Path) -> None:
    make_file("a.jsonl", '{"_id": "\\ud800", "text": "About keys."}\n')
    make_file("b.md", CATS)
    kb = open_kb()
    assert (kb.add([docs]).num_added, kb.add([docs]).num_unchanged) == (2, 2)


def test_malformed_line_keeps_the_indexed_version_of_the_file(open_kb: OpenKb, docs: Path) -> None:
    path = docs / "corpus.jsonl"
    path.write_text('{"_id": "a", "text": "about keys"}\n')
    kb = open_kb()
    kb.add([docs])
    path.write_text('{"_id": "b", "text": "about cats"}\nbroken\n')
    report = kb.add([path])
    assert [failed for failed, _ in report.failures] == [str(path)] and ":2:" in report.failures[0][1]
    assert [info.document_id for info in kb.documents()] == [f"{path}#a"]
    path.write_text("broken\n")
    assert len(kb.add([docs]).failures) == 1, "the first line tells no longer that these are documents"
    assert kb.num_documents == 1
    path.write_text("")
    report = kb.add([docs])
    assert (report.num_removed, report.failures, kb.num_documents) == (1, (), 0)


def test_file_name_that_is_not_utf_8_fails_that_file(open_kb: OpenKb, docs: Path) -> None:
    name = os.fsencode(docs) + b"/\xff.md"
    try:
        with open(name, "w") as file:
            file.write("Strange.")
    except OSError:
        pytest.skip("this file system has no such names")
    report = open_kb().add([docs])
    assert len(report.failures) == 1 and "rename the file" in report.failures[0][1]
    assert report.num_added == open_kb().num_documents


def test_unreadable_file_does_not_stop_the_others(open_kb: OpenKb, three: Path) -> None:
    (three / "binary.txt").write_bytes(b"\x00\x01\x02")
    (three / "dangling.md").symlink_to(three / "nowhere.md")
    report = open_kb().add([three])
    assert report.num_added == 3
    assert sorted(Path(path).name for path, _ in report.failures) == ["binary.txt", "dangling.md"]
    assert "binary data" in dict(report.failures)[str(three / "binary.txt")]


def test_missing_path_adds_nothing(open_kb: OpenKb, three: Path) -> None:
    kb = open_kb()
    with pytest.raises(UsageError):
        kb.add([three, three / "nowhere"])
    assert kb.num_documents == 0


def test_progress_reaches_the_totals(open_kb: OpenKb, three: Path) -> None:
    seen: list[AddProgress] = []
    open_kb().add([three], progress=seen.append)
    total = sum(path.stat().st_size for path in three.rglob("*.md"))
    assert (seen[-1].num_files_done, seen[-1].num_bytes_done, seen[-1].num_chunks) == (3, total, 3)
    for earlier, later in zip(seen, seen[1:], strict=False):
        assert earlier.num_bytes_done <= later.num_bytes_done <= later.num_bytes_total == total
        assert earlier.num_files_done <= later.num_files_done <= later.num_files_total == 3


def test_interruption_loses_one_batch_and_a_repeat_does_the_rest(
    open_kb: OpenKb, docs: Path, make_file: MakeFile, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "_COMMITTED_TOGETHER", 2)
    for number in range(6):
        make_file(f"{number}.txt", f"Text number {number} about subject {'abcdef'[number] * 3}.")
    kb = open_kb()

    def interrupt(progress: AddProgress) -> None:
        if progress.num_files_done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kb.add([docs], progress=interrupt)
    assert kb.num_documents == 4
    assert len(kb.search("text subject", mode="sparse", top_k=10).results) == 4, "the indexes were brought up to date"
    report = kb.add([docs])
    assert (report.num_added, report.num_unchanged, kb.num_documents, len(spy.texts)) == (2, 4, 6, 6)


def test_interrupted_large_file_continues(
    open_kb: OpenKb, docs: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "_COMMITTED_TOGETHER", 2)
    lines = [json.dumps({"_id": str(number), "text": f"Record number {number}."}) for number in range(6)]
    (docs / "corpus.jsonl").write_text("\n".join(lines))
    kb = open_kb()

    def interrupt(progress: AddProgress) -> None:
        if progress.num_chunks > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kb.add([docs], progress=interrupt)
    done = kb.num_documents
    assert 0 < done < 6
    report = kb.add([docs])
    assert (report.num_added, report.num_unchanged) == (6 - done, done)


# Removing


def test_documents_are_removed_by_id_file_and_folder(
    open_kb: OpenKb, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kb = open_kb()
    kb.add([three])
    monkeypatch.chdir(three)
    assert kb.remove(["keys.md"]).num_chunks == 1
    assert kb.remove(["sub"]).num_documents == 1
    assert [info.document_id for info in kb.documents()] == [str(three / "cats.md")]
    assert kb.remove([str(three / "cats.md"), str(three)]).num_documents == 1
    assert kb.num_chunks == 0 and kb.search("cats").results == ()


def test_unknown_target_is_reported_and_does_not_stop_others(
    open_kb: OpenKb, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kb = open_kb()
    kb.add([three])
    monkeypatch.chdir(three)
    with pytest.raises(UsageError, match="empty target"):
        kb.remove([""])
    with pytest.raises(UnknownDocumentError, match="dogs"):
        kb.remove(["dogs.md"])
    assert kb.num_documents == 3
    report = kb.remove(["dogs.md", str(three / "cats.md"), "dogs.md"])
    assert (report.num_documents, report.unknown, kb.num_documents) == (1, ("dogs.md",), 2)
    with pytest.raises(UnknownDocumentError, match=r"'dogs\.md' or the 1 others"):
        kb.remove(["dogs.md", str(three / "cats.md")])


def test_repeated_removal_completes_an_interrupted_one(
    open_kb: OpenKb, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_corpus, "_BATCH", 1)
    kb = open_kb()
    kb.add([three])
    targets = [str(three / name) for name in ("cats.md", "keys.md", "sub")]
    commit = SqliteCorpus.commit

    def interrupted(self: SqliteCorpus, *, removed: Sequence[DocumentId]) -> CommitReport:
        if removed[0] == targets[1]:
            raise KeyboardInterrupt
        return commit(self, removed=removed)

    with monkeypatch.context() as patch:
        patch.setattr(SqliteCorpus, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            kb.remove(targets)
    assert kb.num_documents == 2 and kb.search("cats", mode="sparse").results == ()

    report = kb.remove(targets)
    assert (report.num_documents, report.unknown, kb.num_documents) == (2, (targets[0],), 0)
    with pytest.raises(UnknownDocumentError):
        kb.remove(targets)


@pytest.mark.parametrize("name", ["/../../../../../../../..", "../../guide/intro.md", "../..", "1"])
def test_record_id_that_looks_like_a_path_removes_only_the_record(
    open_kb: OpenKb, docs: Path, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = make_file("data/x.jsonl", json.dumps({"_id": name, "text": "About keys."}) + "\n")
    make_file("guide/intro.md", BREAD)
    kb = open_kb()
    for target in (f"{path}#{name}", f"data/x.jsonl#{name}"):
        kb.add([docs])
        monkeypatch.chdir(docs)
        assert kb.remove([target]).num_documents == 1
        assert [info.title for info in kb.documents()] == ["Bread"]
        with pytest.raises(UnknownDocumentError):
            kb.remove([target])  # it is gone, and stands for nothing else
