"""`stillroom bench tiered --drift`: time that a tiered index needs to adapt to a sudden shift of the popular topics
(VectorLiteRAG 4.1: "re-calibrated if access patterns shift").

Questions of one skew run in sequence; then other lists become hot. One arm exchanges lists by `DriftRules` in a
concurrent thread, as a knowledge base does; the other keeps the initial choice. Both start with the hottest lists of
similar questions. The page cache of the file is dropped at intervals, so that lists on disk are read from disk. An arm
has recovered when its hit rate over one window reaches nine tenths of its mean hit rate before the shift.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stillroom.retrieval.tiers.faiss_lists import write_bare_list_file
from stillroom.retrieval.tiers.hot_lists import DriftRules, HotLists
from stillroom.retrieval.tiers.tiered_ivf import TieredLists
from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.tiered_throughput import SKEWS, SkewedQuestions, check_options, made_lists
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Arm, Metrics, run_arms

_NUM_FOUND = 50
_RECOVERED = 0.9


@dataclass(frozen=True, slots=True)
class DriftOptions:
    """Course of the benchmark; the index and `nprobe` are those of `TieredOptions`."""

    share: float = 0.2
    """Share of the lists' bytes in RAM."""
    num_before: int = 2048
    """Questions before the shift."""
    num_after: int = 8192
    window: int = 128
    """Questions over which hit rate and time are reported."""
    drop_every: int = 8
    """Questions after which the page cache is dropped."""
    half_lives: tuple[float, ...] = (DriftRules().half_life,)
    """Half-lives of an access in questions; one arm each."""
    skew: str = "ORCAS"


@dataclass(frozen=True, slots=True)
class Window:
    """Means over consecutive questions."""

    hit_rate: float
    mean_seconds: float
    """Seconds of a search."""


