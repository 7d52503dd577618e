"""`stillroom bench tiered --parts`: what a search of an IVF-PQ index consists of (VectorLiteRAG Figure 3, left).

Three parts on the same questions, all lists in RAM: the coarse search for the nearest lists, the look-up tables of the
questions, and the scan of the codes through them. Measured is processor time of one thread, so other work on the
machine hardly changes the shares.
"""

import time
from collections.abc import Callable
from typing import Any

import faiss as _faiss
import numpy as np

from stillroom.retrieval.vector_index import one_thread
from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.tiered_throughput import SKEWS, SkewedQuestions, Vectors, check_options, made_lists
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, Samples, run_arms
from stillroom_bench.instrument.statistics import ratio_of_pairs

faiss: Any = _faiss  # its type stubs lack names that are created at import

PARTS = ("coarse", "tables", "scan")
_NUM_QUESTIONS = 128
_NUM_FOUND = 50


def run_parts(options: TieredOptions, on_progress: Callable[[str], None] = lambda _: None) -> BenchResult:
    """Run the benchmark.

    Raises:
        UsageError: there are too few vectors for the number of lists.
    """
    check_options(options)
    environment = record_environment()
    lists = made_lists(options, on_progress)
    arms = []
    for name, share in SKEWS.items():
        on_progress(f"{name}: counting accesses")
        asked = SkewedQuestions(lists, share, options)
        for size in options.batch_sizes:
            arms.append(Arm(f"{name}, batch {size}", _run(lists, asked, size, options.nprobe)))
    samples = run_arms(arms, repeat=options.repeat, on_run=lambda arm, at: on_progress(f"{arm}, {at}"), only_own=True)
    shown = ("size", "nlist", "nprobe", "repeat", "seed")
    return BenchResult(
        "stillroom bench tiered --parts",
        environment,
        {name: getattr(options, name) for name in shown},
        samples,
        notes=[
            f"Processor time of one thread, per question, {_NUM_QUESTIONS} questions a run, all lists in RAM; of "
            "faiss, also where Stillroom's own kernels would search. Scan: the search of given lists, minus the tables."
        ],
        tables={"Shares of a search": _shares(samples)},
    )


def time_parts(lists: Any, queries: Vectors, nprobe: int, clock: Callable[[], float] = time.thread_time) -> Metrics:
    """Return the seconds per question of each part, of one batch [n, d]."""
    tables = np.empty((len(queries), lists.pq.M * lists.pq.ksub), np.float32)
    lists.nprobe = nprobe  # `search_preassigned` wants as many lists
    with one_thread():
        began = clock()
        nearness, probed = lists.quantizer.search(queries, nprobe)
        after_coarse = clock()
        for query, table in zip(queries, tables, strict=True):
            lists.pq.compute_inner_prod_table(faiss.swig_ptr(query), faiss.swig_ptr(table))
        after_tables = clock()
        lists.search_preassigned(queries, _NUM_FOUND, probed, nearness)
        ended = clock()
    seconds = after_coarse - began, after_tables - after_coarse, ended - after_tables - (after_tables - after_coarse)
    return {f"{part}_seconds": value / len(queries) for part, value in zip(PARTS, seconds, strict=True)}


def _run(lists: Any, asked: SkewedQuestions, batch_size: int, nprobe: int) -> Callable[[int], Metrics]:
    def run(repetition: int) -> Metrics:
        queries = asked.draw(max(_NUM_QUESTIONS, batch_size), repetition)
        starts = range(0, len(queries) - batch_size + 1, batch_size)
        timed = [time_parts(lists, queries[start : start + batch_size], nprobe) for start in starts]
        return {name: float(np.mean([one[name] for one in timed])) for name in timed[0]}

    return run


def _shares(samples: Samples) -> list[dict[str, Any]]:
    """Return a row per arm: the share of each part in the whole, with intervals over the runs."""
    rows = []
    for arm in samples.values:
        parts = {part: np.array(samples.of(arm, f"{part}_seconds")) for part in PARTS}
        whole = np.sum(list(parts.values()), axis=0)
        parts["tables and scan"] = parts["tables"] + parts["scan"]
        row: dict[str, Any] = {"questions": arm, "whole, us": f"{1e6 * whole.mean():.0f}"}
        for name, values in parts.items():
            row[name] = str(ratio_of_pairs(values.tolist(), whole.tolist())) if values.min() > 0 else "-"
        rows.append(row)
    return rows
