"""Adapters of other search libraries for `stillroom bench index`: faiss called directly, hnswlib, usearch, bm25s.

Only faiss is a dependency of Stillroom; the others are measured if installed (`pip install hnswlib usearch bm25s`).
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import faiss as _faiss
import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
faiss: Any = _faiss  # its type stubs lack names that are created at import


class GraphPeer(Protocol):
    """An HNSW graph of another library over unit vectors, whose ids are positions."""

    name: str

    def build(self, vectors: Vectors, m: int, ef_construction: int, seed: int) -> None:
        """Index vectors [n, d] with as many threads as faiss uses."""
        ...

    def searcher(self, k: int, ef_search: int) -> Callable[[Vectors], NDArray[np.int64]]:
        """Return a single-threaded function from a query [d] to the ids [k] of its nearest vectors."""
        ...

    def num_bytes(self) -> int:
        """Return the size of the serialised index."""
        ...


class FaissPeer:
    name = "faiss"

    def build(self, vectors: Vectors, m: int, ef_construction: int, seed: int) -> None:
        self._index = faiss.IndexHNSWFlat(vectors.shape[1], m, faiss.METRIC_INNER_PRODUCT)
        self._index.hnsw.efConstruction = ef_construction
        self._index.hnsw.rng = faiss.RandomGenerator(seed)
        self._index.add(vectors)

    def searcher(self, k: int, ef_search: int) -> Callable[[Vectors], NDArray[np.int64]]:
        self._index.hnsw.efSearch = ef_search
        search = self._index.search

        def run(query: Vectors) -> NDArray[np.int64]:
            ids: NDArray[np.int64] = search(query[None], k)[1][0]
            return ids

        return run

    def num_bytes(self) -> int:
        return len(faiss.serialize_index(self._index))


class HnswlibPeer:
    name = "hnswlib"

    def build(self, vectors: Vectors, m: int, ef_construction: int, seed: int) -> None:
        library = importlib.import_module("hnswlib")
        self._index: Any = library.Index(space="ip", dim=vectors.shape[1])
        self._index.init_index(max_elements=len(vectors), M=m, ef_construction=ef_construction, random_seed=seed)
        self._index.add_items(vectors, num_threads=faiss.omp_get_max_threads())

    def searcher(self, k: int, ef_search: int) -> Callable[[Vectors], NDArray[np.int64]]:
        self._index.set_ef(ef_search)
        search = self._index.knn_query

        def run(query: Vectors) -> NDArray[np.int64]:
            ids: NDArray[np.int64] = search(query, k=k, num_threads=1)[0][0].astype(np.int64)
            return ids

        return run

    def num_bytes(self) -> int:
        return int(self._index.index_file_size())


class UsearchPeer:
    name = "usearch"

    def build(self, vectors: Vectors, m: int, ef_construction: int, seed: int) -> None:
        # usearch accepts no seed
        library = importlib.import_module("usearch.index")
        self._index: Any = library.Index(
            ndim=vectors.shape[1], metric="ip", dtype="f32", connectivity=m, expansion_add=ef_construction
        )
        keys = np.arange(len(vectors), dtype=np.uint64)
        self._index.add(keys, vectors, threads=faiss.omp_get_max_threads())

    def searcher(self, k: int, ef_search: int) -> Callable[[Vectors], NDArray[np.int64]]:
        self._index.expansion_search = ef_search
        search = self._index.search

        def run(query: Vectors) -> NDArray[np.int64]:
            ids: NDArray[np.int64] = search(query, k, threads=1).keys.astype(np.int64)
            return ids

        return run

    def num_bytes(self) -> int:
        return int(self._index.serialized_length)


class Bm25sPeer:
    """BM25 of bm25s with its numba backend, on the words of Stillroom's analyzer."""

    name = "bm25s"

    def __init__(self) -> None:
        self._library: Any = importlib.import_module("bm25s")

    def build(self, words: Sequence[Sequence[str]]) -> None:
        """Index documents, each a list of words, with the k1 and b of Stillroom's index."""
        self._index: Any = self._library.BM25(method="lucene", k1=1.2, b=0.75, backend="numba")
        self._index.index([list(some) for some in words], show_progress=False)

    def search(self, words: Sequence[str], k: int) -> NDArray[np.int64]:
        """Return the positions [k] of the best documents for the words of one query."""
        found = self._index.retrieve([list(words)], k=k, show_progress=False, n_threads=1)
        ids: NDArray[np.int64] = found.documents[0]
        return ids

    def num_bytes(self, folder: Path) -> int:
        """Save the index in an empty folder and return its size."""
        self._index.save(str(folder))
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


_GRAPHS: dict[str, tuple[str, Callable[[], GraphPeer]]] = {
    "faiss": ("faiss", FaissPeer),
    "hnswlib": ("hnswlib", HnswlibPeer),
    "usearch": ("usearch", UsearchPeer),
}
PEERS = (*_GRAPHS, "bm25s")


def graph_peers(names: Sequence[str]) -> tuple[dict[str, Callable[[], GraphPeer]], list[str]]:
    """Return constructors of the named graph peers, and a note for each that is not installed."""
    found, notes = {}, []
    for name in names:
        if name not in _GRAPHS:
            continue
        module, make = _GRAPHS[name]
        if importlib.util.find_spec(module) is None:
            notes.append(f"{name} is not installed, so it is left out; pip install {name}")
        else:
            found[name] = make
    return found, notes


def bm25_peer(names: Sequence[str]) -> tuple[Bm25sPeer | None, list[str]]:
    """Return the bm25s peer if it is named and installed; else None and a note."""
    if "bm25s" not in names:
        return None, []
    if importlib.util.find_spec("bm25s") is None or importlib.util.find_spec("numba") is None:
        return None, ["bm25s or numba is not installed, so BM25 is measured alone; pip install bm25s numba"]
    return Bm25sPeer(), []


def peer_versions() -> dict[str, str]:
    """Return the versions of the installed peers."""
    packages = {"faiss": "faiss-cpu"}
    versions = {}
    for name in PEERS:
        try:
            versions[name] = importlib.metadata.version(packages.get(name, name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
