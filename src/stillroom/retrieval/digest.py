"""One hash over everything that decides what a knowledge base answers: equal digests, equal rankings.

Not in it: how hard an approximate index is searched (`ef_search`, `nprobe`, a goal), for that is each user's choice;
and times and line numbers, which decide nothing. Document ids are, and they hold the path of a file: they break ties.
Vectors go in bit by bit, for however they were rounded, some would lie on the edge. When digests can be expected to
agree: docs/index-bench.md
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import faiss as _faiss
import numpy as np
from numpy.typing import NDArray

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId
from stillroom.retrieval.index.bm25 import Bm25Index
from stillroom.retrieval.index.words import WordAnalyzer, searched_text
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.manifest import HERE, SEARCHING, Manifest
from stillroom.retrieval.tiers.tiered_ivf import all_entries, without_entries
from stillroom.retrieval.vector_index import VectorIndex

faiss: Any = _faiss  # its type information lacks what is made at import

_BATCH = 1000

_EXACT = frozenset({"flat"})
"""Arrays of an exact search: it depends on the vectors and ids alone, in whatever order they lie there."""


@dataclass(frozen=True, slots=True)
class IndexDigest:
    """SHA-256 in hexadecimal, of all and of each part, so that two that differ say where."""

    settings: str
    """Of the manifest: embedder, chunker, index."""
    chunks: str
    """Ids and indexed texts, by id."""
    vectors: str
    """Embeddings, by id."""
    dense: str
    """The graph, or the quantizers and lists; nothing for an exact index."""
    sparse: str
    """Words of each chunk, and how many chunks hold each word as BM25 counts them."""

    @property
    def value(self) -> str:
        """Over all parts."""
        return hashlib.sha256("".join(dataclasses.astuple(self)).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return {"digest": self.value, **dataclasses.asdict(self)}


def index_digest(manifest: Manifest, corpus: Corpus, dense: VectorIndex, sparse: Bm25Index) -> IndexDigest:
    """Hash a knowledge base. The indexes are up to date with the corpus, and nobody writes meanwhile."""
    ids = sorted(corpus.changes_since(0).added)
    chunks, vectors, words = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    analyzer = WordAnalyzer()
    vocabulary: set[str] = set()
    for batch in _batches(ids):
        found = corpus.chunks(batch)
        for chunk_id in batch:
            chunk = found[chunk_id]
            _feed(chunks, _identity(chunk))
            counted = sorted(Counter(analyzer.stems(searched_text(chunk))).items())
            vocabulary.update(word for word, _ in counted)
            _feed(words, [int(chunk_id), counted])
        vectors.update(np.ascontiguousarray(corpus.embeddings(batch)[1], dtype="<f4").tobytes())
    _feed(words, [[word, sparse.document_frequency(word)] for word in sorted(vocabulary)])
    return IndexDigest(
        settings=_settings(manifest),
        chunks=chunks.hexdigest(),
        vectors=vectors.hexdigest(),
        dense=_arrays(_in_order(dense.to_arrays())),
        sparse=words.hexdigest(),
    )


def _settings(manifest: Manifest) -> str:
    left_out = {*HERE, *SEARCHING}
    index = {name: value for name, value in dataclasses.asdict(manifest.index).items() if name not in left_out}
    sha = hashlib.sha256()
    _feed(sha, [manifest.fingerprint, manifest.dimension, dataclasses.asdict(manifest.chunker), index])
    return sha.hexdigest()


def _identity(chunk: Chunk) -> list[Any]:
    return [int(chunk.chunk_id), str(chunk.document_id), chunk.ordinal, chunk.indexed_text]


def _in_order(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The same with entries of inverted lists by id: they decide nothing by their order, which removing changes."""
    found = dict(arrays)
    if len(found.get("ivf_pq", ())):
        lists = faiss.deserialize_index(found.pop("ivf_pq"))
        found["quantizers"] = faiss.serialize_index(without_entries(lists))
        for number, (ids, codes) in enumerate(all_entries(lists)):
            order = np.argsort(ids)
            found[f"list {number:09}"] = np.concatenate([ids[order, None].view(np.uint8), codes[order]], axis=1)
    return found


def _arrays(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Of arrays by name."""
    sha = hashlib.sha256()
    for name in sorted(set(arrays) - _EXACT):
        array = np.ascontiguousarray(arrays[name])
        _feed(sha, [name, str(array.dtype), list(array.shape)])
        sha.update(array.tobytes())
    return sha.hexdigest()


def _feed(sha: "hashlib._Hash", value: Any) -> None:
    """Add plain values, each with its own end."""
    sha.update(json.dumps(value, sort_keys=True).encode() + b"\n")


def _batches(ids: Sequence[ChunkId]) -> Iterator[Sequence[ChunkId]]:
    for start in range(0, len(ids), _BATCH):
        yield ids[start : start + _BATCH]
