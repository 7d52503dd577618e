"""A knowledge base whose dense index is a Qdrant collection, embedded: adding, answering, failing servers."""

import logging
from pathlib import Path
from typing import Any

import pytest

from stillroom.config.settings import IndexConfig, QdrantConfig, SearchMode, StillroomConfig
from stillroom.core.document import SearchResult
from stillroom.errors import ConfigError, IndexUnavailableError, KnowledgeBaseBusyError
from stillroom.retrieval import ingest
from stillroom.retrieval.index.qdrant_collection import QdrantCollection
from stillroom.retrieval.index.qdrant_index import CollectionStore, QdrantIndex
from stillroom.retrieval.knowledge_base import KnowledgeBase
from tests.cli.harness import Run, runner
from tests.retrieval.conftest import MakeFile, OpenKb
from tests.server.knowledge import ANSWER, QUESTION, write_knowledge

CONFIG = StillroomConfig(index=IndexConfig(kind="qdrant"), qdrant=QdrantConfig(url="embedded"))
AWAY = StillroomConfig(index=IndexConfig(kind="qdrant"), qdrant=QdrantConfig(url="http://127.0.0.1:9", timeout_s=1))
MODES: tuple[SearchMode, ...] = ("hybrid", "dense", "sparse")


@pytest.fixture
def three(make_file: MakeFile, docs: Path) -> Path:
    make_file("keys.md", "# Key rotation\n\nRotate the keys of the vault every thirty days.\n")
    make_file("cats.md", "# Cats\n\nCats sleep most of the day, and hunt at night.\n")
    make_file("bread.md", "# Bread\n\nBake the bread at two hundred degrees for forty minutes.\n")
    return docs


def collection_of(kb: KnowledgeBase) -> QdrantIndex:
    store = kb.indexes._dense
    assert isinstance(store, CollectionStore)
    return store._opened()


def shown(result: SearchResult) -> list[tuple[str, Any]]:
    return [(scored.chunk.text, pytest.approx(scored.score, abs=1e-5)) for scored in result.results]


def test_qdrant_answers_equal_those_of_a_flat_index(open_kb: OpenKb, three: Path) -> None:
    kb, flat = open_kb(CONFIG), open_kb(name="flat")
    for one in (kb, flat):
        one.add([three])
    assert not (kb.path / "dense.npz").exists()
    for query in ("rotate the keys", "what do cats do at night?", "bread"):
        for mode in MODES:
            assert shown(kb.search(query, mode=mode)) == shown(flat.search(query, mode=mode))
    (three / "cats.md").write_text("# Dogs\n\nDogs sleep at night.\n")
    kb.remove([str(three / "bread.md")])
    flat.remove([str(three / "bread.md")])
    for one in (kb, flat):
        one.add([three / "cats.md"])
    assert shown(kb.search("who sleeps?")) == shown(flat.search("who sleeps?"))
    kb.close()
    again = open_kb(CONFIG)
    assert shown(again.search("who sleeps?")) == shown(flat.search("who sleeps?"))


