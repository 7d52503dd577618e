"""Runs the arms of a benchmark in turn and keeps every sample. Measures; judges nothing.

An arm is a function that runs once and returns its metrics. Arms take turns, forward and backward (A B C, C B A), and
after every two runs another one begins (B C A, A C B): a slow minute of the machine hits all of them alike, and none is
always in the middle. Metric names end in their unit, which says which way is better; others are declared here.
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
    """Which way a metric is better."""

    SMALLER = "smaller"
    LARGER = "larger"
    NEITHER = "neither"
    """It describes what happened."""


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
            "is_recovered",
            "kept_share",
            "kept_tokens",
            "ndcg_at_10",
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
    """By its name, else by the unit it ends in; NEITHER for a metric that nobody has declared."""
    if metric.startswith("within_"):
        return Direction.LARGER
    by_ending = (direction for ending, direction in _BY_ENDING.items() if metric.endswith(ending))
    return _BY_NAME.get(metric) or next(by_ending, Direction.NEITHER)


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the things compared."""

    name: str
    run: Callable[[int], Metrics]
    """Called with the number of the repetition (negative while warming up); returns the metrics of that run. Where it
    returns no `wall_seconds`, the harness adds its own."""


@dataclass(slots=True)
class Samples:
    """Every sample of every metric of every arm, in the order of repetition."""

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
    """Warm every arm up, then run all of them `repeat` times in turn.

    Args:
        on_run: told the arm and the repetition before each run; for progress.
        only_own: keep what the arms return, and not the wall time and memory of whole runs, for arms that measure
            something smaller.
    """
    assert repeat > 0 and len({arm.name for arm in arms}) == len(arms)
    samples = Samples()
    with _old_objects_left_alone():
        for repetition in range(-warmup, repeat):
            for arm in _in_turn(arms, repetition):
                if on_run is not None:
                    on_run(arm.name, repetition)
                metrics = _measure(arm, repetition, only_own)
                if repetition >= 0:
                    samples.add(arm.name, metrics)
    return samples


def _in_turn(arms: Sequence[Arm], repetition: int) -> list[Arm]:
    """The order of one repetition. Turned by the golden section, so that a few turns spread an arm's places evenly over
    many arms too."""
    first = repetition // 2 * round(_GOLDEN * len(arms)) % len(arms)
    order = [*arms[first:], *arms[:first]]
    return order if repetition % 2 == 0 else order[::-1]


@contextlib.contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """The collections between runs look at what the runs made, and not at every module that is loaded."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measure(arm: Arm, repetition: int, only_own: bool) -> Metrics:
    gc.collect()  # one arm does not pay for another's garbage
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
    """Forget the process's memory peak, where the system can (Linux); elsewhere the peak is that of the whole
    process.

    What was freed goes back to the system first, or the next to allocate would look as if it needed nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    """The most memory the process has held since the last reset."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