def run_drift(
    options: TieredOptions, drift: DriftOptions, work_dir: Path, on_progress: Callable[[str], None] = lambda _: None
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
    on_progress(f"{drift.skew}: counting accesses")
    topics = [SkewedQuestions(lists, SKEWS[drift.skew], options, topic=topic) for topic in range(2)]
    file = work_dir / f"tiered-drift-{os.getpid()}.ivf"
    rules = {
        f"exchanging, half-life {half_life:g}": DriftRules(half_life=half_life) for half_life in drift.half_lives
    } | {"first choice stays": DriftRules(is_exchanging=False)}
    courses: dict[str, list[Window]] = {}
    try:
        # shared by all arms, because pages that are mapped elsewhere would not be dropped
        tiers = TieredLists(write_bare_list_file(lists, file))
        runs = [_DriftRun(name, tiers, topics, one, options, drift, courses) for name, one in rules.items()]
        samples = run_arms(
            [Arm(run.name, run) for run in runs],
            repeat=options.repeat,
            warmup=0,
            on_run=lambda arm, at: on_progress(f"{arm}, run {at + 1}"),
            only_own=True,
        )
    finally:
        file.unlink(missing_ok=True)
    return BenchResult(
        "stillroom bench tiered --drift",
        environment,
        {
            "size": options.size,
            "nlist": options.nlist,
            "nprobe": options.nprobe,
            "repeat": options.repeat,
            "seed": options.seed,
            "bytes of lists": int(lists.ntotal) * lists.code_size + int(lists.ntotal) * 8,
            **dataclasses.asdict(drift),
        },
        samples,
        "first choice stays",
        tables={"The course of the first run": _course(courses, drift)},
        notes=[
            f"Recovered: a window with {_RECOVERED:.0%} of the hit rate before the shift. If `is_recovered` is 0, "
            "queries and seconds are those of the whole run after the shift.",
            f"The page cache of the file is dropped every {drift.drop_every} questions, outside the measured times.",
        ],
    )


class _DriftRun:
    """One arm; each run starts from the initial choice."""

    def __init__(  # noqa: PLR0913  the parts of an arm
        self,
        name: str,
        tiers: TieredLists,
        topics: list[SkewedQuestions],
        rules: DriftRules,
        options: TieredOptions,
        drift: DriftOptions,
        courses: dict[str, list[Window]],
    ) -> None:
        self.name = name
        self._tiers, self._topics, self._rules = tiers, topics, rules
        self._options, self._drift, self._courses = options, drift, courses

    def __call__(self, repetition: int) -> Metrics:
        drift = self._drift
        self._tiers.exchange(np.flatnonzero(self._tiers.is_in_ram), ())
        num_bytes = int(drift.share * self._tiers.list_bytes().sum())
        with ThreadPoolExecutor(1, thread_name_prefix="stillroom-lists") as pool:

            def in_background(job: Callable[[], None]) -> None:
                pool.submit(job)

            hot = HotLists(self._tiers, num_bytes, self._rules, lambda job: job(), self._topics[0].counts)
            hot.start()  # loads the initial choice before the first question
            hot = HotLists(self._tiers, num_bytes, self._rules, in_background, self._topics[0].counts)
            before = self._ask(hot, self._topics[0], drift.num_before, repetition)
            after = self._ask(hot, self._topics[1], drift.num_after, repetition)
        self._courses.setdefault(self.name, [*before, *after])
        return self._summary(before, after, hot.num_exchanged)

    def _ask(self, hot: HotLists, topic: SkewedQuestions, count: int, repetition: int) -> list[Window]:
        queries = topic.draw(count, repetition)
        windows = []
        for start in range(0, count, self._drift.window):
            seconds = []
            probes, hits = hot.num_probes, hot.num_hits
            for number, query in enumerate(queries[start : start + self._drift.window], start):
                if number % self._drift.drop_every == 0:
                    self._tiers.drop_pages()
                began = time.perf_counter()
                nearness, probed = self._tiers.probe(query[None], self._options.nprobe)
                hot.record(probed[0])
                self._tiers.scan(query, _NUM_FOUND, probed[0], nearness[0])
                seconds.append(time.perf_counter() - began)
            windows.append(Window((hot.num_hits - hits) / (hot.num_probes - probes), float(np.mean(seconds))))
        return windows

    def _summary(self, before: list[Window], after: list[Window], num_exchanged: int) -> Metrics:
        usual = float(np.mean([one.hit_rate for one in before]))
        good = [number for number, one in enumerate(after) if one.hit_rate >= _RECOVERED * usual]
        num_windows = good[0] + 1 if good else len(after)
        tail = after[-max(1, len(after) // 4) :]
        return {
            "before_hit_rate": usual,
            "right_after_hit_rate": after[0].hit_rate,
            "in_the_end_hit_rate": float(np.mean([one.hit_rate for one in tail])),
            "before_search_seconds": float(np.mean([one.mean_seconds for one in before])),
            "right_after_search_seconds": after[0].mean_seconds,
            "in_the_end_search_seconds": float(np.mean([one.mean_seconds for one in tail])),
            "is_recovered": float(bool(good)),
            "recovery_queries": float(min(num_windows * self._drift.window, self._drift.num_after)),
            "recovery_search_seconds": sum(one.mean_seconds for one in after[:num_windows]) * self._drift.window,
            "exchanged_lists": float(num_exchanged),
        }


def _course(courses: dict[str, list[Window]], drift: DriftOptions) -> list[dict[str, Any]]:
    """Return rows of windows at growing distance from the shift."""
    num_before = -(-drift.num_before // drift.window)
    num_after = -(-drift.num_after // drift.window)
    chosen = [num_before - 1] + sorted(
        {min(num_before + num_after - 1, num_before + 2**step - 1) for step in range(num_after.bit_length() + 1)}
    )
    return [
        {"questions from": (number - num_before) * drift.window}
        | {
            f"{name}: {what}": value
            for name, windows in courses.items()
            for what, value in (
                ("hit rate", f"{windows[number].hit_rate:.2f}"),
                ("ms", f"{1000 * windows[number].mean_seconds:.2f}"),
            )
        }
        for number in chosen
    ]
