"""Filtered searches equal an exhaustive search after the filter, in every index and as a whole."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig, QdrantConfig, SearchMode, StillroomConfig
from stillroom.core.ids import ChunkId
from stillroom.errors import FilterError
from stillroom.retrieval.filters import allowed_lists
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.index import bm25, hnsw, qdrant_index
from stillroom.retrieval.index.bm25 import Bm25Index
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.index.hnsw import HnswIndex
from stillroom.retrieval.index.ivf_pq import IvfPqIndex
from stillroom.retrieval.index.qdrant_collection import QdrantCollection
from stillroom.retrieval.index.qdrant_index import QdrantIndex
from stillroom.retrieval.index.tiered_index import TieredIvfPqIndex
from stillroom.retrieval.ranking import Ranking
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from stillroom.retrieval.vector_index import VectorIndex
from tests.examples import most_examples
from tests.retrieval.conftest import MakeFile, OpenKb
from tests.retrieval.index.test_bm25 import chunk
from tests.retrieval.test_corpus import stored

Vectors = NDArray[np.float32]
D = 16
HNSW = IndexConfig(kind="hnsw", m=8, ef_construction=40, ef_search=20, seed=7)
IVF = IndexConfig(kind="ivf_pq", nbits=4, num_subquantizers=8, nprobe=3, refine=4, seed=3, hot_bytes=4000)
"""Trains on 624 vectors."""
SUBJECTS = np.random.default_rng(99).standard_normal((12, D))


def clustered(count: int, seed: int) -> Vectors:
    """Draw unit vectors, some duplicated, so that there are ties."""
    rng = np.random.default_rng(seed)
    vectors = SUBJECTS[rng.integers(len(SUBJECTS), size=count)]
    vectors = vectors + 0.5 * rng.standard_normal((count, D))
    vectors[count // 2 : count // 2 + count // 8] = vectors[: count // 8]
    unit: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return unit


Make = Callable[[Path], VectorIndex]
INDEXES: dict[str, Make] = {
    "flat": lambda folder: FlatIndex(D),
    "hnsw": lambda folder: HnswIndex(D, HNSW),
    "ivf_pq": lambda folder: IvfPqIndex(D, IVF),
    "tiered": lambda folder: TieredIvfPqIndex(D, IVF, folder, lambda job: job()),
}


def filled(folder: Path, kind: str, count: int) -> tuple[VectorIndex, FlatIndex, NDArray[np.int64], Vectors]:
    """Build an index with removed and later vectors, and the exact index."""
    index = INDEXES[kind](folder)
    ids, vectors = np.random.default_rng(0).permutation(10 * count)[:count], clustered(count, 1)
    first = count * 3 // 4
    index.add(ids[:first], vectors[:first])
    index.remove(ids[5:15].tolist())
    index.add(ids[first:], vectors[first:])
    kept = np.r_[0:5, 15:count]
    return index, exact(ids[kept], vectors[kept]), ids[kept], vectors[kept]


def exact(ids: NDArray[np.int64], vectors: Vectors) -> FlatIndex:
    flat = FlatIndex(D)
    flat.add(ids, vectors)
    return flat


def exhaustive(flat: FlatIndex, query: Vectors, k: int, allowed: AllowedIds) -> Ranking:
    """Compare all vectors, filter, take the first k."""
    wanted = set(allowed.ids.tolist())
    return [pair for pair in flat.search(query, len(flat)) if pair[0] in wanted][:k]


def some(ids: NDArray[np.int64], share: float, seed: int) -> AllowedIds:
    """Draw allowed ids, some unknown to the index."""
    rng = np.random.default_rng(seed)
    chosen = ids[rng.random(len(ids)) < share]
    return AllowedIds(np.sort(np.append(chosen, [-7, 10**15])))


@settings(max_examples=most_examples(60), deadline=None)
@given(st.integers(1, 60), st.integers(0, 2**20), st.floats(0, 1), st.integers(1, 20), st.integers(1, 5))
def test_flat_is_exact(count: int, seed: int, share: float, k: int, num_stages: int) -> None:
    ids = np.arange(count) * 3
    index = flat = exact(ids, clustered(count, seed))
    allowed = some(ids, share, seed)
    query = clustered(1, seed + 1)[0]
    expected = exhaustive(flat, query, k, allowed)
    assert index.search(query, k, None, allowed) == expected
    assert list(index.search_staged(query, k, num_stages, None, allowed))[-1] == expected


@pytest.mark.parametrize("kind", INDEXES)
def test_few_allowed_chunks_are_all_compared(tmp_path: Path, kind: str) -> None:
    index, flat, ids, vectors = filled(tmp_path, kind, 700)
    for seed, query in enumerate(clustered(8, 5)):
        allowed = some(ids, 0.01, seed)
        found = index.search(query, 10, None, allowed)
        expected = exhaustive(flat, query, 10, allowed)
        assert [one for one, _ in found] == [one for one, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-6)
        assert list(index.search_staged(query, 10, 4, None, allowed))[-1] == found
    assert index.search(query, 10, None, AllowedIds(np.empty(0, dtype=np.int64))) == []


@pytest.mark.parametrize("kind", INDEXES)
@pytest.mark.parametrize("share", [0.5, 0.05])
def test_recall_is_kept_without_comparing_all(
    tmp_path: Path, kind: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hnsw, "COMPARED_PER_CANDIDATE", 0)
    monkeypatch.setattr(allowed_lists, "ENTRIES_PER_COMPARED", 10**9)
    index, flat, ids, vectors = filled(tmp_path, kind, 1500)
    queries, shares = clustered(30, 5), []
    everything = AllowedIds(np.sort(ids))
    plain = [len(_ids(index.search(one, 10)) & _ids(exhaustive(flat, one, 10, everything))) / 10 for one in queries]
    allowed = some(ids, share, 2)
    for query in queries:
        found, expected = index.search(query, 10, None, allowed), exhaustive(flat, query, 10, allowed)
        assert len(found) == len(expected) and _ids(found) <= set(allowed.ids.tolist())
        shares.append(len(_ids(found) & _ids(expected)) / len(expected))
        *_, last = index.search_staged(query, 10, 4, None, allowed)
        assert [score for _, score in last] == pytest.approx([score for _, score in found], abs=1e-6)
    assert np.mean(shares) >= np.mean(plain) - 0.02


@pytest.mark.parametrize("kind", INDEXES)
def test_distant_allowed_chunks_are_found(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filter allows only subjects far from the question."""
    monkeypatch.setattr(allowed_lists, "ENTRIES_PER_COMPARED", 10**9)
    index, flat, ids, vectors = filled(tmp_path, kind, 1500)
    shares = []
    subject = np.argmax(vectors @ SUBJECTS.T, axis=1)
    for query in clustered(20, 5):
        far = np.argsort(SUBJECTS @ query)[:4]
        allowed = AllowedIds(np.sort(ids[np.isin(subject, far)]))
        found, expected = index.search(query, 10, None, allowed), exhaustive(flat, query, 10, allowed)
        assert len(found) == 10
        shares.append(len(_ids(found) & _ids(expected)) / 10)
    assert np.mean(shares) > 0.9


