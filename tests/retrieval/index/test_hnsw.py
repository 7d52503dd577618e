"""The graph against the exact index: recall, determinism, removal."""

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.index.hnsw import HnswIndex
from stillroom.retrieval.ranking import Ranking
from tests.retrieval.index.test_flat import unit

CONFIG = IndexConfig(kind="hnsw", m=16, ef_construction=80, ef_search=64, seed=7)


def built(vectors: NDArray[np.float32], config: IndexConfig = CONFIG) -> HnswIndex:
    index = HnswIndex(vectors.shape[1], config)
    half = len(vectors) // 2
    index.add(np.arange(half, dtype=np.int64), vectors[:half])
    index.add(np.arange(half, len(vectors), dtype=np.int64), vectors[half:])
    return index


def ids_of(found: Ranking) -> list[int]:
    return [int(chunk_id) for chunk_id, _ in found]


def test_recall_against_the_exact_index() -> None:
    rng = np.random.default_rng(0)
    vectors, queries = unit(rng, 3000, 32), unit(rng, 50, 32)
    flat = FlatIndex(32)
    flat.add(np.arange(3000, dtype=np.int64), vectors)
    index = built(vectors)
    shares = [len({*ids_of(flat.search(query, 10))} & {*ids_of(index.search(query, 10))}) / 10 for query in queries]
    assert np.mean(shares) > 0.9


def test_the_same_seed_gives_the_same_graph() -> None:
    vectors = unit(np.random.default_rng(1), 800, 32)
    one, two = built(vectors).to_arrays(), built(vectors).to_arrays()
    assert one["hnsw"].tobytes() == two["hnsw"].tobytes()


def test_a_reloaded_graph_grows_like_one_that_stayed_open() -> None:
    vectors = unit(np.random.default_rng(2), 900, 32)
    stayed = built(vectors[:600])
    reloaded = HnswIndex(32, CONFIG)
    reloaded.restore(stayed.to_arrays())
    more = np.arange(600, 900, dtype=np.int64)
    stayed.add(more, vectors[600:])
    reloaded.add(more, vectors[600:])
    assert stayed.to_arrays()["hnsw"].tobytes() == reloaded.to_arrays()["hnsw"].tobytes()


def test_removed_vectors_are_not_found_and_can_be_added_again() -> None:
    vectors = unit(np.random.default_rng(3), 200, 32)
    index = built(vectors)
    index.remove([5, 6, 12345])
    assert len(index) == 198
    assert {5, 6}.isdisjoint(ids_of(index.search(vectors[5], 50)))
    index.add(np.array([5], dtype=np.int64), vectors[6:7])
    assert ids_of(index.search(vectors[6], 1)) == [5]
    assert ids_of(index.search(vectors[5], 1)) != [5]


def test_graph_is_rebuilt_when_a_fifth_is_removed() -> None:
    vectors = unit(np.random.default_rng(4), 200, 32)
    index = built(vectors)
    index.remove(list(range(40)))
    assert len(index.to_arrays()["dead"]) == 40
    index.remove([40])
    assert len(index.to_arrays()["dead"]) == 0 and len(index) == 159
    assert ids_of(index.search(vectors[100], 1)) == [100]


def test_removing_everything_leaves_an_empty_index() -> None:
    vectors = unit(np.random.default_rng(5), 20, 32)
    index = built(vectors)
    index.remove(list(range(20)))
    assert (len(index), index.search(vectors[0], 3)) == (0, [])
