"""Arms that run a list of queries one by one: latency and recall."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stillroom_bench.instrument.harness import Arm, Metrics

K = 10
"""Results per query."""

Vectors = NDArray[np.float32]
Search = Callable[[Vectors], Any]
Query = TypeVar("Query")


def dense_arm(name: str, prepare: Callable[[], Search], queries: Vectors, truth: NDArray[np.int64]) -> Arm:
    """Return an arm that runs every query [q, d] once.

    Args:
        prepare: returns the search; called before each run, because arms may share settings of one index.
        truth: true ids [q, K].
    """

    def run(_: int) -> Metrics:
        seconds, found = timed(prepare(), list(queries))
        return {**latency_metrics(seconds), "ann_recall_at_10": ann_recall(found, truth)}

    return Arm(name, run)


def timed(search: Callable[[Query], Any], queries: Sequence[Query]) -> tuple[list[float], list[Any]]:
    """Return the seconds and the result of each query."""
    seconds, found = [], []
    for query in queries:
        began = time.perf_counter()
        result = search(query)
        seconds.append(time.perf_counter() - began)
        found.append(result)
    return seconds, found


def latency_metrics(seconds: Sequence[float]) -> dict[str, float]:
    """Return latency percentiles over the queries of one run, and queries per second of one thread."""
    p50, p95, p99 = (float(value) for value in np.percentile(seconds, [50, 95, 99]))
    return {
        "p50_seconds": p50,
        "p95_seconds": p95,
        "p99_seconds": p99,
        "queries_per_second": len(seconds) / sum(seconds),
    }


def ann_recall(found: Sequence[Any], truth: NDArray[np.int64]) -> float:
    """Return the mean recall of results that are rankings or arrays of ids."""
    shares = []
    for result, true in zip(found, truth.tolist(), strict=True):
        ids = [pair[0] for pair in result] if isinstance(result, list) else result.tolist()
        shares.append(len(set(ids).intersection(true)) / len(true))
    return float(np.mean(shares))
