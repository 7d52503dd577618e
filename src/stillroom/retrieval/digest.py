"""Digest of a knowledge base: one hash over everything that decides rankings. Equal digests, equal rankings.

Excluded: search effort (`ef_search`, `nprobe`, goals), which each user chooses; times and line numbers. Included:
document ids, with file paths, because they break ties; and vectors bit by bit. When digests agree: docs/index-bench.md
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.core.document import Chunk
from stillroom.errors import StorageError
from stillroom.retrieval.index.bm25 import Bm25Index
from stillroom.retrieval.index.indexes import Indexes
from stillroom.retrieval.index.words import WordAnalyzer, searched_text
from stillroom.retrieval.lazy_faiss import faiss
from stillroom.retrieval.store.corpus import Corpus
from stillroom.retrieval.store.manifest import MACHINE_SETTINGS, SEARCH_SETTINGS, Manifest
from stillroom.retrieval.tiers.faiss_lists import all_entries, without_entries
from stillroom.retrieval.vector_index import SearchedIndex

_BATCH = 1000

_EXACT = frozenset({"flat"})
"""Arrays of an exact index: their order does not change a search."""


@dataclass(frozen=True, slots=True)
class IndexDigest:
    """SHA-256 in hexadecimal, of the whole and of each part, so that a difference can be located."""

    settings: str
    """Manifest: embedder, chunker, index."""
    chunks: str
    """Ids and indexed texts, by id."""
    vectors: str
    """Embeddings, by id."""
    dense: str
    """Graph, or quantizers and lists; empty for an exact index."""
    sparse: str
    """Words of each chunk, and document frequencies as BM25 counts them."""

    @property
    def value(self) -> str:
        """Hash over all parts."""
        return hashlib.sha256("".join(dataclasses.astuple(self)).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"digest": self.value, **dataclasses.asdict(self)}


def current_digest(manifest: Manifest, corpus: Corpus, indexes: Indexes, *, may_write: bool) -> IndexDigest:
    """Bring the indexes up to date, and hash a knowledge base.

    Args:
        may_write: Whether the write lock is held. Otherwise missing postings are made for this process only.

    Raises:
        StorageError: The postings are behind, and may not be written.
    """
    if may_write:
        indexes.write()
    elif not indexes.build_private_postings():
        raise StorageError(
            f"{indexes.folder} cannot be written, and its postings are behind; search it once where it can be written"
        )
    return index_digest(manifest, corpus, *indexes.current())


def index_digest(manifest: Manifest, corpus: Corpus, dense: SearchedIndex, sparse: Bm25Index) -> IndexDigest:
    """Hash a knowledge base. Precondition: the indexes are up to date, and no process writes."""
    ids = sorted(corpus.changes_since(0).added)
    chunks, vectors, words = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    analyzer = WordAnalyzer()
    vocabulary: set[str] = set()
    for batch in (ids[start : start + _BATCH] for start in range(0, len(ids), _BATCH)):
        found = corpus.chunks(batch)
        for chunk_id in batch:
            chunk = found[chunk_id]
            _feed(chunks, _identity(chunk))
            text = searched_text(chunk)
            counted = sorted(Counter(analyzer.stems(text, analyzer.language_of(text))).items())
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
    excluded = {*MACHINE_SETTINGS, *SEARCH_SETTINGS}
    index = {name: value for name, value in dataclasses.asdict(manifest.index).items() if name not in excluded}
    sha = hashlib.sha256()
    _feed(sha, [manifest.fingerprint, manifest.dimension, dataclasses.asdict(manifest.chunker), index])
    return sha.hexdigest()


def _identity(chunk: Chunk) -> list[Any]:
    return [int(chunk.chunk_id), str(chunk.document_id), chunk.ordinal, chunk.indexed_text]


def _in_order(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Sort the entries of inverted lists by id: removals change their order, which does not change a search."""
    found = dict(arrays)
    if len(found.get("ivf_pq", ())):
        lists = faiss.deserialize_index(found.pop("ivf_pq"))
        found["quantizers"] = faiss.serialize_index(without_entries(lists))
        for number, (ids, codes) in enumerate(all_entries(lists)):
            order = np.argsort(ids)
            found[f"list {number:09}"] = np.concatenate([ids[order, None].view(np.uint8), codes[order]], axis=1)
    return found


def _arrays(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Hash arrays by name."""
    sha = hashlib.sha256()
    for name in sorted(set(arrays) - _EXACT):
        array = np.ascontiguousarray(arrays[name])
        _feed(sha, [name, str(array.dtype), list(array.shape)])
        sha.update(array.tobytes())
    return sha.hexdigest()


def _feed(sha: "hashlib._Hash", value: Any) -> None:
    """Hash a JSON value and a separator."""
    sha.update(json.dumps(value, sort_keys=True).encode() + b"\n")
