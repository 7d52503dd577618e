"""Staged searches: the last ranking is that of the plain search, each one before is the best of what was scanned."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stillroom.config.settings import FusionName, IndexConfig, IndexKind, SearchConfig, SearchMode, StillroomConfig
from stillroom.core.document import SearchResult
from stillroom.errors import UsageError
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.index.hnsw import HnswIndex
from stillroom.retrieval.index.ivf_pq import IvfPqIndex
from stillroom.retrieval.vector_index import VectorIndex, stages
from tests.examples import most_examples
from tests.retrieval.conftest import OpenKb

WORDS = ("vault", "key", "rotate", "bread", "bake", "oven", "cat", "sleep", "hunt", "night", "ledger", "audit")
Vectors = NDArray[np.float32]
D = 16
IVF = IndexConfig(kind="ivf_pq", nbits=4, nprobe=6, refine=3, seed=3)
"""Trains on 39 * 16 = 624 vectors."""
MAKERS: dict[str, Callable[[], VectorIndex]] = {
    "flat": lambda: FlatIndex(D),
    "ivf_pq": lambda: IvfPqIndex(D, IVF),
    "ivf_pq without refining": lambda: IvfPqIndex(D, dataclasses.replace(IVF, refine=0)),
}
KINDS = list(MAKERS)
SIZES = st.sampled_from([0, 1, 2, 7, 60, 700, 1000])


def clustered(count: int, seed: int, share_twins: float = 0.0) -> Vectors:
    """Draw unit vectors [count, D] around 12 centres, some duplicated, so that scores are equal."""
    rng = np.random.default_rng(seed)
    vectors = np.random.default_rng(99).standard_normal((12, D))[rng.integers(12, size=count)]
    vectors = vectors + 0.5 * rng.standard_normal((count, D))
    unit: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    twins = rng.random(count) < share_twins
    unit[twins] = unit[rng.integers(max(1, count // 20), size=int(twins.sum()))]
    return unit


def built(kind: str, vectors: Vectors, seed: int = 0) -> VectorIndex:
    """Build an index with shuffled chunk ids and every tenth removed again."""
    index = MAKERS[kind]()
    ids = np.random.default_rng(seed).permutation(10 * len(vectors) + 1)[: len(vectors)].astype(np.int64)
    index.add(ids, vectors)
    index.remove(ids[::10].tolist())
    return index


@given(count=st.integers(0, 200), num_stages=st.integers(1, 30))
def test_stages_cover_everything_once(count: int, num_stages: int) -> None:
    runs = stages(count, num_stages)
    assert [at for run in runs for at in run] == list(range(count))
    assert len(runs) == max(1, min(count, num_stages))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    size=SIZES, seed=st.integers(0, 50), k=st.integers(1, 40), num_stages=st.integers(1, 9), effort=st.integers(0, 30)
)
def test_last_stage_of_an_index_equals_the_plain_search(
    kind: str, size: int, seed: int, k: int, num_stages: int, effort: int
) -> None:
    index = built(kind, clustered(size, seed, share_twins=0.3), seed)
    query = clustered(1, seed + 1)[0]
    lists = list(index.search_staged(query, k, num_stages, effort or None))
    assert lists[-1] == index.search(query, k, effort or None)
    assert 1 <= len(lists) <= num_stages
    for found in lists:
        assert found == sorted(found, key=lambda pair: (-pair[1], pair[0])) and len(found) <= k


@pytest.mark.parametrize("kind", KINDS)
def test_abandoned_staged_search_changes_nothing(kind: str) -> None:
    index, query = built(kind, clustered(900, 1)), clustered(1, 2)[0]
    before = index.search(query, 10)
    left = index.search_staged(query, 10, 5)
    next(left)
    other = list(index.search_staged(query, 10, 5))
    assert other[-1] == before == list(left)[-1] == index.search(query, 10)


def test_stage_of_a_flat_index_is_the_best_of_its_rows_so_far() -> None:
    vectors, query = clustered(50, 3), clustered(1, 4)[0]
    index = FlatIndex(D)
    index.add(np.arange(50, dtype=np.int64), vectors)
    lists = list(index.search_staged(query, 5, 4))
    for found, num_seen in zip(lists, (12, 25, 37, 50), strict=True):
        nearest = np.argsort(-(vectors[:num_seen] @ query), kind="stable")[:5]
        assert [chunk_id for chunk_id, _ in found] == nearest.tolist()


@pytest.mark.parametrize("refine", [0, 3])
def test_a_stage_of_ivf_is_a_search_of_its_nearest_lists(refine: int) -> None:
    index = IvfPqIndex(D, dataclasses.replace(IVF, refine=refine))
    index.add(np.arange(1500, dtype=np.int64), clustered(1500, 5, share_twins=0.1))
    query = clustered(1, 6)[0]
    lists = list(index.search_staged(query, 10, 4, effort=8))
    assert lists == [index.search(query, 10, effort=nprobe) for nprobe in (2, 4, 6, 8)]


def test_equal_codes_come_in_the_order_of_chunk_id() -> None:
    vectors = clustered(700, 7)
    index = IvfPqIndex(D, dataclasses.replace(IVF, refine=0))
    index.add(np.random.default_rng(0).permutation(700).astype(np.int64), vectors)
    index.add(np.arange(1000, 1040, dtype=np.int64)[::-1].copy(), np.repeat(vectors[:1], 40, axis=0))
    everything = index.search(vectors[0], len(index), index.nlist)
    assert len({score for _, score in everything[:30]}) < 20, "there are ties among the first"
    for k in range(1, 60):
        assert index.search(vectors[0], k, index.nlist) == everything[:k]


def exact_vectors(count: int, seed: int) -> Vectors:
    """Vectors [count, 8] of whole numbers, so small that no product of two is rounded, whatever the order of its sum;
    so large that hardly two are equal."""
    return np.random.default_rng(seed).integers(-1000, 1001, size=(count, 8)).astype(np.float32)


@settings(max_examples=most_examples(60), deadline=None)
@given(
    size=st.sampled_from([1, 2, 10, 60, 400]),
    seed=st.integers(0, 500),
    k=st.integers(1, 30),
    num_stages=st.integers(1, 9),
    effort=st.integers(1, 60),
    share_removed=st.sampled_from([0.0, 0.0, 0.1, 0.19]),
)
def test_hnsw_walk_ends_with_the_result_of_faiss(
    size: int, seed: int, k: int, num_stages: int, effort: int, share_removed: float
) -> None:
    vectors, query = exact_vectors(size, seed), exact_vectors(1, seed + 1000)[0]
    assume(len(np.unique(vectors @ query)) == size)  # of equal scores faiss keeps any
    index = HnswIndex(8, IndexConfig(kind="hnsw", m=4, ef_construction=16, seed=seed))
    index.add(10 * np.arange(size, dtype=np.int64), vectors)
    index.remove(range(0, 10 * int(size * share_removed), 10))
    lists = list(index.search_staged(query, k, num_stages, effort))
    assert lists[-1] == index.search(query, k, effort)
    assert 1 <= len(lists) <= num_stages
    best = [found[0][1] for found in lists if found]
    assert best == sorted(best), "it only gets better"


def test_abandoned_walk_changes_nothing_and_a_changed_graph_is_searched_again() -> None:
    vectors = clustered(300, 8)
    index = HnswIndex(D, IndexConfig(kind="hnsw", m=8, ef_construction=40))
    index.add(np.arange(200, dtype=np.int64), vectors[:200])
    query = clustered(1, 9)[0]
    query.flags.writeable = False  # as the embedder gives it
    left = index.search_staged(query, 10, 4)
    next(left)
    index.add(np.arange(200, 300, dtype=np.int64), vectors[200:])
    assert list(left) == [index.search(query, 10)]
    index.remove([chunk_id for chunk_id, _ in index.search(query, 3)])
    assert list(index.search_staged(query, 10, 4))[-1] == index.search(query, 10)
    restored = HnswIndex(D, IndexConfig(kind="hnsw", m=8, ef_construction=40))
    restored.restore(index.to_arrays())
    assert list(restored.search_staged(query, 10, 4))[-1] == index.search(query, 10)


# Whole searches


def notes(folder: Path, count: int) -> None:
    """Write a folder of short documents about a few topics."""
    rng = np.random.default_rng(0)
    for number in range(count):
        (folder / f"{number}.txt").write_text(" ".join(rng.choice(WORDS, size=6)) + f" {number}", encoding="utf-8")


def found(result: SearchResult) -> list[tuple[int, float, dict[str, float]]]:
    return [(int(scored.chunk.chunk_id), scored.score, dict(scored.scores)) for scored in result.results]


@pytest.mark.parametrize("fusion", ["convex", "rrf", "minmax"])
@pytest.mark.parametrize("kind", ["flat", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("hnsw", "ivf_pq"))])
def test_last_stage_of_every_mode_equals_the_plain_search(
    open_kb: OpenKb, docs: Path, kind: IndexKind, fusion: FusionName
) -> None:
    notes(docs, 60)
    index = IndexConfig(kind=kind, nbits=1, nprobe=2, refine=2, m=4, ef_search=8)  # IVF trains on 78 vectors
    kb = open_kb(StillroomConfig(index=index, search=SearchConfig(fusion=fusion, num_candidates=7)))
    kb.add([docs])
    modes: tuple[SearchMode, ...] = ("hybrid", "dense", "sparse")
    for mode in modes:
        for query in ("who audits the ledger?", "cats", "the", "zebra 17"):
            for top_k, num_stages in ((1, 1), (5, 2), (3, 6), (40, 4)):
                results = list(kb.search_staged(query, mode=mode, top_k=top_k, num_stages=num_stages))
                assert found(results[-1]) == found(kb.search(query, mode=mode, top_k=top_k))
                assert len(results) <= num_stages
                costs = [result.embed_seconds + result.search_seconds for result in results]
                assert costs == sorted(costs)


def test_bm25_result_comes_before_the_question_is_embedded(open_kb: OpenKb, docs: Path) -> None:
    notes(docs, 30)
    kb = open_kb()
    kb.add([docs])
    query = "a question that nobody has asked: rotate the key"
    first, second, *_ = kb.search_staged(query, num_stages=3)
    assert found(first) == found(kb.search(query, mode="sparse")) and first.embed_seconds == 0.0
    assert second.embed_seconds > 0.0 and set(second.results[0].scores) == {"dense", "sparse"}
    no_words = list(kb.search_staged("the", num_stages=3))
    assert len(no_words) == 3 and all("dense" in result.results[0].scores for result in no_words)


def test_errors_come_with_the_first_result(open_kb: OpenKb) -> None:
    with pytest.raises(UsageError):
        next(open_kb().search_staged(" "))
    assert [result.results for result in open_kb().search_staged("nothing was added")] == [()]


def test_searches_and_writes_can_run_between_stages(open_kb: OpenKb, docs: Path) -> None:
    """A change between stages replaces the remaining stages by one plain search."""
    notes(docs, 30)
    kb = open_kb()
    kb.add([docs])
    results: Iterator[SearchResult] = kb.search_staged("bread", mode="dense", num_stages=5)
    next(results)

    def write() -> None:
        (docs / "new.txt").write_text("bread bread bread bread", encoding="utf-8")
        kb.add([docs])
        kb.search("bread", mode="dense")

    writer = threading.Thread(target=write)
    writer.start()
    writer.join(60)
    assert not writer.is_alive(), "a paused search blocks no other thread"
    rest = list(results)
    assert len(rest) == 1 and found(rest[0]) == found(kb.search("bread", mode="dense"))
    assert rest[0].results[0].chunk.text == "bread bread bread bread"
