"""`stillroom bench tiered --predict`: predicted against measured throughput of divided lists (VectorLiteRAG Figure 8).

For each skew, the index is profiled as `stillroom plan` does: all lists on disk, a random half in RAM, all in RAM. The
profile predicts the throughput of divisions with the hottest lists in RAM, which are then measured with different
questions. Three predictions are compared: the counted lists of `search_model`, the smallest hit rate of a batch by its
exact order statistic with piecewise times (Eq. 5), and the paper's formula as written (Eq. 1, 3, 4 and 5).
"""

import math
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from stillroom.retrieval.tiers.division import Division
from stillroom.retrieval.tiers.partition import Lists, Partition, hottest_first
from stillroom.retrieval.tiers.search_model import (
    Prediction,
    fit_line,
    hits_of,
    rate_by_hits,
    worst_error_of_line,
)
from stillroom.retrieval.tiers.search_profile import Effort, SearchProfile, measure_profile
from stillroom.retrieval.tiers.tiered_ivf import DISK, RAM
from stillroom_bench.experiments.experiment_options import TieredOptions
from stillroom_bench.experiments.tiered_throughput import (
    SKEWS,
    DividedBench,
    SkewedQuestions,
    check_options,
    made_lists,
)
from stillroom_bench.instrument.bench_report import BenchResult, share_name
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples, run_arms
from stillroom_bench.instrument.statistics import Interval, bootstrapped

PREDICTORS = ("counted lists", "Eq. 5, exact minimum", "paper, Eq. 1 to 5")
GOAL_ERROR, GOAL_HELD = 0.10, 0.90
_NUM_PROFILED = 2000
_NUM_DRAWN = 64
"""Number of batches that a prediction averages."""


@dataclass(frozen=True, slots=True)
class PredictedCell:
    """Predictions for one division at one batch size."""

    arm: str
    """Name of the arm of `DividedBench`."""
    predicted: Prediction
    by_minimum: float
    by_paper: float
    mean_seconds: float
    """Seconds to a query's result with the dispatcher."""


def run_prediction(
    options: TieredOptions, work_dir: Path, on_progress: Callable[[str], None] = lambda _: None
) -> BenchResult:
    """Profile, predict, then measure.

    Args:
        options: its shares and batch sizes are the cells.
        work_dir: folder on the disk that is the slow tier; its files are removed after the run.

    Raises:
        UsageError: there are too few vectors for the number of lists.
    """
    check_options(options)
    environment = record_environment()
    lists = made_lists(options, on_progress)
    work_dir.mkdir(parents=True, exist_ok=True)
    cells: list[PredictedCell] = []
    benches: list[DividedBench] = []
    fitted = []
    try:
        for name, share in SKEWS.items():
            asked = SkewedQuestions(lists, share, options)
            on_progress(f"{name}: profiling")
            profile = _profiled(lists, asked, options, work_dir)
            fitted.append(_fitted_row(name, profile))
            for ram in options.shares:
                cells += _predicted(name, ram, profile, asked, options)
                file = work_dir / f"tiered-model-{os.getpid()}-{len(benches)}.ivf"
                benches.append(DividedBench(name, ram, lists, asked, file, options))
        samples = run_arms(
            [arm for bench in benches for arm in bench.arms()],
            repeat=options.repeat,
            on_run=lambda arm, at: on_progress(f"{arm}, run {at + 1}"),
            only_own=True,
        )
    finally:
        for bench in benches:
            bench.close()
    rows = [_row(cell, samples) for cell in cells]
    return BenchResult(
        "stillroom bench tiered --predict",
        environment,
        {
            "size": options.size,
            "nlist": options.nlist,
            "nprobe": options.nprobe,
            "repeat": options.repeat,
            "seed": options.seed,
        },
        samples,
        notes=[
            "Predicted from batches with all lists on disk, a random half in RAM, and all in RAM; measured with the "
            "hottest lists in RAM and different questions. The page cache of the lists on disk is dropped before each "
            "batch.",
            "The interval should contain nine of ten measurements.",
        ],
        tables={
            "Summary": summary(rows),
            "Width of the intervals": widths(rows),
            "Order of the configurations": ranking(rows),
            "What was fitted": fitted,
            "Queries per second": rows,
        },
    )


