"""`stillroom bench tiered`: gain of an IVF-PQ index with hot lists in RAM and the others on disk (VectorLiteRAG 5).

The index has generated vectors. Questions are skewed: 10 % of the lists take 40 % of the accesses, as in wiki-all, or
80 %, as in ORCAS (3.3). Arms have no list, the hottest lists, or all lists in RAM. Before each batch, the page cache of
the list file is dropped (posix_fadvise) and the file is mapped again, so that every page is read from disk;
`read_bytes` is the amount that the system reports (/proc/self/io).
"""

import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import faiss as _faiss
import numpy as np
from numpy.typing import NDArray

from stillroom.errors import UsageError
from stillroom.retrieval.tiers.faiss_lists import accesses, write_bare_list_file
from stillroom.retrieval.tiers.host_scan import Scored
from stillroom.retrieval.tiers.partition import hottest_first
from stillroom.retrieval.tiers.tiered_ivf import TieredLists
from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.instrument.bench_report import BenchResult, share_name
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, run_arms

faiss: Any = _faiss  # its type stubs lack names that are created at import

Vectors = NDArray[np.float32]
SKEWS = {"wiki-all": 0.4, "ORCAS": 0.8}
"""Share of accesses that go to the hottest tenth of the lists (VectorLiteRAG 3.3)."""

_DIMENSION, _SUBQUANTIZERS, _NBITS = 384, 48, 8
_CHUNK = 50_000
_NOISE = 0.5
_NUM_PROFILED = 2000
_NUM_FOUND = 50


def run_tiered(
    options: TieredOptions, work_dir: Path, on_progress: Callable[[str], None] = lambda _: None
) -> BenchResult:
    """Run the benchmark.

    Args:
        work_dir: folder on the disk that is the slow tier; its files are removed after the run.

    Raises:
        UsageError: there are too few vectors for the number of lists.
    """
    check_options(options)
    environment = record_environment()
    lists = made_lists(options, on_progress)
    work_dir.mkdir(parents=True, exist_ok=True)
    benches: list[DividedBench] = []
    rows = []
    try:
        for name, share in SKEWS.items():
            on_progress(f"{name}: counting accesses")
            asked = SkewedQuestions(lists, share, options)
            rows.append(asked.describe(name))
            for ram in (0.0, *options.shares, 1.0):
                file = work_dir / f"tiered-{os.getpid()}-{len(benches)}.ivf"
                benches.append(DividedBench(name, ram, lists, asked, file, options))
        arms = [arm for bench in benches for arm in bench.arms()]
        samples = run_arms(
            arms, repeat=options.repeat, on_run=lambda arm, at: on_progress(f"{arm}, run {at + 1}"), only_own=True
        )
    finally:
        for bench in benches:
            bench.close()
    return BenchResult(
        "stillroom bench tiered",
        environment,
        {
            "size": options.size,
            "dimension": _DIMENSION,
            "nlist": options.nlist,
            "nprobe": options.nprobe,
            "bytes of lists": int(lists.ntotal) * (_SUBQUANTIZERS + 8),
            "repeat": options.repeat,
            "seed": options.seed,
        },
        samples,
        "all on disk",
        tables={"Where questions go": rows},
        notes=["Before each batch, the page cache of the lists on disk is dropped and the file mapped again."],
    )


def check_options(options: TieredOptions) -> None:
    """Check the options; raises UsageError if there are too few vectors for the number of lists."""
    if options.size < 39 * options.nlist:
        raise UsageError(
            f"{options.size:,} vectors are too few for {options.nlist:,} lists; raise --size to {39 * options.nlist:,}"
        )


