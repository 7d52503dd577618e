"""`stillroom bench components`: time and memory of each part of a request (llmds Tables 2 to 5, Figures 4 to 6).

The sizes are the paper's: KV accounting of 100 sequences of 1,000 tokens, a scheduler with 1,000 requests and batches
of 32, BM25 over 100 documents, HNSW over 1,000 vectors of 128 dimensions, and hybrid search over 200 documents. Texts
and vectors are random. Times are processor time of the calling thread, so other work on the machine hardly changes
them. Memory is the growth of the process's peak during a run, which builds the part anew.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.config.settings import IndexConfig, SearchConfig
from stillroom.core.clock import SystemClock
from stillroom.core.document import Chunk
from stillroom.core.ids import DocumentId, chunk_id_of
from stillroom.retrieval.hybrid import HybridSearch
from stillroom.retrieval.index.bm25 import Bm25Index
from stillroom.retrieval.index.hnsw import HnswIndex
from stillroom.retrieval.index.indexes import Indexes
from stillroom_bench.experiments.experiment_options import ComponentsOptions
from stillroom_bench.experiments.prefix_sharing import sharing
from stillroom_bench.experiments.scheduling import scheduling_arms
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, run_arms
from stillroom_bench.quality.index_whole import PreparedEmbedder, corpus_of
from stillroom_bench.quality.search_arms import Vectors

KV, SCHEDULER, BM25, HNSW, HYBRID = "KV accounting", "scheduler", "BM25", "HNSW", "hybrid search"
_SHARED_TOKENS = 200
_NUM_BM25, _NUM_BM25_QUERIES = 100, 10
_NUM_HNSW, _NUM_HNSW_QUERIES, _DIMENSION = 1000, 100, 128
_NUM_HYBRID, _NUM_HYBRID_QUERIES = 200, 50
_NUM_WORDS, _VOCABULARY = 120, 5000
_NUM_FOUND = 10
_INDEX = IndexConfig(kind="hnsw", m=16, ef_construction=100, ef_search=100)
_NOTES = (
    "Times: processor time of the calling thread, per operation; percentiles are those of the operations of a run.",
    "Memory: growth of the process's peak resident memory while a run builds and uses the part. KV accounting holds no "
    "keys and values, and the paper's resident memory has the Python process in it, so absolute sizes are no match.",
    "Hybrid search: SQLite, HNSW, BM25 and fusion; questions are embedded before.",
)


def run_components(options: ComponentsOptions, on_run: Callable[[str, int], None] | None = None) -> BenchResult:
    """Run all parts."""
    seed = options.seed
    environment = record_environment()
    scheduling = scheduling_arms(seed, options.num_requests)[-1]
    arms = [
        Arm(KV, _renamed(sharing(_SHARED_TOKENS, seed, time.thread_time), ("attach", "match", "release"))),
        Arm(SCHEDULER, _renamed(scheduling.run, ("decision_cpu", "slow_decision_cpu", "submit_cpu"))),
        Arm(BM25, lambda repetition: _bm25(seed, repetition)),
        Arm(HNSW, lambda repetition: _hnsw(seed, repetition)),
        Arm(HYBRID, lambda repetition: _hybrid(seed, repetition)),
    ]
    samples = run_arms(arms, repeat=options.repeat, on_run=on_run)
    for metrics in samples.values.values():
        del metrics["wall_seconds"], metrics["peak_rss_bytes"]
    parameters = {"repeat": options.repeat, "seed": seed, "num_requests": options.num_requests}
    return BenchResult("stillroom bench components", environment, parameters, samples, BM25, notes=list(_NOTES))


def _renamed(run: Callable[[int], Metrics], operations: Sequence[str]) -> Callable[[int], Metrics]:
    """Keep the times of these operations only."""

    def chosen(repetition: int) -> Metrics:
        found = run(repetition)
        names = [f"{operation}{percent}_seconds" for operation in operations for percent in ("", *_PERCENTS)]
        return {name: found[name] for name in names if name in found}

    return chosen


_PERCENTS = ("_p50", "_p95", "_p99")


def _searched(search: Callable[[Any], Any], queries: Sequence[Any]) -> Metrics:
    """Return percentiles of the processor time of each query; the first query is not counted."""
    search(queries[0])
    seconds = []
    for query in queries:
        began = time.thread_time()
        search(query)
        seconds.append(time.thread_time() - began)
    return {f"search_p{percent}_seconds": float(np.percentile(seconds, percent)) for percent in (50, 95, 99)}


def _bm25(seed: int, repetition: int) -> Metrics:
    rng = np.random.default_rng([seed, repetition + 100, 1])
    with tempfile.TemporaryDirectory() as folder:
        index = Bm25Index(Path(folder) / "bm25", "bench")
        index.apply((), _chunks(rng, _NUM_BM25), 1)
        queries = [_text(rng, 6) for _ in range(_NUM_BM25_QUERIES)]
        return _searched(lambda text: index.search(text, _NUM_FOUND), queries)


def _hnsw(seed: int, repetition: int) -> Metrics:
    rng = np.random.default_rng([seed, repetition + 100, 2])
    index = HnswIndex(_DIMENSION, _INDEX)
    index.add(np.arange(_NUM_HNSW, dtype=np.int64), _vectors(rng, _NUM_HNSW))
    return _searched(lambda query: index.search(query, _NUM_FOUND), list(_vectors(rng, _NUM_HNSW_QUERIES)))


def _hybrid(seed: int, repetition: int) -> Metrics:
    rng = np.random.default_rng([seed, repetition + 100, 3])
    texts = [_text(rng, 6) for _ in range(_NUM_HYBRID_QUERIES)]
    embedder = PreparedEmbedder(dict(zip(texts, _vectors(rng, len(texts)), strict=True)))
    with tempfile.TemporaryDirectory() as folder:
        corpus = corpus_of(_chunks(rng, _NUM_HYBRID), _vectors(rng, _NUM_HYBRID), Path(folder) / "corpus.sqlite3")
        with contextlib.closing(corpus):
            (Path(folder) / "index").mkdir()
            indexes = Indexes(Path(folder) / "index", corpus, _INDEX, _DIMENSION)
            indexes.write()
            search = HybridSearch(corpus, indexes, embedder, SearchConfig(), SystemClock())
            return _searched(search.search, texts)


def _text(rng: np.random.Generator, num_words: int) -> str:
    """Return words whose frequencies follow Zipf's law."""
    ranks = (rng.zipf(1.3, size=num_words) - 1) % _VOCABULARY
    return " ".join(f"word{rank}" for rank in ranks.tolist())


def _chunks(rng: np.random.Generator, count: int) -> list[Chunk]:
    found = []
    for number in range(count):
        document_id = DocumentId(f"/bench/{number}")
        text = _text(rng, _NUM_WORDS)
        found.append(Chunk(chunk_id_of(document_id, 0, text), document_id, 0, text))
    return found


def _vectors(rng: np.random.Generator, count: int) -> Vectors:
    """Return random unit vectors, [count, d]."""
    vectors = rng.standard_normal((count, _DIMENSION), dtype=np.float32)
    found: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return found