@pytest.mark.parametrize("kind", INDEXES)
def test_a_change_of_the_index_is_seen_by_the_same_filter(tmp_path: Path, kind: str) -> None:
    index, flat, ids, vectors = filled(tmp_path, kind, 700)
    query, new = clustered(2, 5)
    allowed = AllowedIds(np.sort(np.append(ids[:20], 10**6)))
    best = index.search(query, 3, None, allowed)[0][0]
    index.add(np.array([10**6]), query[None])
    assert index.search(query, 3, None, allowed)[0][0] == 10**6
    index.remove([10**6])
    assert index.search(query, 3, None, allowed)[0][0] == best


def _ids(ranking: Ranking) -> set[ChunkId]:
    return {chunk_id for chunk_id, _ in ranking}


# Words


@pytest.mark.parametrize("most_named", [0, 5000])
def test_filtered_bm25_equals_the_filtered_full_list(
    tmp_path: Path, most_named: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bm25, "_MOST_NAMED", most_named)
    rng = np.random.default_rng(4)
    texts = [" ".join(rng.choice(["key", "vault", "cat", "bread", "lock"], rng.integers(1, 9))) for _ in range(300)]
    index = Bm25Index(tmp_path / "sparse", "corpus")
    index.apply((), [chunk(number, text) for number, text in enumerate(texts, start=1)], 1)
    everything = index.search("vault keys", 300)
    for share in (0.0, 0.02, 0.3, 1.0):
        allowed = some(np.arange(1, 301), share, 1)
        wanted = [pair for pair in everything if allowed.has([pair[0]])[0]]
        for k in (1, 7, 400):
            assert index.search("vault keys", k, allowed) == wanted[:k]


