"""Dense index in a Qdrant collection: results of a flat index, and consistency after edits, crashes and damage."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig, QdrantConfig
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.errors import ConfigError, IndexUnavailableError, KnowledgeBaseBusyError
from stillroom.retrieval.index import qdrant_index
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.index.qdrant_collection import _MARK, QdrantCollection
from stillroom.retrieval.index.qdrant_index import QdrantIndex
from stillroom.retrieval.store.sql_rows import StoredDocument
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus

D = 12
EMBEDDED = QdrantConfig(url="embedded")
INDEX = IndexConfig(kind="qdrant")


def unit(rng: np.random.Generator, num: int) -> NDArray[np.float32]:
    vectors = rng.standard_normal((num, D)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def document(name: str, ids: list[int], vectors: NDArray[np.float32]) -> StoredDocument:
    chunks = tuple(
        Chunk(
            chunk_id=ChunkId(chunk_id),
            document_id=DocumentId(name),
            ordinal=place,
            text=f"text {chunk_id} {vectors[place].tobytes().hex()}",
            title=name,
            heading_path=(),
            num_tokens=3,
            start_line=1,
            end_line=1,
            record_id=None,
        )
        for place, chunk_id in enumerate(ids)
    )
    return StoredDocument(DocumentId(name), name, None, name, "hash", 1, 0.0, chunks, vectors)


class QdrantFixture:
    """A corpus, and an embedded collection that survives being closed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.corpus = SqliteCorpus(folder / "corpus.sqlite3")
        self.index = self.reopened()

    def collection(self) -> QdrantCollection:
        return QdrantCollection(EMBEDDED, INDEX, self.folder / "qdrant", self.corpus.corpus_id, D)

    def reopened(self) -> QdrantIndex:
        """Close and open the index, as a later process would."""
        if hasattr(self, "index"):
            self.index.close()
        self.index = QdrantIndex(self.collection(), self.corpus, D, INDEX.ef_search)
        return self.index

    def put(self, name: str, ids: list[int], vectors: NDArray[np.float32]) -> None:
        self.corpus.commit([document(name, ids, vectors)])

    def flat(self) -> FlatIndex:
        """Return the ranking of a flat index."""
        index = FlatIndex(D)
        ids, vectors = self.corpus.embeddings(self.corpus.changes_since(0).added)
        if len(ids):
            index.add(ids, vectors)
        return index

    def check(self, seed: int = 9, ks: tuple[int, ...] = (1, 7, 1000)) -> None:
        """Assert that searches give the ids, order and scores of a flat index over the corpus."""
        assert self.index.refresh() == self.corpus.generation
        flat = self.flat()
        assert len(self.index) == len(flat)
        for query in unit(np.random.default_rng(seed), 5):
            for k in ks:
                found, expected = self.index.search(query, k), flat.search(query, k)
                assert [chunk_id for chunk_id, _ in found] == [chunk_id for chunk_id, _ in expected]
                assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-5)
                assert list(self.index.search_staged(query, k, 4)) == [found]

    def close(self) -> None:
        self.index.close()
        self.corpus.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[QdrantFixture]:
    one = QdrantFixture(tmp_path)
    yield one
    one.close()


def wide(rng: np.random.Generator, num: int) -> list[int]:
    """Draw chunk ids over all 63 bits."""
    return [int(value) for value in rng.integers(2**63 - 1, size=num)]


def test_collection_finds_what_a_flat_index_finds(world: QdrantFixture) -> None:
    rng = np.random.default_rng(0)
    world.put("a", wide(rng, 700), unit(rng, 700))
    world.check()
    world.index.catch_up()
    assert not world.index.is_behind()
    world.check()
    assert len(world.index._hidden) == 0 and len(world.index._recent) == 0, "everything is in the collection"


def test_equal_scores_come_in_the_order_of_chunk_id(world: QdrantFixture) -> None:
    rng = np.random.default_rng(1)
    vectors = np.repeat(unit(rng, 10), 30, axis=0)
    world.put("a", wide(rng, 300), vectors)
    world.index.catch_up()
    world.check(ks=(1, 4, 29, 31, 64))
    world.put("b", wide(rng, 30), vectors[:30])
    world.check(ks=(1, 4, 29, 31, 64))


