"""`stillroom bench index`: recall, speed and cost of dense indexes; then hybrid search, BM25 and the tuner (llmds
Tables 1, 7 and 10, Hypothesis 3).

Searches are single queries in one thread. Arms of one corpus size are interleaved; each repetition of an arm runs every
query once and gives one sample per metric. Indexes are built once, so build times are single measurements.
"""

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stillroom.config.settings import IndexConfig
from stillroom.errors import ConfigError, UsageError
from stillroom.retrieval.index.flat import FlatIndex
from stillroom.retrieval.index.hnsw import HnswIndex
from stillroom.retrieval.index.ivf_pq import IvfPqIndex
from stillroom.retrieval.index.tuning import Tuner
from stillroom.retrieval.vector_index import VectorIndex
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, Samples, peak_rss_bytes, reset_peak_rss, run_arms
from stillroom_bench.loads.workloads import RealData, choose_queries, clustered_vectors, load_real_data
from stillroom_bench.quality.index_pgvector import PgvectorRun, check_url, pgvector_arms
from stillroom_bench.quality.index_whole import measure_bm25, whole_searches
from stillroom_bench.quality.peers_ann import PEERS, bm25_peer, graph_peers, peer_versions
from stillroom_bench.quality.quality_options import IndexOptions
from stillroom_bench.quality.search_arms import K, Vectors, dense_arm

_M = 16
_SWEPT_M = (8, 32)
"""Values of M measured besides 16 at the middle size: llmds Table 10."""
_EF_CONSTRUCTION = 100
_EF_SEARCH = (25, 50, 100, 200)
_NPROBE = (8, 32, 128)
_NUM_QUERIES = 300
_MIN_SIZE = 100
_ANN_RECALL = 0.99
_BUDGET_S = 0.001
_GROWTH_STEP = 1.2
"""Growth of the corpus between two measurements: less than triggers a new tuning, so stale tuning is measured too."""

Row = dict[str, Any]


@dataclass(slots=True)
class _IndexRun:
    """State shared by the parts of one run."""

    real: RealData
    repeat: int
    seed: int
    say: Callable[[str], None]
    peers: Sequence[str]
    pgvector: str
    """URL of a PostgreSQL database; "" measures none."""
    samples: Samples = field(default_factory=Samples)
    notes: list[str] = field(default_factory=list)
    tables: dict[str, list[Row]] = field(default_factory=dict)

    def measure(self, arms: Sequence[Arm]) -> None:
        """Run the arms interleaved and store their samples."""
        found = run_arms(arms, repeat=self.repeat, on_run=lambda arm, at: self.say(f"{arm}, run {at}"), only_own=True)
        self.samples.values |= found.values


