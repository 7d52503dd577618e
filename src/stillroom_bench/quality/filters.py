"""`stillroom bench filters`: recall and speed of an index under filters that allow 50 %, 10 %, 1 % and 0.1 %.

Each share has two filters: random chunks, and chunks of one subject (those nearest to a random document), which is far
from most queries. The truth is an exhaustive search of the allowed chunks. Arms: the strategy that Stillroom chooses,
comparing the query with all allowed chunks, and always searching the approximate index.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig
from stillroom.errors import UsageError
from stillroom.retrieval.filters import allowed_lists
from stillroom.retrieval.filters.allowed import AllowedIds
from stillroom.retrieval.index import hnsw
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.index.hnsw import HnswIndex
from stillroom.retrieval.index.ivf_pq import IvfPqIndex
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, run_arms
from stillroom_bench.loads.workloads import choose_queries, clustered_vectors, load_real_data
from stillroom_bench.quality.quality_options import FilterOptions
from stillroom_bench.quality.search_arms import K, Vectors, dense_arm

SHARES = (0.5, 0.1, 0.01, 0.001)
KINDS = ("random", "subject")
WAYS = ("chosen", "compare", "approximate")
_NUM_QUERIES = 50
_MIN_SIZE = 10_000
_LEAST_APPROXIMATE = 0.01
"""Smallest share at which the approximate arm runs; below it, a walk of the graph takes minutes."""

Row = dict[str, Any]


def run_filters(
    options: FilterOptions, work_dir: Path, on_progress: Callable[[str], None] = lambda _: None
) -> BenchResult:
    """Run the benchmark.

    Raises:
        UsageError: a data set is missing or empty, or the size is too small.
        DocumentError: a line of a data set cannot be read.
    """
    size, repeat, seed = options.size, options.repeat, options.seed
    if size < _MIN_SIZE:
        raise UsageError(f"--size {size:,} is below {_MIN_SIZE:,}, where an index is searched exhaustively; raise it")
    environment = record_environment()
    real = load_real_data(options.datasets, work_dir, on_progress)
    vectors, queries = clustered_vectors(real.documents, size, seed), choose_queries(real, _NUM_QUERIES, seed)[1]
    ids = np.arange(size, dtype=np.int64)
    flat = FlatIndex(vectors.shape[1])
    flat.add(ids, vectors)
    indexes: dict[str, HnswIndex | IvfPqIndex] = {
        "hnsw": HnswIndex(vectors.shape[1], IndexConfig(kind="hnsw", seed=seed)),
        "ivf_pq": IvfPqIndex(vectors.shape[1], IndexConfig(kind="ivf_pq", seed=seed)),
    }
    for name, index in indexes.items():
        on_progress(f"building {name} over {size:,} vectors")
        index.add(ids, vectors)
    arms = [
        dense_arm(f"{name} unfiltered", _unfiltered(index), queries, flat.exact(queries, K))
        for name, index in indexes.items()
    ]
    for kind in KINDS:
        for share in SHARES:
            allowed = _allowed(vectors, kind, share, seed)
            truth = _truth(flat, queries, allowed)
            for name, index in indexes.items():
                for way in _ways(share):
                    arms.append(_arm(f"{name} {kind} {share:.1%} {way}", index, allowed, way, (queries, truth)))
    samples = run_arms(arms, repeat=repeat, on_run=lambda arm, at: on_progress(f"{arm}, run {at}"), only_own=True)
    return BenchResult(
        benchmark="filters",
        environment=environment,
        parameters={
            "datasets": [path.name for path in options.datasets],
            "size": size,
            "repeat": repeat,
            "seed": seed,
            "num_queries": len(queries),
            "num_real_documents": len(real.texts),
        },
        samples=samples,
        tables={f"{name}, {kind}": _rows(samples.values, name, kind) for name in indexes for kind in KINDS},
    )


def _unfiltered(index: HnswIndex | IvfPqIndex) -> Callable[[], Callable[[Vectors], Any]]:
    return lambda: lambda query: index.search(query, K)


def _arm(
    name: str, index: HnswIndex | IvfPqIndex, allowed: AllowedIds, way: str, asked: tuple[Vectors, NDArray[np.int64]]
) -> Arm:
    """Return an arm that searches under a filter.

    Args:
        asked: queries [q, d], and their true ids [q, K].
    """

    def search(query: Vectors) -> Any:
        return index.search(query, K, None, allowed)

    def prepare() -> Callable[[Vectors], Any]:
        search(asked[0][0])  # builds the structures that are cached per filter
        return search

    inner = dense_arm(name, prepare, *asked)

    def run(repetition: int) -> Metrics:
        with _way(way):
            return inner.run(repetition)

    return Arm(name, run)


@contextlib.contextmanager
def _way(way: str) -> Iterator[None]:
    """Override the rule that chooses a strategy, by setting the cost of a compared vector to nothing or to infinity."""
    rule = hnsw.COMPARED_PER_CANDIDATE, allowed_lists.ENTRIES_PER_COMPARED
    if way != "chosen":
        hnsw.COMPARED_PER_CANDIDATE, allowed_lists.ENTRIES_PER_COMPARED = (10**9, 0) if way == "compare" else (0, 10**9)
    try:
        yield
    finally:
        hnsw.COMPARED_PER_CANDIDATE, allowed_lists.ENTRIES_PER_COMPARED = rule


def _allowed(vectors: Vectors, kind: str, share: float, seed: int) -> AllowedIds:
    rng = np.random.default_rng([seed, round(share * 1e6)])
    num = max(K, round(share * len(vectors)))
    if kind == "random":
        return AllowedIds(np.sort(rng.choice(len(vectors), num, replace=False)))
    nearness = vectors @ vectors[rng.integers(len(vectors))]
    return AllowedIds(np.sort(np.argpartition(-nearness, num - 1)[:num]))


def _truth(flat: FlatIndex, queries: Vectors, allowed: AllowedIds) -> NDArray[np.int64]:
    return np.array([[chunk_id for chunk_id, _ in flat.search(query, K, None, allowed)] for query in queries])


def _rows(values: dict[str, dict[str, list[float]]], index: str, kind: str) -> list[Row]:
    """Return one row per share: recall and latency of each strategy."""
    plain = values[f"{index} unfiltered"]
    rows: list[Row] = [{"allowed": "100% (no filter)", **_figures("chosen", plain)}]
    for share in SHARES:
        row: Row = {"allowed": f"{share:.1%}"}
        for way in _ways(share):
            row |= _figures(way, values[f"{index} {kind} {share:.1%} {way}"])
        rows.append(row)
    names = max(rows, key=len)
    return [{name: row.get(name, "") for name in names} for row in rows]


def _ways(share: float) -> Sequence[str]:
    return WAYS if share >= _LEAST_APPROXIMATE else WAYS[:2]


def _figures(way: str, metrics: dict[str, list[float]]) -> Row:
    return {
        f"{way} recall": round(float(np.median(metrics["ann_recall_at_10"])), 3),
        f"{way} p50 us": round(float(np.median(metrics["p50_seconds"])) * 1e6),
        f"{way} p95 us": round(float(np.median(metrics["p95_seconds"])) * 1e6),
    }
