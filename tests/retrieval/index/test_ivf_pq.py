"""Inverted lists against the exact index: exact at full effort, recall below it, training, removal, determinism."""

import dataclasses

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig
from stillroom.errors import ConfigError
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.index.ivf_pq import IvfPqIndex
from stillroom.retrieval.ranking import Ranking

Vectors = NDArray[np.float32]
CONFIG = IndexConfig(kind="ivf_pq", nbits=4, nprobe=8, seed=3)
"""Trains on 39 * 16 = 624 vectors."""
D = 32


def clustered(count: int, seed: int = 0) -> Vectors:
    rng = np.random.default_rng(seed)
    vectors = np.random.default_rng(99).standard_normal((40, D))[rng.integers(40, size=count)]
    vectors = vectors + 0.7 * rng.standard_normal((count, D))
    unit: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return unit


def ids(start: int, stop: int) -> NDArray[np.int64]:
    return np.arange(start, stop, dtype=np.int64)


def built(vectors: Vectors, config: IndexConfig = CONFIG, batch: int = 10_000) -> IvfPqIndex:
    index = IvfPqIndex(D, config)
    for start in range(0, len(vectors), batch):
        stop = min(len(vectors), start + batch)
        index.add(ids(start, stop), vectors[start:stop])
    return index


def flat(vectors: Vectors) -> FlatIndex:
    index = FlatIndex(D)
    index.add(ids(0, len(vectors)), vectors)
    return index


def ids_of(found: Ranking) -> list[int]:
    return [int(chunk_id) for chunk_id, _ in found]


def test_probing_every_list_and_refining_all_equals_flat() -> None:
    vectors, queries = clustered(1000), clustered(20, seed=1)
    index, exact = built(vectors, dataclasses.replace(CONFIG, refine=1000)), flat(vectors)
    assert index.is_trained
    for query in queries:
        found, true = index.search(query, 10, effort=index.nlist), exact.search(query, 10)
        assert ids_of(found) == ids_of(true)
        assert [score for _, score in found] == pytest.approx([score for _, score in true], abs=1e-6)


def test_untrained_index_equals_flat() -> None:
    vectors, queries = clustered(623), clustered(5, seed=1)
    index, exact = built(vectors), flat(vectors)
    assert not index.is_trained and index.nlist == 0 and index.effort_range() == (1, 1)
    assert all(index.search(query, 10) == exact.search(query, 10) for query in queries)


def test_more_lists_find_more() -> None:
    vectors, queries = clustered(2000), clustered(40, seed=1)
    index = built(vectors)
    truth = index.exact(queries, 10)

    def recall(nprobe: int) -> float:
        pairs = zip(queries, truth.tolist(), strict=True)
        return float(np.mean([len({*ids_of(index.search(query, 10, nprobe))} & {*true}) / 10 for query, true in pairs]))

    assert recall(1) < recall(8) <= recall(index.nlist)
    assert recall(8) > 0.9


def test_index_does_not_depend_on_batches_or_threads() -> None:
    vectors = clustered(2600)  # trains at 624 and again at 2496
    num_threads = faiss.omp_get_max_threads()
    try:
        states = []
        for batch, threads in ((10_000, 1), (300, 2), (77, 4)):
            faiss.omp_set_num_threads(threads)
            states.append(built(vectors, batch=batch).to_arrays())
    finally:
        faiss.omp_set_num_threads(num_threads)
    assert int(states[0]["num_trained"]) == 2496
    assert all(state["ivf_pq"].tobytes() == states[0]["ivf_pq"].tobytes() for state in states)
    other = built(vectors, dataclasses.replace(CONFIG, seed=4)).to_arrays()
    assert other["ivf_pq"].tobytes() != states[0]["ivf_pq"].tobytes(), "the seed is used"


def test_removed_vectors_are_not_found_and_can_be_added_again() -> None:
    vectors = clustered(800)
    index = built(vectors)
    index.remove([5, 6, 12_345])
    index.remove([])
    assert len(index) == 798
    assert {5, 6}.isdisjoint(ids_of(index.search(vectors[5], 798, index.nlist)))
    index.add(ids(5, 6), vectors[5:6])
    assert ids_of(index.search(vectors[5], 1)) == [5]
    index.remove(range(800))
    assert len(index) == 0 and index.search(vectors[0], 5) == []


@pytest.mark.parametrize("refine", [0, 4])
@pytest.mark.parametrize("count", [500, 900])
def test_restoring_changes_nothing(count: int, refine: int) -> None:
    vectors, config = clustered(count), dataclasses.replace(CONFIG, refine=refine)
    stayed, restored = built(vectors, config), IvfPqIndex(D, config)
    restored.restore(stayed.to_arrays())
    more = clustered(300, seed=2)
    for index in (stayed, restored):
        index.add(ids(count, count + 300), more)
    assert len(restored) == count + 300
    assert all(stayed.search(query, 10) == restored.search(query, 10) for query in more[:20])


def test_without_refining_no_full_vectors_are_kept() -> None:
    vectors = clustered(900)
    index = built(vectors, dataclasses.replace(CONFIG, refine=0))
    stored = sum(array.nbytes for array in index.to_arrays().values())
    assert stored < vectors.nbytes / 2
    assert len(index.search(vectors[0], 10)) == 10
    with pytest.raises(ConfigError, match=r"index\.refine"):
        index.exact(vectors[:1], 10)


def test_unfitting_dimension_and_arrays_are_refused() -> None:
    vectors = clustered(700)
    with pytest.raises(ConfigError, match="does not divide the 32 dimensions.*; 4 does"):
        IvfPqIndex(D, dataclasses.replace(CONFIG, num_subquantizers=5))
    with pytest.raises(ValueError, match="not an IVF-PQ"):
        IvfPqIndex(D, CONFIG).restore(flat(vectors).to_arrays())
    with pytest.raises(ValueError):
        IvfPqIndex(16, CONFIG).restore(built(vectors).to_arrays())