def _profiled(lists: Any, asked: SkewedQuestions, options: TieredOptions, work_dir: Path) -> SearchProfile:
    effort = Effort(batch_sizes=options.batch_sizes, seed=options.seed)
    return measure_profile(lists, asked.draw(_NUM_PROFILED, -2), options.nprobe, work_dir, effort)


def _predicted(
    name: str, ram: float, profile: SearchProfile, asked: SkewedQuestions, options: TieredOptions
) -> list[PredictedCell]:
    """Predict all batch sizes of one division, which is that of `DividedBench`."""
    shard_of = np.full(options.nlist, DISK)
    shard_of[hottest_first(asked.counts)[: round(ram * options.nlist)]] = RAM
    division = Division(profile.sizes, profile.bytes_per_vector, Partition(shard_of, 2))
    hits, times = hits_of(division, profile.probed), profile.model.times
    cells = []
    for size in options.batch_sizes:
        batches = drawn_batches(profile.probed, size, options.seed)
        num_measured = options.repeat * max(2, min(options.num_batches, 64 // size))
        cells.append(
            PredictedCell(
                f"{name}, batch {size}/{share_name(ram)} of lists in RAM",
                profile.model.throughput(division, batches, num_measured),
                rate_by_hits(times, hits, size),
                rate_by_hits(times, hits, size, as_paper=True),
                float(np.mean([profile.model.release_seconds(division, probed) for probed in batches])),
            )
        )
    return cells


def drawn_batches(probed: Lists, batch_size: int, seed: int) -> list[Lists]:
    """Draw batches from a profile's queries [n, p]."""
    rng = np.random.default_rng([seed, 7, batch_size])
    return [probed[rng.integers(len(probed), size=batch_size)] for _ in range(_NUM_DRAWN)]


def _row(cell: PredictedCell, samples: Samples) -> dict[str, Any]:
    rates = samples.of(cell.arm, "queries_per_second")
    measured = len(rates) / sum(1 / rate for rate in rates)  # total queries divided by total seconds
    group, _, division = cell.arm.partition("/")
    waited = float(np.mean(samples.of(cell.arm, "mean_seconds")))
    row: dict[str, Any] = {"questions like": group, "division": division, "measured": measured}
    row |= {"predicted": cell.predicted.value, "interval": f"{cell.predicted.low:.4g} to {cell.predicted.high:.4g}"}
    row |= {"holds": "yes" if cell.predicted.holds(measured) else "no"}
    values = dict(zip(PREDICTORS, (cell.predicted.value, cell.by_minimum, cell.by_paper), strict=True))
    row |= {f"error, {name}": f"{value / measured - 1:+.1%}" for name, value in values.items()}
    return row | {"mean wait ms": 1e3 * waited, "predicted wait ms": 1e3 * cell.mean_seconds}


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the median relative error of each predictor, and how often the interval contains the measurement."""
    found = []
    for name in PREDICTORS:
        errors = [abs(float(row[f"error, {name}"].rstrip("%"))) / 100 for row in rows]
        own = name == PREDICTORS[0]
        held = sum(row["holds"] == "yes" for row in rows) / len(rows)
        found.append(
            {
                "prediction": name,
                "median error": f"{float(np.median(errors)):.1%}",
                "goal": f"{GOAL_ERROR:.0%}",
                "largest error": f"{max(errors):.1%}",
                "cells in the interval": f"{held:.0%}" if own else "",
                "goal of the interval": f"{GOAL_HELD:.0%}" if own else "",
            }
        )
    return found


def widths(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how wide the 90 % intervals are, beside the narrowest that would have been enough.

    An interval is as good as it is narrow while it holds. The last row is the smallest factor to both sides of the
    prediction that contains nine of ten measurements; it is known afterwards only.
    """
    bounds = [[float(bound) for bound in row["interval"].split(" to ")] for row in rows]
    low, high = np.array([pair / np.array(row["predicted"]) - 1 for pair, row in zip(bounds, rows, strict=True)]).T
    factor = float(np.quantile([abs(math.log(row["predicted"] / row["measured"])) for row in rows], GOAL_HELD))
    held = sum(row["holds"] == "yes" for row in rows) / len(rows)
    medians = {"low": f"{float(np.median(low)):+.0%}", "high": f"{float(np.median(high)):+.0%}"}
    return [
        {"interval": "predicted (median)", **medians, "contains": f"{held:.0%}"},
        {
            "interval": "enough in hindsight",
            "low": f"{math.exp(-factor) - 1:+.0%}",
            "high": f"{math.exp(factor) - 1:+.0%}",
            "contains": f"{GOAL_HELD:.0%}",
        },
    ]


def ranking(rows: Sequence[dict[str, Any]], num_resamples: int = 1000) -> list[dict[str, Any]]:
    """Return how well each predictor orders configurations: Kendall's tau with a 95 % bootstrap interval.

    Configurations are ordered within the same questions: shares at one batch size, batch sizes at one share, or all
    (tau is the mean over these groups). The bootstrap draws groups anew; for all configurations, of which there are two
    groups, it draws configurations within each. *More of it* orders by share and by batch size without a model.
    """
    cells = [_Cell.of(row) for row in rows]
    choices: dict[str, Callable[[_Cell], Hashable]] = {
        "share of the lists": lambda cell: (cell.skew, cell.batch_size),
        "batch size": lambda cell: (cell.skew, cell.share),
        "both": lambda cell: cell.skew,
    }
    table = []
    for choice, group_of in choices.items():
        groups: dict[Hashable, list[_Cell]] = {}
        for cell in cells:
            groups.setdefault(group_of(cell), []).append(cell)
        row: dict[str, Any] = {"choice": choice, "groups": len(groups), "configurations": len(cells) // len(groups)}
        is_both = choice == "both"
        for name in PREDICTORS:
            orders = [
                ([cell.predicted[name] for cell in one], [cell.measured for cell in one]) for one in groups.values()
            ]
            row[name] = str(_tau(orders, num_resamples if is_both else 0))
        more = [
            ([cell.share * cell.batch_size for cell in one], [cell.measured for cell in one]) for one in groups.values()
        ]
        table.append(row | {"more of it": "" if is_both else str(_tau(more, 0))})
    return table


@dataclass(frozen=True, slots=True)
class _Cell:
    skew: str
    batch_size: int
    share: float
    measured: float
    predicted: dict[str, float]

    @classmethod
    def of(cls, row: dict[str, Any]) -> "_Cell":
        """Read a row of the table of queries per second."""
        skew, _, size = row["questions like"].partition(", batch ")
        share = float(row["division"].partition("%")[0])
        errors = {name: float(row[f"error, {name}"].rstrip("%")) / 100 for name in PREDICTORS}
        predicted = {name: row["measured"] * (1 + error) for name, error in errors.items()}
        return cls(skew, int(size), share, row["measured"], predicted | {PREDICTORS[0]: row["predicted"]})


def _tau(groups: Sequence[tuple[Sequence[float], Sequence[float]]], num_resamples: int) -> Interval:
    """Return the mean of Kendall's tau-b over groups of predicted and measured values.

    Args:
        num_resamples: number of times that configurations are drawn within each group; 0: groups are drawn.
    """
    pairs = [np.array(one) for one in groups]
    taus = np.array([_kendall(one) for one in pairs])
    if num_resamples == 0:
        return bootstrapped(taus)
    rng = np.random.default_rng(0)
    drawn = [
        float(np.nanmean([_kendall(one[:, rng.integers(one.shape[1], size=one.shape[1])]) for one in pairs]))
        for _ in range(num_resamples)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Interval(float(taus.mean()), float(low), float(high))


def _kendall(pairs: NDArray[np.float64]) -> float:
    """Return tau-b of predicted and measured values [2, n]; NaN if all are equal."""
    return float(stats.kendalltau(*pairs).statistic)


def _fitted_row(name: str, profile: SearchProfile) -> dict[str, Any]:
    model = profile.model
    slope, start = fit_line(model.times.batch_sizes, model.times.scan_seconds)
    return {
        "questions like": name,
        "us per batch": 1e6 * model.per_batch,
        "us per query": 1e6 * model.per_query,
        "us per list": 1e6 * model.per_list,
        "ns per code": 1e9 * model.per_code,
        "ns per code, one query": 1e9 * (model.per_code_alone or model.per_code),
        "us per window": 1e6 * model.per_window,
        "window KiB": model.window_bytes // 1024,
        "ns per byte read": 1e9 * model.per_byte,
        "overlap": model.overlap,
        "batches apart": f"{model.batch_sd:.1%}",
        "groups apart": f"{model.block_sd:.1%}",
        "Eq. 1, scan ms": f"{1e3 * slope:.3g} B + {1e3 * start:.3g}",
        "worst error of Eq. 1": f"{worst_error_of_line(model.times.batch_sizes, model.times.scan_seconds):.0%}",
    }