def test_lost_collection_is_rebuilt_by_the_first_search(
    open_kb: OpenKb, three: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kb = open_kb(CONFIG)
    kb.add([three])
    expected = shown(kb.search("rotate the keys", mode="dense"))
    collection_of(kb)._collection.delete()
    kb.close()
    again = open_kb(CONFIG)
    with caplog.at_level(logging.WARNING):
        assert shown(again.search("rotate the keys", mode="dense")) == expected
    assert "missing or outdated; sending 3 chunks" in caplog.text
    assert not again.indexes.needs_write()


def test_collection_is_written_during_a_long_add(
    open_kb: OpenKb, docs: Path, make_file: MakeFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "_COMMITTED_TOGETHER", 1)
    for number in range(4):
        make_file(f"{number}.md", f"# Note {number}\n\nThis is note number {number}.\n")
    kb = open_kb(CONFIG)
    behind: list[int] = []
    collection = collection_of(kb)
    mark = collection._collection.mark

    def marked(generation: int, commit_id: str = "") -> None:
        behind.append(kb.generation[0] - generation)
        mark(generation, commit_id)

    monkeypatch.setattr(collection._collection, "mark", marked)
    kb.add([docs])
    assert len(behind) == 5 and max(behind) <= 1, "once at creation, and after each of four commits"


def test_unreachable_server_is_reported_and_sparse_search_works(open_kb: OpenKb, three: Path) -> None:
    kb = open_kb(CONFIG)
    kb.add([three])
    kb.close()
    away = open_kb(AWAY)
    for mode in ("hybrid", "dense"):
        for _ in range(2):
            with pytest.raises(IndexUnavailableError, match="cannot be used.*--mode sparse"):
                away.search("rotate the keys", mode=mode)
    assert away.search("rotate the keys", mode="sparse").results
    assert away.num_documents == 3


def test_add_checks_the_server_first_and_keeps_commits_when_it_fails(
    open_kb: OpenKb, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = open_kb(AWAY)
    with pytest.raises(IndexUnavailableError):
        away.add([three])
    assert away.num_documents == 0
    away.close()
    kb = open_kb(CONFIG)
    with monkeypatch.context() as patched:

        def gone(*_: object) -> None:
            raise IndexUnavailableError("gone")

        patched.setattr(QdrantCollection, "put", gone)
        with pytest.raises(IndexUnavailableError, match="gone"):
            kb.add([three])
    assert kb.num_documents == 3, "committed, and BM25 finds them"
    assert kb.search("cats", mode="sparse").results
    kb.close()
    again = open_kb(CONFIG)
    assert again.search("cats hunt", mode="dense").results[0].chunk.title == "Cats"
    assert not again.indexes.needs_write()


def test_second_process_of_an_embedded_collection_is_refused(open_kb: OpenKb, three: Path) -> None:
    kb = open_kb(CONFIG)
    kb.add([three])
    reader = open_kb(CONFIG)
    with pytest.raises(KnowledgeBaseBusyError, match="one process at a time"):
        reader.search("cats")
    assert reader.search("cats", mode="sparse").results
    kb.close()
    assert reader.search("cats").results


def test_address_of_the_collection_is_required(open_kb: OpenKb, three: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"qdrant.url: a server's address"):
        StillroomConfig(index=IndexConfig(kind="qdrant"))
    open_kb(CONFIG).close()
    with pytest.raises(ConfigError, match="qdrant.url"):
        open_kb()
    assert "127.0.0.1" not in (tmp_path / "kb" / "manifest.json").read_text(), "a server may move"


def test_digest_of_a_collection(open_kb: OpenKb, three: Path) -> None:
    kb = open_kb(CONFIG)
    kb.add([three])
    assert kb.digest() == kb.digest()


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    return runner(capfd)


def test_commands_work_with_a_collection(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STILLROOM_INDEX__KIND", "qdrant")
    monkeypatch.setenv("STILLROOM_QDRANT__URL", "embedded")
    docs, kb = write_knowledge(tmp_path / "docs"), tmp_path / "kb"
    assert run("add", docs, "--kb", kb, "--json").json["num_added"] == 2
    monkeypatch.delenv("STILLROOM_INDEX__KIND")  # the manifest knows
    found = run("search", "Tunstead", "--kb", kb, "-k", 1, "--json").json
    assert found["results"][0]["document"] == str(docs / "people.md")
    assert run("ask", QUESTION, "--kb", kb, "--model", "bundled:microworld", "--json").json["text"] == ANSWER
    monkeypatch.setenv("STILLROOM_QDRANT__URL", "http://127.0.0.1:9")
    away = run("search", "Tunstead", "--kb", kb)
    assert away.code == 1 and "cannot be used" in away.err and len(away.err.splitlines()) == 1
    assert run("search", "Tunstead", "--kb", kb, "--mode", "sparse").code == 0
    monkeypatch.delenv("STILLROOM_QDRANT__URL")
    nowhere = run("search", "Tunstead", "--kb", kb)
    assert nowhere.code == 2 and "needs qdrant.url" in nowhere.err


def test_close_closes_the_collection(open_kb: OpenKb, three: Path) -> None:
    with KnowledgeBase.open(open_kb(CONFIG).path, CONFIG) as kb:
        kb.add([three])
    with KnowledgeBase.open(kb.path, CONFIG) as again:
        assert again.search("cats").results