def test_edits_and_removals_reach_the_collection(world: QdrantFixture) -> None:
    rng = np.random.default_rng(2)
    ids = wide(rng, 40)
    world.put("a", ids[:20], unit(rng, 20))
    world.put("b", ids[20:], unit(rng, 20))
    world.index.catch_up()
    world.put("a", ids[:10], unit(rng, 10))  # half of them gone, half under the same ids with other vectors
    world.corpus.commit(removed=[DocumentId("b")])
    world.check()
    assert world.index.is_behind()
    world.index.catch_up()
    world.check()
    assert world.index._collection.count() == 10


class SimulatedCrash(Exception):
    pass


def crashing(method: Callable[..., None], num_calls: int) -> Callable[..., None]:
    """Wrap a method to raise `SimulatedCrash` after `num_calls` calls."""
    left = num_calls

    def call(*arguments: object) -> None:
        nonlocal left
        if left == 0:
            raise SimulatedCrash
        left -= 1
        method(*arguments)

    return call


@pytest.mark.parametrize("method", ["put", "drop", "mark", "clear"])
@pytest.mark.parametrize("num_calls", [0, 1, 2])
def test_a_crash_between_commit_and_collection_is_caught_up(
    world: QdrantFixture, monkeypatch: pytest.MonkeyPatch, method: str, num_calls: int
) -> None:
    monkeypatch.setattr(qdrant_index, "_STEP", 10)
    monkeypatch.setattr(qdrant_index, "_BATCH", 4)
    rng = np.random.default_rng(3)
    ids = wide(rng, 60)
    world.put("a", ids[:12], unit(rng, 12))
    if method != "clear":
        world.index.catch_up()
    for name, start in [("b", 12), ("c", 24), ("d", 36)]:
        world.put(name, ids[start : start + 12], unit(rng, 12))
    world.put("a", ids[:6], unit(rng, 6))
    world.corpus.commit(removed=[DocumentId("c")])
    collection = world.index._collection
    with monkeypatch.context() as patched:
        patched.setattr(collection, method, crashing(getattr(collection, method), num_calls))
        if method != "clear" or num_calls == 0:
            with pytest.raises(SimulatedCrash):
                world.index.catch_up()
        else:
            world.index.catch_up()
    world.check()
    world.reopened()
    world.check()
    world.put("c", ids[24:30], unit(rng, 6))  # meanwhile the truth moves on
    world.corpus.commit(removed=[DocumentId("d")])
    world.check()
    world.index.catch_up()
    world.check()
    assert world.index._collection.count() == world.corpus.num_chunks


def test_an_interrupted_catch_up_is_continued_not_repeated(
    world: QdrantFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qdrant_index, "_STEP", 10)
    rng = np.random.default_rng(4)
    for number in range(6):
        world.put(str(number), wide(rng, 10), unit(rng, 10))
    collection = world.index._collection
    with monkeypatch.context() as patched:
        patched.setattr(collection, "put", crashing(collection.put, 4))
        with pytest.raises(SimulatedCrash):
            world.index.catch_up()
    sent: list[int] = []
    again = world.reopened()
    put = again._collection.put

    def noting(ids: list[int], vectors: NDArray[np.float32]) -> None:
        sent.extend(ids)
        put(ids, vectors)

    monkeypatch.setattr(again._collection, "put", noting)
    again.catch_up()
    assert len(sent) == 20
    world.check()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_collection_is_right_after_any_history_of_edits_and_crashes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("history")
    with contextlib.closing(QdrantFixture(folder)) as world, pytest.MonkeyPatch.context() as monkeypatch:
        rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
        monkeypatch.setattr(qdrant_index, "_STEP", 6)
        monkeypatch.setattr(qdrant_index, "_BATCH", 4)
        for _ in range(data.draw(st.integers(1, 8))):
            name = data.draw(st.sampled_from("abc"))
            match data.draw(st.sampled_from(["put", "remove", "crash", "catch up", "reopen", "search"])):
                case "put":
                    num, base = data.draw(st.integers(1, 8)), "abc".index(name) * 100
                    world.put(name, [base + place for place in range(num)], unit(rng, num))
                case "remove":
                    world.corpus.commit(removed=[DocumentId(name)])
                case "crash":
                    collection = world.index._collection
                    method = data.draw(st.sampled_from(["put", "drop", "mark"]))
                    with monkeypatch.context() as patched:
                        crash = crashing(getattr(collection, method), data.draw(st.integers(0, 3)))
                        patched.setattr(collection, method, crash)
                        with contextlib.suppress(SimulatedCrash):
                            world.index.catch_up()
                case "catch up":
                    world.index.catch_up()
                case "reopen":
                    world.reopened()
                case "search":
                    world.check(ks=(1, 4))
        world.check(ks=(1, 4, 100))
        world.index.catch_up()
        world.check(ks=(1, 4, 100))
        assert world.index._collection.count() == world.corpus.num_chunks


