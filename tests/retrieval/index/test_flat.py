"""The exact index against numpy."""

import numpy as np
import pytest
from numpy.typing import NDArray

from stillroom.retrieval.index.flat import FlatIndex


def unit(rng: np.random.Generator, num: int, dimension: int = 16) -> NDArray[np.float32]:
    vectors = rng.standard_normal((num, dimension)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def test_search_equals_brute_force() -> None:
    rng = np.random.default_rng(0)
    vectors, queries = unit(rng, 300), unit(rng, 20)
    ids = rng.permutation(10**6)[:300].astype(np.int64)
    index = FlatIndex(16)
    index.add(ids[:100], vectors[:100])
    index.add(ids[100:], vectors[100:])
    for query in queries:
        scores = vectors @ query
        expected = sorted(zip(ids.tolist(), scores.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))[:10]
        found = index.search(query, 10)
        assert [chunk_id for chunk_id, _ in found] == [chunk_id for chunk_id, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-5)


def test_removed_vectors_are_not_found() -> None:
    rng = np.random.default_rng(1)
    vectors = unit(rng, 20)
    index = FlatIndex(16)
    index.add(np.arange(20, dtype=np.int64), vectors)
    index.remove([3, 4, 999])
    index.remove([])
    assert len(index) == 18
    assert {3, 4}.isdisjoint(chunk_id for chunk_id, _ in index.search(vectors[3], 20))


def test_equal_vectors_come_in_the_order_of_chunk_id() -> None:
    vector = unit(np.random.default_rng(2), 1)
    index = FlatIndex(16)
    index.add(np.array([9, 2, 7, 5, 1], dtype=np.int64), np.repeat(vector, 5, axis=0))
    assert [chunk_id for chunk_id, _ in index.search(vector[0], 3)] == [1, 2, 5]


def test_fewer_vectors_than_asked_for() -> None:
    index = FlatIndex(16)
    vector = unit(np.random.default_rng(3), 1)
    assert index.search(vector[0], 5) == []
    index.add(np.array([1], dtype=np.int64), vector)
    assert len(index.search(vector[0], 5)) == 1


def test_restored_index_finds_the_same() -> None:
    vectors = unit(np.random.default_rng(4), 50)
    index, other = FlatIndex(16), FlatIndex(16)
    index.add(np.arange(50, dtype=np.int64), vectors)
    other.restore(index.to_arrays())
    assert other.search(vectors[7], 5) == index.search(vectors[7], 5)
    with pytest.raises(ValueError, match="dimensions"):
        FlatIndex(8).restore(index.to_arrays())
    with pytest.raises(ValueError, match="not a flat index"):
        FlatIndex(16).restore({})