def made_lists(options: TieredOptions, on_progress: Callable[[str], None] = lambda _: None) -> Any:
    """Build an IndexIVFPQ over generated vectors around as many centres as there are lists."""
    rng = np.random.default_rng(options.seed)
    centres = _unit(rng.standard_normal((options.nlist, _DIMENSION)))
    quantizer = faiss.IndexFlatIP(_DIMENSION)
    lists = faiss.IndexIVFPQ(quantizer, _DIMENSION, options.nlist, _SUBQUANTIZERS, _NBITS, faiss.METRIC_INNER_PRODUCT)
    lists.cp.niter, lists.cp.max_points_per_centroid = 4, 39
    lists.pq.cp.niter, lists.pq.cp.max_points_per_centroid = 8, 64
    on_progress("training")
    lists.train(np.concatenate(list(islice(_chunks(centres, options, rng), -(-39 * options.nlist // _CHUNK)))))
    for number, chunk in enumerate(_chunks(centres, options, rng)):
        lists.add(chunk)
        if number % 10 == 0:
            on_progress(f"{lists.ntotal:,} of {options.size:,} vectors")
    return lists


def _chunks(centres: Vectors, options: TieredOptions, rng: np.random.Generator) -> Iterator[Vectors]:
    for start in range(0, options.size, _CHUNK):
        chosen = centres[rng.integers(len(centres), size=min(_CHUNK, options.size - start))]
        yield _near(chosen, rng)


def _near(vectors: Vectors, rng: np.random.Generator) -> Vectors:
    noise = rng.standard_normal(vectors.shape, dtype=np.float32)
    return _unit(vectors + _NOISE * noise / np.linalg.norm(noise, axis=1, keepdims=True))


def _unit(vectors: NDArray[Any]) -> Vectors:
    found: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return found


class SkewedQuestions:
    """Questions near the centres of lists, with Zipf popularity that gives the hottest tenth of the lists a share."""

    def __init__(self, lists: Any, share: float, options: TieredOptions, topic: int = 0) -> None:
        """
        Args:
            share: share of accesses of the hottest tenth of the lists.
            topic: number that selects which lists are popular.
        """
        self._topic = topic
        self._options, self._lists = options, lists
        self._centres = lists.quantizer.reconstruct_n(0, options.nlist)
        order = np.random.default_rng([options.seed, 1 + 2 * topic]).permutation(options.nlist)
        self._centres = np.ascontiguousarray(self._centres[order])
        low, high = 0.0, 4.0
        for _ in range(12):  # accesses spread to neighbouring lists, so the exponent is fitted to counts
            self._exponent = (low + high) / 2
            counts = accesses(lists, self.draw(_NUM_PROFILED, -1), options.nprobe)
            found = np.sort(counts)[::-1][: options.nlist // 10].sum() / counts.sum()
            low, high = (self._exponent, high) if found < share else (low, self._exponent)
        self.counts = accesses(lists, self.draw(_NUM_PROFILED, -2), options.nprobe)
        """Accesses per list of the questions that decide the division; the measured questions are different."""

    def draw(self, count: int, repetition: int) -> Vectors:
        """Return questions [count, d]."""
        rng = np.random.default_rng([self._options.seed, 2 + 2 * self._topic, repetition + 1000])
        weights = np.arange(1, len(self._centres) + 1, dtype=float) ** -self._exponent
        chosen = rng.choice(len(weights), size=count, p=weights / weights.sum())
        return _near(self._centres[chosen], rng)

    def describe(self, name: str) -> dict[str, Any]:
        counts = np.sort(self.counts)[::-1]
        row: dict[str, Any] = {"questions like": name, "exponent": self._exponent}
        for tenth in (1, 2, 3, 5):
            taken = counts[: self._options.nlist * tenth // 10].sum() / counts.sum()
            row[f"accesses of the hottest {tenth}0 %"] = f"{taken:.0%}"
        return row


class DividedBench:
    """Arms of one division of the lists between RAM and disk."""

    def __init__(
        self, skew: str, share: float, lists: Any, asked: SkewedQuestions, file: Path, options: TieredOptions
    ) -> None:
        self._skew, self._share, self._options, self._asked, self._file = skew, share, options, asked, file
        self._tiered = TieredLists(
            write_bare_list_file(lists, file), hottest_first(asked.counts)[: round(share * options.nlist)]
        )

    def arms(self) -> Iterator[Arm]:
        where = {0.0: "all on disk", 1.0: "all in RAM"}.get(self._share, f"{share_name(self._share)} of lists in RAM")
        for size in self._options.batch_sizes:
            yield Arm(f"{self._skew}, batch {size}/{where}", self._run(size))

    def close(self) -> None:
        self._tiered.close()
        self._file.unlink(missing_ok=True)

    def _run(self, batch_size: int) -> Callable[[int], Metrics]:
        num_batches = max(2, min(self._options.num_batches, 64 // batch_size))

        def run(repetition: int) -> Metrics:
            queries = self._asked.draw(num_batches * batch_size, repetition)
            waits: list[float] = []
            whole: list[float] = []
            num_read = 0
            for start in range(0, len(queries), batch_size):
                self._tiered.drop_pages()
                before = _bytes_read()
                seconds = self._batch(queries[start : start + batch_size])
                num_read += _bytes_read() - before
                waits += seconds
                whole.append(max(seconds))
            return {
                "mean_seconds": float(np.mean(waits)),
                "p50_seconds": float(np.quantile(waits, 0.5)),
                "p95_seconds": float(np.quantile(waits, 0.95)),
                "without_dispatcher_mean_seconds": float(np.mean(whole)),
                "queries_per_second": len(queries) / sum(whole),
                "read_bytes": num_read / len(queries),
            }

        return run

    def _batch(self, queries: Vectors) -> list[float]:
        """Return the seconds to each query's result."""
        seconds = [0.0] * len(queries)
        began = time.perf_counter()

        def on_found(number: int, _: Scored) -> None:
            seconds[number] = time.perf_counter() - began

        self._tiered.search_batch(queries, _NUM_FOUND, self._options.nprobe, on_found)
        return seconds


def _bytes_read() -> int:
    """Return the bytes that this process has read from disks; 0 if the system does not report them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)