def test_lost_foreign_and_damaged_collections_are_rebuilt(world: QdrantFixture) -> None:
    rng = np.random.default_rng(5)
    world.put("a", wide(rng, 50), unit(rng, 50))

    def claim(collection: QdrantCollection) -> None:
        other = QdrantCollection(EMBEDDED, INDEX, world.folder / "qdrant", "another", D)
        other.name, other._client = collection.name, collection._client
        other.mark(1)

    def unmark(collection: QdrantCollection) -> None:
        collection.drop([cast(int, _MARK)])  # a point id like any other

    def take_some_away(collection: QdrantCollection) -> None:
        ids = world.corpus.changes_since(0).added
        collection.drop([int(chunk_id) for chunk_id in ids[:3]])

    def run_ahead(collection: QdrantCollection) -> None:
        collection.mark(world.corpus.generation + 5)

    for damage in (QdrantCollection.delete, claim, unmark, take_some_away, run_ahead):
        world.index.catch_up()
        world.check()
        damage(world.index._collection)
        world.reopened()
        assert world.index.is_behind(), damage.__name__
        world.check()
        world.index.catch_up()
        assert not world.index.is_behind()
        world.check()


def test_collection_deleted_during_reading_is_reported(world: QdrantFixture) -> None:
    rng = np.random.default_rng(6)
    world.put("a", wide(rng, 5), unit(rng, 5))
    world.index.catch_up()
    world.index.refresh()
    world.index._collection.delete()
    with pytest.raises(IndexUnavailableError, match="does not exist.*stillroom add"):
        world.index.search(unit(rng, 1)[0], 3)
    world.check()


def test_reader_refuses_a_collection_too_far_behind(world: QdrantFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qdrant_index, "MOST_BEHIND", 20)
    rng = np.random.default_rng(7)
    for number in range(4):
        world.put(str(number), wide(rng, 10), unit(rng, 10))
    with pytest.raises(KnowledgeBaseBusyError, match="20 chunks behind.*stillroom add"):
        world.index.refresh()
    world.index.catch_up()
    world.check()
    world.corpus.commit(removed=[DocumentId(str(number)) for number in range(3)])
    with pytest.raises(KnowledgeBaseBusyError, match="20 chunks behind"):
        world.index.refresh()


def test_knowledge_bases_never_share_a_collection(tmp_path: Path) -> None:
    one, other = QdrantFixture(tmp_path / "one"), QdrantFixture(tmp_path / "other")
    assert one.collection().name != other.collection().name
    assert one.corpus.corpus_id in one.collection().name
    one.close()
    other.close()


def test_an_embedded_collection_serves_one_process(world: QdrantFixture) -> None:
    world.index.catch_up()
    second = QdrantIndex(world.collection(), world.corpus, D, 64)
    with pytest.raises(KnowledgeBaseBusyError, match="one process at a time, for searching too.*qdrant.url"):
        second.refresh()
    world.index.close()
    assert second.refresh() == 0
    second.close()


def test_missing_package_is_named_in_the_error(world: QdrantFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'stillroom\[qdrant\]'"):
        world.index.refresh()