def run_index(
    options: IndexOptions, work_dir: Path, on_progress: Callable[[str], None] = lambda _: None
) -> BenchResult:
    """Run the benchmark.

    Args:
        work_dir: folder that keeps embeddings between runs.

    Raises:
        UsageError: a data set is missing or empty, a peer is unknown, a size is too small, or `pgvector` is no URL.
        ConfigError: the database of `pgvector` lacks the extension.
        DocumentError: a line of a data set cannot be read.
    """
    peers, repeat, seed = options.peers or PEERS, options.repeat, options.seed
    if unknown := set(peers) - set(PEERS):
        raise UsageError(f"unknown peers {', '.join(sorted(unknown))}; known are {', '.join(PEERS)}")
    if not options.sizes or min(options.sizes) < _MIN_SIZE:
        raise UsageError(f"--size {min(options.sizes, default=0)} is fewer than {_MIN_SIZE} vectors; raise it")
    if options.pgvector:
        check_url(options.pgvector)
    sizes = sorted(set(options.sizes))
    environment = record_environment()
    real = load_real_data(options.datasets, work_dir, on_progress)
    run = _IndexRun(real, repeat, seed, on_progress, peers, options.pgvector)
    for size in sizes:
        _measure_size(run, size, with_sweep=size == sizes[len(sizes) // 2])
    run.tables["tuner"] = _tuner_rows(run, sizes[0], sizes[-1])
    peer, notes = bm25_peer(peers)
    run.notes += notes
    with _temporary_folder(work_dir) as folder:
        arms, run.tables["BM25 at rest"] = measure_bm25(run.real, sizes[-1], seed, folder, peer)
        run.measure(arms)
        with whole_searches(run.real, sizes[-1], seed, folder) as arms:
            run.measure(arms)
    return BenchResult(
        benchmark="index",
        environment=environment,
        parameters={
            "datasets": [path.name for path in options.datasets],
            "sizes": list(sizes),
            "repeat": repeat,
            "seed": seed,
            "num_real_documents": len(run.real.texts),
            "num_queries": len(_queries(run)),
            "ef_construction": _EF_CONSTRUCTION,
            "peers": peer_versions(),
        },
        samples=run.samples,
        notes=run.notes,
        tables=run.tables,
    )


@contextlib.contextmanager
def _temporary_folder(work_dir: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=work_dir) as folder:
        yield Path(folder)


def _queries(run: _IndexRun) -> Vectors:
    return choose_queries(run.real, _NUM_QUERIES, run.seed)[1]


# Dense indexes at one size


def _measure_size(run: _IndexRun, size: int, *, with_sweep: bool) -> None:
    vectors = clustered_vectors(run.real.documents, size, run.seed)
    queries = _queries(run)
    ids = np.arange(size, dtype=np.int64)
    flat = FlatIndex(vectors.shape[1])
    rows = [_built(run, size, "flat", lambda: flat.add(ids, vectors), lambda: _num_bytes(flat))]
    truth = flat.exact(queries, K)
    arms = [dense_arm(f"{size:,} flat", lambda: lambda query: flat.search(query, K), queries, truth)]

    for m in (_M, *(_SWEPT_M if with_sweep else ())):
        config = IndexConfig(kind="hnsw", m=m, ef_construction=_EF_CONSTRUCTION, seed=run.seed)
        rows.append(
            _add_own(run, arms, HnswIndex(vectors.shape[1], config), f"hnsw m={m} ef=", (vectors, queries, truth))
        )
    config = IndexConfig(kind="ivf_pq", seed=run.seed)
    rows.append(_add_own(run, arms, IvfPqIndex(vectors.shape[1], config), "ivf_pq nprobe=", (vectors, queries, truth)))
    rows += _add_peers(run, arms, (vectors, queries, truth))
    with contextlib.ExitStack() as stack:
        if run.pgvector:
            run.say(f"committing {size:,} vectors to pgvector")
            config = IndexConfig(kind="pgvector", m=_M, ef_construction=_EF_CONSTRUCTION)
            wanted = PgvectorRun(run.pgvector, config, _EF_SEARCH)
            more, costs = stack.enter_context(pgvector_arms(wanted, vectors, queries, truth))
            arms += more
            run.tables[f"pgvector {size:,}"] = [costs]
        run.measure(arms)
    run.tables[f"building {size:,}"] = rows
    run.tables[f"recall and speed at {size:,}"] = _frontier(run, size)


Workload = tuple[Vectors, Vectors, NDArray[np.int64]]
"""Vectors [n, d], queries [q, d] and the true ids [q, K]."""


def _add_own(run: _IndexRun, arms: list[Arm], index: HnswIndex | IvfPqIndex, name: str, workload: Workload) -> Row:
    """Build one of Stillroom's indexes and add an arm per search effort."""
    vectors, queries, truth = workload
    size = len(vectors)
    ids = np.arange(size, dtype=np.int64)
    row = _built(run, size, name.rpartition(" ")[0], lambda: index.add(ids, vectors), lambda: _num_bytes(index))

    def searcher(effort: int) -> Callable[[], Callable[[Vectors], Any]]:
        return lambda: lambda query: index.search(query, K, effort)

    for effort in _EF_SEARCH if isinstance(index, HnswIndex) else _NPROBE:
        arms.append(dense_arm(f"{size:,} {name}{effort}", searcher(effort), queries, truth))
    return row


def _add_peers(run: _IndexRun, arms: list[Arm], workload: Workload) -> list[Row]:
    """Build the graphs of other libraries and add an arm per search effort."""
    vectors, queries, truth = workload
    makers, notes = graph_peers(run.peers)
    run.notes += [note for note in notes if note not in run.notes]
    rows = []
    for name, make in makers.items():
        peer = make()

        def build(peer: Any = peer) -> None:
            peer.build(vectors, _M, _EF_CONSTRUCTION, run.seed)

        rows.append(_built(run, len(vectors), f"{name} m={_M}", build, peer.num_bytes))
        for ef_search in _EF_SEARCH:

            def searcher(peer: Any = peer, ef_search: int = ef_search) -> Callable[[Vectors], Any]:
                found: Callable[[Vectors], Any] = peer.searcher(K, ef_search)
                return found

            arms.append(dense_arm(f"{len(vectors):,} {name} m={_M} ef={ef_search}", searcher, queries, truth))
    return rows


def _built(run: _IndexRun, size: int, name: str, build: Callable[[], object], num_bytes: Callable[[], int]) -> Row:
    """Build an index once and return its build cost."""
    run.say(f"building {name} over {size:,} vectors")
    reset_peak_rss()
    before, began = peak_rss_bytes(), time.perf_counter()
    build()
    seconds = time.perf_counter() - began
    return {
        "index": name,
        "build seconds": seconds,
        "ms per vector": seconds / size * 1e3,
        "index MiB": num_bytes() / 2**20,
        "peak RSS grown by MiB": (peak_rss_bytes() - before) / 2**20,
    }


def _num_bytes(index: VectorIndex) -> int:
    return sum(array.nbytes for array in index.to_arrays().values())


def _frontier(run: _IndexRun, size: int) -> list[Row]:
    """Return one row per arm: recall and latency."""
    rows = []
    prefix = f"{size:,} "
    for arm, metrics in run.samples.values.items():
        if arm.startswith(prefix):
            row: Row = {"arm": arm.removeprefix(prefix)}
            row["ann_recall@10"] = float(np.median(metrics["ann_recall_at_10"]))
            row["queries/s"] = round(float(np.median(metrics["queries_per_second"])))
            for name in ("p50", "p95", "p99"):
                row[f"{name} us"] = round(float(np.median(metrics[f"{name}_seconds"])) * 1e6)
            rows.append(row)
    return rows


# The tuner on a growing corpus


def _tuner_rows(run: _IndexRun, first: int, last: int) -> list[Row]:
    """Grow one graph, and measure recall at each size with real queries that the tuner does not use."""
    vectors = clustered_vectors(run.real.documents, last, run.seed)
    queries = _queries(run)
    plain = IndexConfig(kind="hnsw", m=_M, ef_construction=_EF_CONSTRUCTION, seed=run.seed)
    index = HnswIndex(vectors.shape[1], plain)
    unused = Path("unused")  # nothing is saved
    for_recall = Tuner(unused, dataclasses.replace(plain, ann_recall=_ANN_RECALL), "bench")
    for_time = Tuner(unused, dataclasses.replace(plain, search_budget_s=_BUDGET_S), "bench")
    rows: list[Row] = []
    fixed: int | None = None
    for size in _growing_sizes(first, last):
        run.say(f"tuning at {size:,} vectors")
        index.add(np.arange(len(index), size, dtype=np.int64), vectors[len(index) : size])
        truth = index.exact(queries, K)
        before, began = for_recall.tuning, time.perf_counter()
        effort = _effort(for_recall, index)
        seconds, is_measured = time.perf_counter() - began, for_recall.tuning is not before
        fixed = fixed or effort
        budget = _effort(for_time, index)
        held = _measured(index, effort, queries, truth)
        rows.append(
            {
                "vectors": size,
                "measured again": f"{seconds:.2f} s" if is_measured else "no",
                f"ef for {_ANN_RECALL}": effort or "impossible",
                "recall": held["ann_recall_at_10"],
                "p50 us": round(held["p50_seconds"] * 1e6),
                f"recall at ef={fixed}": _measured(index, fixed, queries, truth)["ann_recall_at_10"],
                f"ef for {_BUDGET_S * 1e3:g} ms": budget or "impossible",
                "its p95 us": round(_measured(index, budget, queries, truth)["p95_seconds"] * 1e6),
            }
        )
    return rows


def _effort(tuner: Tuner, index: HnswIndex) -> int | None:
    """Return the tuner's choice; None if no effort reaches the goal."""
    try:
        return tuner.effort(index)
    except ConfigError:
        return None


def _measured(index: HnswIndex, effort: int | None, queries: Vectors, truth: NDArray[np.int64]) -> Metrics:
    return dense_arm("", lambda: lambda query: index.search(query, K, effort), queries, truth).run(0)


def _growing_sizes(first: int, last: int) -> list[int]:
    """Return sizes from first to last, each at most `_GROWTH_STEP` times the previous size."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(last, int(sizes[-1] * _GROWTH_STEP) + 1))
    return sizes
