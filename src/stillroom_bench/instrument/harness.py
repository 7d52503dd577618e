"""Runs the arms of a benchmark interleaved and stores every sample.

An arm is a function that runs once and returns its metrics. Arms run forward and backward (A B C, C B A), and after
every two repetitions another arm begins (B C A, A C B), so that slow phases of the machine affect all arms alike and no
arm always runs in the middle. Metric names end in their unit, which implies the better direction; others are declared
here.
"""

import contextlib
import ctypes
import gc
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

Metrics = Mapping[str, float]

_GOLDEN = (3 - math.sqrt(5)) / 2


class Direction(StrEnum):
    """The better direction of a metric."""

    SMALLER = "smaller"
    LARGER = "larger"
    NEITHER = "neither"
    """Descriptive, without a better direction."""


_BY_ENDING = {
    "_seconds": Direction.SMALLER,
    "_bytes": Direction.SMALLER,
    "_error": Direction.SMALLER,
    "_per_second": Direction.LARGER,
    "hit_rate": Direction.LARGER,
    "_recall_at_10": Direction.LARGER,
}
_BY_NAME = {
    **dict.fromkeys(("blocks", "entries_held", "recomputed_tokens", "recovery_queries"), Direction.SMALLER),
    **dict.fromkeys(
        (
            "cached_share",
            "compute_saved_ratio",
            "exact_match",
            "f1",
            "is_cited",
            "is_recovered",
            "kept_share",
            "kept_tokens",
            "ndcg_at_10",
            "quoted",
            "right_share",
            "same_answer",
            "saved",
            "saved_of_bound",
            "saved_of_bound_beside_unsegmented",
            "share_within_bound",
        ),
        Direction.LARGER,
    ),
}


def direction_of(metric: str) -> Direction:
    """Return the better direction by name, else by unit; NEITHER for an undeclared metric."""
    if metric.startswith("within_"):
        return Direction.LARGER
    by_ending = (direction for ending, direction in _BY_ENDING.items() if metric.endswith(ending))
    return _BY_NAME.get(metric) or next(by_ending, Direction.NEITHER)


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the compared alternatives."""

    name: str
    run: Callable[[int], Metrics]
    """Runs one repetition and returns its metrics. The number of a warm-up repetition is negative."""


@dataclass(slots=True)
class Samples:
    """Samples by arm and metric, in the order of repetition."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, arm: str, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.values.setdefault(arm, {}).setdefault(name, []).append(float(value))

    def of(self, arm: str, metric: str) -> list[float]:
        return self.values[arm][metric]


def run_arms(
    arms: Sequence[Arm],
    *,
    repeat: int,
    warmup: int = 1,
    on_run: Callable[[str, int], None] | None = None,
    only_own: bool = False,
) -> Samples:
    """Warm up every arm, then run all arms `repeat` times, interleaved.

    Args:
        on_run: progress callback, called with the arm and the repetition before each run.
        only_own: store only the metrics that arms return, without wall time and memory of the whole run.
    """
    assert repeat > 0 and len({arm.name for arm in arms}) == len(arms)
    samples = Samples()
    with _frozen_objects():
        for repetition in range(-warmup, repeat):
            for arm in _ordered(arms, repetition):
                if on_run is not None:
                    on_run(arm.name, repetition)
                metrics = _measure(arm, repetition, only_own)
                if repetition >= 0:
                    samples.add(arm.name, metrics)
    return samples


def _ordered(arms: Sequence[Arm], repetition: int) -> list[Arm]:
    """Return the order of one repetition.

    Orders are rotated by the golden section, so that few repetitions spread the places of an arm evenly.
    """
    first = repetition // 2 * round(_GOLDEN * len(arms)) % len(arms)
    order = [*arms[first:], *arms[:first]]
    return order if repetition % 2 == 0 else order[::-1]


@contextlib.contextmanager
def _frozen_objects() -> Iterator[None]:
    """Exclude existing objects from garbage collection, so that collections between runs are fast."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measure(arm: Arm, repetition: int, only_own: bool) -> Metrics:
    gc.collect()  # garbage of the previous arm is not measured
    if only_own:
        return arm.run(repetition)
    reset_peak_rss()
    before = peak_rss_bytes()
    start = time.perf_counter()
    metrics = arm.run(repetition)
    wall = time.perf_counter() - start
    peak = peak_rss_bytes()
    return {"wall_seconds": wall, "peak_rss_bytes": peak, "peak_rss_delta_bytes": max(0, peak - before), **metrics}


def reset_peak_rss() -> None:
    """Reset the memory peak of the process on Linux; elsewhere the peak covers the whole process lifetime.

    Freed memory is returned to the system first; otherwise the next arm would reuse it and show no growth.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """Return the peak memory of the process since the last reset."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
