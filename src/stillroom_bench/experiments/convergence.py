"""`stillroom bench convergence`: after which stage the documents of a staged search are final (RAGCache 5.3), and the
cost of stages.

A list is final at a stage if its first documents, in order, no longer change. Corpora, indexes and questions are those
of `bench index`. Hybrid searches run over the real documents only, because generated ones share no meaningful words
with the questions.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.config.settings import IndexConfig, SearchConfig
from stillroom.core.clock import SystemClock
from stillroom.retrieval.hybrid import HybridSearch
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.index.graph_walk import GraphWalk
from stillroom.retrieval.index.hnsw import HnswIndex
from stillroom.retrieval.index.indexes import Indexes
from stillroom.retrieval.index.ivf_pq import IvfPqIndex
from stillroom.retrieval.ranking import ranked_arrays
from stillroom.retrieval.vector_index import VectorIndex
from stillroom_bench.experiments.experiment_options import ConvergenceOptions
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, run_arms
from stillroom_bench.loads.workloads import RealData, choose_queries, clustered_vectors, load_real_data
from stillroom_bench.quality.index_whole import PreparedEmbedder, chunks_of, corpus_of
from stillroom_bench.quality.search_arms import Vectors, latency_metrics, timed

FIRST = (1, 3, 5)
"""Lengths of the head of a list that is compared: as many documents as a prompt holds."""

_DEPTH = 50
"""Results per search: the default of `search.num_candidates`."""
_TOP_K = 5
_NUM_QUESTIONS = 500
_NUM_TIMED = 300
_KINDS = {
    "flat": IndexConfig(),
    "hnsw": IndexConfig(kind="hnsw", m=16, ef_construction=100, ef_search=100),
    "ivf_pq": IndexConfig(kind="ivf_pq", nbits=6, nprobe=32),
}
"""6 bits per code, because 8 need ten thousand training vectors."""

Row = dict[str, Any]
Ids = list[int]


def run_convergence(
    options: ConvergenceOptions, work_dir: Path, on_progress: Callable[[str], None] = lambda _: None
) -> BenchResult:
    """Run the benchmark.

    Args:
        work_dir: folder that keeps embeddings between runs.

    Raises:
        UsageError: a data set is missing or empty.
        DocumentError: a line of a data set cannot be read.
    """
    size, num_stages, repeat, seed = options.size, options.num_stages, options.repeat, options.seed
    environment = record_environment()
    real = load_real_data(options.datasets, work_dir, on_progress)
    vectors = clustered_vectors(real.documents, size, seed)
    indexes = {kind: _built(config, vectors, on_progress) for kind, config in _KINDS.items()}
    questions, queries = choose_queries(real, _NUM_QUESTIONS, seed)
    dense_rows = []
    for kind, index in indexes.items():
        on_progress(f"{len(queries):,} searches of {kind} in stages")
        pairs = ((index.search_staged(query, _DEPTH, num_stages), index.search(query, _DEPTH)) for query in queries)
        dense_rows += _rows(
            kind, [([_ids(found) for found in lists], _ids(plain)) for lists, plain in pairs], num_stages
        )
    with tempfile.TemporaryDirectory(dir=work_dir) as folder:
        hybrid_rows = _whole_searches(real, questions, Path(folder), num_stages, on_progress)
    arms = _arms(indexes, queries[:_NUM_TIMED], num_stages)
    samples = run_arms(arms, repeat=repeat, on_run=lambda arm, at: on_progress(f"{arm}, run {at}"), only_own=True)
    return BenchResult(
        "stillroom bench convergence",
        environment,
        {
            "datasets": [path.name for path in options.datasets],
            "num_real_documents": len(real.texts),
            "num_questions": len(queries),
            "size": size,
            "num_stages": num_stages,
            "repeat": repeat,
            "seed": seed,
        },
        samples,
        "plain",
        tables={f"dense, {size:,} vectors": dense_rows, f"hybrid, {len(real.texts):,} documents": hybrid_rows},
    )


def first_final(lists: Sequence[Ids], first: int) -> int:
    """Return the 1-based number of the list from which on the first `first` ids equal those of the last list."""
    num = len(lists)
    while num > 1 and lists[num - 2][:first] == lists[-1][:first]:
        num -= 1
    return num


def _rows(index: str, searches: Sequence[tuple[Sequence[Ids], Ids]], num_stages: int) -> list[Row]:
    """Return one row per head length: how early it is final."""
    exact = float(np.mean([lists[-1] == plain for lists, plain in searches]))
    rows = []
    for first in FIRST:
        shares = np.array([first_final(lists, first) / max(len(lists), num_stages) for lists, _ in searches])
        row: Row = {"index": index, "first": first, "mean share of stages": float(shares.mean())}
        for share in (1 / num_stages, 0.25, 0.5, 0.75):
            row[f"final after {share:.3g}"] = float((shares <= share).mean())
        rows.append({**row, "last list is the plain search's": exact})
    return rows


def _ids(found: Sequence[tuple[int, float]]) -> Ids:
    return [int(chunk_id) for chunk_id, _ in found]


def _built(config: IndexConfig, vectors: Vectors, on_progress: Callable[[str], None]) -> VectorIndex:
    on_progress(f"building {config.kind} over {len(vectors):,} vectors")
    index: VectorIndex
    if config.kind == "hnsw":
        index = HnswIndex(vectors.shape[1], config)
    elif config.kind == "ivf_pq":
        index = IvfPqIndex(vectors.shape[1], config)
    else:
        index = FlatIndex(vectors.shape[1])
    index.add(np.arange(len(vectors), dtype=np.int64), vectors)
    return index


# Whole searches


def _whole_searches(
    real: RealData, questions: Sequence[str], folder: Path, num_stages: int, on_progress: Callable[[str], None]
) -> list[Row]:
    corpus = corpus_of(list(chunks_of(real.texts)), real.documents, folder / "corpus.sqlite3")
    embedder = PreparedEmbedder(dict(zip(real.questions, real.queries, strict=True)))
    rows = []
    for kind, config in _KINDS.items():
        on_progress(f"{len(questions):,} hybrid searches with {kind} in stages")
        place = folder / kind
        place.mkdir()
        indexes = Indexes(place, corpus, config, real.documents.shape[1])
        indexes.write()
        search = HybridSearch(corpus, indexes, embedder, SearchConfig(), SystemClock())

        def ids(results: Iterator[Any]) -> list[Ids]:
            return [[int(scored.chunk.chunk_id) for scored in result.results] for result in results]

        searches = []
        for text in questions:
            lists = ids(search.search_staged(text, "hybrid", _TOP_K, num_stages))
            searches.append((lists, ids(iter([search.search(text, "hybrid", _TOP_K)]))[0]))
        rows += _rows(kind, searches, num_stages)
    corpus.close()
    return rows


# What the stages cost


def _arms(indexes: dict[str, VectorIndex], queries: Vectors, num_stages: int) -> list[Arm]:
    """Return arms that search each index unstaged and staged; for HNSW also Stillroom's graph walk without pauses."""
    arms = []
    for kind, index in indexes.items():

        def plain(query: Vectors, index: VectorIndex = index) -> Any:
            return index.search(query, _DEPTH)

        def staged(query: Vectors, index: VectorIndex = index) -> Any:
            return list(index.search_staged(query, _DEPTH, num_stages))

        arms += [_arm(f"{kind}/plain", plain, queries), _arm(f"{kind}/{num_stages} stages", staged, queries)]
        if isinstance(index, HnswIndex):
            arms.append(_arm(f"{kind}/walk without a pause", _walker(index), queries))
    return arms


def _arm(name: str, search: Callable[[Vectors], Any], queries: Vectors) -> Arm:
    def run(_: int) -> Metrics:
        return latency_metrics(timed(search, list(queries))[0])

    return Arm(name, run)


def _walker(index: HnswIndex) -> Callable[[Vectors], Any]:
    """Return a search that runs the complete graph walk; ids equal rows here."""
    graph = index.walkable_graph()
    ef_search = _KINDS["hnsw"].ef_search

    def search(query: Vectors) -> Any:
        walk = GraphWalk(graph, query, _DEPTH, ef_search)
        walk.advance(len(index))
        return ranked_arrays(*walk.best())

    return search