# A collection


@pytest.fixture
def collection(tmp_path: Path) -> Iterator[tuple[QdrantIndex, NDArray[np.int64], Vectors]]:
    corpus = SqliteCorpus(tmp_path / "corpus.sqlite3")
    place = QdrantCollection(QdrantConfig(url="embedded"), IndexConfig(kind="qdrant"), tmp_path / "q", "x", D)
    index = QdrantIndex(place, corpus, D, 64)
    document = stored("a", *(f"text {number}" for number in range(60)))
    vectors = clustered(60, 1)
    corpus.commit([dataclasses.replace(document, vectors=vectors)])
    index.catch_up()
    index.refresh()
    yield index, np.array([chunk.chunk_id for chunk in document.chunks]), vectors
    index.close()
    corpus.close()


@pytest.mark.parametrize("most_compared", [0, 2000])
def test_filtered_search_of_a_collection(
    collection: tuple[QdrantIndex, NDArray[np.int64], Vectors], most_compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qdrant_index, "MOST_COMPARED", most_compared)
    index, ids, vectors = collection
    flat = exact(ids, vectors)
    for seed, share in enumerate((0.0, 0.1, 0.6, 1.0)):
        allowed = some(ids, share, seed)
        query = clustered(1, 50 + seed)[0]
        assert index.search(query, 10, None, allowed) == exhaustive(flat, query, 10, allowed)


# Whole


TEAMS = ("legal", "sales", "ops")
MODES: tuple[SearchMode, ...] = ("hybrid", "dense", "sparse")


@pytest.fixture
def teams(make_file: MakeFile, docs: Path) -> Path:
    for number in range(24):
        team = TEAMS[number % 3]
        make_file(f"{number}.md", f"---\nteam: {team}\nyear: {2000 + number}\n---\nKeys of vault {number}, {team}.\n")
    return docs


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_a_filter_holds_in_every_mode_and_finds_what_the_whole_search_finds(
    open_kb: OpenKb, teams: Path, kind: str
) -> None:
    kb = open_kb(StillroomConfig(index=IndexConfig(kind=kind)))  # type: ignore[arg-type]
    kb.add([teams])
    for mode in MODES:
        everything = kb.search("vault keys", mode=mode, top_k=24).results
        assert len(everything) == 24
        for where, holds in (
            ("team = legal", lambda number: number % 3 == 0),
            ("year >= 2020 and not team = ops", lambda number: number >= 20 and number % 3 != 2),
            ("type = md and path ~ /1", lambda number: str(number).startswith("1")),
        ):
            found = kb.search("vault keys", mode=mode, top_k=24, where=where).results
            wanted = {one.chunk.chunk_id for one in everything if holds(int(Path(one.chunk.document_id).stem))}
            assert wanted and {one.chunk.chunk_id for one in found} == wanted
            if mode != "hybrid":
                scores = {one.chunk.chunk_id: one.score for one in everything}
                assert [one.score for one in found] == pytest.approx([scores[one.chunk.chunk_id] for one in found])
            stages = list(kb.search_staged("vault keys", mode=mode, top_k=24, where=where))
            assert stages[-1].results == found
            assert all({one.chunk.chunk_id for one in stage.results} <= wanted for stage in stages)
        assert kb.search("vault keys", mode=mode, where="team = nobody").results == ()


def test_changed_metadata_changes_filtered_results(open_kb: OpenKb, teams: Path, make_file: MakeFile) -> None:
    kb = open_kb()
    kb.add([teams])
    assert len(kb.search("keys", where="team = board", top_k=24).results) == 0
    make_file("3.md", "---\nteam: board\n---\nKeys of vault 3, legal.\n")
    kb.add([teams])
    assert [Path(one.chunk.document_id).name for one in kb.search("keys", where="team = board").results] == ["3.md"]


def test_malformed_filter_is_refused(open_kb: OpenKb, teams: Path) -> None:
    kb = open_kb()
    with pytest.raises(FilterError, match="a value is missing"):
        kb.search("keys", where="team = ")
