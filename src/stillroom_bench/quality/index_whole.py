"""Arms of `stillroom bench index` for BM25 and for hybrid searches through SQLite, both indexes and fusion."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.config.settings import EmbedderConfig, IndexConfig, SearchConfig
from stillroom.core.clock import SystemClock
from stillroom.core.document import Chunk
from stillroom.core.ids import DocumentId, chunk_id_of
from stillroom.retrieval.embedder import Embedder
from stillroom.retrieval.hybrid import HybridSearch
from stillroom.retrieval.index.bm25 import Bm25Index
from stillroom.retrieval.index.indexes import Indexes
from stillroom.retrieval.index.words import WordAnalyzer
from stillroom.retrieval.store.sql_rows import StoredDocument
from stillroom.retrieval.store.sqlite_corpus import SqliteCorpus
from stillroom_bench.instrument.harness import Arm, Metrics
from stillroom_bench.loads.workloads import RealData, choose_queries, clustered_vectors, random_texts
from stillroom_bench.quality.peers_ann import Bm25sPeer
from stillroom_bench.quality.search_arms import Vectors, latency_metrics, timed

_NUM_QUERIES = 200
_NUM_EMBEDDED = 30
"""Number of embedded queries; embedding a query takes longer than 30 searches."""
_DEPTH = 50
"""Candidates of each retriever."""
_BATCH = 2000
_INDEXES = {
    "flat": IndexConfig(),
    "hnsw m=16 ef=100": IndexConfig(kind="hnsw", m=16, ef_construction=100, ef_search=100),
}


def measure_bm25(
    real: RealData, size: int, seed: int, folder: Path, peer: Bm25sPeer | None
) -> tuple[list[Arm], list[dict[str, Any]]]:
    """Build BM25 indexes of generated texts. Returns arms that search for the best chunks, and rows of build costs."""
    chunks = list(chunks_of(random_texts(real.texts, size, seed)))
    queries = choose_queries(real, _NUM_QUERIES, seed)[0]
    own = Bm25Index(folder / "bm25", "bench")
    began = time.perf_counter()
    own.apply((), chunks, 1)
    rows = [_at_rest("stillroom", size, time.perf_counter() - began, _folder_bytes(folder / "bm25"))]
    arms = [_text_arm(f"BM25 {size:,} stillroom", lambda text: own.search(text, _DEPTH), queries)]
    if peer is not None:
        words = WordAnalyzer()  # both indexes get the same words
        began = time.perf_counter()
        peer.build([words.stems(chunk.indexed_text) for chunk in chunks])
        rows.append(_at_rest("bm25s", size, time.perf_counter() - began, peer.num_bytes(folder / "bm25s")))
        arms.append(
            _text_arm(f"BM25 {size:,} bm25s", lambda text: peer.search(words.query_stems(text), _DEPTH), queries)
        )
    return arms, rows


@contextlib.contextmanager
def whole_searches(real: RealData, size: int, seed: int, folder: Path) -> Iterator[list[Arm]]:
    """Yield arms that search generated documents as `KnowledgeBase` does, and an arm that embeds queries.

    The search arms use precomputed query vectors.
    """
    chunks = list(chunks_of(random_texts(real.texts, size, seed)))
    vectors = clustered_vectors(real.documents, size, seed)
    texts, query_vectors = choose_queries(real, _NUM_QUERIES, seed)
    prepared = PreparedEmbedder(dict(zip(texts, query_vectors, strict=True)))
    arms = []
    with contextlib.closing(corpus_of(chunks, vectors, folder / "corpus.sqlite3")) as corpus:
        for name, config in _INDEXES.items():
            place = folder / config.kind
            place.mkdir()
            indexes = Indexes(place, corpus, config, vectors.shape[1])
            indexes.write()
            search = HybridSearch(corpus, indexes, prepared, SearchConfig(), SystemClock())
            arms.append(_text_arm(f"hybrid {size:,} {name}", search.search, texts))
        embedder = Embedder(EmbedderConfig())
        arms.append(_text_arm("embed one query", lambda text: embedder.embed_queries([text]), texts[:_NUM_EMBEDDED]))
        yield arms


class PreparedEmbedder(Embedder):
    """An embedder with precomputed vectors of known queries."""

    def __init__(self, vectors: dict[str, Vectors]) -> None:
        super().__init__(EmbedderConfig())
        self._known = vectors

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        return np.stack([self._known[text] for text in texts])


def _text_arm(name: str, search: Callable[[str], Any], queries: Sequence[str]) -> Arm:
    def run(_: int) -> Metrics:
        return latency_metrics(timed(search, queries)[0])

    return Arm(name, run)


def _at_rest(name: str, size: int, seconds: float, num_bytes: int) -> dict[str, Any]:
    return {
        "index": name,
        "chunks": size,
        "build seconds": seconds,
        "chunks/s": round(size / seconds),
        "index MiB": num_bytes / 2**20,
    }


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def chunks_of(texts: Iterable[str]) -> Iterator[Chunk]:
    """Yield each text as the only chunk of a document."""
    for number, text in enumerate(texts):
        document_id = DocumentId(f"/bench/{number}")
        yield Chunk(chunk_id_of(document_id, 0, text), document_id, 0, text)


def corpus_of(chunks: Sequence[Chunk], vectors: Vectors, path: Path) -> SqliteCorpus:
    """Write a new corpus in which each chunk is a document, with vectors [len(chunks), d]."""
    corpus = SqliteCorpus(path)
    documents = [
        StoredDocument(
            document_id=chunk.document_id,
            path=str(chunk.document_id),
            record_id=None,
            title="",
            content_hash="",
            num_bytes=len(chunk.text),
            added_at=0.0,
            chunks=(chunk,),
            vectors=vectors[number : number + 1],
        )
        for number, chunk in enumerate(chunks)
    ]
    for start in range(0, len(chunks), _BATCH):
        corpus.commit(documents[start : start + _BATCH])
    return corpus
